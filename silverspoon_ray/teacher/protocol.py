"""What a distiller knows of its teacher.

A :class:`Teacher` answers "for this batch, these logits and these activations", wherever it runs: in the student's
process (:mod:`silverspoon_ray.teacher.local`), in a Ray actor group (:mod:`silverspoon_ray.cluster`), or on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.nested import map_tensors

FORMS = ("full", "top_k", "sampled", "hidden")
"""What can travel for logits."""


@dataclass(frozen=True)
class TeacherRequest:
    """What the student wants of every batch; declared once, when its stream to the teacher opens.

    Args:
        logits: ``"full"``: the logits as the teacher gives them; ``"hidden"``: what its output head is called with
            instead, which :class:`GivesHead` turns into the same logits; ``"top_k"``: the most likely classes with
            their log-probabilities; ``"sampled"``: classes drawn from its distribution; None: nothing of the kind.
        outputs: dotted names of the teacher's modules whose outputs are wanted.
        inputs: dotted names of the teacher's modules whose first tensor input is wanted.
        wire_dtype: floating-point tensors are sent in this dtype; None: as they are, bit-exact.
        selectors: pairs of a name in ``outputs`` and a function of that module's output (hashable, picklable); what it
            returns is the answer, so that the rest need not travel.
        copies: keep copies of what modules get and give, for models that write to it in place.
        top_k: how many classes ``"top_k"`` sends, or how many draws ``"sampled"`` makes.
        temperature: of the distribution that those two describe.
        classes: they are taken from the first so many classes (the student has no more); None: from all.
        seed: of the draws. They depend on it and on a sample's content, so that a question has one answer.
        transport: how answers come from another process: ``"object_store"``, ``"collective"`` or ``"auto"``, as for
            ``TrainingArguments.teacher_transport``. It does not change them, so requests that differ in it are equal.
    """

    logits: str | None = "full"
    outputs: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    wire_dtype: torch.dtype | None = None
    selectors: tuple[tuple[str, Callable[[Any], Any]], ...] = ()
    copies: bool = False
    top_k: int = 64
    temperature: float = 1.0
    classes: int | None = None
    seed: int = 0
    transport: str = field(default="object_store", compare=False)


@dataclass
class TeacherOutput:
    """A teacher's answer for one batch.

    Attributes:
        logits: ``[batch, ..., vocabulary]``, or None if they were not asked for.
        soft_targets: what was asked for instead: ``hidden`` ``[batch, ..., width]``, or ``indices`` (uint16 or int32,
            ``[batch, ..., k]``) and ``log_probs`` (of those classes; with ``"top_k"`` one more, of all the others).
        outputs: by module name, what the module returned (a tensor, or nested tuples, lists and dicts of tensors).
        inputs: by module name, the first tensor that the module was called with.
        borrowed: the tensors are views of memory that other readers share, and must not be written to; see
            :meth:`owned`.
    """

    logits: torch.Tensor | None = None
    outputs: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    borrowed: bool = False
    soft_targets: dict[str, torch.Tensor] = field(default_factory=dict)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> TeacherOutput:
        """A new answer with ``function`` applied to every tensor."""
        return TeacherOutput(
            logits=None if self.logits is None else function(self.logits),
            outputs={name: map_tensors(function, value) for name, value in self.outputs.items()},
            inputs={name: map_tensors(function, value) for name, value in self.inputs.items()},
            borrowed=self.borrowed,
            soft_targets={name: function(value) for name, value in self.soft_targets.items()},
        )

    def to(self, device: torch.device) -> TeacherOutput:
        """The answer on ``device``; tensors that are there already are not copied."""
        moved = self.map(lambda tensor: tensor.to(device, non_blocking=True))
        moved.borrowed = self.borrowed and device.type == "cpu"
        return moved

    def owned(self) -> TeacherOutput:
        """The same answer in private memory, free to be written to."""
        if not self.borrowed:
            return self
        copied = self.map(torch.clone)
        copied.borrowed = False
        return copied


class PendingAnswer(Protocol):
    """An answer that is being computed somewhere else."""

    def ready(self) -> bool:
        """:meth:`result` would not have to wait."""

    def result(self) -> TeacherOutput:
        """Wait for it. Raises TeacherError if the teacher failed or the time is up."""

    def release(self) -> None:
        """The answer has been used, and nothing refers to its tensors any more: its memory may go."""

    @property
    def nbytes(self) -> int:
        """Bytes that travelled; known after :meth:`result`."""


class TeacherStream(Protocol):
    """A student's line to the teacher: one request for all its batches."""

    def submit(self, batch: Mapping[str, Any]) -> PendingAnswer:
        """Ask for the answer to ``batch``; returns at once. Answers may be awaited in any order."""


@runtime_checkable
class Teacher(Protocol):
    """Anything that answers batches."""

    dedicated: bool
    """It computes on devices of its own, so asking early helps."""

    @property
    def structure(self) -> nn.Module:
        """Its model on the meta device: names, shapes and configuration without weights."""

    def open(self, request: TeacherRequest) -> TeacherStream:
        """Open a stream on which every batch is answered with what ``request`` says."""


@runtime_checkable
class GivesHead(Protocol):
    """A teacher whose output head can be had, once, so that logits need not travel."""

    def output_head(self) -> OutputHead:
        """The head, on any device.

        Raises:
            ConfigError: the model has none that is known.
        """
