"""The one pass over the student's logits that gives both losses and their gradient; see `fused.combined_loss`.

Two sizes of chunks: a *block* of rows is what the matrix products work on, and its logits are the only array with a
dimension of the vocabulary besides the head itself; within it, a few rows at a time go through the processor's cache,
where logits become gradients in place. Then the block is multiplied into the gradients of hidden states and head, and
its memory is used again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from silverspoon_ray.losses.chunks import chunk_rows, scaled_gradient, slices
from silverspoon_ray.losses.counted import CountedRows
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.losses.row_work import Losses, Plan, RowWork
from silverspoon_ray.losses.soft_rows import SoftRows, soft_rows

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


def logits_pass(logits: torch.Tensor, plan: Plan, *, gradient: bool) -> Losses:
    """The losses of logits [..., V] and, if wanted, the gradient in their shape and dtype."""
    logits = logits.detach()
    total = logits.shape[-1]
    classes = total if plan.labels is not None else plan.classes
    rows = CountedRows(logits[..., :classes], plan.index)
    limit = plan.chunk_size or chunk_rows(classes, plan.dtype, logits.device, plan.arrays)
    gain = plan.gain if logits.dtype == torch.float16 else 1.0
    work = RowWork(plan, _soft(plan, limit, limit), classes, limit, len(rows), gradient=gradient, gain=gain)
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
    work = RowWork(
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
        # Not `addmm_`, which FlopCounterMode does not know.
        return torch.addmm(out, left, right, out=out) if add else torch.mm(left, right, out=out)
    # Half precision into float32: a GPU can leave out the rounding in between, the CPU's kernels cannot.
    product = torch.mm(left, right, out_dtype=out.dtype) if left.is_cuda else torch.mm(left, right)
    return out.add_(product) if add else out.copy_(product)
