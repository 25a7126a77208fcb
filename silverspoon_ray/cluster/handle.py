"""The student's end of the line to a teacher group."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import nn

from silverspoon_ray.cluster.codec import Encoded, decode, decode_output, encode
from silverspoon_ray.cluster.layouts.pipeline import ask_pipeline
from silverspoon_ray.cluster.layouts.ranks import Scattered
from silverspoon_ray.cluster.transport.choice import chosen_inbox
from silverspoon_ray.cluster.transport.inbox import Delivery, Inbox
from silverspoon_ray.cluster.waiting import AnswerLateError, AnswerLostError, get
from silverspoon_ray.cluster.worker import describe_batch
from silverspoon_ray.errors import ConfigError, TeacherError
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.nested import map_tensors
from silverspoon_ray.teacher.protocol import FORMS, TeacherOutput, TeacherRequest
from silverspoon_ray.teacher.stages import PipelinePlan

logger = logging.getLogger(__name__)

ATTEMPTS = 3
PING_TIMEOUT_S = 5.0


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

    def weight_digests(self) -> dict[str, str]:
        """Of the teacher's tensors, see :mod:`silverspoon_ray.teacher.cache.identity`; the same in every layout."""
        replica = self.replicas[0] if self.plan is not None else self.replicas[0][:1]
        asked = [worker.weight_digests.remote() for worker in replica]
        digests: dict[str, str] = {}
        for part in asked:
            digests |= get(part, self.timeout_s, "the digests of the teacher's weights")
        return digests

    def open(self, request: TeacherRequest) -> RemoteStream:
        return RemoteStream(self, request)

    def numbered(self) -> int:
        """The next request's number."""
        self._submitted += 1
        return self._submitted

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
            further: of :class:`TeacherRequest`: ``top_k``, ``temperature``, ``classes``, ``seed``, ``wire_dtype``,
                ``transport``.

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
        process started. Of the collective transport: open streams, and bytes that wait to be fetched."""
        return [get(worker.stats.remote(), self.timeout_s, "the teacher's stats") for worker in self.workers]

    def send(
        self, batch: Encoded, request: TeacherRequest, inbox: Inbox | None = None
    ) -> tuple[list[ray.ObjectRef], int, int]:
        """Submit to the least loaded replica; the one unused for longest where several are.

        Args:
            batch: encoded.
            request: what is wanted.
            inbox: where tensors are to go; None: into the object store.

        Returns:
            references of the answer's parts, the replica's rank, the batch's number.
        """
        if len(self.replicas) > 1:
            for outstanding in self._outstanding:
                if outstanding:
                    done, _ = ray.wait(list(outstanding), num_returns=len(outstanding), timeout=0, fetch_local=False)
                    outstanding.difference_update(done)
        rank = min(range(len(self.replicas)), key=lambda r: (len(self._outstanding[r]), self._last_used[r]))
        number = self._last_used[rank] = self.numbered()
        reply_to = None if inbox is None else inbox.reply_to(number)
        replica = self.replicas[rank]
        if self.plan is None:
            refs = [replica[0].forward.remote(batch, request, number, reply_to)]
        else:
            refs = ask_pipeline(replica, self.plan, ray.put(batch), request, number, reply_to)
        if len(self.replicas) > 1:
            self._outstanding[rank].update(refs[-1:])
        return refs, rank, number

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
    """Batches to a teacher group.

    Raises:
        TeacherError: ``request.transport`` is ``"collective"``, and this process cannot receive.
    """

    def __init__(self, handle: TeacherHandle, request: TeacherRequest) -> None:
        self.handle = handle
        self.request = request
        self.inbox = chosen_inbox(handle, request.transport)

    def submit(self, batch: Mapping[str, Any]) -> RemoteAnswer:
        encoded = encode(dict(batch))
        return RemoteAnswer(self.handle, encoded, self.request, self.inbox)


class RemoteAnswer:
    """An answer that a replica is computing.

    Args:
        handle: of the replicas.
        batch: encoded, kept in case that it has to be asked again.
        request: what is wanted.
        inbox: where the tensors come; None: into the object store.
    """

    def __init__(
        self, handle: TeacherHandle, batch: Encoded, request: TeacherRequest, inbox: Inbox | None = None
    ) -> None:
        self.handle = handle
        self.batch = batch
        self.request = request
        self.inbox = inbox
        self.nbytes = 0
        self._refs: list[ray.ObjectRef] | None = None
        self._delivery: Delivery | None = None
        self._send()

    def _send(self) -> None:
        self._refs, self.rank, number = self.handle.send(self.batch, self.request, self.inbox)
        self.described = describe_batch(self.batch, number)
        if self.inbox is not None:
            join = merged if self.handle.plan is not None else concatenated
            limit = self.handle.timeout_s
            self._delivery = Delivery(number, self._refs, self.rank, self.described, limit, join)
            self.inbox.expect(self._delivery)

    def ready(self) -> bool:
        """The answer has been computed (or has failed) and is where :meth:`result` takes it from."""
        assert self._refs is not None, "released answers cannot be read"
        if self._delivery is not None:
            return self._delivery.done.is_set()
        return not ray.wait(self._refs, num_returns=len(self._refs), timeout=0, fetch_local=False)[1]

    def result(self) -> TeacherOutput:
        """Wait for the answer: views of the object store's memory, to be read only, or tensors of this process.

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
        if self._delivery is not None:
            output = self._delivery.result(self.handle.timeout_s)
            self.handle.finished(self._refs, self.rank)
            self.nbytes = self._delivery.nbytes
            return output
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
        """Let the answer's memory go: Ray may evict it from now on, and what is still to come need not be sent."""
        self._refs = None
        if self._delivery is not None:
            self._delivery.cancel()


def concatenated(parts: Sequence[TeacherOutput]) -> TeacherOutput:
    """One answer out of those for parts of the batch's rows, in order; what has no rows is the first part's."""

    if len(parts) == 1:
        return parts[0]

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
    whole = TeacherOutput(borrowed=any(part.borrowed for part in parts))
    for part in parts:
        whole.logits = part.logits if part.logits is not None else whole.logits
        whole.outputs |= part.outputs
        whole.inputs |= part.inputs
        whole.soft_targets |= part.soft_targets
    return whole


def _failed(ref: ray.ObjectRef) -> bool:
    try:
        ray.get(ref, timeout=PING_TIMEOUT_S)
    except RayError:
        return True
    return False
