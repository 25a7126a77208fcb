"""Both losses of a few rows of logits, and the gradient of their weighted sum: the inside of `fused_pass`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from silverspoon_ray.losses.chunks import HALF_GAIN, Rows
from silverspoon_ray.losses.divergence import JSDLoss, KLDivergenceLoss
from silverspoon_ray.losses.kernels import exponentials
from silverspoon_ray.losses.soft_rows import SoftRows
from silverspoon_ray.losses.targets import HiddenTargets, LogitTargets, SampledTargets, SoftTargets

IGNORED = -100

# Gain of a float16 gradient (see `chunks.HALF_GAIN`) where no entry is larger than 2: all but reverse KL.
BOUNDED_GAIN = 2.0**14


@dataclass(frozen=True)
class Plan:
    """What `combined_loss` is asked for, without the student's tensors.

    Attributes:
        targets, loss: both None without a soft loss.
        index: which of the flattened rows count in either loss, None = all.
        soft_mask: bool [n], which of them count in the soft loss, None = all.
        labels: int64 [n], None without a task loss.
        soft_items, task_items: what the sums are divided by, not 0.
        soft_weight, task_weight: 0-d; None without such a loss, or where its gradient is not needed as that is 0.
        classes: of the soft loss.
        dtype: of the arithmetic.
    """

    targets: SoftTargets | None
    loss: KLDivergenceLoss | JSDLoss | None
    index: torch.Tensor | None
    soft_mask: torch.Tensor | None
    labels: torch.Tensor | None
    soft_items: torch.Tensor
    task_items: torch.Tensor
    soft_weight: torch.Tensor | None
    task_weight: torch.Tensor | None
    classes: int
    dtype: torch.dtype

    @property
    def chunk_size(self) -> int:
        return 0 if self.loss is None else int(self.loss.chunk_size)

    @property
    def temperature(self) -> float:
        return 1.0 if self.loss is None else float(self.loss.temperature)

    @property
    def arrays(self) -> int:
        """How many arrays [rows, V] the soft loss goes through: only whole distributions need the teacher's."""
        return 4 if isinstance(self.targets, LogitTargets | HiddenTargets) else 2

    @property
    def gain(self) -> float:
        reverse = isinstance(self.loss, KLDivergenceLoss) and self.loss.reverse
        return HALF_GAIN if reverse else BOUNDED_GAIN

    def factors(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """What the gradients of a row's two values are multiplied by in the pass, and the rest for the backward.

        The rest is the larger of the two, which may be as small as 1 / tokens: what waits for the backward in half
        precision has entries of the size of probabilities. None for a value that needs no gradient.
        """
        soft = None if self.soft_weight is None else self.soft_weight * self.temperature / self.soft_items
        task = None if self.task_weight is None else self.task_weight / self.task_items
        if soft is None or task is None:
            rest = soft if soft is not None else task if task is not None else torch.zeros_like(self.soft_items)
            one = torch.ones_like(rest)
            return (None if soft is None else one), (None if task is None else one), rest
        rest = torch.maximum(soft.abs(), task.abs())
        rest = rest + (rest == 0.0)
        return soft / rest, task / rest, rest


@dataclass
class Losses:
    """The values of a pass, and the gradients times ``factor``; those that are not needed are None."""

    total: torch.Tensor
    soft: torch.Tensor
    task: torch.Tensor | None
    gradients: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    factor: torch.Tensor | None


class RowWork:
    """Both losses of a few rows: workspace, values, and gradients with respect to the logits.

    Args:
        classes: V of the student's logits.
        limit: most rows of a call.
        gradient: whether gradients are wanted.
        softcap: of the student's head.
        bias_sum: [V], to which the gradients are added, or None.
        gain: of the gradients.
    """

    def __init__(
        self,
        plan: Plan,
        soft: SoftRows | None,
        classes: int,
        limit: int,
        rows: int,
        *,
        gradient: bool,
        softcap: float | None = None,
        bias_sum: torch.Tensor | None = None,
        gain: float = 1.0,
    ) -> None:
        self._plan, self.soft, self._softcap, self._bias_sum, self._gain = plan, soft, softcap, bias_sum, gain
        self.soft_factor, self.task_factor, self.rest = plan.factors()
        if not gradient:
            self.soft_factor = self.task_factor = None
        device = plan.soft_items.device
        self.soft_values = torch.zeros(rows, dtype=plan.dtype, device=device)
        self.task_values = torch.zeros(rows, dtype=plan.dtype, device=device)
        limit = min(limit, max(rows, 1))
        # logits, scratch, gradient of the task loss, slope of the soft-cap; untouched memory costs nothing
        self._work = torch.empty(4, limit, classes, dtype=plan.dtype, device=device)
        self.logits = self._work[0]
        if plan.labels is not None:
            counted = plan.labels != IGNORED
            self._labels = plan.labels.masked_fill(~counted, 0).unsqueeze(-1)
            self._counted = counted.unsqueeze(-1)
            self._task_rows = self._counted * self.task_factor if self.task_factor is not None else None
        if plan.soft_mask is not None:
            self._soft_ignored = ~plan.soft_mask.unsqueeze(-1)

    def __call__(
        self, source: torch.Tensor, part: slice, *, owned: bool, goal: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Fill in the values of the rows at ``part`` and return their gradient times the gain, None if not wanted.

        Args:
            source: logits [r, V], which may be overwritten if ``owned``.
            goal: where the gradient would best be, if that has the dtype of the arithmetic.
        """
        plan = self._plan
        logits, scratch, task_work, slope = self._work[:, : len(source)]
        if source.dtype != plan.dtype:
            source = logits.copy_(source)
        elif owned:
            logits = source
        if goal is not None and goal.dtype != plan.dtype:
            goal = None
        wanted = self.soft_factor is not None or self.task_factor is not None
        if self._softcap is not None and wanted:  # before the logits become something else
            torch.div(source, self._softcap, out=slope).square_().neg_().add_(1.0)

        maximum = task = soft = None
        if plan.labels is not None:
            maximum = source.amax(-1, keepdim=True)
            task = self._task(source, maximum, part, task_work if self.task_factor is not None else scratch)
        if self.soft is not None:
            first = slice(None, plan.classes)
            if plan.classes != source.shape[-1]:
                maximum = None  # that of the first classes is another
            if self.soft_factor is not None:
                alone = task is None and plan.classes == source.shape[-1]
                soft = goal if alone and goal is not None else logits[:, first]
            own = Rows(logits[:, first], scratch[:, first])
            given = own.logits if source is logits else source[:, first]
            self.soft_values[part] = self.soft(given, own, part, soft, maximum)
        result = self._sum(task, soft, part, goal, logits)
        if result is None:
            return None
        if self._softcap is not None:
            result.mul_(slope)
        if self._gain != 1.0:
            result.mul_(self._gain)
        if self._bias_sum is not None:
            self._bias_sum.add_(result.sum(0))
        return result

    def _task(self, logits: torch.Tensor, maximum: torch.Tensor, part: slice, out: torch.Tensor) -> torch.Tensor | None:
        """Cross-entropy; its gradient (softmax - onehot) * factor in ``out``, None if not wanted."""
        labels = self._labels[part]
        torch.sub(logits, maximum, out=out)
        picked = out.gather(1, labels)
        sums = exponentials(out, out=out)
        values = sums.log().sub_(picked).masked_fill_(~self._counted[part], 0.0)
        self.task_values[part] = values.view(-1)
        if self.task_factor is None or self._task_rows is None:
            return None
        factors = self._task_rows[part]
        out.mul_(factors / sums)
        return out.scatter_add_(1, labels, -factors)

    def _sum(
        self,
        task: torch.Tensor | None,
        soft: torch.Tensor | None,
        part: slice,
        goal: torch.Tensor | None,
        logits: torch.Tensor,
    ) -> torch.Tensor | None:
        """The weighted sum of both gradients [r, V]."""
        if soft is None or self.soft_factor is None:
            return task
        if self._plan.soft_mask is not None:
            soft.masked_fill_(self._soft_ignored[part], 0.0)  # a product with 0 would keep nan
        classes = soft.shape[-1]
        if task is None:
            if classes == logits.shape[-1]:
                return soft
            logits[:, classes:] = 0.0
            return logits
        if classes == task.shape[-1]:
            return torch.addcmul(task, soft, self.soft_factor, out=logits if goal is None else goal)
        task[:, :classes].addcmul_(soft, self.soft_factor)
        return task

    def losses(
        self,
        first: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        scale: float = 1.0,
    ) -> Losses:
        """The losses once all rows are done, with gradients that are still to be multiplied by ``scale``."""
        plan = self._plan
        values = self.soft_values
        if plan.loss is not None and not isinstance(plan.targets, SampledTargets):
            values.clamp_(min=0.0)  # rounding can leave -1e-8, which T^2 would multiply
        if plan.soft_mask is not None:
            values = values.masked_fill(~plan.soft_mask, 0.0)
        soft = values.sum() * plan.temperature**2 / plan.soft_items
        total = torch.zeros_like(soft) if plan.soft_weight is None else soft * plan.soft_weight
        task = None if plan.labels is None else self.task_values.sum() / plan.task_items
        if task is not None and plan.task_weight is not None:
            total = total + task * plan.task_weight
        return Losses(total, soft, task, (first, weight, bias), self.rest * (scale / self._gain))
