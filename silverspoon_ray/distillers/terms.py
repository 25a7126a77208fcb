"""Components of a loss: a mean, how much it stands for, and how components become one number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from silverspoon_ray.nested import map_tensors

# A component whose value is exactly 0 has no direction to scale; 0 / tiny stays 0 instead of becoming nan.
_TINY = 1e-12


@dataclass(frozen=True)
class LossTerm:
    """One component over one batch.

    Attributes:
        mean: 0-d, mean over what counts; 0 where nothing does.
        count: how many positions or samples that is.
        kind: what is counted, see :meth:`BaseDistiller.counted`; ``"task"`` for the student's own loss on the labels.
        weight: what the component is multiplied by in the total.
        carrier: 0-d; where a loss was computed together with its gradient, ``mean`` is a number alone, and this has
            the gradient of the whole weighted sum. One of the components has it.
    """

    mean: torch.Tensor
    count: torch.Tensor | int
    kind: str = "soft"
    weight: float = 1.0
    carrier: torch.Tensor | None = None

    @property
    def is_task(self) -> bool:
        return self.kind == "task"


def combine(
    terms: Mapping[str, LossTerm],
    shares: Mapping[str, torch.Tensor | float],
    alpha: float,
    magnitude_aware: bool,
) -> torch.Tensor:
    """(1 - alpha) x distillation + alpha x task.

    Args:
        terms: the components.
        shares: each component's part in the whole optimizer step, multiplied onto its mean.
        alpha: weight of the task loss, in [0, 1].
        magnitude_aware: divide each component by its own detached magnitude first, so that alpha weighs directions
            and not units.
    """
    total: torch.Tensor | None = None
    for name, term in terms.items():
        value = weighted(term, shares[name], alpha, magnitude_aware)
        if term.carrier is not None:
            value = value + (term.carrier - term.carrier.detach())
        total = value if total is None else total + value
    assert total is not None, "a distiller gave no loss terms"
    return total


def weighted(term: LossTerm, share: torch.Tensor | float, alpha: float, magnitude_aware: bool) -> torch.Tensor:
    """What one component adds to the total of :func:`combine`."""
    value = term.mean
    if magnitude_aware:
        value = value / value.detach().abs().clamp(min=_TINY)
    return value * share * (term.weight * (alpha if term.is_task else 1 - alpha))


def first_rows(kept: int, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that cuts tensors of ``rows`` samples down to the first ``kept``; it passes any other unchanged."""

    def head(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:kept] if tensor.dim() > 0 and tensor.shape[0] == rows else tensor

    return head


def widen_rows(value: Any, rows: int) -> Any:
    """Repeat the last sample until there are ``rows``, so that every rank gathers tensors of one shape."""

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] >= rows:
            return tensor
        return torch.cat([tensor, tensor[-1:].expand(rows - tensor.shape[0], *tensor.shape[1:])])

    return map_tensors(widened, value)
