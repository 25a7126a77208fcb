"""What all losses share: which rows count, what their sum is divided by, in which precision, and checks.

A *row* is one vector along the feature dimension, so [B, T, D] has B * T rows. A mask says which rows count. It may
stop early: [B] for [B, T, D] lets whole samples count or not.

No check looks at values on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from silverspoon_ray.errors import ConfigError

NumItems = int | float | torch.Tensor
RowValues = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def row_loss(
    values: RowValues,
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    num_items: NumItems | None,
    dim: int = -1,
) -> torch.Tensor:
    """The sum of the counted rows' values over ``num_items``.

    Args:
        values: from student and teacher [..., D] in the dtype of the arithmetic to values [...].
        student, teacher: features of one shape, any floating dtypes.
        mask: bool, the leading dimensions of the features without ``dim``, all or some; None = every row counts. A row
            with False may hold anything and adds exactly 0 to value and gradient.
        num_items: the denominator; None = the number of counted rows, at least 1. It counts what the mask counts: with
            a mask [B] for [B, T, D] an item is a sample, whose value is the mean of its rows.
        dim: the feature dimension.

    Returns:
        0-d float32, float64 if the student is float64.
    """
    check_features(student, teacher, mask, dim=dim)
    with full_precision(student.device):
        features = (counted_only(x.movedim(dim, -1), mask, arithmetic_dtype(student)) for x in (student, teacher))
        row_values = values(*features)
        return mean_of_counted(row_values, mask, num_items)


def mean_of_counted(values: torch.Tensor, mask: torch.Tensor | None, num_items: NumItems | None) -> torch.Tensor:
    """The sum of the counted values [...] over the denominator; see `row_loss`."""
    if mask is not None:
        values = values.unsqueeze(-1).flatten(mask.ndim)
        values = (values.sum(-1) / max(values.shape[-1], 1)).masked_fill(~mask, 0.0)
    return values.sum() / denominator(values.numel(), mask, num_items, dtype=values.dtype, device=values.device)


def share_of_items(
    student: torch.Tensor, mask: torch.Tensor | None, num_items: NumItems | None
) -> float | torch.Tensor:
    """Counted rows / ``num_items``, the weight of a batch whose loss is no sum over rows; 1 without ``num_items``."""
    if num_items is None:
        return 1.0
    rows, dtype = student.shape[:-1].numel(), arithmetic_dtype(student)
    counted = float(rows) if mask is None else mask.sum().to(dtype)
    return counted / denominator(rows, mask, num_items, dtype=dtype, device=student.device)


def denominator(
    rows: int, mask: torch.Tensor | None, num_items: NumItems | None, *, dtype: torch.dtype, device: torch.device
) -> float | torch.Tensor:
    """``num_items``, or the number of counted rows; never 0. A tensor has the dtype and device given.

    Args:
        rows: how many there are, for a ``mask`` of None.

    Raises:
        ConfigError: ``num_items`` is negative, not finite, or a tensor that is not 0-d.
    """
    check_num_items(num_items)
    if num_items is None:
        return float(max(rows, 1)) if mask is None else mask.sum().clamp(min=1).to(dtype)
    if isinstance(num_items, torch.Tensor):
        items = num_items.detach().to(device, dtype, non_blocking=True)
        return items + (items == 0)  # 0 items: nothing counts, and 0 / 1 is the answer
    return float(num_items) or 1.0


def counted_only(features: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The features in ``dtype`` with zeros in the rows that do not count.

    Before any arithmetic: a product with 0 afterwards would keep nan, in the value or in the gradient.
    """
    if mask is not None:
        features = features.masked_fill(~_trailing(mask, features.ndim), 0.0)
    return features.to(dtype)


def full_mask(features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask for each row: bool [...] for features [..., D]."""
    return _trailing(mask, features.ndim - 1).expand(features.shape[:-1])


def counted_samples(features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Whether anything counts in each sample: bool [B] for features [B, ..., D]."""
    return full_mask(features, mask).unsqueeze(-1).flatten(1).any(-1)


def arithmetic_dtype(student: torch.Tensor) -> torch.dtype:
    return torch.promote_types(torch.float32, student.dtype)


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast: it would compute matrix products of the float32 features in half precision."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def through(module: Callable[[torch.Tensor], torch.Tensor], features: torch.Tensor) -> torch.Tensor:
    """``module(features)`` on the features' device, in the dtype of the module's parameters.

    A module on another device stays there, as it may be in use: copies of its parameters are used, made at each call.
    """
    if not isinstance(module, nn.Module):
        return module(features)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if dtype := next((x.dtype for x in state.values() if x.is_floating_point()), None):
        features = features.to(dtype)
    if all(x.device == features.device for x in state.values()):
        output: torch.Tensor = module(features)
        return output
    return functional_call(module, {name: x.to(features.device) for name, x in state.items()}, (features,))


# --- Geometry


def unit_rows(features: torch.Tensor, eps: float) -> torch.Tensor:
    """Each row [..., D] over its length, or over ``eps`` if that is more.

    A row of zeros has no direction. It stays zero and gets no gradient: 1 / eps in place of it would drown the rest.
    """
    return _over_length(features, torch.linalg.vector_norm(features, dim=-1), eps)


def cosine_distances(student: torch.Tensor, teacher: torch.Tensor, eps: float) -> torch.Tensor:
    """1 - cosine of each pair of rows [..., D]; 1 where a row is zero.

    With unit vectors u and v that is |u - v|^2 / 2, which has no cancellation: exactly 0, with gradient 0, for equal
    rows, and never negative.
    """
    lengths = [torch.linalg.vector_norm(x, dim=-1) for x in (student, teacher)]
    u, v = _over_length(student, lengths[0], eps), _over_length(teacher, lengths[1], eps)
    # 1 - uv = |u - v|^2 / 2 + (1 - |u|^2) / 2 + (1 - |v|^2) / 2; the last two are 0 but for rows shorter than eps.
    missing = sum((1.0 - (length / eps).clamp(max=1.0).square()) / 2.0 for length in lengths)
    return (u - v).square().sum(-1) / 2.0 + missing


def _over_length(features: torch.Tensor, lengths: torch.Tensor, eps: float) -> torch.Tensor:
    lengths = lengths.unsqueeze(-1)
    return features.masked_fill(lengths == 0.0, 0.0) / lengths.clamp(min=eps)


# --- Checks


def check_features(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None, *, dim: int = -1) -> None:
    """Raise ConfigError unless the two have one shape with a feature dimension ``dim`` and the mask fits."""
    if student.shape != teacher.shape:
        raise ConfigError(
            "teacher",
            tuple(teacher.shape),
            f"must have the student's shape {tuple(student.shape)}; features of different shapes need a projector "
            f"(auto_projector=True)",
        )
    if student.ndim == 0 or not -student.ndim <= dim < student.ndim:
        raise ConfigError("dim", dim, f"is no dimension of features of the shape {tuple(student.shape)}")
    if student.shape[dim] == 0:
        raise ConfigError("student", tuple(student.shape), f"the feature dimension {dim} must not be empty")
    check_tensors(student, teacher, mask)
    lead = [*student.shape]
    del lead[dim]
    if mask is not None and [*mask.shape] != lead[: mask.ndim]:
        raise ConfigError(
            "mask",
            tuple(mask.shape),
            f"must be {tuple(lead)} or a leading part of it: the features' shape {tuple(student.shape)} without the "
            f"feature dimension {dim}",
        )


def check_tensors(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Raise ConfigError unless both are floating, the mask is bool, and all are on one device."""
    for key, tensor in (("student", student), ("teacher", teacher)):
        if not tensor.is_floating_point():
            raise ConfigError(key, tensor.dtype, "must be of a floating dtype")
    if mask is not None and mask.dtype != torch.bool:
        raise ConfigError("mask", mask.dtype, "must be torch.bool")
    for key, other in (("teacher", teacher), ("mask", mask)):
        if other is not None and other.device != student.device:
            raise ConfigError(key, other.device, f"must be on the student's device {student.device}")


def check_num_items(num_items: NumItems | None) -> None:
    if isinstance(num_items, torch.Tensor):
        if num_items.ndim:
            raise ConfigError("num_items", tuple(num_items.shape), "a tensor must be 0-d, this is its shape")
    elif num_items is not None and (not is_real(num_items) or not 0.0 <= num_items < math.inf):
        raise ConfigError("num_items", num_items, "must be a finite number >= 0, a 0-d tensor or None")


def check_positive(key: str, value: float) -> None:
    if not is_real(value) or not 0.0 < value < math.inf:
        raise ConfigError(key, value, "must be a finite number > 0")


def check_not_negative(key: str, value: float) -> None:
    if not is_real(value) or not 0.0 <= value < math.inf:
        raise ConfigError(key, value, "must be a finite number >= 0")


def is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _trailing(mask: torch.Tensor, ndim: int) -> torch.Tensor:
    return mask.view(mask.shape + (1,) * (ndim - mask.ndim))
