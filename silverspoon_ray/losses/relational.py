"""Relational distillation: how samples lie to one another, not where they lie (Park et al. 2019, arXiv:1904.05068).

A sample is everything behind the first dimension, as one vector x_i.

- distance (section 3.2): |x_i - x_j| over the mean of those that are not 0; all pairs (i, j) of the batch
- angle (section 3.2): cosine between x_j - x_i and x_k - x_i; all triples (i, j, k), 0 where two of them coincide

Student and teacher are compared by smooth L1 with beta 1, mean over all pairs or triples.

A loss of pairs is no sum over samples: micro-batches see fewer of them, and no denominator can bring the missing ones
back. ``num_items`` only weighs the batch, by its counted rows.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.rows import (
    NumItems,
    arithmetic_dtype,
    check_features,
    check_not_negative,
    counted_only,
    counted_samples,
    full_precision,
    share_of_items,
    unit_rows,
)

logger = logging.getLogger(__name__)

ANGLE_EPS = 1e-12  # the shortest difference that is divided by, as in torch.nn.functional.normalize


@dataclass(frozen=True)
class RelationalLoss:
    """dist_weight times the distance loss + angle_weight times the angle loss.

    A part of weight 0 is not computed. The angle takes memory for the differences of all pairs, B^2 times a sample.

    Attributes:
        dist_weight, angle_weight: >= 0.

    Raises:
        ConfigError: a weight is out of its range.
    """

    dist_weight: float = 1.0
    angle_weight: float = 2.0
    counts_samples: ClassVar[bool] = True
    """Its mean is over samples, not over positions."""

    def __post_init__(self) -> None:
        check_not_negative("dist_weight", self.dist_weight)
        check_not_negative("angle_weight", self.angle_weight)

    def __call__(
        self,
        student: torch.Tensor,
        teacher: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        num_items: NumItems | None = None,
    ) -> torch.Tensor:
        """The loss as a 0-d tensor, float32 (float64 if the student is float64); 0 for a single sample.

        Args:
            student: features [B, ..., D], any floating dtype.
            teacher: features of the same shape; its dtype may be another. It never gets a gradient.
            mask: bool [B, ...] without the feature dimension, or a leading part of that. A sample takes part if
                anything of it counts; what does not count is 0 in both models, whatever it holds. None = all.
            num_items: the loss is multiplied by the number of counted rows over this; None = it is not.

        Raises:
            ConfigError: shapes, dtypes or devices that do not belong together, a mask that is not bool.
        """
        check_features(student, teacher, mask)
        if student.ndim < 2:
            raise ConfigError("student", tuple(student.shape), "relations need a dimension of samples: [B, ..., D]")
        if len(student) == 1:
            _warn_of_single_sample()
        with full_precision(student.device):
            own = _samples(student, mask, arithmetic_dtype(student))
            with torch.no_grad():
                other = _samples(teacher, mask, arithmetic_dtype(student))
            loss = own.sum() * 0.0 if not (self.dist_weight or self.angle_weight) else own.new_zeros(())
            for weight, relations in ((self.dist_weight, _distances), (self.angle_weight, _angles)):
                if weight:
                    with torch.no_grad():
                        target = relations(other)
                    loss = loss + weight * _mean_smooth_l1(relations(own), target)
            return loss * share_of_items(student, mask, num_items)


def relkd_distance_loss() -> RelationalLoss:
    """A `RelationalLoss` of the distances alone."""
    return RelationalLoss(dist_weight=1.0, angle_weight=0.0)


def relkd_angle_loss() -> RelationalLoss:
    """A `RelationalLoss` of the angles alone."""
    return RelationalLoss(dist_weight=0.0, angle_weight=1.0)


def relkd_da_loss(*, dist_weight: float = 1.0, angle_weight: float = 2.0) -> RelationalLoss:
    """A `RelationalLoss` of both distances and angles."""
    return RelationalLoss(dist_weight=dist_weight, angle_weight=angle_weight)


@functools.cache
def _warn_of_single_sample() -> None:
    logger.warning("a relational loss of a batch with a single sample is 0: there is nothing to relate it to")


def _samples(features: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The samples that take part, one per row."""
    samples = counted_only(features, mask, dtype).flatten(1)
    return samples if mask is None else samples[counted_samples(features, mask)]


def _distances(samples: torch.Tensor) -> torch.Tensor:
    """[B, B]"""
    # By differences. From 26 rows on torch takes inner products, whose rounding puts a sample at a distance from itself
    # (about 1e-3 of the others); that would also count in the mean.
    distances = torch.cdist(samples, samples, compute_mode="donot_use_mm_for_euclid_dist")
    different = distances > 0.0
    mean = distances.sum() / different.sum().clamp(min=1)
    return distances / (mean + ~different.any())


def _angles(samples: torch.Tensor) -> torch.Tensor:
    """[B, B, B], the vertex first."""
    directions = unit_rows(samples[None, :, :] - samples[:, None, :], ANGLE_EPS)
    return directions @ directions.mT


def _mean_smooth_l1(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return F.smooth_l1_loss(student, teacher, reduction="sum") / max(student.numel(), 1)
