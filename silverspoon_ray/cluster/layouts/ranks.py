"""Tensor-parallel and sharded replicas: actors that form a process group and answer every batch together."""

from __future__ import annotations

import datetime
import logging
import os
import socket
import time
import traceback
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from torch import nn

from silverspoon_ray.cluster.codec import Encoded, decode, encode, encode_output
from silverspoon_ray.cluster.transport.collective import Posted, ReplyTo
from silverspoon_ray.cluster.worker import TeacherSpec, TeacherWorker, describe_batch, resident_bytes
from silverspoon_ray.errors import SilverspoonError, TeacherError
from silverspoon_ray.models.partial import load_part
from silverspoon_ray.models.source import build_model, known_structure
from silverspoon_ray.models.structure import structure_of
from silverspoon_ray.teacher.cache.identity import digests_of, source_digests
from silverspoon_ray.teacher.distributed import (
    gathered,
    load_tensor_parallel,
    own_rows,
    rows_of,
    shard_over_ranks,
)
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherOutput, TeacherRequest
from silverspoon_ray.teacher.wanted import required_head

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 120.0
ASSEMBLE_TIMEOUT_S = 600.0
ATTEMPTS = 3


@dataclass
class Scattered:
    """An answer whose rows are on several ranks.

    Attributes:
        parts: the leader's own rows, and references of the others', in the order of the rows.
        nbytes: of the leader's part.
    """

    own: Encoded | Posted
    others: list[ray.ObjectRef]

    @property
    def nbytes(self) -> int:
        return self.own.nbytes


class TeacherRank(TeacherWorker):
    """One rank of a replica.

    Args:
        spec: the teacher.
        rank: of the replica in the group, for messages.
        number: of this process in the replica.
        ranks: how many there are.
    """

    def __init__(self, spec: TeacherSpec, rank: int, number: int, ranks: int) -> None:
        super().__init__(spec, rank)
        self.number = number
        self.ranks = ranks
        self._structure: nn.Module | None = None

    def join(self, address: str) -> None:
        """Become a member of a new process group, and load the model for it.

        Args:
            address: ``tcp://host:port`` of the leader.

        Raises:
            TeacherError: the group did not come about, or the model could not be loaded.
        """
        try:
            self._leave()
            self._choose_device()
            torch.distributed.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                init_method=address,
                rank=self.number,
                world_size=self.ranks,
                timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
            # transformers' tensor parallelism reads these.
            os.environ.update(RANK=str(self.number), LOCAL_RANK="0", WORLD_SIZE=str(self.ranks))
            self.teacher = LocalTeacher(self._load_part())
            if self.spec.strategy != "tp":
                self.teacher.compiled = self._compiled(self.teacher.model)
            elif self.spec.torch_compile is not None:
                # The collectives are in hooks on the linear layers inside.
                logger.warning("torch_compile leaves a tensor-parallel teacher as it is")
        except SilverspoonError:
            raise
        except Exception as error:
            raise TeacherError(
                f"rank {self.number} of the teacher could not be loaded: {type(error).__name__}: {error}",
                rank=self.rank,
                remote_traceback=traceback.format_exc(),
            ) from None

    def part(
        self, batch: Encoded, request: TeacherRequest, number: int, reply_to: ReplyTo | None = None
    ) -> Encoded | Posted:
        """This rank's part of the answer to a batch that all ranks get."""
        if self.teacher is None:
            raise TeacherError("this rank has not joined its replica", rank=self.rank)
        begin = time.perf_counter()
        try:
            encoded = self._part(batch, request, arrays=reply_to is None)
        except Exception as error:
            self._leave()  # closes the connections, so that nobody waits for this rank
            raise TeacherError(
                f"{type(error).__name__}: {error}", rank=self.rank, remote_traceback=traceback.format_exc()
            ) from None
        self.forwards += 1
        self.nbytes += encoded.nbytes
        self.busy_s += time.perf_counter() - begin
        return self.outbox.post(encoded, number, reply_to)

    def _part(self, batch: Encoded, request: TeacherRequest, arrays: bool) -> Encoded:
        assert self.teacher is not None
        values = decode(batch)
        inputs = {k: v.to(self.device, copy=True) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
        if self.spec.strategy == "sharded":
            mine, real = own_rows(inputs, self.number, self.ranks)
            each = -(-rows_of(inputs) // self.ranks)

            def own(tensor: torch.Tensor) -> torch.Tensor:
                """Without rows that were repeated; also of tensors in which a row takes several places."""
                if tensor.dim() > 0 and tensor.shape[0] % each == 0:
                    return tensor[: tensor.shape[0] // each * real]
                return tensor if self.number == 0 else tensor[:0]  # the same for all rows: one is enough

            answer = self.teacher.answer(mine, request).map(own)
        else:
            answer = gathered(self.teacher.answer(inputs, request), self.teacher.model, request, self.ranks)
            answer = answer if self.number == 0 else TeacherOutput()  # all ranks have the same
        return encode_output(answer, request.wire_dtype, arrays)

    def structure(self) -> nn.Module:
        self.ready()
        assert self._structure is not None
        return self._structure

    def output_head(self) -> Encoded:
        """Read once more from where the model came from: no rank has all of it."""
        structure, spec = self.structure(), self.spec
        name = required_head(structure)
        if spec.module is not None:
            model: nn.Module = ray.get(spec.module)
        else:
            assert spec.source is not None
            own = {f"{name}.{parameter}" for parameter, _ in structure.get_submodule(name).named_parameters()}
            model = load_part(spec.source, own, torch.device("cpu"), **spec.load_kwargs)
        return encode(vars(LocalTeacher(model).output_head()))

    def weight_digests(self) -> dict[str, str]:
        """Read once more from where the model came from, part by part: no rank has all of it."""
        if self.spec.module is not None:
            return digests_of(ray.get(self.spec.module))
        assert self.spec.source is not None
        return source_digests(self.spec.source, **self.spec.load_kwargs)

    def weights(self) -> dict[str, Any]:
        held = {} if self.teacher is None else {"weight_bytes": resident_bytes(self.teacher.model)}
        return {"device_rank": self.number, **held}

    def _leave(self) -> None:
        self.teacher = None
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _load_part(self) -> nn.Module:
        spec = self.spec
        if spec.strategy == "tp":
            assert spec.source is not None
            self._structure = known_structure(spec.source)
            return load_tensor_parallel(spec.source, self.ranks, self.device, **spec.load_kwargs)
        if spec.module is not None:
            model: nn.Module = ray.get(spec.module)
        else:
            assert spec.source is not None
            model = build_model(spec.source, "teacher", **spec.load_kwargs)
        self._structure = structure_of(model)
        return shard_over_ranks(model, spec.wrap_cls, self.ranks, self.device)


class TeacherLeader(TeacherRank):
    """The first rank of a replica. Batches come to it alone, and it hands them on: so all ranks see one order.

    Args:
        spec, rank, ranks: as for :class:`TeacherRank`.
        others: the replica's other actors, in order.
    """

    def __init__(self, spec: TeacherSpec, rank: int, ranks: int, others: list[Any]) -> None:
        super().__init__(spec, rank, 0, ranks)
        self.others = others
        self.assembled = False

    def ready(self) -> dict[str, Any]:
        self._assemble()
        return self.stats()

    def forward(  # type: ignore[override]
        self, batch: Encoded, request: TeacherRequest, number: int, reply_to: ReplyTo | None = None
    ) -> Encoded | Posted | Scattered:
        """The answer to one batch; where it is spread over ranks, with references of their parts.

        A rank that died is waited for, and the batch tried again.

        Raises:
            TeacherError: with the traceback, this replica and the batch.
        """
        shared = ray.put(batch)
        for attempt in range(ATTEMPTS):
            self._assemble()
            parts = [other.part.remote(shared, request, number, reply_to) for other in self.others]
            try:
                own = self.part(batch, request, number, reply_to)
                if self.spec.strategy == "tp":
                    ray.get(parts, timeout=COLLECTIVE_TIMEOUT_S)  # an error of theirs is one of the replica's
                    return own
                return Scattered(own, parts)
            except Exception as error:
                self.assembled = False  # who knows in which collective the others are
                errors = [error, *self._errors_of(parts)]
                if any(map(_is_death, errors)) and attempt + 1 < ATTEMPTS:
                    logger.warning("a rank of teacher replica %d died; the replica is assembled again", self.rank)
                    continue
                # The first to fail says what is wrong; the others only that they were left alone.
                cause = next((e for e in errors if not _is_left_alone(e)), error)
                raise TeacherError(
                    f"the teacher's forward raised {getattr(cause, 'reason', cause)}",
                    rank=self.rank,
                    batch=describe_batch(batch, number),
                    remote_traceback=getattr(cause, "remote_traceback", "") or traceback.format_exc(),
                ) from None
        raise AssertionError("unreachable")

    def _assemble(self) -> None:
        """Form the process group, in which everyone loads its part; ranks that are being restarted are waited for."""
        if self.assembled:
            return
        with socket.socket() as probe:
            host = ray.util.get_node_ip_address()
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        address = f"tcp://{host}:{port}"
        joining = [other.join.options(max_task_retries=-1).remote(address) for other in self.others]
        self.join(address)
        ray.get(joining, timeout=ASSEMBLE_TIMEOUT_S)
        self.assembled = True

    def _errors_of(self, parts: list[ray.ObjectRef]) -> list[BaseException]:
        errors: list[BaseException] = []
        for part in parts:
            try:
                ray.get(part, timeout=COLLECTIVE_TIMEOUT_S)
            except RayTaskError as error:
                errors.append(error.cause if isinstance(error.cause, BaseException) else error)
            except RayError as error:
                errors.append(error)
        return errors


def _is_death(error: BaseException) -> bool:
    return isinstance(error, RayActorError) or "has not joined" in str(error)


def _is_left_alone(error: BaseException) -> bool:
    text = str(error)
    return any(word in text for word in ("gloo", "NCCL", "Connection", "onnection closed", "has not joined"))
