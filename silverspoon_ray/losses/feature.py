"""Losses between feature vectors of one size, one value per row: squared error, smooth L1, cosine, angle and length.

With s and t a row of student and teacher, D entries each:

- mse: |s - t|^2 / D
- normalized_mse: mse of (x - mean x) / (std x + eps), std with D - 1 (so without the scale that a width gives)
- smooth_l1: mean of h(s - t), h(d) = d^2 / (2 beta) where |d| < beta, else |d| - beta / 2
  (Girshick 2015, arXiv:1504.08083, section 2.3)
- cosine: 1 - cos(s, t)
- angular_magnitude: alpha (1 - cos(s, t)) + beta (|s| - |t|)^2

The loss is their mean over the counted rows. Gradients reach the teacher where it asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.rows import (
    NumItems,
    RowValues,
    arithmetic_dtype,
    check_features,
    check_not_negative,
    check_num_items,
    check_positive,
    cosine_distances,
    counted_only,
    row_loss,
)

COSINE_EPS = 1e-8  # the shortest length that a vector is divided by, as in torch.nn.functional.cosine_similarity


@dataclass(frozen=True)
class MSELoss:
    """Mean squared error.

    Attributes:
        reduction: "mean"; "sum" over all entries, or "none", which gives them in the features' shape. The last two have
            no denominator: entries that do not count are 0, and ``num_items`` changes nothing.

    Raises:
        ConfigError: there is no such reduction.
    """

    reduction: str = "mean"

    def __post_init__(self) -> None:
        _check_reduction(self.reduction)

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
            mask: bool [...], the rows that count, or a leading part of that shape: [B] for [B, T, D] counts whole
                samples. None = all. Rows that do not count may hold anything, even nan.
            num_items: the denominator, counting what the mask counts; None = the number of those, at least 1.
                Micro-batches with the denominator of the whole batch add up to its loss.

        Raises:
            ConfigError: shapes, dtypes or devices that do not belong together, a mask that is not bool.
        """
        return _elementwise_loss(_squares, student, teacher, mask, num_items, self.reduction)


@dataclass(frozen=True)
class NormalizedMSELoss:
    """Mean squared error of rows that were brought to mean 0 and standard deviation 1.

    Attributes:
        eps: added to the standard deviation, > 0. A constant row becomes zeros.

    Raises:
        ConfigError: ``eps`` is out of its range.
    """

    eps: float = 1e-5

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
        """The loss as a 0-d tensor; arguments, dtypes and errors as those of `MSELoss.__call__`."""

        def values(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return (self._standardized(s) - self._standardized(t)).square().mean(-1)

        return row_loss(values, student, teacher, mask=mask, num_items=num_items)

    def _standardized(self, features: torch.Tensor) -> torch.Tensor:
        centred = features - features.mean(-1, keepdim=True)
        # Not torch.std: a single entry would be nan there, here it is 0.
        lengths = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
        return centred / (lengths / max(features.shape[-1] - 1, 1) ** 0.5 + self.eps)


@dataclass(frozen=True)
class SmoothL1Loss:
    """Squared error near 0, absolute error beyond.

    Attributes:
        beta: where one becomes the other, >= 0; 0 is the absolute error.
        reduction: as in `MSELoss`.

    Raises:
        ConfigError: an attribute is out of its range.
    """

    beta: float = 1.0
    reduction: str = "mean"

    def __post_init__(self) -> None:
        check_not_negative("beta", self.beta)
        _check_reduction(self.reduction)

    def __call__(
        self,
        student: torch.Tensor,
        teacher: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        num_items: NumItems | None = None,
    ) -> torch.Tensor:
        """The loss as a 0-d tensor; arguments, dtypes and errors as those of `MSELoss.__call__`."""

        def entries(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return F.smooth_l1_loss(s, t, reduction="none", beta=float(self.beta))

        return _elementwise_loss(entries, student, teacher, mask, num_items, self.reduction)


@dataclass(frozen=True)
class CosineLoss:
    """1 - cosine. A row of zeros is at distance 1 from every other and gets no gradient.

    Attributes:
        dim: the feature dimension; -1 = the last. The channels of a convolutional map [B, C, H, W] are 1; its full mask
            is then [B, H, W].

    Raises:
        ConfigError: ``dim`` is not a whole number; when called, the features have no such dimension.
    """

    dim: int = -1

    def __post_init__(self) -> None:
        _check_dim(self.dim)

    def __call__(
        self,
        student: torch.Tensor,
        teacher: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        num_items: NumItems | None = None,
    ) -> torch.Tensor:
        """The loss as a 0-d tensor; arguments, dtypes and errors as those of `MSELoss.__call__`."""

        def values(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return cosine_distances(s, t, COSINE_EPS)

        return row_loss(values, student, teacher, mask=mask, num_items=num_items, dim=self.dim)


@dataclass(frozen=True)
class AngularMagnitudeLoss:
    """alpha (1 - cosine) + beta (difference of the lengths)^2.

    Attributes:
        alpha: weight of the direction, >= 0.
        beta: weight of the length, >= 0.
        dim: the feature dimension, as in `CosineLoss`.

    Raises:
        ConfigError: an attribute is out of its range; when called, the features have no such dimension.
    """

    alpha: float = 1.0
    beta: float = 1.0
    dim: int = -1

    def __post_init__(self) -> None:
        check_not_negative("alpha", self.alpha)
        check_not_negative("beta", self.beta)
        _check_dim(self.dim)

    def __call__(
        self,
        student: torch.Tensor,
        teacher: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        num_items: NumItems | None = None,
    ) -> torch.Tensor:
        """The loss as a 0-d tensor; arguments, dtypes and errors as those of `MSELoss.__call__`."""

        def values(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            lengths = torch.linalg.vector_norm(s, dim=-1) - torch.linalg.vector_norm(t, dim=-1)
            return self.alpha * cosine_distances(s, t, COSINE_EPS) + self.beta * lengths.square()

        return row_loss(values, student, teacher, mask=mask, num_items=num_items, dim=self.dim)


def mse_loss(*, reduction: str = "mean") -> MSELoss:
    """An `MSELoss`: the mean squared error."""
    return MSELoss(reduction=reduction)


def normalized_mse_loss(*, eps: float = 1e-5) -> NormalizedMSELoss:
    """A `NormalizedMSELoss`: the mean squared error of standardised rows."""
    return NormalizedMSELoss(eps=eps)


def smooth_l1_loss(*, beta: float = 1.0, reduction: str = "mean") -> SmoothL1Loss:
    """A `SmoothL1Loss`: squared below ``beta``, absolute above."""
    return SmoothL1Loss(beta=beta, reduction=reduction)


def cosine_loss(*, dim: int = -1) -> CosineLoss:
    """A `CosineLoss`: 1 - cosine."""
    return CosineLoss(dim=dim)


def angular_magnitude_loss(*, alpha: float = 1.0, beta: float = 1.0, dim: int = -1) -> AngularMagnitudeLoss:
    """An `AngularMagnitudeLoss`: alpha (1 - cosine) + beta (difference of the lengths)^2."""
    return AngularMagnitudeLoss(alpha=alpha, beta=beta, dim=dim)


def _squares(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return (student - teacher).square()


def _elementwise_loss(
    entries: RowValues,
    student: torch.Tensor,
    teacher: torch.Tensor,
    mask: torch.Tensor | None,
    num_items: NumItems | None,
    reduction: str,
) -> torch.Tensor:
    """``entries`` maps two arrays to one of their shape, equal entries to 0."""
    if reduction == "mean":
        return row_loss(lambda s, t: entries(s, t).mean(-1), student, teacher, mask=mask, num_items=num_items)
    check_features(student, teacher, mask)
    check_num_items(num_items)
    result = entries(*(counted_only(x, mask, arithmetic_dtype(student)) for x in (student, teacher)))
    return result.sum() if reduction == "sum" else result


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError("reduction", reduction, "must be 'mean', 'sum' or 'none'")


def _check_dim(dim: int) -> None:
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ConfigError("dim", dim, "must be a whole number, the feature dimension")
