"""What a teacher sends: top-k with the mass of the rest, draws, output heads as data."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses import (
    HiddenTargets,
    KLDivergenceLoss,
    LogitTargets,
    OutputHead,
    SampledTargets,
    TopKTargets,
    combined_loss,
    sampled_targets,
    targets,
    top_k_targets,
)
from tests.losses.fused_kinds import normal

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
temperatures = pytest.mark.parametrize("temperature", [0.05, 1.0, 4.0, 10.0])


def uniforms(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed))


# --- Top-k


@dtypes
@temperatures
@pytest.mark.parametrize("k", [1, 5, 50, 80])
def test_top_k(dtype: torch.dtype, temperature: float, k: int) -> None:
    logits = normal(3, 4, 50, seed=1, spread=3.0, dtype=dtype)
    made = top_k_targets(logits, k, temperature)
    k = min(k, 50)
    assert made.indices.shape == (3, 4, k)
    assert made.log_probs.shape == (3, 4, k + 1)
    assert made.indices.dtype == torch.uint16
    assert made.log_probs.dtype == (torch.float16 if dtype.itemsize == 2 else torch.float32)
    log_p = (logits.double() / temperature).log_softmax(-1)
    indices = made.indices.long()
    assert torch.equal(logits.gather(-1, indices), logits.topk(k, -1).values)
    expected = torch.cat(
        [log_p.gather(-1, indices), log_p.scatter(-1, indices, -math.inf).logsumexp(-1, keepdim=True)], -1
    )
    rounding = 6e-4 if dtype.itemsize == 2 else 1e-6
    torch.testing.assert_close(made.log_probs.double(), expected, rtol=rounding, atol=2e-6)
    if k == 50:
        assert made.log_probs[..., -1].eq(-math.inf).all()


def test_small_remaining_mass_is_not_rounded_away() -> None:
    """1 - p is 0 here, and exp(-400) too; their logarithm is neither."""
    logits = torch.tensor([[0.0, -400.0, -401.0, -math.inf]])
    made = top_k_targets(logits, 1, 1.0)
    assert made.log_probs[0, 0] == 0.0
    assert made.log_probs[0, 1].item() == pytest.approx(-400 + math.log1p(math.exp(-1)), rel=1e-6)
    assert top_k_targets(logits, 3, 1.0).log_probs[0, -1] == -math.inf


@pytest.mark.parametrize(("classes", "dtype"), [(2**16, torch.uint16), (2**16 + 1, torch.int32)])
def test_fewest_bytes_that_hold_the_class(classes: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(2, classes)
    logits[:, -1] = 90.0
    for made in (top_k_targets(logits, 2, 1.0), sampled_targets(logits, 2, 1.0, torch.rand(2))):
        assert made.indices.dtype == dtype
        assert made.indices.long()[:, 0].tolist() == [classes - 1] * 2
        assert combined_loss(logits, made, KLDivergenceLoss()).soft.abs() < 1e-6


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, u = normal(13, 40, seed=2, spread=3.0), uniforms(13)
    top, drawn = top_k_targets(logits, 5, 2.0), sampled_targets(logits, 9, 2.0, u)
    for rows in (1, 2, 5):
        monkeypatch.setattr(targets, "CHUNK_BYTES_CPU", 4 * 40 * rows)
        for one, other in ((top_k_targets(logits, 5, 2.0), top), (sampled_targets(logits, 9, 2.0, u), drawn)):
            assert torch.equal(one.indices, other.indices)
            assert torch.equal(one.log_probs, other.log_probs)


def test_makers_leave_the_logits_alone_and_build_no_graph() -> None:
    logits = normal(4, 30, seed=3).requires_grad_()
    before = logits.detach().clone()
    for made in (top_k_targets(logits, 5, 2.0), sampled_targets(logits, 5, 2.0, uniforms(4))):
        assert not made.log_probs.requires_grad
    assert torch.equal(logits, before)
    shifted = logits[:, 1:-1]
    assert torch.equal(top_k_targets(shifted, 5, 2.0).indices, top_k_targets(shifted.clone(), 5, 2.0).indices)


# --- Draws


def test_systematic_draws_by_hand() -> None:
    p = torch.tensor([[0.1, 0.5, 0.0, 0.4]])
    made = sampled_targets(p.log(), 5, 1.0, torch.tensor([0.25]))
    # points 0.05, 0.25, 0.45, 0.65, 0.85
    assert made.indices.tolist() == [[0, 1, 1, 3, 3]]
    assert made.log_probs.exp().tolist() == [pytest.approx([0.1, 0.5, 0.5, 0.4, 0.4])]


@dtypes
@temperatures
def test_draws_have_their_log_probabilities(dtype: torch.dtype, temperature: float) -> None:
    logits = normal(6, 50, seed=4, spread=3.0, dtype=dtype)
    logits[:, 10:20] = -math.inf
    made = sampled_targets(logits, 16, temperature, uniforms(6))
    assert made.indices.shape == made.log_probs.shape == (6, 16)
    log_p = (logits.double() / temperature).log_softmax(-1).gather(-1, made.indices.long())
    rounding = 6e-4 if dtype.itemsize == 2 else 1e-6
    torch.testing.assert_close(made.log_probs.double(), log_p, rtol=rounding, atol=2e-6)
    assert made.log_probs.isfinite().all()


@pytest.mark.parametrize("last", [0.0, 1.0 - 2**-24, 1.0 - 2**-53])
@pytest.mark.parametrize("banned", ["first", "last"])
def test_ends_of_the_distribution(last: float, banned: str) -> None:
    """Neither end finds a class without mass, nor one past the last."""
    logits = normal(1, 1000, seed=5)
    logits[:, slice(0, 10) if banned == "first" else slice(990, 1000)] = -math.inf
    made = sampled_targets(logits, 3, 1.0, torch.tensor([last], dtype=torch.float64))
    assert made.log_probs.isfinite().all()


def test_draws_are_unbiased() -> None:
    """Counts over 4000 uniforms: mean draws * p within 4.5 standard errors, and never off by 1 or more."""
    rows, draws = 4000, 7
    logits = normal(1, 12, seed=6, spread=1.5)
    expected = draws * (logits.double() / 2.0).softmax(-1)
    made = sampled_targets(logits.expand(rows, -1), draws, 2.0, uniforms(rows))
    counts = F.one_hot(made.indices.long(), 12).sum(1).double()
    assert ((counts - expected).abs() < 1).all()
    spread = counts.std(0) / math.sqrt(rows)
    assert ((counts.mean(0) - expected[0]).abs() <= 4.5 * spread + 1e-9).all()
    assert counts.std(0).max() > 0.3


@pytest.mark.parametrize("draws", [1, 3, 12])
def test_sampled_loss_and_gradient_are_unbiased(draws: int) -> None:
    """The mean over 2000 seeds is KL and its gradient, within 4.5 standard errors."""
    seeds, classes, temperature = 2000, 9, 2.0
    student, teacher = normal(1, classes, seed=7, spread=1.5), normal(1, classes, seed=8, spread=2.0)
    loss = KLDivergenceLoss(temperature)
    exact = student.double().requires_grad_()
    value = loss(exact, teacher.double())
    (gradient,) = torch.autograd.grad(value, exact)
    made = sampled_targets(teacher.expand(seeds, -1), draws, temperature, uniforms(seeds, seed=9))
    leaf = student.expand(seeds, -1).clone().requires_grad_()
    mean = combined_loss(leaf, made, loss).total
    (gradients,) = torch.autograd.grad(mean * seeds, leaf)
    values = [
        combined_loss(
            leaf.detach()[i : i + 1], SampledTargets(made.indices[i : i + 1], made.log_probs[i : i + 1]), loss
        ).soft
        for i in range(200)
    ]
    error = torch.stack(values).double().std() / math.sqrt(seeds)
    assert (mean.double() - value).abs() <= 4.5 * error + 1e-6
    error = gradients.double().std(0) / math.sqrt(seeds)
    assert ((gradients.double().mean(0) - gradient[0]).abs() <= 4.5 * error + 1e-6).all()
    assert error.max() > 1e-4


# --- Output heads


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
def test_head(scale: float, softcap: float | None, bias: bool) -> None:
    weight, hidden = normal(6, 4, seed=1, dtype=torch.float64), normal(2, 3, 4, seed=2, dtype=torch.float64)
    head = OutputHead(weight, normal(6, seed=3, dtype=torch.float64) if bias else None, scale, softcap)
    expected = scale * (hidden @ weight.T + (head.bias if head.bias is not None else 0.0))
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    torch.testing.assert_close(head.logits(hidden), expected)
    torch.testing.assert_close(head.first(4).logits(hidden), expected[..., :4])
    assert head.first(4).weight.data_ptr() == weight.data_ptr()
    assert head.first(6) is head
    half = head.to("cpu", torch.bfloat16)
    assert half.weight.dtype == half.logits(hidden.bfloat16()).dtype == torch.bfloat16
    assert half.scale == scale
    assert half.softcap == softcap
    assert head.to("cpu") is head
    assert head.logits(hidden.half()).dtype == torch.float16
    flat = hidden.view(-1, 4)
    made = head.finish_(head.products(flat, out=torch.empty(6, 6, dtype=torch.float64)))
    torch.testing.assert_close(made, expected.view(6, 6))


# --- Refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OutputHead(torch.zeros(3)), r"^weight=\(3,\)"),
        (lambda: OutputHead(torch.zeros(0, 3)), r"^weight=\(0, 3\)"),
        (lambda: OutputHead(torch.zeros(2, 3).long()), "^weight=torch.int64"),
        (lambda: OutputHead(torch.zeros(2, 3), torch.zeros(3)), r"^bias=\(3,\).*\(2,\)"),
        (lambda: OutputHead(torch.zeros(2, 3), torch.zeros(2, device="meta")), "^bias=.*meta"),
        (lambda: OutputHead(torch.zeros(2, 3), scale=0.0), "^scale=0.0"),
        (lambda: OutputHead(torch.zeros(2, 3), scale=math.nan), "^scale=nan"),
        (lambda: OutputHead(torch.zeros(2, 3), softcap=0.0), "^softcap=0.0"),
        (lambda: OutputHead(torch.zeros(2, 3)).first(3), "^classes=3.*1..2"),
        (lambda: LogitTargets(torch.zeros(2, 3).long()), "^logits=torch.int64"),
        (lambda: LogitTargets(torch.zeros(())), r"^logits=\(\)"),
        (lambda: HiddenTargets(torch.zeros(2, 3), OutputHead(torch.zeros(5, 4))), r"^hidden=\(2, 3\).*4"),
        (lambda: HiddenTargets(torch.zeros(2, 3, device="meta"), OutputHead(torch.zeros(5, 3))), "^head=.*cpu.*meta"),
        (lambda: TopKTargets(torch.zeros(2, 3), torch.zeros(2, 4)), "^indices=torch.float32"),
        (lambda: TopKTargets(torch.zeros(2, 3).long(), torch.zeros(2, 3)), r"^log_probs=\(2, 3\).*\(2, 4\)"),
        (lambda: SampledTargets(torch.zeros(2, 3).long(), torch.zeros(2, 4)), r"^log_probs=\(2, 4\).*\(2, 3\)"),
        (lambda: SampledTargets(torch.zeros(2, 0).long(), torch.zeros(2, 0)), r"^(log_probs|indices)=\(2, 0\)"),
        (lambda: top_k_targets(torch.zeros(2, 3), 0, 1.0), "^k=0"),
        (lambda: top_k_targets(torch.zeros(2, 3), True, 1.0), "^k=True"),
        (lambda: top_k_targets(torch.zeros(2, 3), 1, 0.0), "^temperature=0.0"),
        (lambda: top_k_targets(torch.zeros(2, 3).long(), 1, 1.0), "^logits=torch.int64"),
        (lambda: sampled_targets(torch.zeros(2, 3), 0, 1.0, torch.rand(2)), "^draws=0"),
        (lambda: sampled_targets(torch.zeros(2, 3), 4, 1.0, torch.rand(3)), r"^uniforms=.*\(3,\).*2"),
        (lambda: sampled_targets(torch.zeros(2, 3), 4, 1.0, torch.zeros(2).long()), "^uniforms=.*int64"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
