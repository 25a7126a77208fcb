"""The student's end: answers are fetched as soon as they are there, beside the student's own work."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import torch
from torch.distributed import TCPStore

from silverspoon_ray.cluster.codec import Encoded, decode_received
from silverspoon_ray.cluster.layouts.ranks import Scattered
from silverspoon_ray.cluster.transport.collective import Posted, ReplyTo, arrived, gone, new_name
from silverspoon_ray.cluster.transport.memory import Blocks
from silverspoon_ray.cluster.transport.pair import STUDENT, Pair, PairBrokenError
from silverspoon_ray.cluster.waiting import AnswerLateError, AnswerLostError, get
from silverspoon_ray.errors import TeacherError
from silverspoon_ray.teacher.protocol import TeacherOutput

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often a thread that waits for a teacher looks whether the student still wants it."""
EXIT_TIMEOUT_S = 5.0
STORE_TIMEOUT_S = 30.0


def on_gpu() -> bool:
    """This process computes on a GPU; a student's has begun to when it opens its stream."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


class Delivery:
    """An answer on its way.

    Args:
        number: of the answer.
        refs: of its parts.
        rank, batch: which replica answers what, for messages.
        limit_s: for the whole delivery, from when it is its turn.
        join: makes one answer of the parts'.
    """

    def __init__(
        self,
        number: int,
        refs: Sequence[ray.ObjectRef],
        rank: int,
        batch: str,
        limit_s: float,
        join: Callable[[list[TeacherOutput]], TeacherOutput],
    ) -> None:
        self.number = number
        self.refs: Sequence[ray.ObjectRef] = refs
        self.rank = rank
        self.batch = batch
        self.limit_s = limit_s
        self.join = join
        self.nbytes = 0
        self.done = threading.Event()
        self.cancelled = False
        self._output: TeacherOutput | None = None
        self._error: Exception | None = None

    def settle(self, output: TeacherOutput | None, error: Exception | None) -> None:
        self.refs = ()
        self._output, self._error = output, error
        if self.cancelled:
            self._output = None
        self.done.set()

    def cancel(self) -> None:
        """Nobody will read it."""
        self.cancelled = True
        self._output = None

    def result(self, limit_s: float) -> TeacherOutput:
        """Wait for it.

        Args:
            limit_s: from now.

        Raises:
            AnswerLateError: it did not come in time.
            AnswerLostError: the process that had it is gone, or the connection.
            TeacherError: the teacher failed.
        """
        if not self.done.wait(limit_s):
            raise self.late("the teacher's answer did not come", limit_s)
        if self._error is not None:
            # Kept and raised, it would refer to this frame and so to itself, and keep the stream until the garbage
            # collector comes by.
            error, self._error = self._error, TeacherError(str(self._error), rank=self.rank, batch=self.batch)
            try:
                raise error
            finally:
                del error
        assert self._output is not None, "released answers cannot be read"
        return self._output

    def late(self, what: str, limit_s: float) -> AnswerLateError:
        return AnswerLateError(f"{what} within {limit_s:g} s", rank=self.rank, batch=self.batch)

    def closed(self) -> TeacherError:
        return TeacherError("the stream to the teacher was closed", rank=self.rank, batch=self.batch)


class Inbox:
    """What one stream receives.

    Args:
        replicas: how many there are; each is read from by a thread of its own, in the order in which it was asked.

    It ends when nothing refers to it any more; answers that are still on their way are then given up.
    """

    def __init__(self, replicas: int) -> None:
        self.stream = new_name()
        host = ray.util.get_node_ip_address()
        timeout = datetime.timedelta(seconds=STORE_TIMEOUT_S)
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        # Of this thread; those that receive would begin with the first GPU.
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")
        self._address = (host, store.port)
        self._pending: set[int] = set()
        self._lanes = [
            Lane(store, self._pending, self._device, f"{self.stream[:8]}-{rank}") for rank in range(replicas)
        ]
        weakref.finalize(self, _close, self._lanes).atexit = False  # see _close_all

    def reply_to(self, number: int) -> ReplyTo:
        """What the actors are told with the request of that number, which counts as wanted from now on."""
        self._pending.add(number)
        settled = min(tuple(self._pending))
        return ReplyTo(self.stream, *self._address, self._device.type, settled)

    def expect(self, delivery: Delivery) -> None:
        """Receive it as soon as it is there; see :meth:`Delivery.result`."""
        self._lanes[delivery.rank].add(delivery)


class Lane:
    """Receives from one replica.

    Knows nothing of its inbox, so that its thread does not keep it alive.

    Args:
        store: where actors meet the student.
        pending: numbers of the answers that are wanted; settled ones are taken out.
        device: where the student computes.
        name: for the thread.
    """

    def __init__(self, store: TCPStore, pending: set[int], device: torch.device, name: str) -> None:
        self.store = store
        self.pending = pending
        self.device = device
        self.name = name
        self.closing = threading.Event()
        self._queue: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pairs: dict[str, tuple[str, Pair]] = {}  # by actor: its generation, and the connection
        self._lost: set[str] = set()  # generations
        self._blocks = Blocks()

    def add(self, delivery: Delivery) -> None:
        self._queue.put(delivery)
        if self.closing.is_set():
            self._fail_the_rest()
        elif self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"silverspoon-receive-{self.name}", daemon=True)
            self._thread.start()
            _open_lanes.add(self)

    def close(self) -> None:
        """Let the thread end; returns at once."""
        self.closing.set()
        self._queue.put(None)

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            while (delivery := self._queue.get()) is not None:
                self._deliver(delivery)
                del delivery  # the thread waits now, perhaps for long; what it has delivered is not its own any more
        finally:
            self.closing.set()
            self._fail_the_rest()
            self._blocks = Blocks()
            self._pairs.clear()  # closes the connections, by which the actors know
            _open_lanes.discard(self)

    def _deliver(self, delivery: Delivery) -> None:
        output: TeacherOutput | None = None
        error: Exception | None = delivery.closed()
        try:
            output = self._receive(delivery)
            error = None
        except Exception as raised:  # whatever it is, it belongs to who waits for the answer
            # Without the frames of this thread, which refer to the error again; see Delivery.result.
            error = raised.with_traceback(None)
            error.__context__ = None
        finally:  # also where Ray ends, and its threads with it
            self.pending.discard(delivery.number)
            delivery.settle(output, error)

    def _fail_the_rest(self) -> None:
        while not self._queue.empty():
            with contextlib.suppress(queue.Empty):  # two may be at it
                delivery = self._queue.get_nowait()
                if delivery is not None:
                    delivery.settle(None, delivery.closed())

    def _receive(self, delivery: Delivery) -> TeacherOutput | None:
        deadline = time.monotonic() + delivery.limit_s
        outputs = []
        for part in self._parts(delivery, delivery.refs, deadline):
            delivery.nbytes += part.nbytes
            output = self._unpacked(delivery, part, deadline)
            if output is not None:
                outputs.append(output)
        return None if delivery.cancelled else delivery.join(outputs)

    def _parts(self, delivery: Delivery, refs: Sequence[ray.ObjectRef], deadline: float) -> Iterator[Encoded | Posted]:
        """One after the other: what an early stage has is fetched while a later one is at work."""
        for ref in refs:
            part = self._get(delivery, ref, deadline)
            if isinstance(part, Scattered):
                yield part.own
                yield from self._parts(delivery, part.others, deadline)
            else:
                yield part

    def _get(self, delivery: Delivery, ref: ray.ObjectRef, deadline: float) -> Any:
        while not self.closing.is_set() and ray.is_initialized():
            remaining = max(deadline - time.monotonic(), 0.0)
            if ray.wait([ref], timeout=min(POLL_S, remaining))[0]:
                return get(ref, max(remaining, POLL_S), "the teacher's answer", delivery.rank, delivery.batch)
            if remaining == 0.0:
                raise delivery.late("the teacher's answer did not come", delivery.limit_s)
        raise delivery.closed()

    def _unpacked(self, delivery: Delivery, part: Encoded | Posted, deadline: float) -> TeacherOutput | None:
        if isinstance(part, Encoded):  # no tensor in it
            return decode_received(part)
        try:
            pair = self._pair(part)
            if delivery.cancelled:
                pair.drop(part.number)
                return None
            buffers = pair.receive(part.number, part.sizes, max(deadline - time.monotonic(), POLL_S))
        except PairBrokenError as error:
            self._break(part)
            if time.monotonic() >= deadline:
                what = f"the teacher's answer, {part.nbytes} bytes, did not arrive"
                raise delivery.late(what, delivery.limit_s) from None
            reason = f"the teacher's answer, {part.nbytes} bytes, was lost on its way: {error}"
            raise AnswerLostError(reason, rank=delivery.rank, batch=delivery.batch) from None
        return decode_received(Encoded(part.value, list(buffers)))

    def _pair(self, part: Posted) -> Pair:
        """The connection with the actor, as it is since its last start."""
        known = self._pairs.get(part.actor)
        if known is not None and known[0] == part.generation:
            return known[1]
        if part.generation in self._lost or self.store.check([gone(part.generation)]):
            raise PairBrokenError("the connection that it was to come by is closed")
        self._pairs.pop(part.actor, None)
        self.store.set(arrived(part.generation), "")
        device = self.device if part.device_type == "cuda" else torch.device("cpu")
        pair = Pair(self.store, part.generation, STUDENT, device, self._blocks)
        self._pairs[part.actor] = (part.generation, pair)
        return pair

    def _break(self, part: Posted) -> None:
        self._lost.add(part.generation)
        known = self._pairs.get(part.actor)
        if known is not None and known[0] == part.generation:
            known[1].abort()
            del self._pairs[part.actor]


_open_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


def _close(lanes: list[Lane]) -> None:
    for lane in lanes:
        lane.close()


@atexit.register  # after Ray's own was registered, so it runs before Ray ends
def _close_all() -> None:
    lanes = list(_open_lanes)
    _close(lanes)
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for lane in lanes:
        lane.join(max(deadline - time.monotonic(), 0.0))
