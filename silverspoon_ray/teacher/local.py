"""A teacher in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.models.output_head import output_head
from silverspoon_ray.models.structure import structure_of
from silverspoon_ray.teacher.cache.identity import digests_of
from silverspoon_ray.teacher.compiled import CompiledLayers, running
from silverspoon_ray.teacher.protocol import Teacher, TeacherOutput, TeacherRequest
from silverspoon_ray.teacher.wanted import Wanted, required_head

logger = logging.getLogger(__name__)


class LocalTeacher:
    """A frozen model that answers in the process that asks.

    The model is only ever run in eval mode and without gradients. Nothing about it is changed: not its configuration,
    not ``requires_grad``, and if its mode is not eval when a batch comes (the student and the teacher may be one and
    the same object), each module's mode is put back afterwards.

    Args:
        model: the teacher.
        overlap: run forwards on a CUDA stream of their own, beside the student's. On the CPU it changes nothing.
    """

    dedicated = False

    def __init__(self, model: nn.Module, overlap: bool = False) -> None:
        self.model = model
        self.overlap = overlap
        self._structure: nn.Module | None = None
        self._wanted: dict[TeacherRequest, Wanted] = {}
        self._side_streams: dict[torch.device, torch.cuda.Stream] = {}
        self.compiled: CompiledLayers | None = None
        """Set, the model's layers run compiled."""

    @property
    def structure(self) -> nn.Module:
        if self._structure is None:
            self._structure = structure_of(self.model)
        return self._structure

    def open(self, request: TeacherRequest) -> LocalStream:
        return LocalStream(self, request)

    @torch.no_grad()
    def answer(self, batch: Mapping[str, Any], request: TeacherRequest) -> TeacherOutput:
        """Run the model on ``batch``, the keyword arguments of its forward, on the model's device.

        Where no logits are wanted the forward ends with the last module that is: the rest is skipped (for the last
        hidden state, that is the output head). The first batch of a request runs whole, see :class:`Wanted`.
        """
        wanted = self._wanted.get(request)
        if wanted is None:
            wanted = self._wanted[request] = Wanted(self.model, request)
        looked_into = (*request.outputs, *request.inputs)
        with evaluating(self.model), wanted.capturing() as captured, running(self.compiled, looked_into):
            return wanted.answer(captured, captured.forward(**batch), batch)

    def output_head(self) -> OutputHead:
        """The model's output head, with its own weights.

        Raises:
            ConfigError: it has none.
        """
        head = output_head(self.model, required_head(self.model))
        return replace(head, weight=head.weight.detach(), bias=None if head.bias is None else head.bias.detach())

    def weight_digests(self) -> dict[str, str]:
        """Of the model's tensors, see :mod:`silverspoon_ray.teacher.cache.identity`."""
        return digests_of(self.model)

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._side_streams:
            self._side_streams[device] = torch.cuda.Stream(device)
        return self._side_streams[device]


def as_teacher(
    teacher: nn.Module | Teacher, device: torch.device, overlap: bool | None = None, place: bool = True
) -> Teacher:
    """A module as a local teacher; anything that answers batches as it is.

    Args:
        teacher: a module, or a teacher.
        device: the student's; a module is moved there if ``place`` is set.
        overlap: whether the teacher's forward may run beside the student's; None: where it can.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(teacher, nn.Module):
        if overlap and device.type != "cuda":
            logger.warning(
                "overlap_teacher_forward=True has no effect here: a teacher in the student's own process can only run "
                "beside it on CUDA. Give it devices of its own with teacher_placement."
            )
        return LocalTeacher(teacher.to(device) if place else teacher, overlap=overlap is not False)
    if isinstance(teacher, Teacher):
        return teacher
    raise ConfigError("teacher_model", type(teacher).__name__, "an nn.Module, or the handle of a TeacherGroup")


class LocalStream:
    """Batches to a :class:`LocalTeacher`."""

    def __init__(self, teacher: LocalTeacher, request: TeacherRequest) -> None:
        self.teacher = teacher
        self.request = request

    def submit(self, batch: Mapping[str, Any]) -> LocalAnswer:
        device = next((value.device for value in batch.values() if isinstance(value, torch.Tensor)), None)
        if not self.teacher.overlap or device is None or device.type != "cuda":
            return LocalAnswer(self.teacher.answer(batch, self.request))
        side = self.teacher.side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            answer = self.teacher.answer(batch, self.request)
        return LocalAnswer(answer, side.record_event(), device)


class LocalAnswer:
    """An answer that is there already, or is being computed on another CUDA stream of this process."""

    nbytes = 0

    def __init__(
        self, output: TeacherOutput, computed: torch.cuda.Event | None = None, device: torch.device | None = None
    ) -> None:
        self.output = output
        self.computed = computed
        self.device = device

    def ready(self) -> bool:
        return True  # on CUDA too: the student's stream waits, not the student

    def result(self) -> TeacherOutput:
        if self.computed is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self.computed)

            def used_here(tensor: torch.Tensor) -> torch.Tensor:
                # Without it the allocator could hand the memory out again while this stream still reads it.
                tensor.record_stream(current)
                return tensor

            self.output.map(used_here)
        return self.output

    def release(self) -> None:
        self.output = TeacherOutput()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode while the context lasts; afterwards every module has the mode it had."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
