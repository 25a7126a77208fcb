"""Asking the teacher early: batches are drawn ahead of the student and submitted within a window.

The lookahead sits *beneath* accelerate's data loader. accelerate itself looks one batch ahead to know the end of the
data, so whatever draws further ahead above it would move that end and change what evaluation cuts off.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from silverspoon_ray.teacher.protocol import PendingAnswer, TeacherOutput, TeacherStream
from silverspoon_ray.teacher.random_stream import RandomStream

TICKET_KEY = "teacher_ticket"
"""The key under which a batch carries its :class:`Ticket` from the loader to ``compute_loss``."""


@dataclass
class TeacherTraffic:
    """What a student waited for and received since the last :meth:`take`.

    Attributes:
        wait_s: seconds.
        answers: batches for which the teacher computed something.
        nbytes: that travelled.
        hits: samples that came from a cache.
    """

    wait_s: float = 0.0
    answers: int = 0
    nbytes: int = 0
    hits: int = 0

    def take(self) -> TeacherTraffic:
        taken = TeacherTraffic(self.wait_s, self.answers, self.nbytes, self.hits)
        self.wait_s, self.answers, self.nbytes, self.hits = 0.0, 0, 0, 0
        return taken


class Window:
    """At most ``depth`` batches are with the teacher, or answered and not yet used.

    A slot is freed when the student has used an answer, not when the answer arrives: so the memory that answers take
    is bounded by ``depth`` times one answer, however slow the student is.

    Args:
        stream: where batches go.
        depth: the number of slots; 0: nothing is asked before the student asks for it.
        traffic: where waiting and bytes are counted.
    """

    def __init__(self, stream: TeacherStream, depth: int, traffic: TeacherTraffic) -> None:
        self.stream = stream
        self.depth = depth
        self.traffic = traffic
        self.waiting: deque[Ticket] = deque()
        self.taken = 0

    def add(self, ticket: Ticket) -> None:
        self.waiting.append(ticket)
        self.fill()

    def fill(self) -> None:
        while self.waiting and self.taken < self.depth:
            self.submit(self.waiting.popleft())

    def submit(self, ticket: Ticket) -> None:
        if ticket in self.waiting:
            self.waiting.remove(ticket)
        self.taken += 1
        ticket.pending = self.stream.submit(ticket.teacher_batch or {})
        ticket.teacher_batch = None

    def release(self) -> None:
        self.taken -= 1
        self.fill()


@dataclass(eq=False)
class Ticket:
    """A batch's claim on its answer, and what else must stay with the batch on its way to the loss.

    Attributes:
        teacher_batch: the teacher's inputs until they are submitted.
        window: where to submit; None until the student comes, for a teacher that cannot be asked ahead.
        random_state_after: the data's random state when the batch had been drawn; a run that resumes after this
            batch goes on from it.
        items: denominators by what is counted (see ``LossTerm.kind``): in all micro-batches of the optimizer step, on
            all ranks. Without one a component is weighed by ``share``.
        share: this micro-batch's part of the step where items cannot be counted beforehand.
        cut: takes from an answer the samples that were taken from the batch after the teacher had been asked.
        repeated: nothing in the batch is this rank's own; it is there to keep the ranks in step and counts nothing.
    """

    teacher_batch: Mapping[str, Any] | None = None
    window: Window | None = None
    random_state_after: dict[str, Any] | None = None
    pending: PendingAnswer | None = None
    items: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0
    cut: Callable[[torch.Tensor], torch.Tensor] | None = None
    repeated: bool = False

    def start(self) -> None:
        """Submit the batch if that has not happened yet."""
        if self.window is not None and self.pending is None:
            self.window.submit(self)

    @property
    def is_there(self) -> bool:
        """Waiting for the answer would take no time."""
        return self.pending is not None and self.pending.ready()

    def answer(self) -> TeacherOutput:
        """Wait for the answer. Raises TeacherError where the teacher failed."""
        assert self.window is not None, "a ticket without a window has no answer to wait for"
        self.start()
        assert self.pending is not None
        traffic = self.window.traffic
        begin = time.perf_counter()
        try:
            output = self.pending.result()
        finally:
            traffic.wait_s += time.perf_counter() - begin
        traffic.answers += getattr(self.pending, "asked", True)
        traffic.nbytes += self.pending.nbytes
        traffic.hits += getattr(self.pending, "hits", 0)
        return output

    def release(self) -> None:
        """The answer has been used; its memory may go and its slot is free."""
        if self.pending is not None and self.window is not None:
            self.pending.release()
            self.pending = None
            self.window.release()


class LookaheadLoader:
    """Stands in for the data loader that accelerate wraps; batches come out with a :class:`Ticket`.

    Args:
        base: the loader to read from.
        seed: gives the seed of the data's random stream each time iteration begins.
        window: makes the window of one iteration; None for a local teacher.
        teacher_inputs: turns a batch into the teacher's inputs.
        depth: how far to draw ahead of accelerate, which is itself one batch ahead.
        skip: so many batches at the start of the first iteration will be thrown away, so nobody is asked for them.
    """

    def __init__(
        self,
        base: Any,
        *,
        seed: Callable[[], int],
        window: Callable[[], Window] | None,
        teacher_inputs: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        depth: int = 0,
        skip: int = 0,
    ) -> None:
        self.base = base
        self.seed = seed
        self.window = window
        self.teacher_inputs = teacher_inputs
        self.depth = depth
        self.skip = skip

    def __getattr__(self, name: str) -> Any:
        if name == "base":
            raise AttributeError(name)
        return getattr(self.base, name)

    def __len__(self) -> int:
        return len(self.base)

    def __iter__(self) -> Iterator[Any]:
        random_stream = RandomStream(self.seed())
        with random_stream.active():
            iterator = iter(self.base)  # with workers it reads the sampler's order already
        if getattr(self.base, "generator", None) is None:
            # What a loader draws from the global generator when iteration begins, as a seed for its workers. Without a
            # lookahead it is part of the student's random sequence, so that sequence goes on behind it here as well.
            torch.empty((), dtype=torch.int64).random_()
        skip, self.skip = self.skip, 0
        window = self.window() if self.window is not None else None
        drawn: deque[Any] = deque()
        ahead = max(self.depth - 1, 0)
        exhausted = False
        while True:
            while not exhausted and len(drawn) <= ahead:
                try:
                    with random_stream.active():
                        batch = next(iterator)
                except StopIteration:
                    exhausted = True
                    break
                asks = window is not None and skip == 0
                skip = max(skip - 1, 0)
                drawn.append(self._with_ticket(batch, window if asks else None, random_stream.state))
            if not drawn:
                return
            yield drawn.popleft()

    def _with_ticket(self, batch: Any, window: Window | None, state: dict[str, Any]) -> Any:
        if not isinstance(batch, Mapping):
            return batch  # the Trainer will refuse it with its own message
        ticket = Ticket(window=window, random_state_after=state)
        if window is not None:
            ticket.teacher_batch = self.teacher_inputs(batch)
            window.add(ticket)
        batch[TICKET_KEY] = ticket  # type: ignore[index]
        return batch
