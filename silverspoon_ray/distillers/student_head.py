"""The student's output head, left out of its forward so that a fused loss can do its work in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from silverspoon_ray.distillers.masks import IGNORED
from silverspoon_ray.distillers.task_loss import labels_by_row
from silverspoon_ray.distillers.terms import first_rows
from silverspoon_ray.distillers.trunk import overridden_forward
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.chunks import slices
from silverspoon_ray.losses.fused import LinearStudent
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.models.output_head import is_linear, output_head
from silverspoon_ray.nested import map_tensors
from silverspoon_ray.teacher.random_stream import global_state, set_global_state
from silverspoon_ray.teacher.wanted import extract_logits

# The logits of a trial go from -SPREAD to SPREAD: an unknown soft cap at 30, the usual one, moves the largest by 13 %.
SPREAD = 20.0

# How far what the model makes of them may be off, over the largest. Half precision rounds at 2^-8, a few times.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
HALF_TOLERANCE = 1e-2

# And its loss, which transformers computes in float32 at least.
LOSS_TOLERANCE = 2e-5

# Compared at a time.
ROWS = 256


class StudentHead:
    """A student's output head.

    Args:
        find: gives the model, without wrappers; asked each time, because a Trainer may make a new one.
        name: of its head, see :func:`~silverspoon_ray.models.output_head.output_head_name`.
    """

    def __init__(self, find: Callable[[], nn.Module], name: str) -> None:
        self.find = find
        self.name = name
        self.hidden: torch.Tensor | None = None
        self.first: torch.Tensor | None = None

    @property
    def student(self) -> nn.Module:
        return self.find()

    @property
    def layer(self) -> Any:
        return self.student.get_submodule(self.name)

    @property
    def usable(self) -> bool:
        """It is a plain linear layer (still), and no hook looks at logits or at their gradient, which are not there
        where the head is left out."""
        module: nn.Module = self.student
        around = [module]
        for part in self.name.split("."):
            module = module.get_submodule(part)
            around.append(module)
        looked_at = any(one._forward_hooks or one._backward_hooks or one._backward_pre_hooks for one in around)
        return is_linear(module) and not looked_at

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """While the context lasts, the head computes the logits of the first class alone.

        They keep the outputs of the model connected with all of its parameters, as DDP wants to see it, and have the
        dtype that the logits would have.
        """
        self.hidden = self.first = None
        with overridden_forward(self.layer, self._first_class):
            yield

    def _first_class(self, forward: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        if self.hidden is not None:
            raise ConfigError("output_head_layer", self.name, "a layer that runs once in a forward; this ran again")
        self.hidden = hidden
        self.first = _of_first_class(self.layer, hidden)
        return self.first

    def seen(self) -> LinearStudent:
        """What the loss needs, of the forward that has just run.

        Raises:
            ConfigError: the head did not run.
        """
        if self.hidden is None or self.first is None:
            raise ConfigError("output_head_layer", self.name, "a layer that runs in the student's forward")
        hidden, dtype = self.hidden, self.first.dtype
        self.hidden = self.first = None
        return LinearStudent(hidden, output_head(self.student, self.name), dtype)

    # ---- what is behind it ---------------------------------------------------------------

    @torch.no_grad()
    def explains(self, inputs: Mapping[str, Any], with_task: bool, shifts: bool) -> bool:
        """Whether the head is all there is: it runs once in a forward, nothing is behind it but the scale and soft cap
        of the configuration, and the model's loss is the cross-entropy of its logits.

        For this the model runs on two samples of a batch, its head giving numbers that are spread over a wide range:
        what the weights and the data of the moment happen to give could hide what a later step shows. Random states
        and buffers are afterwards what they were.

        Args:
            inputs: the model's keyword arguments.
            with_task: they have labels, and the model gives a loss of them.
            shifts: it is a causal language model.
        """
        layer = self.layer
        if not is_linear(layer):
            return False
        inputs = _two_samples(inputs)
        if with_task:
            names = ("labels", "shift_labels")
            inputs |= {name: _labels(inputs[name], layer.out_features) for name in names if name in inputs}
        given: list[torch.Tensor] = []

        def give(forward: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
            given.append(_of_first_class(layer, hidden))
            return _numbers(given[-1], layer.out_features).view(*hidden.shape[:-1], -1)

        with _left_as_it_was(self.student), overridden_forward(layer, give):
            outputs = self.student(**inputs)
        if len(given) != 1:
            return False
        logits = extract_logits(outputs)
        if not _are_finished(logits, output_head(self.student, self.name), given[0]):
            return False
        return not with_task or _is_cross_entropy(_loss_of(outputs), logits, labels_by_row(inputs, shifts))


def _of_first_class(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden, layer.weight[:1], None if layer.bias is None else layer.bias[:1])


def _numbers(first: torch.Tensor, classes: int, part: slice = slice(None)) -> torch.Tensor:
    """Logits [rows of the part, classes] of which no row and no class is like another.

    Args:
        first: [..., 1], of the first class; has the dtype.
        classes: how many.
        part: of the rows.
    """
    device, dtype = first.device, first.dtype
    by_row = torch.linspace(-0.4, 0.4, first.numel(), device=device)[part] * SPREAD
    # Multiples of an irrational number modulo 1: spread evenly in any order of classes.
    by_class = (torch.arange(classes, device=device, dtype=torch.float64) * 0.6180339887498949).frac()
    by_class = (by_class * 1.2 - 0.6) * SPREAD
    return by_row.to(dtype)[:, None] + by_class.to(dtype)


def _are_finished(logits: torch.Tensor, head: OutputHead, first: torch.Tensor) -> bool:
    """The logits are the numbers, scaled and capped."""
    if logits.shape != (*first.shape[:-1], head.classes) or not logits.numel():
        return False
    narrower = max(TOLERANCE.get(dtype, HALF_TOLERANCE) for dtype in (first.dtype, logits.dtype))
    rows = logits.reshape(-1, head.classes)
    for part in slices(len(rows), ROWS):
        expected = head.finish_(_numbers(first, head.classes, part))
        if not (rows[part] - expected).abs().amax() <= narrower * expected.abs().amax():
            return False
    return True


def _is_cross_entropy(loss: torch.Tensor | None, logits: torch.Tensor, labels: torch.Tensor) -> bool:
    if loss is None or labels.shape != logits.shape[:-1]:
        return False
    rows, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for part in slices(len(rows), ROWS):
        total += F.cross_entropy(rows[part].float(), labels[part], ignore_index=IGNORED, reduction="sum")
    expected = (total / (labels != IGNORED).sum()).to(loss.dtype)
    return torch.allclose(loss, expected, rtol=LOSS_TOLERANCE, atol=LOSS_TOLERANCE, equal_nan=True)


def _loss_of(outputs: Any) -> torch.Tensor | None:
    loss = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, torch.Tensor) and loss.dim() == 0 else None


def _labels(labels: Any, classes: int) -> Any:
    """Labels of which two thirds count, whatever the batch has."""
    if not isinstance(labels, torch.Tensor):
        return labels
    numbers = torch.arange(labels.numel(), device=labels.device)
    numbers = (numbers % classes).masked_fill(numbers % 3 == 0, IGNORED)
    return numbers.view(labels.shape).to(labels.dtype)


def _two_samples(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The first two, or all where what belongs to a sample cannot be told."""
    sizes: set[int] = set()
    map_tensors(lambda tensor: sizes.add(tensor.shape[0] if tensor.dim() > 0 else -1), dict(inputs))
    if len(sizes) != 1 or -1 in sizes:
        return dict(inputs)
    cut = first_rows(2, sizes.pop())
    return {name: map_tensors(cut, value) for name, value in inputs.items()}


@contextmanager
def _left_as_it_was(student: nn.Module) -> Iterator[None]:
    """Afterwards random states and the model's buffers (a batch norm's averages) are what they were."""
    state = global_state()
    devices = {tensor.device for tensor in student.parameters() if tensor.device.type == "cuda"}
    of_devices = {device: torch.cuda.get_rng_state(device) for device in devices}
    buffers = [(buffer, buffer.clone()) for buffer in student.buffers()]
    try:
        yield
    finally:
        set_global_state(state)
        for device, before in of_devices.items():
            torch.cuda.set_rng_state(before, device)
        for buffer, value in buffers:
            buffer.copy_(value)
