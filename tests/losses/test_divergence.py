"""The divergences against formulas in float64, by hand, against silverspoon-kd, and at the ends of their range."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from silverspoon_ray.losses import JSDLoss, KLDivergenceLoss, jsd_loss, kl_divergence_loss

Loss = KLDivergenceLoss | JSDLoss
INF = math.inf

KINDS: dict[str, Callable[..., Loss]] = {
    "kl": kl_divergence_loss,
    "reverse": lambda **kw: kl_divergence_loss(reverse=True, **kw),
    "jsd_0.5": jsd_loss,
    "jsd_0.1": lambda **kw: jsd_loss(beta=0.1, **kw),
    "jsd_0.9": lambda **kw: jsd_loss(beta=0.9, **kw),
}
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]
TEMPERATURES = [0.05, 0.5, 1.0, 3.0, 10.0]
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize(
    "dtypes", DTYPES, ids=lambda pair: "-".join(str(d).removeprefix("torch.") for d in pair)
)
temperatures = pytest.mark.parametrize("temperature", TEMPERATURES)


def reference(student: torch.Tensor, teacher: torch.Tensor, kind: str, temperature: float) -> torch.Tensor:
    """T^2 times the divergence of each row, term by term in float64; terms of zero probability are 0."""
    p_s, p_t = ((x.double() / temperature).softmax(-1) for x in (student, teacher))
    log_s, log_t = ((x.double() / temperature).log_softmax(-1) for x in (student, teacher))

    def kl(p: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)

    if kind == "kl":
        rows = kl(p_t, log_t, log_s)
    elif kind == "reverse":
        rows = kl(p_s, log_s, log_t)
    else:
        beta = float(kind.removeprefix("jsd_"))
        log_m = (beta * p_t + (1 - beta) * p_s).log()
        rows = beta * kl(p_t, log_t, log_m) + (1 - beta) * kl(p_s, log_s, log_m)
    return rows * temperature**2


def logits(*shape: int, seed: int, spread: float = 3.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def value_and_gradient(
    loss: Callable[..., torch.Tensor], student: torch.Tensor, teacher: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = student.detach().clone().requires_grad_()
    value = loss(leaf, teacher, **kwargs)
    value.backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


@pytest.mark.parametrize(
    ("kind", "expected", "gradient"),
    [
        # teacher (1/2, 1/4, 1/4), student (1/8, 1/8, 3/4)
        # 1/2 ln 4 + 1/4 ln 2 + 1/4 ln 1/3; p_s - p_t
        ("kl", 0.591781, (-0.375, -0.125, 0.5)),
        # 1/8 ln 1/4 + 1/8 ln 1/2 + 3/4 ln 3; p_s (ln p_s/p_t - value)
        ("reverse", 0.564029, (-0.243790, -0.157147, 0.400937)),
        # m = (7, 5, 20) / 32: 1/4 (1/2 ln 16/7 + 1/4 ln 8/5 + 1/4 ln 2/5) + 3/4 (1/8 ln 4/7 + 1/8 ln 4/5 + 3/4 ln 6/5)
        ("jsd_0.25", 0.104614, (-0.056110, -0.024566, 0.080676)),
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_three_tokens_by_hand(
    kind: str, expected: float, gradient: tuple[float, float, float], temperature: float
) -> None:
    """One token that differs, one that agrees and one that does not count: the mean is over two."""
    p_t, p_s = torch.tensor([1 / 2, 1 / 4, 1 / 4]), torch.tensor([1 / 8, 1 / 8, 3 / 4])
    other, ignored = torch.tensor([0.2, 0.3, 0.5]), torch.full((3,), math.nan)
    # Softmax takes no notice of a constant.
    student = temperature * torch.stack([p_s.log() + 5, other.log(), ignored])
    teacher = temperature * torch.stack([p_t.log() - 2, other.log(), ignored])
    loss = jsd_loss(beta=0.25, temperature=temperature) if kind == "jsd_0.25" else KINDS[kind](temperature=temperature)
    mask = torch.tensor([True, True, False])
    value, actual = value_and_gradient(loss, student, teacher, mask=mask)
    assert value.item() == pytest.approx(temperature**2 * expected / 2, abs=4e-6)
    assert actual[0].tolist() == pytest.approx([temperature * g / 2 for g in gradient], abs=4e-6)
    assert actual[1].tolist() == pytest.approx([0, 0, 0], abs=1e-7)
    assert actual[2].tolist() == [0, 0, 0]


@kinds
@dtypes
@temperatures
def test_equals_float64_formula(kind: str, dtypes: tuple[torch.dtype, torch.dtype], temperature: float) -> None:
    student, teacher = logits(3, 5, 211, seed=1, dtype=dtypes[0]), logits(3, 5, 211, seed=2, dtype=dtypes[1])
    value, gradient = value_and_gradient(KINDS[kind](temperature=temperature), student, teacher)
    leaf = student.double().requires_grad_()
    expected = reference(leaf, teacher, kind, temperature).mean()
    expected.backward()
    assert value.dtype == torch.float32
    assert value.shape == ()
    assert gradient.dtype == dtypes[0]
    torch.testing.assert_close(value.double(), expected.detach(), rtol=2e-6, atol=2e-6)
    # Where a probability is 1 the gradient is a difference of numbers of size 1 (reverse: of log-ratios) times
    # T / rows. The half types are rounded twice; the smallest float16 is 2**-24.
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtypes[0]]
    smallest = 2**-24 if dtypes[0] == torch.float16 else 0.0
    size = (student.double() - teacher.double()).abs().max().item() if kind == "reverse" else 0.0
    atol = 2e-7 * (temperature + size) / 15 + smallest
    torch.testing.assert_close(gradient.double(), leaf.grad, rtol=rounding, atol=atol)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("shape", [(9, 33), (2, 7, 33)])
@pytest.mark.parametrize("kind", ["kl", "jsd_0.5", "jsd_0.1", "jsd_0.9"])
def test_equals_silverspoon_kd(kind: str, shape: tuple[int, ...], temperature: float) -> None:
    kd = pytest.importorskip("silverspoon_kd")
    student, teacher = logits(*shape, seed=3), logits(*shape, seed=4)
    if kind == "kl":
        theirs = kd.kl_divergence_loss(temperature=temperature)
    else:
        theirs = kd.jsd_loss(temperature=temperature, beta=float(kind.removeprefix("jsd_")))
    value, gradient = value_and_gradient(KINDS[kind](temperature=temperature), student, teacher)
    expected, expected_gradient = value_and_gradient(theirs, student, teacher)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-6)


def _ban(x: torch.Tensor, classes: slice, how: str) -> torch.Tensor:
    x = x.clone()
    x[..., classes] = -INF if how == "-inf" else torch.finfo(x.dtype).min
    return x


@kinds
@dtypes
@temperatures
@pytest.mark.parametrize("how", ["-inf", "finfo.min"])
@pytest.mark.parametrize("where", ["both", "student", "teacher", "apart"])
def test_banned_classes_stay_finite(
    kind: str, dtypes: tuple[torch.dtype, torch.dtype], temperature: float, how: str, where: str
) -> None:
    student, teacher = logits(4, 50, seed=5, dtype=dtypes[0]), logits(4, 50, seed=6, dtype=dtypes[1])
    if where != "teacher":
        student = _ban(student, slice(10, 20), how)
    if where != "student":
        teacher = _ban(teacher, slice(30, 40) if where == "apart" else slice(10, 20), how)
    value, gradient = value_and_gradient(KINDS[kind](temperature=temperature), student, teacher)
    assert value.isfinite()
    assert gradient.isfinite().all()
    if where == "both":  # as if the classes did not exist
        keep = [c for c in range(50) if not 10 <= c < 20]
        expected = reference(student[:, keep], teacher[:, keep], kind, temperature).mean()
        torch.testing.assert_close(value.double(), expected, rtol=2e-6, atol=2e-6)
        assert gradient[:, 10:20].eq(0).all()


@pytest.mark.parametrize(
    ("kind", "where", "expected"),
    [
        # Two classes, one banned: the other side gives it 1/2. At T = 1 log-probabilities are 0 and LOG_ZERO.
        ("kl", "student", 0.5 * (math.log(0.5) + 1e4) + 0.5 * math.log(0.5)),
        ("reverse", "teacher", 0.5 * (math.log(0.5) + 1e4) + 0.5 * math.log(0.5)),
        ("kl", "teacher", math.log(2)),
        ("reverse", "student", math.log(2)),
    ],
)
def test_missing_support_costs_log_zero(kind: str, where: str, expected: float) -> None:
    banned, even = torch.tensor([7.0, -INF]), torch.tensor([3.0, 3.0])
    student, teacher = (banned, even) if where == "student" else (even, banned)
    assert KINDS[kind]()(student, teacher).item() == pytest.approx(expected, rel=1e-6)


@kinds
@temperatures
@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, torch.finfo(torch.float32).max, -1e30, 0.0])
def test_extreme_rows_stay_finite(kind: str, temperature: float, fill: float) -> None:
    """A whole row at one extreme is uniform; divided by a small temperature first it would be infinite."""
    student, teacher = torch.full((1, 8), fill), torch.zeros(1, 8)
    value, gradient = value_and_gradient(KINDS[kind](temperature=temperature), student, teacher)
    assert value.item() == pytest.approx(0.0, abs=1e-7)
    assert gradient.abs().max() < 1e-6


@kinds
@temperatures
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("how", ["plain", "-inf", "finfo.min"])
def test_identity_is_zero(kind: str, temperature: float, dtype: torch.dtype, how: str) -> None:
    teacher = logits(6, 300, seed=7, dtype=dtype)
    if how != "plain":
        teacher = _ban(teacher, slice(5, 9), how)
    value, gradient = value_and_gradient(KINDS[kind](temperature=temperature), teacher, teacher.clone())
    assert value.item() == 0.0
    assert gradient.eq(0).all()


@kinds
@pytest.mark.parametrize("distance", [1e-6, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 10.0])
def test_never_negative(kind: str, distance: float, temperature: float) -> None:
    teacher = logits(1, 500, seed=8)
    loss = KINDS[kind](temperature=temperature)
    for seed in range(20):
        student = teacher + distance * logits(1, 500, seed=100 + seed, spread=1.0)
        assert loss(student, teacher) >= 0.0


@kinds
def test_vocabulary_of_one_class(kind: str) -> None:
    value, gradient = value_and_gradient(KINDS[kind](), torch.tensor([[4.0], [-2.0]]), torch.zeros(2, 1))
    assert value.item() == 0.0
    assert gradient.eq(0).all()


@kinds
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_gradcheck(kind: str, temperature: float) -> None:
    student, teacher = logits(2, 3, 7, seed=9).double().requires_grad_(), logits(2, 3, 7, seed=10).double()
    loss = KINDS[kind](temperature=temperature, chunk_size=4)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    assert torch.autograd.gradcheck(lambda s: loss(s, teacher, mask=mask, num_items=3.5), student)
    assert loss(student, teacher).dtype == torch.float64


@kinds
def test_nan_in_a_counted_row_is_not_hidden(kind: str) -> None:
    student, teacher = logits(4, 9, seed=11), logits(4, 9, seed=12)
    student[2, 3] = math.nan
    assert KINDS[kind]()(student, teacher).isnan()
