"""The divergences of a chunk of rows with their gradients, in few passes (see `chunks.RowKernel`).

Probabilities are exp(logits) divided by its sum, as late as possible. In KL their logarithms occur only as differences,
and the logarithm of the ratio of two sums is more exact than the difference of their logarithms.
"""

from __future__ import annotations

import math

import torch

from silverspoon_ray.losses.chunks import Rows, row_sums

# Floor of log-probabilities. A logit of -inf (or of finfo.min over a small temperature) would make nan = 0 * inf of a
# probability that is exactly zero. At -1e4 the probability is still exactly zero, exp(-1e4) in any dtype, and what is
# computed from its logarithm is finite, in float16 (up to 65504) too.
LOG_ZERO = -1e4


def kl_rows(student: Rows, teacher: Rows, gradient: torch.Tensor | None) -> torch.Tensor:
    """KL(teacher || student)."""
    student_sum, teacher_sum = exponentials(*student), exponentials(*teacher)
    _hold_at_log_zero(student, student_sum)
    _hold_at_log_zero(teacher, teacher_sum)
    # sum p_t (log p_t - log p_s)
    terms = teacher.logits.sub_(student.logits).mul_(teacher.scratch)
    values = row_sums(terms) / teacher_sum - (teacher_sum / student_sum).log_()
    if gradient is not None:  # p_s - p_t: the same operations on both, so that equal logits give exactly 0
        student.scratch.mul_(student_sum.reciprocal_())
        teacher.scratch.mul_(teacher_sum.reciprocal_())
        torch.sub(student.scratch, teacher.scratch, out=gradient)
    return values.view(-1)


def reverse_kl_rows(student: Rows, teacher: Rows, gradient: torch.Tensor | None) -> torch.Tensor:
    """KL(student || teacher)."""
    student_sum, teacher_sum = exponentials(*student), exponentials(*teacher)
    _hold_at_log_zero(student, student_sum)
    _hold_at_log_zero(teacher, teacher_sum)
    ratios = student.logits.sub_(teacher.logits)  # log p_s - log p_t, but for a constant of the row
    terms = torch.mul(student.scratch, ratios, out=teacher.scratch)
    means = row_sums(terms).div_(student_sum)
    values = means - (student_sum / teacher_sum).log_()
    if gradient is not None:  # p_s (log p_s - log p_t - value), where the constant cancels
        student.scratch.mul_(student_sum.reciprocal_())
        torch.mul(student.scratch, ratios.sub_(means), out=gradient)
    return values.view(-1)


def jsd_rows(student: Rows, teacher: Rows, gradient: torch.Tensor | None, *, beta: float) -> torch.Tensor:
    """beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student."""
    for rows in (student, teacher):
        rows.scratch.mul_(exponentials(*rows).reciprocal_())
    student_p, teacher_p = student.scratch, teacher.scratch
    # Logarithms of p/m rather than differences of logarithms: p/m is at most 1/beta or 1/(1-beta), and where p is equal
    # in both, lerp gives exactly p and the logarithm exactly 0.
    mixture = torch.lerp(student_p, teacher_p, beta, out=student.logits)
    mixture.clamp_(min=torch.finfo(mixture.dtype).tiny)  # 0 / 0 where neither has mass
    terms = _log_ratio(teacher_p, mixture, out=teacher.logits).mul_(teacher_p)
    teacher_values = row_sums(terms)
    ratios = _log_ratio(student_p, mixture, out=teacher.scratch)
    student_values = row_sums(torch.mul(student_p, ratios, out=student.logits))
    if gradient is not None:  # (1 - beta) p_s (log(p_s / m) - sum p_s log(p_s / m))
        torch.mul(student_p, ratios.sub_(student_values), out=gradient).mul_(1.0 - beta)
    return teacher_values.mul_(beta).add_(student_values, alpha=1.0 - beta).view(-1)


def exponentials(logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write exp(logits) [r, V] to ``out``, which may be ``logits``, and return the sums of its rows [r, 1].

    Probabilities that would be subnormal are 0 (in float32 those under 1e-32 of the largest). On a CPU, an exp that
    comes out subnormal takes 170 times as long and one that comes out 0 takes 50 times (measured): with banned classes
    or a small temperature that was most of the run. So exp is kept from both, and its smallest result becomes 0.
    """
    # exp(13) is more classes than a vocabulary has: the quotient by the sum is not subnormal either.
    smallest = math.log(torch.finfo(logits.dtype).tiny) + 13.0
    torch.clamp(logits, min=smallest, out=out).exp_()
    return row_sums(torch.threshold_(out, math.exp(smallest + 0.5), 0.0))


def _hold_at_log_zero(rows: Rows, sums: torch.Tensor) -> None:
    """Raise the logits where logits - log(sums), the log-probabilities, are below LOG_ZERO."""
    torch.maximum(rows.logits, sums.log().add_(LOG_ZERO), out=rows.logits)


def _log_ratio(p: torch.Tensor, mixture: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """log(p / mixture); where p is 0 any finite number, because it is multiplied by p (and log(0) is slow on a CPU)."""
    return torch.div(p, mixture, out=out).clamp_(min=torch.finfo(p.dtype).tiny).log_()
