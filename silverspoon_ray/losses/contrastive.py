"""Contrastive distillation: the student's row should be nearer to the teacher's row of the same place than to others.

Per row i, with unit vectors and the temperature T: -log of the softmax over j of cos(s_i, t_j) / T, at j = i (InfoNCE,
van den Oord et al. 2018, arXiv:1807.03748; for distillation Tian et al. 2020, arXiv:1910.10699). The rows are all the
rows of the batch: B * T of [B, T, D].

The other rows of the batch are what a row is compared with. So micro-batches make it easier, and no denominator makes
up for it: ``num_items`` gives each row its weight, its value still comes from the rows at hand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.rows import (
    NumItems,
    arithmetic_dtype,
    check_features,
    check_positive,
    counted_only,
    full_mask,
    full_precision,
    share_of_items,
    unit_rows,
)

UNIT_EPS = 1e-12  # the shortest length that a vector is divided by, as in torch.nn.functional.normalize


class ContrastiveDistillationLoss(nn.Module):
    """InfoNCE from the student's rows to the teacher's.

    Attributes:
        temperature: T, finite and > 0.
        projector: linear from the student's to the teacher's feature size, or None. It is learned: its parameters
            belong in the optimizer.

    Raises:
        ConfigError: the temperature or a size is out of its range.
    """

    temperature: float
    projector: nn.Linear | None

    def __init__(
        self, temperature: float = 0.07, student_dim: int | None = None, teacher_dim: int | None = None
    ) -> None:
        """
        Args:
            temperature: see above.
            student_dim, teacher_dim: feature sizes. If both are given and differ, there is a projector.
        """
        super().__init__()
        check_positive("temperature", temperature)
        for key, size in (("student_dim", student_dim), ("teacher_dim", teacher_dim)):
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ConfigError(key, size, "must be a whole number >= 1, the feature size, or None")
        self.temperature = temperature
        self.projector = None
        if student_dim is not None and teacher_dim is not None and student_dim != teacher_dim:
            self.projector = nn.Linear(student_dim, teacher_dim)

    def forward(
        self,
        student_features: torch.Tensor,
        teacher_features: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        num_items: NumItems | None = None,
    ) -> torch.Tensor:
        """The loss as a 0-d tensor, float32 (float64 if the student is float64).

        Args:
            student_features: [..., D_s], any floating dtype. Rows of zeros get no gradient.
            teacher_features: the same shape but for D_t where there is a projector; its dtype may be another.
            mask: bool [...], the rows that take part, or a leading part of that shape; None = all. The others may hold
                anything and are compared with nothing.
            num_items: the denominator, counting what the mask counts; None = the number of those, at least 1.

        Raises:
            ConfigError: shapes, dtypes or devices that do not belong together, a mask that is not bool.
        """
        student, dtype = student_features, arithmetic_dtype(student_features)
        self._check(student, teacher_features, mask)
        with full_precision(student.device):
            own, other = (_counted_rows(x, mask, dtype) for x in (student, teacher_features))
            if self.projector is not None:
                # Cast here and not by .to(): whoever holds the parameters, such as an optimizer, keeps them.
                own = F.linear(own, self.projector.weight.to(own), self.projector.bias.to(own))
            logits = unit_rows(own, UNIT_EPS) @ unit_rows(other, UNIT_EPS).mT / self.temperature
            places = torch.arange(len(logits), device=logits.device)
            loss = F.cross_entropy(logits, places, reduction="sum") / max(len(logits), 1)
            return loss * share_of_items(student, mask, num_items)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"

    def _check(self, student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None) -> None:
        if student.ndim < 2:
            raise ConfigError("student", tuple(student.shape), "rows to compare need a dimension: [..., D]")
        if self.projector is None:
            check_features(student, teacher, mask)
            return
        sizes = self.projector.in_features, self.projector.out_features
        for key, features, size in zip(("student", "teacher"), (student, teacher), sizes, strict=True):
            if features.ndim == 0 or features.shape[-1] != size:
                raise ConfigError(key, tuple(features.shape), f"must end in {key}_dim={size}")
        if student.shape[:-1] != teacher.shape[:-1]:
            raise ConfigError(
                "teacher",
                tuple(teacher.shape),
                f"must have the rows of the student, whose shape is {tuple(student.shape)}",
            )
        check_features(student, teacher[..., :1].expand_as(student), mask)


def contrastive_loss(
    *, temperature: float = 0.07, student_dim: int | None = None, teacher_dim: int | None = None
) -> ContrastiveDistillationLoss:
    """A `ContrastiveDistillationLoss`: each row against the teacher's rows of the batch."""
    return ContrastiveDistillationLoss(temperature=temperature, student_dim=student_dim, teacher_dim=teacher_dim)


def _counted_rows(features: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """[rows that take part, D]"""
    rows = counted_only(features, mask, dtype)
    return rows.flatten(0, -2) if mask is None else rows[full_mask(features, mask)]
