"""The divergence of a chunk of rows from each form of soft targets, with its gradient: what `fused` calls per chunk."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.chunks import RowKernel, Rows, row_sums, scaled
from silverspoon_ray.losses.counted import CountedRows
from silverspoon_ray.losses.divergence import JSDLoss, KLDivergenceLoss
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.losses.kernels import LOG_ZERO, exponentials, jsd_rows, kl_rows, reverse_kl_rows
from silverspoon_ray.losses.targets import HiddenTargets, LogitTargets, SampledTargets, SoftTargets, TopKTargets


class SoftRows(Protocol):
    """Divergence of the student's rows from their targets."""

    def start_block(self, block: slice) -> None:
        """Get ready for the rows at ``block``, of which the calls until the next block ask for parts."""

    def __call__(
        self,
        student: torch.Tensor,
        work: Rows,
        part: slice,
        gradient: torch.Tensor | None,
        maximum: torch.Tensor | None,
    ) -> torch.Tensor:
        """The values [r] without T^2; writes the gradient with respect to logits / T unless ``gradient`` is None.

        Args:
            student: logits [r, C] in the dtype of the arithmetic; left as they are unless they are ``work.logits``.
            work: workspace of the student.
            part: the positions of the rows.
            gradient: [r, C] or None; may be ``work.logits``.
            maximum: [r, 1], of the student's rows, if it is known.
        """


def soft_rows(
    targets: SoftTargets,
    loss: KLDivergenceLoss | JSDLoss,
    index: torch.Tensor | None,
    mask: torch.Tensor | None,
    classes: int,
    *,
    block: int,
    limit: int,
    dtype: torch.dtype,
) -> SoftRows:
    """What computes ``loss`` from ``targets``.

    Args:
        index: which of the flattened rows count, None = all.
        mask: bool [n], which of those rows are of interest, None = all; values and gradients of the others are any.
        classes: C, how many of the first classes enter.
        block: most rows of a block.
        limit: most rows of a call.
        dtype: of the arithmetic.
    """
    kernel = row_kernel(loss)
    temperature = float(loss.temperature)
    if isinstance(targets, LogitTargets):
        rows = CountedRows(targets.logits.detach()[..., :classes], index)
        return _FullRows(rows, kernel, temperature, _workspace(limit, classes, dtype, rows))
    if isinstance(targets, HiddenTargets):
        rows = CountedRows(targets.hidden.detach(), index)
        head = targets.head.first(classes).to(None, targets.hidden.dtype)
        return _HeadRows(rows, head, kernel, temperature, _workspace(limit, classes, dtype, rows), block)
    sparse = _SparseRows(targets, index, mask)
    return (
        _TopKRows(sparse, kernel, temperature)
        if isinstance(targets, TopKTargets)
        else _SampledRows(sparse, temperature)
    )


def row_kernel(loss: KLDivergenceLoss | JSDLoss) -> RowKernel:
    if isinstance(loss, JSDLoss):
        return partial(jsd_rows, beta=float(loss.beta))
    return reverse_kl_rows if loss.reverse else kl_rows


def check_computable(targets: SoftTargets, loss: KLDivergenceLoss | JSDLoss) -> None:
    """Raise ConfigError if this loss cannot be had from these targets."""
    if isinstance(targets, SampledTargets) and (isinstance(loss, JSDLoss) or loss.reverse):
        raise ConfigError(
            "loss",
            loss,
            "sampled targets give forward KL only: that is a mean over the teacher's draws, while reverse KL and JSD "
            "need the teacher's probability of every class the student may give",
        )


def _workspace(limit: int, classes: int, dtype: torch.dtype, rows: CountedRows) -> torch.Tensor:
    return torch.empty(2, min(limit, max(len(rows), 1)), classes, dtype=dtype, device=rows.device)


class _FullRows:
    """From the teacher's logits [n, C]."""

    def __init__(self, rows: CountedRows, kernel: RowKernel, temperature: float, work: torch.Tensor) -> None:
        self._rows, self._kernel, self._temperature, self._work = rows, kernel, temperature, work

    def start_block(self, block: slice) -> None:
        pass

    def __call__(
        self,
        student: torch.Tensor,
        work: Rows,
        part: slice,
        gradient: torch.Tensor | None,
        maximum: torch.Tensor | None,
    ) -> torch.Tensor:
        logits, scratch = self._work[:, : len(student)]
        teacher, logits = self._teacher(part, logits)
        own = Rows(scaled(student, work.logits, self._temperature, maximum), work.scratch)
        other = Rows(scaled(teacher, logits, self._temperature), scratch)
        return self._kernel(own, other, gradient)

    def _teacher(self, part: slice, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The teacher's logits and where the scaled ones may be written."""
        same = self._rows.dtype == out.dtype
        return self._rows.read(part, out if same else None), out


class _HeadRows(_FullRows):
    """From the teacher's hidden states [n, Ht] and its head."""

    def __init__(
        self,
        rows: CountedRows,
        head: OutputHead,
        kernel: RowKernel,
        temperature: float,
        work: torch.Tensor,
        block: int,
    ) -> None:
        super().__init__(rows, kernel, temperature, work)
        self._head = head
        self._block = torch.empty(block, head.classes, dtype=head.weight.dtype, device=rows.device)
        self._start = 0

    def start_block(self, block: slice) -> None:
        self._start = block.start
        self._head.products(self._rows.read(block), out=self._block[: block.stop - block.start])

    def _teacher(self, part: slice, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._head.finish_(self._block[part.start - self._start : part.stop - self._start])
        return logits, logits if logits.dtype == out.dtype else out


class _SparseRows:
    """Classes [r, k] and their log-probabilities of the rows that count."""

    def __init__(
        self, targets: TopKTargets | SampledTargets, index: torch.Tensor | None, mask: torch.Tensor | None
    ) -> None:
        self._indices, self._log_probs = CountedRows(targets.indices, index), CountedRows(targets.log_probs, index)
        self._mask = mask

    def read(self, part: slice, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        indices = self._indices.read(part).long()
        if self._mask is not None:  # what is not of interest need not be a class
            indices = indices.masked_fill(~self._mask[part].unsqueeze(-1), 0)
        return indices, self._log_probs.read(part).to(dtype)


class _TopKRows:
    """From k classes and the mass of the rest: the divergence between distributions over k + 1 buckets.

    A divergence cannot grow when classes are put together (data processing inequality), so this is a lower bound of
    that over all classes; the bound is attained if the student divides the rest as the teacher does.
    """

    def __init__(self, rows: _SparseRows, kernel: RowKernel, temperature: float) -> None:
        self._rows, self._kernel, self._temperature = rows, kernel, temperature

    def start_block(self, block: slice) -> None:
        pass

    def __call__(
        self,
        student: torch.Tensor,
        work: Rows,
        part: slice,
        gradient: torch.Tensor | None,
        maximum: torch.Tensor | None,
    ) -> torch.Tensor:
        indices, target = self._rows.read(part, student.dtype)
        picked = student.gather(1, indices)
        rest = work.logits if work.logits is student else work.logits.copy_(student)
        # The others are shifted by their own maximum: by that of all, a small temperature would leave exp nothing.
        rest.scatter_(1, indices, -torch.inf)
        largest = rest.amax(-1, keepdim=True)
        known = largest.clamp(min=torch.finfo(largest.dtype).min)  # -inf if there are no others
        sums = exponentials(scaled(rest, rest, self._temperature, known), out=work.scratch)
        top = torch.maximum(picked.amax(-1, keepdim=True), largest)
        tail = (largest - top).div_(self._temperature).add_(sums.log())
        buckets = torch.cat([(picked - top).div_(self._temperature), tail], -1)
        buckets.sub_(buckets.amax(-1, keepdim=True))
        target = target - target.amax(-1, keepdim=True)
        slopes = None if gradient is None else torch.empty_like(buckets)
        values = self._kernel(Rows(buckets, torch.empty_like(buckets)), Rows(target, torch.empty_like(target)), slopes)
        if gradient is not None and slopes is not None:
            # A logit among the others moves the tail by its share of the tail.
            share = slopes[:, -1:] / sums.masked_fill_(sums == 0.0, torch.inf)
            torch.mul(work.scratch, share, out=gradient)
            gradient.scatter_(1, indices, slopes[:, :-1])
        return values


class _SampledRows:
    """From n draws of the teacher's distribution: mean over the draws of log p_t - log p_s.

    The mean over all that could have been drawn is KL(p_t || p_s), in value and in gradient, p_s - counts / n (arXiv:
    2503.16870, section 4); that of one draw may be negative.
    """

    def __init__(self, rows: _SparseRows, temperature: float) -> None:
        self._rows, self._temperature = rows, temperature

    def start_block(self, block: slice) -> None:
        pass

    def __call__(
        self,
        student: torch.Tensor,
        work: Rows,
        part: slice,
        gradient: torch.Tensor | None,
        maximum: torch.Tensor | None,
    ) -> torch.Tensor:
        indices, log_probs = self._rows.read(part, student.dtype)
        logits = scaled(student, work.logits, self._temperature, maximum)
        picked = logits.gather(1, indices)
        sums = exponentials(logits, out=logits)
        log_p = picked.sub_(sums.log()).clamp_(min=LOG_ZERO)
        values = row_sums(log_probs - log_p).div_(indices.shape[1])
        if gradient is not None:
            torch.mul(logits, sums.reciprocal_(), out=gradient)
            gradient.scatter_add_(1, indices, torch.full_like(log_p, -1.0 / indices.shape[1]))
        return values.view(-1)
