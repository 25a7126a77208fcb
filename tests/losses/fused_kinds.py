"""Students, targets and losses for the tests of `combined_loss`, and its formula once more: in float64, by autograd,
with the whole of [rows, V] and term by term.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from silverspoon_ray.losses import (
    HiddenTargets,
    JSDLoss,
    KLDivergenceLoss,
    LinearStudent,
    LogitTargets,
    OutputHead,
    SampledTargets,
    SoftTargets,
    TopKTargets,
    combined_loss,
    sampled_targets,
    top_k_targets,
)

Loss = KLDivergenceLoss | JSDLoss
Tensors = list[torch.Tensor]

LOSSES: dict[str, Callable[..., Loss]] = {
    "kl": KLDivergenceLoss,
    "reverse": lambda *a, **kw: KLDivergenceLoss(*a, reverse=True, **kw),
    "jsd": lambda *a, **kw: JSDLoss(*a, beta=0.3, **kw),
}
FORMS = ["full", "hidden", "top_k", "sampled"]
EXACT = [(form, name) for form in FORMS for name in LOSSES if form != "sampled" or name == "kl"]
every = pytest.mark.parametrize(("form", "name"), EXACT, ids=["-".join(pair) for pair in EXACT])
losses = pytest.mark.parametrize("name", LOSSES)


def normal(*shape: int, seed: int, spread: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * spread).to(dtype)


def head(classes: int, width: int, seed: int, dtype: torch.dtype = torch.float32, **parts: Any) -> OutputHead:
    bias = normal(classes, seed=seed + 1, dtype=dtype) if parts.pop("bias", False) else None
    return OutputHead(normal(classes, width, seed=seed, dtype=dtype), bias, **parts)


def learning(student: LinearStudent) -> LinearStudent:
    """The same with leaves that ask for gradients."""
    parts = student.head
    bias = None if parts.bias is None else parts.bias.detach().clone().requires_grad_()
    weight = parts.weight.detach().clone().requires_grad_()
    return LinearStudent(
        student.hidden.detach().clone().requires_grad_(),
        OutputHead(weight, bias, parts.scale, parts.softcap),
        student.dtype,
    )


def leaves(student: LinearStudent | torch.Tensor) -> Tensors:
    if isinstance(student, torch.Tensor):
        return [student]
    found = [student.hidden, student.head.weight, *([] if student.head.bias is None else [student.head.bias])]
    return [x for x in found if x.requires_grad]


def targets_of(
    form: str, teacher: OutputHead, hidden: torch.Tensor, temperature: float, classes: int | None = None
) -> SoftTargets:
    logits = teacher.logits(hidden)
    if form == "full":
        return LogitTargets(logits)
    if form == "hidden":
        return HiddenTargets(hidden, teacher)
    if form == "top_k":
        return top_k_targets(logits[..., :classes], 6, temperature)
    uniforms = torch.rand(hidden.shape[:-1], generator=torch.Generator().manual_seed(7))
    return sampled_targets(logits[..., :classes], 6, temperature, uniforms)


def _xlogx(p: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.where(p > 0, p * log_ratio, 0.0).sum(-1)


def divergence(p_t: torch.Tensor, p_s: torch.Tensor, loss: Loss) -> torch.Tensor:
    """Of probabilities, by the definition; terms of no mass are 0."""
    tiny = torch.finfo(p_t.dtype).tiny
    log_t, log_s = p_t.clamp(min=tiny).log(), p_s.clamp(min=tiny).log()
    if isinstance(loss, KLDivergenceLoss):
        return _xlogx(p_s, log_s - log_t) if loss.reverse else _xlogx(p_t, log_t - log_s)
    log_m = (loss.beta * p_t + (1 - loss.beta) * p_s).clamp(min=tiny).log()
    return loss.beta * _xlogx(p_t, log_t - log_m) + (1 - loss.beta) * _xlogx(p_s, log_s - log_m)


def row_values(logits: torch.Tensor, targets: SoftTargets, loss: Loss, classes: int | None = None) -> torch.Tensor:
    """T^2 times the divergence of each row; logits [n, V] in float64."""
    temperature = loss.temperature
    p_s = (logits[:, :classes] / temperature).softmax(-1)
    count = len(logits)
    if isinstance(targets, (LogitTargets, HiddenTargets)):
        other = targets.logits if isinstance(targets, LogitTargets) else targets.head.logits(targets.hidden)
        p_t = (other.reshape(count, -1)[:, :classes].double() / temperature).softmax(-1)
        return divergence(p_t, p_s, loss) * temperature**2
    indices = targets.indices.reshape(count, -1).long()
    log_probs = targets.log_probs.reshape(count, -1).double()
    if isinstance(targets, TopKTargets):
        p_t = log_probs.softmax(-1)
        rest = torch.ones_like(p_s).scatter(-1, indices, 0.0)
        p_s = torch.cat([p_s.gather(-1, indices), (p_s * rest).sum(-1, keepdim=True)], -1)
        return divergence(p_t, p_s, loss) * temperature**2
    assert isinstance(targets, SampledTargets)
    return (log_probs - p_s.gather(-1, indices).log()).mean(-1) * temperature**2


def reference(
    student: torch.Tensor | LinearStudent,
    targets: SoftTargets | None,
    loss: Loss | None,
    *,
    mask: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    classes: int | None = None,
    soft_weight: Any = 1.0,
    task_weight: Any = 0.0,
) -> tuple[torch.Tensor, Tensors]:
    """total in float64 and its gradients with respect to `leaves`."""
    inputs = leaves(student)
    copies = {id(x): x.detach().double().requires_grad_() for x in inputs}

    def exact(x: torch.Tensor | None) -> Any:
        return None if x is None else copies.get(id(x), x.detach().double())

    if isinstance(student, LinearStudent):
        own = student.head
        z = exact(student.hidden) @ exact(own.weight).T
        z = own.scale * (z if own.bias is None else z + exact(own.bias))
        z = z if own.softcap is None else own.softcap * (z / own.softcap).tanh()
    else:
        z = exact(student)
    z = z.reshape(-1, z.shape[-1])
    total = z.sum() * 0.0
    if targets is not None and loss is not None:
        values = row_values(z, targets, loss, classes)
        chosen = values if mask is None else values[mask.reshape(-1)]
        total = total + float(soft_weight) * chosen.sum() / max(len(chosen), 1)
    if labels is not None:
        flat = labels.reshape(-1).long()
        counted = flat != -100
        log_p = z[counted].log_softmax(-1).gather(-1, flat[counted].unsqueeze(-1))
        total = total - float(task_weight) * log_p.sum() / max(len(log_p), 1)
    gradients = torch.autograd.grad(total, list(copies.values())) if copies else ()
    return total.detach(), list(gradients)


def actual(
    student: torch.Tensor | LinearStudent, targets: SoftTargets | None, loss: Loss | None, **keywords: Any
) -> tuple[torch.Tensor, Tensors]:
    """total of `combined_loss` and its gradients with respect to `leaves`."""
    result = combined_loss(student, targets, loss, **keywords)
    return result.total.detach(), list(torch.autograd.grad(result.total, leaves(student)))


def close(result: tuple[torch.Tensor, Tensors], expected: tuple[torch.Tensor, Tensors], tolerance: float) -> None:
    """Value and each gradient agree within ``tolerance`` of their size."""
    for x, y in zip([result[0], *result[1]], [expected[0], *expected[1]], strict=True):
        assert x.shape == y.shape
        assert (x.double() - y).abs().max() <= tolerance * y.abs().max()
