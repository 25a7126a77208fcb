"""One replica of the teacher: the actor."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from silverspoon_ray.cluster.codec import Encoded, decode, encode, encode_output
from silverspoon_ray.cluster.transport.collective import Posted, ReplyTo, known_bytes
from silverspoon_ray.cluster.transport.outbox import Outbox
from silverspoon_ray.errors import TeacherError
from silverspoon_ray.models.source import ModelSource, build_model
from silverspoon_ray.teacher.compiled import CompiledLayers, compiled_graphs
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherOutput, TeacherRequest
from silverspoon_ray.teacher.stages import PipelinePlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TeacherSpec:
    """What a replica needs to build its model, and to build it again after a restart.

    Attributes:
        source: where the model comes from; a module travels as an object reference instead.
        module: reference to the module, if the user gave one.
        load_kwargs: passed to ``from_pretrained``.
        device_type: ``"cuda"`` or ``"cpu"``.
        threads: threads of a CPU replica.
        strategy, wrap_cls: see ``TeacherPlacement``.
        torch_compile: ``backend`` and ``mode`` of torch.compile; None: nothing is compiled.
    """

    source: ModelSource | None
    module: ray.ObjectRef | None
    load_kwargs: Mapping[str, Any]
    device_type: str
    threads: int
    strategy: str = "pp"
    wrap_cls: str | Sequence[str] | None = None
    torch_compile: Mapping[str, Any] | None = None


class TeacherWorker:
    """A replica of the teacher on one device.

    The constructor does nothing that can fail, so that a broken model shows as an error of :meth:`ready` and not as
    an actor that Ray restarts over and over. The model is loaded when the first call needs it, also after a restart.
    """

    def __init__(self, spec: TeacherSpec, rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self.teacher: LocalTeacher | None = None
        self.device = torch.device("cpu")
        self.forwards = 0
        self.nbytes = 0
        self.busy_s = 0.0
        self.outbox = Outbox()

    def ready(self) -> dict[str, Any]:
        """Load the model if need be; says where it runs.

        Raises:
            TeacherError: the model could not be loaded.
        """
        self._loaded()
        return self.stats()

    def ping(self) -> None:
        """Answers at once, unless the process is gone or busy."""

    def plan(self) -> PipelinePlan | None:
        """How the model is cut into stages; None where it is not."""
        return None

    def structure(self) -> nn.Module:
        """The model on the meta device."""
        return self._loaded().structure

    def output_head(self) -> Encoded:
        """The fields of the model's :class:`OutputHead`.

        Raises:
            ConfigError: it has none that is known.
        """
        return encode(vars(self._loaded().output_head()))

    def weight_digests(self) -> dict[str, str]:
        """Of the tensors that this process holds, see :mod:`silverspoon_ray.teacher.cache.identity`."""
        return self._loaded().weight_digests()

    def greet(self, number: int, reply_to: ReplyTo) -> Encoded | Posted:
        """Send what the student knows, so that it sees whether tensors arrive."""
        greeting = TeacherOutput(logits=known_bytes().to(self.device))
        return self.outbox.post(encode_output(greeting, arrays=False), number, reply_to)

    def forward(
        self, batch: Encoded, request: TeacherRequest, number: int, reply_to: ReplyTo | None = None
    ) -> Encoded | Posted:
        """The answer to one batch.

        Args:
            batch: the model's keyword arguments.
            request: what is wanted.
            number: the student's count of its batches.
            reply_to: where the tensors are to go; None: with what is returned.

        Raises:
            TeacherError: with the traceback, this rank and the batch.
        """
        teacher = self._loaded()
        begin = time.perf_counter()
        try:
            inputs = decode(batch)
            # Arguments in the object store are shared memory; models may write to what they are given.
            moved = {k: v.to(self.device, copy=True) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
            encoded = encode_output(teacher.answer(moved, request), request.wire_dtype, arrays=reply_to is None)
        except Exception as error:
            raise TeacherError(
                f"the teacher's forward raised {type(error).__name__}: {error}",
                rank=self.rank,
                batch=describe_batch(batch, number),
                remote_traceback=traceback.format_exc(),
            ) from None
        self.forwards += 1
        self.nbytes += encoded.nbytes
        self.busy_s += time.perf_counter() - begin
        return self.outbox.post(encoded, number, reply_to)

    def stats(self) -> dict[str, Any]:
        """Counts since this process started, and where it is."""
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "device": str(self.device),
            "forwards": self.forwards,
            "bytes_sent": self.nbytes,
            "busy_s": self.busy_s,
            **self.outbox.stats(),
            **self.weights(),
            **({} if self.spec.torch_compile is None else {"compiled_graphs": compiled_graphs()}),
        }

    def weights(self) -> dict[str, Any]:
        """Bytes of the weights that this process holds; empty before they are loaded."""
        return {} if self.teacher is None else {"weight_bytes": resident_bytes(self.teacher.model)}

    def _loaded(self) -> LocalTeacher:
        if self.teacher is None:
            try:
                self.teacher = LocalTeacher(self._load())
                self.teacher.compiled = self._compiled(self.teacher.model)
            except Exception as error:
                raise TeacherError(
                    f"the teacher could not be loaded: {type(error).__name__}: {error}",
                    rank=self.rank,
                    remote_traceback=traceback.format_exc(),
                ) from None
        return self.teacher

    def _compiled(self, model: nn.Module, layers: Sequence[str] | None = None) -> CompiledLayers | None:
        settings = self.spec.torch_compile
        return None if settings is None else CompiledLayers(model, layers=layers, **settings)

    def _choose_device(self) -> None:
        if self.spec.device_type == "cuda":
            self.device = torch.device("cuda", 0)  # Ray shows the actor its own GPU only
        else:
            torch.set_num_threads(self.spec.threads)

    def _load(self) -> nn.Module:
        self._choose_device()
        if self.spec.module is not None:
            model: nn.Module = ray.get(self.spec.module)
        else:
            assert self.spec.source is not None
            model = build_model(self.spec.source, "teacher", **self.spec.load_kwargs)
        return model.to(self.device).eval()


def resident_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that have memory here."""
    held = {}
    for parameter in model.parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        held[id(parameter)] = 0 if own.device.type == "meta" else own.numel() * own.element_size()
    return sum(held.values())


def describe_batch(batch: Encoded, number: int) -> str:
    """E.g. ``batch 12: input_ids int64[8, 128], attention_mask int64[8, 128]``."""
    parts = [
        f"{name} {spec.dtype}{list(spec.shape)}" if hasattr(spec, "dtype") else f"{name}={spec!r}"
        for name, spec in batch.value.items()
    ]
    return f"batch {number}: {', '.join(parts)}"
