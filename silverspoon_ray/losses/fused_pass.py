"""The one pass over the student's logits that gives both losses and their gradient; see `fused.combined_loss`.

Two sizes of chunks: a *block* of rows is what the matrix products work on, and its logits are the only array with a
dimension of the vocabulary besides the head itself; within it, a few rows at a time go through the processor's cache,
where logits become gradients in place. Then the block is multiplied into the gradients of hidden states and head, and
its memory is used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from silverspoon_ray.losses.chunks import HALF_GAIN, Rows, chunk_rows, scaled_gradient, slices
from silverspoon_ray.losses.counted import CountedRows
from silverspoon_ray.losses.divergence import JSDLoss, KLDivergenceLoss
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.losses.kernels import exponentials
from silverspoon_ray.losses.soft_rows import SoftRows, soft_rows
from silverspoon_ray.losses.targets import HiddenTargets, LogitTargets, SampledTargets, SoftTargets

IGNORED = -100

# Bytes of a block of logits that chunk_size=0 aims at, and the fewest rows: each block costs a pass over the gradient
# of the head's weight. Measured with 32 to 1024 rows of hidden 256, vocabularies of 8192 and 32000, float32, one
# thread: flat within the noise from 128 to 512 rows; 32 rows take 25 to 35 % longer, 64 rows and 1024 rows 10 %.
BLOCK_BYTES_CPU = 8 * 2**20
BLOCK_ROWS_CPU = 128

# In half precision a CPU's products are rounded before they are added up, which is another pass: 512 rows were 5 to 8 %
# faster than 128.
HALF_BLOCK_ROWS_CPU = 512

# Other devices: enough rows that products outweigh the reading of the weights. Reasoned, not measured: no GPU at hand.
BLOCK_BYTES = 512 * 2**20
BLOCK_ROWS = 256

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


class LogitsLoss(torch.autograd.Function):
    """total, soft, task of a student's logits [..., V]."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, plan: Plan) -> Any:
        losses = logits_pass(logits, plan, gradient=True)
        return _saved(ctx, losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor, *ignored: Any) -> Any:
        return _gradients(ctx, grad_output)[0], None


class LinearLoss(torch.autograd.Function):
    """total, soft, task of a student's hidden states [..., H] and its output head."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        head: OutputHead,
        dtype: torch.dtype,
        plan: Plan,
    ) -> Any:
        losses = linear_pass(hidden, head, dtype, plan, needs=ctx.needs_input_grad[:3])
        return _saved(ctx, losses, hidden, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor, *ignored: Any) -> Any:
        return *_gradients(ctx, grad_output), None, None, None


def _saved(ctx: Any, losses: Losses, *inputs: torch.Tensor | None) -> Any:
    ctx.save_for_backward(*losses.gradients)
    ctx.dtypes = [None if x is None else x.dtype for x in inputs]
    ctx.factor = losses.factor
    ctx.mark_non_differentiable(*(x for x in (losses.soft, losses.task) if x is not None))
    return losses.total, losses.soft, losses.task


def _gradients(ctx: Any, grad_output: torch.Tensor) -> list[torch.Tensor | None]:
    gradients = ctx.saved_tensors
    dtypes = ctx.dtypes or [x.dtype for x in gradients if x is not None]
    factor = grad_output * ctx.factor
    return [
        None if gradient is None else scaled_gradient(gradient, factor, dtype)
        for gradient, dtype in zip(gradients, dtypes, strict=False)
    ]


class _RowWork:
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


def logits_pass(logits: torch.Tensor, plan: Plan, *, gradient: bool) -> Losses:
    """The losses of logits [..., V] and, if wanted, the gradient in their shape and dtype."""
    logits = logits.detach()
    total = logits.shape[-1]
    classes = total if plan.labels is not None else plan.classes
    rows = CountedRows(logits[..., :classes], plan.index)
    limit = plan.chunk_size or chunk_rows(classes, plan.dtype, logits.device, plan.arrays)
    gain = plan.gain if logits.dtype == torch.float16 else 1.0
    work = _RowWork(plan, _soft(plan, limit, limit), classes, limit, len(rows), gradient=gradient, gain=gain)
    gradients = goals = None
    if gradient:
        filled = plan.index is None and classes == total
        gradients = (torch.empty if filled else torch.zeros)(logits.shape, dtype=logits.dtype, device=logits.device)
        goals = gradients.view(-1, total)[:, :classes]
    for part in slices(len(rows), limit):
        if work.soft is not None:
            work.soft.start_block(part)
        buffer = work.logits[: part.stop - part.start]
        source = rows.read(part, buffer if logits.dtype == plan.dtype else None)
        goal = goals[part] if goals is not None and plan.index is None else None
        result = work(source, part, owned=source is buffer, goal=goal)
        if goals is None or result is None or result is goal:
            continue
        if plan.index is None:
            goals[part] = result
        else:
            goals.index_copy_(0, plan.index[part], result.to(goals.dtype))
    return work.losses(gradients)


def linear_pass(
    hidden: torch.Tensor, head: OutputHead, dtype: torch.dtype, plan: Plan, *, needs: tuple[bool, bool, bool]
) -> Losses:
    """The losses of hidden states [..., H] under ``head``, and the gradients asked for.

    Args:
        dtype: of the matrix products.
        needs: whether hidden states, weight and bias need a gradient.

    Returns:
        Gradients in the shapes of hidden [..., H], weight [V, H] and bias [V], in dtypes as the products give them.
    """
    hidden, device = hidden.detach(), hidden.device
    full = head.classes
    used = head if plan.labels is not None else head.first(plan.classes)
    used = OutputHead(used.weight.detach(), None if used.bias is None else used.bias.detach(), head.scale, head.softcap)
    used = used.to(None, dtype)
    classes, width = used.classes, used.width
    rows = CountedRows(hidden, plan.index)
    count = len(rows)
    cut = _block_rows(count, classes, dtype, plan)
    limit = min(cut, chunk_rows(classes, plan.dtype, device, plan.arrays))

    for_hidden, for_weight, for_bias = needs
    # float16 overflows at 65504, which sums over rows or classes may reach: CUDA sums in float32 anyway and is asked
    # not to round (`_product`); other devices get float32 products, on a CPU as fast.
    product_dtype = torch.float32 if dtype == torch.float16 and device.type != "cuda" else dtype
    sum_dtype = product_dtype if device.type == "cpu" else plan.dtype
    backward_weight = used.weight.to(product_dtype) if for_hidden else None
    hidden_sum = weight_sum = bias_sum = None
    if for_hidden:
        filled = plan.index is None
        hidden_sum = (torch.empty if filled else torch.zeros)(hidden.shape, dtype=sum_dtype, device=device)
        hidden_sum = hidden_sum.view(-1, width)
    if for_weight:
        weight_sum = (torch.empty if count else torch.zeros)(full, width, dtype=plan.dtype, device=device)
        weight_sum[classes:] = 0.0
    if for_bias:
        bias_sum = torch.zeros(full, dtype=plan.dtype, device=device)

    gain = plan.gain if product_dtype == torch.float16 else 1.0
    work = _RowWork(
        plan,
        _soft(plan, cut, limit),
        classes,
        limit,
        count,
        gradient=any(needs),
        softcap=head.softcap,
        bias_sum=None if bias_sum is None else bias_sum[:classes],
        gain=gain,
    )
    logits = torch.empty(min(cut, count), classes, dtype=dtype, device=device)
    slopes = logits if product_dtype == dtype else torch.empty_like(logits, dtype=product_dtype)
    for block in slices(count, cut):
        inputs = rows.read(block).to(dtype)
        used.products(inputs, out=logits[: len(inputs)])
        if work.soft is not None:
            work.soft.start_block(block)
        for inner in slices(len(inputs), limit):
            source = used.finish_(logits[inner])
            goal = source if slopes is logits else slopes[inner]
            part = slice(block.start + inner.start, block.start + inner.stop)
            result = work(source, part, owned=True, goal=goal)
            if result is not None and result is not goal:
                goal.copy_(result)
        gradient = slopes[: len(inputs)]
        if hidden_sum is not None and backward_weight is not None:
            if plan.index is None:
                _product(gradient, backward_weight, out=hidden_sum[block])
            else:
                some = torch.empty(len(inputs), width, dtype=sum_dtype, device=device)
                hidden_sum.index_copy_(0, plan.index[block], _product(gradient, backward_weight, out=some))
        if weight_sum is not None:
            _product(gradient.T, inputs.to(product_dtype), out=weight_sum[:classes], add=block.start > 0)
    return work.losses(
        None if hidden_sum is None else hidden_sum.view(hidden.shape), weight_sum, bias_sum, scale=head.scale
    )


def _soft(plan: Plan, block: int, limit: int) -> SoftRows | None:
    if plan.targets is None or plan.loss is None:
        return None
    return soft_rows(
        plan.targets, plan.loss, plan.index, plan.soft_mask, plan.classes, block=block, limit=limit, dtype=plan.dtype
    )


def _block_rows(rows: int, classes: int, dtype: torch.dtype, plan: Plan) -> int:
    if plan.chunk_size:
        return max(1, min(plan.chunk_size, rows))
    aim, fewest = BLOCK_BYTES, BLOCK_ROWS
    if plan.soft_items.device.type == "cpu":
        aim, fewest = BLOCK_BYTES_CPU, BLOCK_ROWS_CPU if dtype.itemsize >= 4 else HALF_BLOCK_ROWS_CPU
    return max(1, min(rows, max(fewest, aim // (classes * dtype.itemsize))))


def _product(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, add: bool = False) -> torch.Tensor:
    """left @ right, or out + left @ right if ``add``, in ``out``, whose dtype may be wider."""
    if left.dtype == out.dtype:
        return out.addmm_(left, right) if add else torch.mm(left, right, out=out)
    # Half precision into float32: a GPU can leave out the rounding in between, the CPU's kernels cannot.
    product = torch.mm(left, right, out_dtype=out.dtype) if left.is_cuda else torch.mm(left, right)
    return out.add_(product) if add else out.copy_(product)
