"""Keeping the components of the loss apart, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable

import torch


class TrainingMeter:
    """Sums of components between two logs.

    In training every micro-batch contributes its part of the optimizer step's loss (numerator over the step's total
    denominator), so contributions simply add up, and the mean over steps is what is logged.
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.steps = 0

    def add(self, name: str, contribution: torch.Tensor) -> None:
        detached = contribution.detach().to(torch.float32)
        self.sums[name] = self.sums[name] + detached if name in self.sums else detached

    def take(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Means per optimizer step and over ranks since the last call; empty if there was no step.

        Args:
            gather: collects a tensor from all ranks, called once.
        """
        sums, steps = self.sums, self.steps
        self.sums, self.steps = {}, 0
        if not sums or steps == 0:
            return {}
        stacked = gather(torch.stack(list(sums.values())).unsqueeze(0)).mean(dim=0) / steps
        return dict(zip(sums, stacked.tolist(), strict=True))


class EvaluationMeter:
    """Numerators and denominators of components over an evaluation.

    A mean of batch means would weigh a batch of few tokens like one of many. Here the denominator of each component
    is what was counted on all ranks, so the result is that of one pass over the whole set in one batch.
    """

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, torch.Tensor] = {}

    def add(self, name: str, mean: torch.Tensor, count: torch.Tensor | int | float) -> None:
        """A batch's mean and how much it counts; a batch that counts nothing adds nothing, whatever its mean."""
        number = torch.as_tensor(count, dtype=torch.float64, device="cpu")
        value = mean.detach().to("cpu", torch.float64)
        total = torch.where(number > 0, value * number, torch.zeros_like(value))
        self.sums[name] = self.sums.get(name, torch.zeros_like(total)) + total
        self.counts[name] = self.counts.get(name, torch.zeros_like(number)) + number

    def means(self, reduce_sum: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """The mean of each component over the whole set.

        Args:
            reduce_sum: adds a float64 tensor up over all ranks, called once.
        """
        if not self.sums:
            return {}
        numbers = torch.stack([torch.stack([self.sums[name], self.counts[name]]) for name in self.sums])
        totals = reduce_sum(numbers)
        return {
            name: (total / count).item() if count > 0 else float("nan")
            for name, (total, count) in zip(self.sums, totals, strict=True)
        }
