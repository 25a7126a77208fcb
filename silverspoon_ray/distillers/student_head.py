"""The student's output head, left out of its forward so that a fused loss can do its work in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from silverspoon_ray.distillers.trunk import overridden_forward
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.fused import LinearStudent
from silverspoon_ray.models.output_head import explains, output_head


class StudentHead:
    """A student's output head.

    Args:
        student: the model, without wrappers.
        name: of its head, see :func:`~silverspoon_ray.models.output_head.output_head_name`.
    """

    def __init__(self, student: nn.Module, name: str) -> None:
        self.student = student
        self.name = name
        self.hidden: torch.Tensor | None = None
        self.first: torch.Tensor | None = None

    @contextmanager
    def left_out(self, whole: bool = False) -> Iterator[None]:
        """While the context lasts, the head computes the logits of the first class alone.

        They keep the outputs of the model connected with all of its parameters, as DDP wants to see it, and have the
        dtype that the logits would have.

        Args:
            whole: all logits after all, to see what the model does with them.
        """
        self.hidden = self.first = None
        with overridden_forward(self.student.get_submodule(self.name), self._logits if whole else self._first_class):
            yield

    def _logits(self, forward: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        self._first_class(forward, hidden)
        logits: torch.Tensor = forward(hidden)
        return logits

    def _first_class(self, forward: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
        if self.hidden is not None:
            raise ConfigError("output_head_layer", self.name, "a layer that runs once in a forward; this ran again")
        layer: Any = self.student.get_submodule(self.name)
        self.hidden = hidden
        self.first = F.linear(hidden, layer.weight[:1], None if layer.bias is None else layer.bias[:1])
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

    def explains(self, student: LinearStudent, logits: torch.Tensor) -> bool:
        """The model's logits are what the head gives, scaled and capped as its configuration says: nothing else happens
        behind it."""
        with torch.no_grad():
            return explains(student.head, student.hidden.to(student.dtype), logits)
