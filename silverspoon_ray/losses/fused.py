"""The soft loss and the task loss of a student from one pass over its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.divergence import JSDLoss, KLDivergenceLoss
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.losses.rows import arithmetic_dtype, full_precision
from silverspoon_ray.losses.targets import HiddenTargets, LogitTargets, SampledTargets, SoftTargets, TopKTargets


@dataclass(frozen=True)
class LinearStudent:
    """The student before its output head.

    Attributes:
        hidden: [..., H], the last hidden state.
        head: of the width H.
        dtype: in which the model would have computed its logits (that of autocast); hidden and weight are cast to it.
    """

    hidden: torch.Tensor
    head: OutputHead
    dtype: torch.dtype


@dataclass(frozen=True)
class CombinedLoss:
    """0-d losses; ``total`` carries the gradient, the others are detached, ``task`` is None without labels."""

    total: torch.Tensor
    soft: torch.Tensor
    task: torch.Tensor | None


def combined_loss(
    student: torch.Tensor | LinearStudent,
    targets: SoftTargets | None,
    loss: KLDivergenceLoss | JSDLoss | None,
    *,
    mask: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    classes: int | None = None,
    soft_weight: float | torch.Tensor = 1.0,
    task_weight: float | torch.Tensor = 0.0,
) -> CombinedLoss:
    """soft_weight * soft + task_weight * task of a student, logits [..., V] or before its output head."""
    if isinstance(student, LinearStudent):
        with full_precision(student.hidden.device):
            student = student.head.logits(student.hidden.to(student.dtype))
    rows = student.reshape(-1, student.shape[-1])
    soft = (rows[:0].sum() * 0.0).to(arithmetic_dtype(rows))
    if targets is not None and loss is not None:
        counted = mask.reshape(-1) if mask is not None else torch.ones_like(rows[:, 0], dtype=torch.bool)
        own, other, at_one = _bucketed(rows[:, :classes], targets, loss.temperature, classes)
        if other is None:
            soft = (at_one * counted).sum() / counted.sum().clamp(min=1) * loss.temperature**2
        else:
            soft = loss(own, other, mask=counted)
    task = None
    total = soft * soft_weight
    if labels is not None:
        flat = labels.reshape(-1)
        task = F.cross_entropy(rows.to(arithmetic_dtype(rows)), flat, reduction="sum") / flat.ne(-100).sum().clamp(
            min=1
        )
        total = total + task * task_weight
    return CombinedLoss(total, soft.detach(), None if task is None else task.detach())


def _bucketed(student: torch.Tensor, targets: SoftTargets, temperature: float, classes: int | None) -> Any:
    if isinstance(targets, LogitTargets):
        return student, targets.logits.reshape(-1, targets.logits.shape[-1])[:, :classes], None
    if isinstance(targets, HiddenTargets):
        head = targets.head if classes is None else targets.head.first(classes)
        return student, head.logits(targets.hidden).reshape(len(student), -1), None
    indices = targets.indices.reshape(len(student), -1).long()
    log_probs = targets.log_probs.reshape(len(student), -1).to(arithmetic_dtype(student))
    values = student.to(arithmetic_dtype(student))
    picked = values.gather(-1, indices)
    if isinstance(targets, TopKTargets):
        rest = (values / temperature).scatter(-1, indices, -torch.inf).logsumexp(-1, keepdim=True) * temperature
        return torch.cat([picked, rest], -1), log_probs * temperature, None
    if isinstance(targets, SampledTargets):
        log_p = picked / temperature - (values / temperature).logsumexp(-1, keepdim=True)
        return None, None, (log_probs - log_p).mean(-1)
    raise ConfigError("targets", targets, "no known form of soft targets")
