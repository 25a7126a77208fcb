"""Logit lens: hidden states of any layer compared by what an output head makes of them (nostalgebraist 2020,
"interpreting GPT: the logit lens"; with a distance between distributions Belrose et al. 2023, arXiv:2303.08112).

T^2 KL(softmax(head(t) / T) || softmax(head(s) / T)), summed over the rows and divided by the number of *samples*, the
first dimension ("batchmean"): for [B, T, D] that is T times the mean per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.divergence import KLDivergenceLoss
from silverspoon_ray.losses.rows import (
    NumItems,
    arithmetic_dtype,
    check_features,
    check_positive,
    counted_only,
    counted_samples,
    full_mask,
    full_precision,
    through,
)


@dataclass(frozen=True, eq=False)
class LogitLensKLLoss:
    """KL divergence of the teacher's and the student's hidden states behind one output head.

    Attributes:
        output_head: module from [..., D] to logits [..., V], row by row; D is the teacher's width, to which features of
            the student are projected first, so that it is normally the teacher's head. Its parameters get a gradient
            from the student's side; freeze them if they should not learn. It is called in the dtype of its parameters.
        temperature: T, finite and > 0.

    Raises:
        ConfigError: there is no head, or the temperature is out of its range.
    """

    output_head: Callable[[torch.Tensor], torch.Tensor]
    temperature: float = 1.0
    counts_samples: ClassVar[bool] = True
    """Its mean is over samples, not over positions."""

    def __post_init__(self) -> None:
        if not callable(self.output_head):
            raise ConfigError("output_head", self.output_head, "must be a module from features to logits")
        check_positive("temperature", self.temperature)

    def __call__(
        self,
        student: torch.Tensor,
        teacher: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        num_items: NumItems | None = None,
    ) -> torch.Tensor:
        """The loss as a 0-d tensor, float32 (float64 if the student is float64).

        Args:
            student: features [B, ..., D], any floating dtype.
            teacher: features of the same shape; its dtype may be another. It never gets a gradient.
            mask: bool [B, ...] without the feature dimension, the rows that count, or a leading part of that shape;
                None = all. Rows that do not count may hold anything, even nan.
            num_items: what the sum over the counted rows is divided by, e.g. the tokens of all micro-batches, which
                gives the mean per token; None = the number of samples of which any row counts, at least 1.

        Raises:
            ConfigError: shapes, dtypes or devices that do not belong together, a mask that is not bool.
        """
        check_features(student, teacher, mask)
        with full_precision(student.device):
            logits = through(self.output_head, counted_only(student, mask, student.dtype))
            with torch.no_grad():
                targets = through(self.output_head, counted_only(teacher, mask, teacher.dtype))
        if mask is None:
            samples: NumItems = student.shape[0] if student.ndim > 1 else 1
        else:
            samples = counted_samples(student, mask).sum().clamp(min=1)
            mask = full_mask(student, mask)
        divergence = KLDivergenceLoss(temperature=self.temperature)
        loss = divergence(logits, targets, mask=mask, num_items=samples if num_items is None else num_items)
        return loss.to(arithmetic_dtype(student))


def logit_lens_kl_loss(
    *, output_head: Callable[[torch.Tensor], torch.Tensor] | None = None, temperature: float = 1.0
) -> LogitLensKLLoss:
    """A `LogitLensKLLoss`: the KL divergence behind ``output_head``, which must be given."""
    if output_head is None:
        raise ConfigError("output_head", None, "logit_lens_kl needs the module that makes logits of features")
    return LogitLensKLLoss(output_head=output_head, temperature=temperature)
