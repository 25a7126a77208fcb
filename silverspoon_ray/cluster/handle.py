"""The student's end of the line to a teacher group."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from torch import nn

from silverspoon_ray.cluster.codec import Encoded, decode, decode_output, encode
from silverspoon_ray.cluster.layouts.pipeline import ask_pipeline
from silverspoon_ray.cluster.layouts.ranks import Scattered
from silverspoon_ray.cluster.worker import describe_batch
from silverspoon_ray.errors import ConfigError, SilverspoonError, TeacherError
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.nested import map_tensors
from silverspoon_ray.teacher.protocol import FORMS, TeacherOutput, TeacherRequest
from silverspoon_ray.teacher.stages import PipelinePlan

logger = logging.getLogger(__name__)

ATTEMPTS = 3
PING_TIMEOUT_S = 5.0


class AnswerLateError(TeacherError):
    """The answer did not come in time."""


class AnswerLostError(TeacherError):
    """The answer existed, but the process or node that held it is gone."""


class TeacherHandle:
    """A teacher group, as seen by a student: picklable, and accepted as ``teacher_model`` by every distiller.

    Args:
        replicas: the actors of each replica; several are the stages of a pipeline.
        timeout_s: the limit of every wait; a replica that restarts must have loaded its model by then.
        plan: how the stages share the model; None where a replica is one actor.
    """

    dedicated = True
    owner: Any = None
    """The group, in the process that made it: as long as its handle is used there, it is not given up."""

    def __init__(self, replicas: Sequence[Sequence[Any]], timeout_s: float, plan: PipelinePlan | None = None) -> None:
        self.replicas = [list(replica) for replica in replicas]
        self.timeout_s = timeout_s
        self.plan = plan
        self._reset()

    @property
    def workers(self) -> list[Any]:
        """All actors."""
        return [worker for replica in self.replicas for worker in replica]

    def _reset(self) -> None:
        self._structure: nn.Module | None = None
        self._outstanding: list[set[ray.ObjectRef]] = [set() for _ in self.replicas]
        self._last_used = [0] * len(self.replicas)
        self._submitted = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"replicas": self.replicas, "timeout_s": self.timeout_s, "plan": self.plan}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def structure(self) -> nn.Module:
        """The teacher's model on the meta device."""
        if self._structure is None:
            self._structure = get(self.workers[0].structure.remote(), self.timeout_s, "the teacher's structure")
        assert self._structure is not None
        return self._structure

    def output_head(self) -> OutputHead:
        """The teacher's output head, on the CPU, in memory of its own."""
        holder = self.replicas[0][-1 if self.plan is not None else 0]
        fields = get(holder.output_head.remote(), self.timeout_s, "the teacher's output head")
        return OutputHead(**map_tensors(torch.clone, decode(fields)))

    def open(self, request: TeacherRequest) -> RemoteStream:
        return RemoteStream(self, request)

    def forward(
        self,
        batch: Mapping[str, Any],
        logits: str | None = "full",
        outputs: Sequence[str] = (),
        inputs: Sequence[str] = (),
        device: Any = None,
        **further: Any,
    ) -> TeacherOutput:
        """One batch, asked for and waited for.

        Args:
            batch: keyword arguments of the teacher's forward.
            logits: ``"full"``, one of the forms that give ``soft_targets`` (``"hidden"``, ``"top_k"``,
                ``"sampled"``), or None for none.
            outputs, inputs: dotted module names whose outputs, or first tensor inputs, are wanted.
            device: where the tensors shall be; None: the CPU.
            further: of :class:`TeacherRequest`: ``top_k``, ``temperature``, ``classes``, ``seed``, ``wire_dtype``.

        Returns:
            tensors in memory of their own, free to be written to.

        Raises:
            TeacherError: the teacher failed or did not answer in time.
        """
        if logits is not None and logits not in FORMS:
            raise ConfigError("logits", logits, f"one of {', '.join(FORMS)}, or None")
        request = TeacherRequest(logits=logits, outputs=tuple(outputs), inputs=tuple(inputs), **further)
        pending = self.open(request).submit(batch)
        answer = pending.result().owned()
        pending.release()
        return answer if device is None else answer.to(torch.device(device))

    def stats(self) -> list[dict[str, Any]]:
        """Per actor: rank, pid, node, stage, bytes of weights, forwards, bytes sent, seconds busy; counted since its
        process started."""
        return [get(worker.stats.remote(), self.timeout_s, "the teacher's stats") for worker in self.workers]

    def send(self, batch: Encoded, request: TeacherRequest) -> tuple[list[ray.ObjectRef], int, int]:
        """Submit to the least loaded replica; the one unused for longest where several are.

        Returns:
            references of the answer's parts, the replica's rank, the batch's number.
        """
        if len(self.replicas) > 1:
            for outstanding in self._outstanding:
                if outstanding:
                    done, _ = ray.wait(list(outstanding), num_returns=len(outstanding), timeout=0, fetch_local=False)
                    outstanding.difference_update(done)
        rank = min(range(len(self.replicas)), key=lambda r: (len(self._outstanding[r]), self._last_used[r]))
        self._submitted += 1
        self._last_used[rank] = self._submitted
        replica = self.replicas[rank]
        if self.plan is None:
            refs = [replica[0].forward.remote(batch, request, self._submitted)]
        else:
            refs = ask_pipeline(replica, self.plan, ray.put(batch), request, self._submitted)
        if len(self.replicas) > 1:
            self._outstanding[rank].update(refs[-1:])
        return refs, rank, self._submitted

    def silent(self, rank: int) -> str:
        """Which processes of a replica do not answer, in words: they are gone, or busy."""
        replica = self.replicas[rank]
        pings = {worker.ping.remote(): number for number, worker in enumerate(replica)}
        answered, _ = ray.wait(list(pings), num_returns=len(pings), timeout=PING_TIMEOUT_S)
        # A ping to a process that is gone for good comes back at once, as an error.
        alive = {pings[ref] for ref in answered if not _failed(ref)}
        kind = "stage" if self.plan is not None else "rank"
        names = [f"{kind} {number} of {len(replica)}" for number in range(len(replica)) if number not in alive]
        if not names:
            return "all of its processes are alive"
        if len(replica) == 1:
            names = ["its process"]
        return f"{', '.join(names)} did not answer within {PING_TIMEOUT_S:g} s either: gone with its node, or busy"

    def finished(self, refs: Sequence[ray.ObjectRef], rank: int) -> None:
        """The answer has been fetched; its references are not to be kept alive for counting."""
        self._outstanding[rank].difference_update(refs)


class RemoteStream:
    """Batches to a teacher group."""

    def __init__(self, handle: TeacherHandle, request: TeacherRequest) -> None:
        self.handle = handle
        self.request = request

    def submit(self, batch: Mapping[str, Any]) -> RemoteAnswer:
        encoded = encode(dict(batch))
        return RemoteAnswer(self.handle, encoded, self.request)


class RemoteAnswer:
    """An answer that a replica is computing."""

    def __init__(self, handle: TeacherHandle, batch: Encoded, request: TeacherRequest) -> None:
        self.handle = handle
        self.batch = batch
        self.request = request
        self.nbytes = 0
        self._refs: list[ray.ObjectRef] | None = None
        self._send()

    def _send(self) -> None:
        self._refs, self.rank, number = self.handle.send(self.batch, self.request)
        self.described = describe_batch(self.batch, number)

    def ready(self) -> bool:
        """The answer has been computed (or has failed), wherever it is."""
        assert self._refs is not None, "released answers cannot be read"
        return not ray.wait(self._refs, num_returns=len(self._refs), timeout=0, fetch_local=False)[1]

    def result(self) -> TeacherOutput:
        """Wait for the answer: views of the object store's memory, to be read only.

        An answer that was lost with the node or process that held it is asked for again.
        """
        for _ in range(ATTEMPTS - 1):
            try:
                return self._result()
            except AnswerLostError as error:
                logger.warning("asking the teacher again: %s", error.reason)
                self._send()
        return self._result()

    def _result(self) -> TeacherOutput:
        try:
            return self._fetched()
        except AnswerLateError as error:
            silent = self.handle.silent(self.rank)
            raise TeacherError(f"{error.reason}; {silent}", rank=self.rank, batch=self.described) from None

    def _fetched(self) -> TeacherOutput:
        assert self._refs is not None, "released answers cannot be read"
        what, limit = "the teacher's answer", self.handle.timeout_s
        parts: list[Any] = get(self._refs, limit, what, self.rank, self.described)
        self.handle.finished(self._refs, self.rank)
        if isinstance(parts[0], Scattered):
            rows = [parts[0].own, *get(parts[0].others, limit, what, self.rank, self.described)]
            self.nbytes = sum(part.nbytes for part in rows)
            return concatenated([decode_output(part) for part in rows])
        self.nbytes = sum(part.nbytes for part in parts)
        return merged([decode_output(part) for part in parts])

    def release(self) -> None:
        """Let the answer's memory go: Ray may evict it from now on."""
        self._refs = None


def concatenated(parts: Sequence[TeacherOutput]) -> TeacherOutput:
    """One answer out of those for parts of the batch's rows, in order; what has no rows is the first part's."""

    def joined(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, torch.Tensor):
            return torch.cat(list(values)) if first.dim() > 0 else first
        if isinstance(first, dict):
            return {key: joined([value[key] for value in values]) for key in first}
        if isinstance(first, tuple | list):
            return type(first)(joined(entries) for entries in zip(*values, strict=True))
        return first

    return TeacherOutput(
        logits=None if parts[0].logits is None else joined([part.logits for part in parts]),
        outputs=joined([part.outputs for part in parts]),
        inputs=joined([part.inputs for part in parts]),
        soft_targets=joined([part.soft_targets for part in parts]),
    )


def merged(parts: Sequence[TeacherOutput]) -> TeacherOutput:
    """One answer out of those of several stages."""
    if len(parts) == 1:
        return parts[0]
    whole = TeacherOutput(borrowed=True)
    for part in parts:
        whole.logits = part.logits if part.logits is not None else whole.logits
        whole.outputs |= part.outputs
        whole.inputs |= part.inputs
        whole.soft_targets |= part.soft_targets
    return whole


def get(ref: Any, timeout_s: float, what: str, rank: int | None = None, batch: str | None = None) -> Any:
    """``ray.get`` with a limit, and with errors that say what was waited for.

    Raises:
        TeacherError: the teacher raised (its own error, with its traceback), died for good, or took too long.
    """
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SilverspoonError):
            raise cause from None
        raise TeacherError(f"{what} failed: {cause!r}", rank=rank, batch=batch, remote_traceback=str(error)) from None
    except GetTimeoutError:
        raise AnswerLateError(f"{what} did not come within {timeout_s:g} s", rank=rank, batch=batch) from None
    except RayActorError as error:
        reason = f"{what} will not come: the teacher's process died and was not brought back ({error})"
        raise TeacherError(reason, rank=rank, batch=batch) from None
    except RayError as error:
        raise AnswerLostError(f"{what} was lost: {first_line(error)}", rank=rank, batch=batch) from None


def _failed(ref: ray.ObjectRef) -> bool:
    try:
        ray.get(ref, timeout=PING_TIMEOUT_S)
    except RayError:
        return True
    return False


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
