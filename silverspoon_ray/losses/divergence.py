"""Divergences between the teacher's and the student's distribution over classes: KL, reverse KL, generalised JSD.

With p_t and p_s the softmaxes of logits / T, per row and times T^2 (Hinton et al. 2015, arXiv:1503.02531, section 2:
gradients of soft targets shrink with 1/T^2):

- KL(p_t || p_s) = sum p_t (log p_t - log p_s)
- reverse: KL(p_s || p_t)
- JSD(beta) = beta KL(p_t || m) + (1 - beta) KL(p_s || m), m = beta p_t + (1 - beta) p_s
  (Agarwal et al. 2023, arXiv:2306.13649, section 2)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.chunks import RowKernel, chunked_loss
from silverspoon_ray.losses.kernels import LOG_ZERO, jsd_rows, kl_rows, reverse_kl_rows
from silverspoon_ray.losses.rows import arithmetic_dtype, check_positive, check_tensors, denominator, is_real


@dataclass(frozen=True)
class KLDivergenceLoss:
    """T^2 KL(teacher || student), or T^2 KL(student || teacher) if ``reverse``, per counted row.

    Attributes:
        temperature: T, finite and > 0.
        chunk_size: rows computed at a time, 0 = chosen by size. It bounds the memory and never changes the loss.
        reverse: which of the two directions.

    Raises:
        ConfigError: an attribute is out of its range.
    """

    temperature: float = 1.0
    chunk_size: int = 0
    reverse: bool = False

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)
        _check_chunk_size(self.chunk_size)

    def __call__(
        self,
        student: torch.Tensor,
        teacher: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        num_items: int | float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss as a 0-d tensor, float32 (float64 if the student is float64).

        Args:
            student: logits [..., V], any floating dtype.
            teacher: logits of the same shape; its dtype may be another.
            mask: bool [...], the rows that count; None = all. The others may hold anything, even nan.
            num_items: the denominator; None = the number of counted rows, at least 1. Micro-batches with the
                denominator of the whole batch add up to its loss.

        Raises:
            ConfigError: shapes or devices that do not belong together, a mask that is not bool.
        """
        kernel, formula = (reverse_kl_rows, _reverse_kl_formula) if self.reverse else (kl_rows, _kl_formula)
        return _divergence(
            student, teacher, kernel, formula, mask, num_items, float(self.temperature), int(self.chunk_size)
        )


@dataclass(frozen=True)
class JSDLoss:
    """T^2 JSD(beta) of teacher and student per counted row; see the module's docstring for the formula.

    Attributes:
        temperature: T, finite and > 0.
        beta: weight of the teacher in the mixture, in (0, 1) without the ends.
        chunk_size: rows computed at a time, 0 = chosen by size. It bounds the memory and never changes the loss.

    Raises:
        ConfigError: an attribute is out of its range.
    """

    temperature: float = 1.0
    beta: float = 0.5
    chunk_size: int = 0

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)
        if not is_real(self.beta) or not 0.0 < self.beta < 1.0:
            raise ConfigError(
                "beta", self.beta, "must lie between 0 and 1, both excluded; the limits are kl_divergence_loss's"
            )
        _check_chunk_size(self.chunk_size)

    def __call__(
        self,
        student: torch.Tensor,
        teacher: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        num_items: int | float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss as a 0-d tensor; arguments, dtypes and errors as those of `KLDivergenceLoss.__call__`."""
        beta = float(self.beta)
        kernel, formula = partial(jsd_rows, beta=beta), partial(_jsd_formula, beta=beta)
        return _divergence(
            student, teacher, kernel, formula, mask, num_items, float(self.temperature), int(self.chunk_size)
        )


def kl_divergence_loss(*, temperature: float = 1.0, chunk_size: int = 0, reverse: bool = False) -> KLDivergenceLoss:
    """A `KLDivergenceLoss`: T^2 KL(teacher || student) per counted row, or the other direction if ``reverse``."""
    return KLDivergenceLoss(temperature=temperature, chunk_size=chunk_size, reverse=reverse)


def jsd_loss(*, temperature: float = 1.0, beta: float = 0.5, chunk_size: int = 0) -> JSDLoss:
    """A `JSDLoss`: T^2 (beta KL(p_t || m) + (1 - beta) KL(p_s || m)) per counted row."""
    return JSDLoss(temperature=temperature, beta=beta, chunk_size=chunk_size)


def _divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    kernel: RowKernel,
    formula: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    mask: torch.Tensor | None,
    num_items: int | float | torch.Tensor | None,
    temperature: float,
    chunk_size: int,
) -> torch.Tensor:
    _check_logits(student, teacher, mask)
    dtype = arithmetic_dtype(student)
    items = denominator(student.shape[:-1].numel(), mask, num_items, dtype=dtype, device=student.device)
    if not (torch.is_grad_enabled() and teacher.requires_grad):
        return chunked_loss(
            student,
            teacher,
            kernel,
            mask=mask,
            num_items=items,
            temperature=temperature,
            chunk_size=chunk_size,
        )
    # The kernels know the student's gradient only. A teacher that learns too is rare: autograd's memory is affordable.
    student_log, teacher_log = (_log_softmax(logits, mask, dtype, temperature) for logits in (student, teacher))
    values = formula(student_log, teacher_log)
    values = values - values.detach().clamp(max=0.0)  # not negative, as in `chunked_loss`; the gradient stays
    if mask is not None:
        values = values.masked_fill(~mask, 0.0)
    return values.sum() * temperature**2 / items


# --- The kernels' formulas for autograd: log-probabilities [..., V] of student and teacher to values [...].


def _kl_formula(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return (teacher.exp() * (teacher - student)).sum(-1)


def _reverse_kl_formula(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return _kl_formula(teacher, student)


def _jsd_formula(student: torch.Tensor, teacher: torch.Tensor, *, beta: float) -> torch.Tensor:
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl_formula(mixture, teacher) + (1.0 - beta) * _kl_formula(mixture, student)


def _log_softmax(
    logits: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype, temperature: float
) -> torch.Tensor:
    if mask is not None:  # before anything else: the backward of log_softmax would make nan of 0 * nan
        logits = logits.masked_fill(~mask.unsqueeze(-1), 0.0)
    logits = logits.to(dtype)
    logits = (logits - logits.detach().amax(-1, keepdim=True)) / temperature
    return logits.log_softmax(-1).clamp(min=LOG_ZERO)


def _check_logits(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None) -> None:
    if student.shape != teacher.shape:
        raise ConfigError("teacher", tuple(teacher.shape), f"must have the student's shape {tuple(student.shape)}")
    if student.ndim == 0 or student.shape[-1] == 0:
        raise ConfigError("student", tuple(student.shape), "logits need a last dimension of at least one class")
    check_tensors(student, teacher, mask)
    if mask is not None and mask.shape != student.shape[:-1]:
        raise ConfigError(
            "mask",
            tuple(mask.shape),
            f"must be {tuple(student.shape[:-1])}, the student's shape {tuple(student.shape)} without the classes",
        )


def _check_chunk_size(chunk_size: int) -> None:
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 0:
        raise ConfigError("chunk_size", chunk_size, "must be a whole number of rows, 0 = chosen by size")
