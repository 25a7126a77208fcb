"""Losses in the metric M of an output head, M = W^T W: what differs in the features counts as it moves the logits.

With x.y = x^T M y, and s and t a row of student and teacher:

- mahalanobis_mse: (s - t).(s - t), which is |W s - W t|^2; not divided by D
- mahalanobis_cosine: 1 - s.t / max(sqrt(s.s) sqrt(t.t), eps), which is 1 - cos(W s, W t)

The product W^T W is made once; a step then costs D x D per row, whatever V. The loss is the mean over the counted rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.rows import (
    NumItems,
    RowValues,
    arithmetic_dtype,
    check_positive,
    full_precision,
    row_loss,
    through,
)


class Metric:
    """A symmetric matrix [D, D], on whatever device and in whatever dtype the features come.

    Args:
        matrix: any floating dtype, kept as it is; what is not symmetric in it is dropped.
    """

    def __init__(self, matrix: torch.Tensor) -> None:
        # Exactly symmetric, so that x.y and y.x have the same rounding.
        self.matrix = (matrix + matrix.mT) / 2.0
        self._copies: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"Metric({len(self.matrix)} x {len(self.matrix)})"

    def __getstate__(self) -> dict[str, object]:
        return {"matrix": self.matrix, "_copies": {}}  # the copies may be on devices that the reader has not

    @property
    def size(self) -> int:
        return len(self.matrix)

    def inner(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x.y of each pair of rows [..., D]."""
        key = x.device, x.dtype
        if key not in self._copies:
            self._copies[key] = self.matrix.to(x)
        return (x @ self._copies[key] * y).sum(-1)


@dataclass(frozen=True, eq=False)
class MahalanobisMSELoss:
    """Squared length of the difference in a metric.

    Attributes:
        metric: M. It gets no gradient.
        pre_norm: module that both are passed through first, e.g. the norm before the head, or None. The student's side
            of it has a gradient, the teacher's has none.
    """

    metric: Metric
    pre_norm: nn.Module | None = None

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
            student: features [..., D], any floating dtype.
            teacher: features of the same shape; its dtype may be another.
            mask: bool [...], the rows that count, or a leading part of that shape; None = all. Rows that do not count
                may hold anything, even nan.
            num_items: the denominator, counting what the mask counts; None = the number of those, at least 1.
                Micro-batches with the denominator of the whole batch add up to its loss.

        Raises:
            ConfigError: shapes, dtypes or devices that do not belong together, a mask that is not bool, features of
                another size than the metric's.
        """

        def values(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            difference = s - t
            return self.metric.inner(difference, difference)

        return _loss(self.metric, self.pre_norm, values, student, teacher, mask, num_items)


@dataclass(frozen=True, eq=False)
class MahalanobisCosineLoss:
    """1 - cosine in a metric. A row of length 0 is at distance 1 from every other and gets no gradient.

    Attributes:
        metric, pre_norm: as in `MahalanobisMSELoss`.
        eps: the smallest product of two lengths that is divided by, > 0.

    Raises:
        ConfigError: ``eps`` is out of its range.
    """

    metric: Metric
    pre_norm: nn.Module | None = None
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_positive("eps", self.eps)

    def __call__(
        self,
        student: torch.Tensor,
        teacher: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        num_items: NumItems | None = None,
    ) -> torch.Tensor:
        """The loss as a 0-d tensor; arguments, dtypes and errors as those of `MahalanobisMSELoss.__call__`."""
        return _loss(self.metric, self.pre_norm, self._values, student, teacher, mask, num_items)

    def _values(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        inner = self.metric.inner
        squares = inner(student, student), inner(teacher, teacher)
        exist = (squares[0] > 0.0) & (squares[1] > 0.0)
        # The square root of 0 has no derivative, and the one of less is nan: 1 in their place, for what is not taken.
        lengths = [square.where(exist, 1.0).sqrt() for square in squares]
        product = lengths[0] * lengths[1]
        # |u - v|^2 / 2 of unit vectors, without cancellation: see `rows.cosine_distances`.
        difference = student / lengths[0].unsqueeze(-1) - teacher / lengths[1].unsqueeze(-1)
        values = (inner(difference, difference) / 2.0).where(
            product >= self.eps, 1.0 - inner(student, teacher) / product.clamp(min=self.eps)
        )
        return values.where(exist, 1.0)


def mahalanobis_mse_loss(
    *,
    weight_matrix: torch.Tensor | None = None,
    metric_matrix: torch.Tensor | None = None,
    pre_norm: nn.Module | None = None,
) -> MahalanobisMSELoss:
    """A `MahalanobisMSELoss`: the squared length of the difference in the metric of an output head.

    Args:
        weight_matrix: W [V, D], such as the weight of an output head; M = W^T W, as W is now.
        metric_matrix: M [D, D], symmetric and without negative eigenvalues. Not looked at beside a ``weight_matrix``.
        pre_norm: see `MahalanobisMSELoss`.

    Raises:
        ConfigError: there is no matrix, or it has a wrong shape.
    """
    return MahalanobisMSELoss(_metric(weight_matrix, metric_matrix), _checked(pre_norm))


def mahalanobis_cosine_loss(
    *,
    weight_matrix: torch.Tensor | None = None,
    metric_matrix: torch.Tensor | None = None,
    pre_norm: nn.Module | None = None,
    eps: float = 1e-8,
) -> MahalanobisCosineLoss:
    """A `MahalanobisCosineLoss`: 1 - cosine in the metric of an output head.

    Args and errors as those of `mahalanobis_mse_loss`; ``eps`` as in `MahalanobisCosineLoss`.
    """
    return MahalanobisCosineLoss(_metric(weight_matrix, metric_matrix), _checked(pre_norm), eps)


def _loss(
    metric: Metric,
    pre_norm: nn.Module | None,
    values: RowValues,
    student: torch.Tensor,
    teacher: torch.Tensor,
    mask: torch.Tensor | None,
    num_items: NumItems | None,
) -> torch.Tensor:
    if student.ndim and student.shape[-1] != metric.size:
        raise ConfigError("student", tuple(student.shape), f"must end in the size of the metric, {metric.size}")

    def normed_values(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        if pre_norm is None:
            return values(s, t)
        own = through(pre_norm, s).to(s)
        with torch.no_grad():
            other = through(pre_norm, t).to(s)
        return values(own, other)

    return row_loss(normed_values, student, teacher, mask=mask, num_items=num_items)


def _metric(weight: torch.Tensor | None, metric: torch.Tensor | None) -> Metric:
    for key, matrix, shape in (("weight_matrix", weight, "(V, D)"), ("metric_matrix", metric, "(D, D)")):
        if matrix is None:
            continue
        if not isinstance(matrix, torch.Tensor) or not matrix.is_floating_point():
            raise ConfigError(key, matrix, "must be a tensor of a floating dtype")
        if matrix.ndim != 2 or 0 in matrix.shape or (matrix is metric and matrix.shape[0] != matrix.shape[1]):
            raise ConfigError(key, tuple(matrix.shape), f"must be a matrix {shape}, this is its shape")
    if weight is not None:
        weight = weight.detach().to(arithmetic_dtype(weight))
        with full_precision(weight.device):
            return Metric(weight.mT @ weight)
    if metric is not None:
        return Metric(metric.detach().to(arithmetic_dtype(metric)))
    raise ConfigError("weight_matrix", None, "a Mahalanobis loss needs it, (V, D), or metric_matrix, (D, D)")


def _checked(pre_norm: nn.Module | None) -> nn.Module | None:
    if pre_norm is not None and not callable(pre_norm):
        raise ConfigError("pre_norm", pre_norm, "must be a module or None")
    return pre_norm
