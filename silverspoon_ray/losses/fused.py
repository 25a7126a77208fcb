"""The soft loss and the task loss of a student from one pass over its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.divergence import JSDLoss, KLDivergenceLoss
from silverspoon_ray.losses.fused_pass import LinearLoss, LogitsLoss, linear_pass, logits_pass
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.losses.row_work import IGNORED, Plan
from silverspoon_ray.losses.rows import full_precision, is_real
from silverspoon_ray.losses.soft_rows import check_computable
from silverspoon_ray.losses.targets import SoftTargets


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
    """soft_weight * soft + task_weight * task: soft is the mean of ``loss`` over the rows of the mask, task the mean
    cross-entropy over the rows that have a label. A mean over no rows is 0.

    Logits of a `LinearStudent` exist only for a block of rows at a time, and the gradient is computed in the forward:
    memory beyond inputs and gradients does not depend on the number of rows. Rows that count in neither mean are not
    computed and may hold anything. No gradient flows to the targets, labels or weights.

    The only look at values on the device is which rows count, where a mask or labels are given.

    Args:
        student: logits [..., V] of any floating dtype, or what they are made of.
        targets: of the same rows; None = task loss only.
        loss: its temperature must be that of `TopKTargets` and `SampledTargets`; its ``chunk_size`` is the number of
            rows whose logits exist at a time, 0 = chosen by size. None without targets.
        mask: bool [...], the rows of the soft loss, None = all.
        labels: integers [...], the class of each row, -100 = none. None = no task loss.
        classes: only the first ones of both models enter the soft loss; None = all. For padded vocabularies.
        soft_weight, task_weight: numbers or 0-d tensors.

    Returns:
        Losses in float32, float64 for a student in float64. Never negative, but for `SampledTargets`, where only the
        mean over draws is KL.

    Raises:
        ConfigError: shapes, dtypes, devices or classes that do not belong together; reverse KL or JSD of
            `SampledTargets`; on a CPU also labels and indices that are no classes.
    """
    logits = student.hidden if isinstance(student, LinearStudent) else student
    _check_student(student)
    total = student.head.classes if isinstance(student, LinearStudent) else logits.shape[-1]
    lead = logits.shape[:-1]
    classes = _check_soft(targets, loss, mask, classes, lead, total, logits.device)
    _check_labels(labels, lead, total, logits.device)
    if targets is None and labels is None:
        raise ConfigError("targets", None, "there is nothing to compute without targets and without labels")
    plan = _plan(targets, loss, mask, labels, classes, soft_weight, task_weight, logits, student.dtype)
    with full_precision(logits.device):
        if isinstance(student, LinearStudent):
            head = student.head
            inputs = [student.hidden, head.weight, *([] if head.bias is None else [head.bias])]
            if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
                return CombinedLoss(
                    *LinearLoss.apply(student.hidden, head.weight, head.bias, head, student.dtype, plan)
                )
            with torch.no_grad():
                losses = linear_pass(student.hidden, head, student.dtype, plan, needs=(False, False, False))
        else:
            if torch.is_grad_enabled() and student.requires_grad:
                return CombinedLoss(*LogitsLoss.apply(student, plan))
            with torch.no_grad():
                losses = logits_pass(student, plan, gradient=False)
    return CombinedLoss(losses.total, losses.soft, losses.task)


def _plan(
    targets: SoftTargets | None,
    loss: KLDivergenceLoss | JSDLoss | None,
    mask: torch.Tensor | None,
    labels: torch.Tensor | None,
    classes: int,
    soft_weight: float | torch.Tensor,
    task_weight: float | torch.Tensor,
    student: torch.Tensor,
    dtype: torch.dtype,
) -> Plan:
    """Which rows are computed, and what their sums are divided and multiplied by."""
    device, rows = student.device, student.shape[:-1].numel()
    dtype = torch.promote_types(torch.float32, dtype)
    soft_mask = None if mask is None else mask.reshape(-1)
    flat = None if labels is None else labels.reshape(-1).long()
    soft_items = _items(soft_mask, rows, dtype, device)
    task_items = _items(None if flat is None else flat != IGNORED, rows, dtype, device)
    if targets is None:
        counted = None if flat is None else flat != IGNORED
    elif soft_mask is None or flat is None:
        counted = soft_mask
    else:
        counted = soft_mask | (flat != IGNORED)
    index = None if counted is None else counted.nonzero().view(-1)
    if index is not None and len(index) == rows:
        index = None
    if index is not None:
        soft_mask = None if soft_mask is None else soft_mask[index]
        flat = None if flat is None else flat[index]
    if flat is None:
        soft_mask = None  # all that are computed count
    soft_scale = None if targets is None else _weight("soft_weight", soft_weight, dtype, device)
    task_scale = None if flat is None else _weight("task_weight", task_weight, dtype, device)
    # What is known to be 0 needs no gradient, if something else gives one.
    if task_scale is not None and isinstance(soft_weight, (int, float)) and soft_weight == 0:
        soft_scale = None
    elif soft_scale is not None and isinstance(task_weight, (int, float)) and task_weight == 0:
        task_scale = None
    return Plan(
        targets=targets,
        loss=loss,
        index=index,
        soft_mask=soft_mask,
        labels=flat,
        soft_items=soft_items,
        task_items=task_items,
        soft_weight=soft_scale,
        task_weight=task_scale,
        classes=classes,
        dtype=dtype,
    )


def _items(counted: torch.Tensor | None, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if counted is None:
        return torch.full((), float(max(rows, 1)), dtype=dtype, device=device)
    return counted.sum().clamp(min=1).to(dtype)


def _weight(key: str, weight: float | torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The weight as a 0-d tensor."""
    if isinstance(weight, torch.Tensor):
        if weight.ndim:
            raise ConfigError(key, tuple(weight.shape), "a tensor must be 0-d, this is its shape")
        return weight.detach().to(device, dtype, non_blocking=True)
    if not is_real(weight) or not math.isfinite(weight):
        raise ConfigError(key, weight, "must be a finite number or a 0-d tensor")
    return torch.full((), float(weight), dtype=dtype, device=device)


# --- Checks


def _check_student(student: torch.Tensor | LinearStudent) -> None:
    if isinstance(student, LinearStudent):
        hidden, head = student.hidden, student.head
        if hidden.ndim == 0 or hidden.shape[-1] != head.width:
            raise ConfigError(
                "student.hidden", tuple(hidden.shape), f"the last dimension must be {head.width}, the head's width"
            )
        if head.weight.device != hidden.device:
            raise ConfigError("student.head", head.weight.device, f"must be on the device of hidden, {hidden.device}")
        for key, dtype in (("student.hidden", hidden.dtype), ("student.dtype", student.dtype)):
            if not dtype.is_floating_point:
                raise ConfigError(key, dtype, "must be a floating dtype")
        return
    if student.ndim == 0 or student.shape[-1] == 0:
        raise ConfigError("student", tuple(student.shape), "logits need a last dimension of at least one class")
    if not student.is_floating_point():
        raise ConfigError("student", student.dtype, "must be of a floating dtype")


def _check_soft(
    targets: SoftTargets | None,
    loss: KLDivergenceLoss | JSDLoss | None,
    mask: torch.Tensor | None,
    classes: int | None,
    lead: torch.Size,
    total: int,
    device: torch.device,
) -> int:
    """How many classes enter the soft loss."""
    if (targets is None) != (loss is None):
        raise ConfigError("loss", loss, "targets and a loss are given both or not at all")
    if mask is not None and mask.dtype != torch.bool:
        raise ConfigError("mask", mask.dtype, "must be torch.bool")
    shapes = {"mask": None if mask is None else mask.shape, "targets": None if targets is None else targets.rows}
    for key, shape in shapes.items():
        if shape is not None and shape != lead:
            raise ConfigError(key, tuple(shape), f"the rows must be {tuple(lead)}, those of the student")
    if mask is not None and mask.device != device:
        raise ConfigError("mask", mask.device, f"must be on the student's device {device}")
    if classes is not None and (not isinstance(classes, int) or isinstance(classes, bool) or classes < 1):
        raise ConfigError("classes", classes, "must be a whole number >= 1, or None for all")
    if classes is not None and classes > total:
        raise ConfigError("classes", classes, f"the student has {total}")
    if targets is None or loss is None:
        return total if classes is None else classes
    if targets.device != device:
        raise ConfigError("targets", targets.device, f"must be on the student's device {device}")
    known = targets.classes
    if known is not None and (known != total if classes is None else known < classes):
        raise ConfigError("classes", classes, f"the student has {total} and the teacher {known}")
    check_computable(targets, loss)
    count = total if classes is None else classes
    indices = getattr(targets, "indices", None)
    if indices is not None and device.type == "cpu":
        worst = _outside((indices if mask is None else indices[mask]).long(), count)
        if not 0 <= worst < count:
            raise ConfigError("targets.indices", worst, f"must be classes, 0..{count - 1}")
    return count


def _check_labels(labels: torch.Tensor | None, lead: torch.Size, total: int, device: torch.device) -> None:
    if labels is None:
        return
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ConfigError("labels", labels.dtype, "must be of an integer dtype")
    if labels.shape != lead:
        raise ConfigError("labels", tuple(labels.shape), f"must be {tuple(lead)}, one for each row of the student")
    if labels.device != device:
        raise ConfigError("labels", labels.device, f"must be on the student's device {device}")
    if device.type == "cpu":  # elsewhere a look would wait for the device, and `gather` objects
        labels = labels.long()
        worst = _outside(labels.masked_fill(labels == IGNORED, 0), total)
        if not 0 <= worst < total:
            raise ConfigError("labels", worst, f"must be classes, 0..{total - 1}, or {IGNORED}")


def _outside(numbers: torch.Tensor, count: int) -> int:
    """One that is not in 0..count-1, else any."""
    if not numbers.numel():
        return 0
    low, high = (int(x) for x in torch.aminmax(numbers))
    return low if low < 0 else high
