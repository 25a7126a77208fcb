"""Losses over rows of logits, computed chunk by chunk with the gradient taken along in the forward.

A divergence between two softmaxes needs several arrays as large as the logits if autograd is left to itself: both
log-probabilities, both probabilities, the product. At a vocabulary of 152 064 that is more memory than the model. Here
a chunk of rows goes through a small workspace and leaves two things behind: its value per row and its finished
gradient, in the student's dtype. So the peak beyond the inputs is one gradient, whatever the number of rows, and the
workspace stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

# Bytes of workspace (4 arrays of [rows, V]) that chunk_size=0 aims at. On a CPU each thread works on its own part of
# the chunk, so the aim grows with their number. Measured with 0.25 to 256 MiB: forward and backward of KL and JSD on
# float32 [1024, 8192] and [1024, 32000], Xeon with 2 MiB of L2 per core. Fastest at 1 to 2 MiB with one thread and at 2
# to 8 MiB with two. From 64 MiB on it is 15 to 130 % slower; below 1 MiB with two threads 2 to 3 times, because torch
# does not split an operation that small.
AUTO_BYTES_PER_CPU_THREAD = 2 * 2**20

# Other devices: large enough that the arithmetic of a chunk outlasts the launch of its kernels; also the most on a CPU.
# Reasoned, not measured: no GPU was at hand.
AUTO_BYTES = 64 * 2**20

# The gradient of a float16 student waits in the buffer times this power of two, and is divided by it when the factor of
# the loss scaler is known: without it, p_s - p_t of a large vocabulary would be rounded to zero before the scaler could
# save it. The largest gradient, 2500 (reverse KL with log-probabilities at LOG_ZERO), times this stays under 65504.
HALF_GAIN = 16.0


class Rows(NamedTuple):
    """Workspace of one model for one chunk; a kernel may overwrite both.

    Attributes:
        logits: [r, V], (logits - maximum of the row) / temperature; -inf is possible, the maximum is 0.
        scratch: [r, V], uninitialised.
    """

    logits: torch.Tensor
    scratch: torch.Tensor


class RowKernel(Protocol):
    """Divergence of each row and, where asked for, its gradient with respect to the student's scaled logits."""

    def __call__(self, student: Rows, teacher: Rows, gradient: torch.Tensor | None) -> torch.Tensor:
        """Return the values [r]; write the gradient [r, V] to ``gradient`` unless that is None.

        ``gradient`` may be ``student.logits`` itself.
        """


def row_sums(array: torch.Tensor) -> torch.Tensor:
    """Sum of each row of [r, V] as [r, 1], the same bits whatever r.

    torch splits a sum over *all* elements between its threads, but keeps each row in one thread if there are several
    rows. So a chunk of a single row is summed as one of two equal rows (a view: nothing is copied).
    """
    if array.shape[0] == 1:
        return array.expand(2, -1).sum(-1, keepdim=True)[:1]
    return array.sum(-1, keepdim=True)


def chunked_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    kernel: RowKernel,
    *,
    mask: torch.Tensor | None,
    num_items: int | float | torch.Tensor,
    temperature: float,
    chunk_size: int,
) -> torch.Tensor:
    """T^2 * (sum of the divergences of the counted rows) / num_items, differentiable once in the student.

    Args:
        student, teacher: logits [..., V] of one shape, any floating dtypes; no gradient flows to the teacher.
        kernel: the divergence.
        mask: bool [...] or None; a row with False may hold anything and adds exactly 0 to value and gradient.
        num_items: the denominator, not 0; a tensor is 0-d.
        temperature: logits are divided by it after the conversion to float32.
        chunk_size: rows at a time, 0 = chosen by size.

    Returns:
        0-d float32, float64 if the student is float64. The rows' values are summed in one step at the end, so that it
        does not depend on the chunk size.
    """
    if torch.is_grad_enabled() and student.requires_grad:
        loss: torch.Tensor = _ChunkedLoss.apply(student, teacher, kernel, mask, num_items, temperature, chunk_size)
        return loss
    with torch.no_grad():
        return _run(student, teacher, kernel, mask, num_items, temperature, chunk_size, None)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: torch.Tensor,
        teacher: torch.Tensor,
        kernel: RowKernel,
        mask: torch.Tensor | None,
        num_items: int | float | torch.Tensor,
        temperature: float,
        chunk_size: int,
    ) -> torch.Tensor:
        gradient = torch.empty(student.shape, dtype=student.dtype, device=student.device)
        loss = _run(student, teacher, kernel, mask, num_items, temperature, chunk_size, gradient)
        ctx.save_for_backward(gradient)
        # The chain rule leaves T^2 * (1/T) / num_items. It meets grad_output in `backward`, in loss.dtype, so that the
        # product is rounded to the student's dtype only once it is complete.
        ctx.factor = temperature / num_items / _gain(student.dtype)
        ctx.chunk_size = chunk_size
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        out = scaled_gradient(gradient, grad_output * ctx.factor, gradient.dtype, ctx.chunk_size)
        return out, None, None, None, None, None, None


def scaled_gradient(
    gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, chunk_size: int = 0
) -> torch.Tensor:
    """gradient * factor in ``dtype``, in the gradient's own memory where it has that dtype and is not needed again.

    Args:
        gradient: contiguous, saved by the forward whose backward is running.
        factor: 0-d; the product is computed in its dtype and rounded to ``dtype`` once it is complete.
        dtype: of the result.
        chunk_size: rows at a time where dtypes differ, 0 = chosen by size.
    """
    # A retained graph may come here again and must find the gradient as it was.
    in_place = gradient.dtype == dtype and not graph_is_kept()
    out = gradient if in_place else torch.empty_like(gradient, dtype=dtype)
    if gradient.dtype == factor.dtype == dtype:
        return torch.mul(gradient, factor, out=out)
    # A 0-d factor would be rounded to half precision first, an error common to all entries; one of shape [1] has the
    # product computed in the factor's dtype. By chunks: on a CPU that takes an array of that dtype.
    factor = factor.reshape(1)
    width = gradient.shape[-1]
    rows, out_rows = gradient.view(-1, width), out.view(-1, width)
    for part in slices(len(rows), chunk_size or chunk_rows(width, factor.dtype, gradient.device)):
        torch.mul(rows[part], factor, out=out_rows[part])
    return out


def _run(
    student: torch.Tensor,
    teacher: torch.Tensor,
    kernel: RowKernel,
    mask: torch.Tensor | None,
    num_items: int | float | torch.Tensor,
    temperature: float,
    chunk_size: int,
    gradient: torch.Tensor | None,
) -> torch.Tensor:
    """The loss; fills ``gradient`` with the rows' gradients times `_gain`."""
    classes = student.shape[-1]
    dtype = torch.promote_types(torch.float32, student.dtype)
    values = torch.empty(student.shape[:-1].numel(), dtype=dtype, device=student.device)
    ignored = None if mask is None else mask.reshape(-1, 1).logical_not()
    gradients = None if gradient is None else gradient.view(-1, classes)
    limit = min(chunk_size or chunk_rows(classes, dtype, student.device), max(len(values), 1))
    workspace = torch.empty(4, limit, classes, dtype=dtype, device=student.device)
    gain = _gain(student.dtype)

    start = 0
    for student_rows, teacher_rows in _matrices(student, teacher):
        for part in slices(len(student_rows), limit):
            source, target = student_rows[part], teacher_rows[part]
            work = workspace[:, : len(source)]
            chunk = slice(start, start + len(source))
            start = chunk.stop
            own = Rows(scaled(source, work[0], temperature), work[1])
            other = Rows(scaled(target, work[2], temperature), work[3])
            if gradients is None:
                values[chunk] = kernel(own, other, None)
                continue
            goal = gradients[chunk]
            result = goal if goal.dtype == dtype else own.logits
            values[chunk] = kernel(own, other, result)
            if ignored is not None:
                result.masked_fill_(ignored[chunk], 0.0)  # a product with 0 would keep nan
            if result is not goal:
                goal.copy_(result if gain == 1.0 else result.mul_(gain))

    # A divergence is not negative. Rounding can leave -1e-8, which T^2 would multiply.
    values.clamp_(min=0.0)
    if ignored is not None:
        values.masked_fill_(ignored.view(-1), 0.0)
    return values.sum() * (temperature**2) / num_items


def scaled(
    logits: torch.Tensor, out: torch.Tensor, temperature: float, maximum: torch.Tensor | None = None
) -> torch.Tensor:
    """(logits - row maximum) / temperature in the dtype of ``out``: at most 0, so that no finite logit overflows.

    Args:
        logits: [r, V]; ``out`` [r, V] may be the same array.
        maximum: [r, 1], of the rows, if it is known already.
    """
    if logits.dtype != out.dtype:
        logits = out.copy_(logits)
    torch.sub(logits, logits.amax(-1, keepdim=True) if maximum is None else maximum, out=out)
    return out if temperature == 1.0 else out.mul_(1.0 / temperature)


def _gain(dtype: torch.dtype) -> float:
    return HALF_GAIN if dtype == torch.float16 else 1.0


def chunk_rows(width: int, dtype: torch.dtype, device: torch.device, arrays: int = 4) -> int:
    """How many rows of a workspace of ``arrays`` arrays [rows, width] to work on at a time."""
    aim = AUTO_BYTES
    if device.type == "cpu":
        aim = min(aim, AUTO_BYTES_PER_CPU_THREAD * torch.get_num_threads())
    return max(1, aim // (arrays * dtype.itemsize * max(width, 1)))


def slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _matrices(student: torch.Tensor, teacher: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both as views [rows, V], in order; several where one view cannot span them, as in ``logits[:, :-1]``.

    `reshape` would copy the whole array there.
    """
    if is_matrix(student) and is_matrix(teacher):
        yield student.view(-1, student.shape[-1]), teacher.view(-1, teacher.shape[-1])
        return
    for student_part, teacher_part in zip(student, teacher, strict=True):
        yield from _matrices(student_part, teacher_part)


def is_matrix(logits: torch.Tensor) -> bool:
    strides = [
        (size, stride) for size, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True) if size != 1
    ]
    return logits.numel() == 0 or all(outer == size * stride for (_, outer), (size, stride) in pairwise(strides))


# Whether the engine keeps the graph after the running backward. Private to torch, which uses it for the same purpose
# (compiled functions may overwrite their saved arrays); without it the buffer is always taken to be needed again.
_keeps_graph: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def graph_is_kept() -> bool:
    return _keeps_graph is None or _keeps_graph()
