"""`combined_loss` against its formula: forms of targets, divergences, heads, masks, labels, dtypes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from silverspoon_ray.losses import (
    HiddenTargets,
    KLDivergenceLoss,
    LinearStudent,
    LogitTargets,
    OutputHead,
    SampledTargets,
    TopKTargets,
    combined_loss,
    top_k_targets,
)
from tests.losses.fused_kinds import (
    LOSSES,
    actual,
    close,
    every,
    head,
    learning,
    leaves,
    losses,
    normal,
    reference,
    row_values,
    targets_of,
)

LEAD, CLASSES, WIDTH = (3, 7), 37, 11
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"bias": True, "scale": 0.3},
    "softcap": {"bias": True, "scale": 1.5, "softcap": 4.0},
}
MASK = torch.rand(LEAD, generator=torch.Generator().manual_seed(1)) > 0.4
LABELS = torch.randint(0, CLASSES, LEAD, generator=torch.Generator().manual_seed(2))
SOME_LABELS = LABELS.masked_fill(torch.rand(LEAD, generator=torch.Generator().manual_seed(3)) > 0.6, -100)
COUNTS: dict[str, dict[str, Any]] = {
    "all": {},
    "mask": {"mask": MASK},
    "one": {"mask": torch.arange(21).view(LEAD) == 12},
    "labels": {"labels": LABELS, "task_weight": 0.4, "soft_weight": 0.7},
    "both": {"mask": MASK, "labels": SOME_LABELS, "task_weight": 2.0, "soft_weight": 0.1},
    "padded": {"mask": MASK, "classes": 29},
    "padded-both": {"mask": MASK, "classes": 29, "labels": SOME_LABELS, "task_weight": 0.5, "soft_weight": 0.5},
    "tensors": {
        "labels": SOME_LABELS.int(),
        "task_weight": torch.tensor(0.25),
        "soft_weight": torch.tensor(0.75, dtype=torch.float64),
    },
    "soft-weight-0": {"mask": MASK, "labels": SOME_LABELS, "task_weight": 0.5, "soft_weight": 0.0},
    "task-weight-0": {"mask": MASK, "classes": 29, "labels": SOME_LABELS, "task_weight": 0.0, "soft_weight": 0.5},
    "negative": {"labels": SOME_LABELS, "task_weight": -0.5, "soft_weight": 1.5},
}


def student_of(dtype: torch.dtype = torch.float32, **parts: Any) -> LinearStudent:
    return learning(
        LinearStudent(normal(*LEAD, WIDTH, seed=10, dtype=dtype), head(CLASSES, WIDTH, 11, dtype, **parts), dtype)
    )


def teacher_of(dtype: torch.dtype = torch.float32, **parts: Any) -> tuple[OutputHead, torch.Tensor]:
    return head(CLASSES, 5, 20, dtype, **parts), normal(*LEAD, 5, seed=22, dtype=dtype)


@every
@pytest.mark.parametrize("own", HEADS)
@pytest.mark.parametrize("count", COUNTS)
def test_equals_formula(form: str, name: str, own: str, count: str) -> None:
    """From hidden states and from logits, in float32."""
    keywords = COUNTS[count]
    loss = LOSSES[name](2.0)
    student = student_of(**HEADS[own])
    targets = targets_of(form, *teacher_of(scale=1.3, softcap=9.0), 2.0, keywords.get("classes"))
    close(actual(student, targets, loss, **keywords), reference(student, targets, loss, **keywords), 3e-6)
    logits = student.head.logits(student.hidden).detach().requires_grad_()
    close(actual(logits, targets, loss, **keywords), reference(logits, targets, loss, **keywords), 3e-6)


@every
@pytest.mark.parametrize("temperature", [0.05, 0.5, 1.0, 3.0, 10.0])
def test_temperatures(form: str, name: str, temperature: float) -> None:
    loss, keywords = LOSSES[name](temperature), COUNTS["both"]
    student = student_of(bias=True)
    targets = targets_of(form, *teacher_of(), temperature)
    # The loss depends on logits / T, so that their rounding counts 1/T times; log_probs are rounded to float32.
    close(
        actual(student, targets, loss, **keywords),
        reference(student, targets, loss, **keywords),
        3e-6 * max(1.0, 1.0 / temperature),
    )


@every
def test_float64_and_gradcheck(form: str, name: str) -> None:
    loss, keywords = LOSSES[name](2.0, chunk_size=4), COUNTS["both"]
    student = student_of(torch.float64, bias=True, scale=0.7, softcap=5.0)
    targets = targets_of(form, *teacher_of(torch.float64), 2.0)
    result, expected = actual(student, targets, loss, **keywords), reference(student, targets, loss, **keywords)
    assert result[0].dtype == torch.float64
    close(result, expected, 1e-12)

    def total(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        again = LinearStudent(hidden, OutputHead(weight, bias, 0.7, 5.0), torch.float64)
        return combined_loss(again, targets, loss, **keywords).total

    assert torch.autograd.gradcheck(total, leaves(student), fast_mode=True)
    logits = normal(*LEAD, CLASSES, seed=5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: combined_loss(z, targets, loss, **keywords).total, logits, fast_mode=True)


@losses
def test_hidden_equals_full(name: str) -> None:
    teacher, hidden = teacher_of(bias=True, softcap=3.0)
    student, loss = student_of(), LOSSES[name](2.0)
    value, gradients = actual(student, HiddenTargets(hidden, teacher), loss)
    expected, expected_gradients = actual(student, LogitTargets(teacher.logits(hidden)), loss)
    close((value, gradients), (expected.double(), [x.double() for x in expected_gradients]), 1e-6)


@losses
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own", HEADS)
def test_identity_is_zero(name: str, dtype: torch.dtype, own: str) -> None:
    student = student_of(dtype, **HEADS[own])
    same = OutputHead(
        student.head.weight.detach(),
        None if student.head.bias is None else student.head.bias.detach(),
        student.head.scale,
        student.head.softcap,
    )
    value, gradients = actual(student, HiddenTargets(student.hidden.detach(), same), LOSSES[name](0.5))
    assert value == 0.0
    assert all(x.eq(0).all() for x in gradients)


def test_three_tokens_and_their_tail_by_hand() -> None:
    """Teacher (1/2, 1/4, 1/8, 1/8), student (1/8, 1/8, 1/4, 1/2), k = 1: buckets (1/2, 1/2) and (1/8, 7/8)."""
    p_t, p_s = torch.tensor([[1 / 2, 1 / 4, 1 / 8, 1 / 8]]), torch.tensor([[1 / 8, 1 / 8, 1 / 4, 1 / 2]])
    for temperature in (1.0, 2.0):
        targets = top_k_targets(temperature * p_t.log() + 3, 1, temperature)
        assert targets.indices.tolist() == [[0]]
        assert targets.log_probs.exp().tolist() == [pytest.approx([0.5, 0.5])]
        student = (temperature * p_s.log() - 1).requires_grad_()
        result = combined_loss(student, targets, KLDivergenceLoss(temperature))
        result.total.backward()
        # 1/2 ln 4 + 1/2 ln 4/7; the tail's 7/8 - 1/2 divided as 1 : 2 : 4
        expected = 0.5 * math.log(4) + 0.5 * math.log(4 / 7)
        assert result.soft.item() == pytest.approx(temperature**2 * expected, rel=1e-6)
        slopes = [1 / 8 - 1 / 2, *(3 / 8 * share / 7 for share in (1, 2, 4))]
        assert student.grad is not None
        assert student.grad[0].tolist() == pytest.approx([temperature * x for x in slopes], rel=1e-5)


@pytest.mark.parametrize("linear", [True, False])
def test_task_loss_alone(linear: bool) -> None:
    student: Any = student_of(bias=True)
    if not linear:
        student = student.head.logits(student.hidden).detach().requires_grad_()
    expected = reference(student, None, None, labels=SOME_LABELS, task_weight=0.5)
    close(actual(student, None, None, labels=SOME_LABELS, task_weight=0.5), expected, 3e-6)
    result = combined_loss(student, None, None, labels=SOME_LABELS, task_weight=0.5)
    logits = student.head.logits(student.hidden) if linear else student
    torch.testing.assert_close(result.task, F.cross_entropy(logits.view(-1, CLASSES), SOME_LABELS.view(-1)).detach())
    assert result.soft.item() == 0.0


def test_parts_are_detached_and_add_up() -> None:
    student, loss = student_of(), KLDivergenceLoss(2.0)
    targets = targets_of("full", *teacher_of(), 2.0)
    result = combined_loss(student, targets, loss, labels=LABELS, soft_weight=0.3, task_weight=0.6)
    assert result.task is not None
    assert not result.soft.requires_grad
    assert not result.task.requires_grad
    assert result.total.item() == pytest.approx(0.3 * result.soft.item() + 0.6 * result.task.item(), rel=1e-6)
    assert combined_loss(student, targets, loss).task is None


# --- Rows that do not count


@every
@pytest.mark.parametrize("linear", [True, False])
def test_nothing_counts(form: str, name: str, linear: bool) -> None:
    student: Any = student_of(bias=True)
    if not linear:
        student = student.head.logits(student.hidden).detach().requires_grad_()
    targets = targets_of(form, *teacher_of(), 1.0)
    none = {"mask": torch.zeros(LEAD, dtype=torch.bool), "labels": torch.full(LEAD, -100), "task_weight": 1.0}
    value, gradients = actual(student, targets, LOSSES[name](), **none)
    assert value == 0.0
    assert all(x.eq(0).all() for x in gradients)
    empty = torch.empty(0, 4, CLASSES).requires_grad_()
    assert actual(empty, LogitTargets(empty.detach()), KLDivergenceLoss())[0] == 0.0


@every
@pytest.mark.parametrize("linear", [True, False])
def test_what_does_not_count_may_hold_anything(form: str, name: str, linear: bool) -> None:
    loss, keywords = LOSSES[name](2.0), COUNTS["both"]
    teacher, hidden = teacher_of()
    student: Any = student_of(bias=True)
    if not linear:
        student = student.head.logits(student.hidden).detach().requires_grad_()
    expected = actual(student, targets_of(form, teacher, hidden, 2.0), loss, **keywords)
    targets: Any = targets_of(form, teacher, hidden, 2.0)
    neither = ~MASK & (SOME_LABELS == -100)
    assert neither.any()
    with torch.no_grad():
        (student.hidden if linear else student)[neither] = math.nan
        for x in vars(targets).values():
            if isinstance(x, torch.Tensor):
                junk = 60000 if x.dtype == torch.uint16 else math.nan
                x.copy_(x.double().masked_fill(~MASK.unsqueeze(-1), junk))
    value, gradients = actual(student, targets, loss, **keywords)
    assert torch.equal(value, expected[0])
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected[1], strict=True))
    assert gradients[0][neither].eq(0).all()


def test_weights_of_zero_give_no_gradient() -> None:
    student, targets = student_of(bias=True), targets_of("full", *teacher_of(), 1.0)
    for weights in ({"soft_weight": 0.0}, {"soft_weight": 0, "labels": LABELS}, {"soft_weight": torch.tensor(0.0)}):
        value, gradients = actual(student, targets, KLDivergenceLoss(), **weights)
        assert value == 0.0
        assert all(x.eq(0).all() for x in gradients)
    value, gradients = actual(student, None, None, labels=LABELS)
    assert value == 0.0
    assert all(x.eq(0).all() for x in gradients)


# --- Half precision


def error(
    result: tuple[torch.Tensor, list[torch.Tensor]], expected: tuple[torch.Tensor, list[torch.Tensor]]
) -> list[float]:
    pairs = zip([result[0], *result[1]], [expected[0], *expected[1]], strict=True)
    return [((x.double() - y).norm() / y.norm()).item() for x, y in pairs]


@losses
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 6.0])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("teacher_dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_no_worse_than_eager(
    name: str, dtype: torch.dtype, softcap: float | None, autocast: bool, teacher_dtype: torch.dtype
) -> None:
    """Against float64 arithmetic with the same numbers; eager = the model's logits in that dtype, then our loss."""
    rows, classes, width = 200, 300, 64
    own = torch.float32 if autocast else dtype
    hidden, weight, bias = (
        normal(*shape, seed=s, spread=r, dtype=dtype).to(own)
        for shape, s, r in (((rows, width), 1, 1.0), ((classes, width), 2, 0.3), ((classes,), 3, 0.5))
    )
    student = learning(LinearStudent(hidden, OutputHead(weight, bias, 1.0, softcap), dtype))
    teacher = LogitTargets(normal(rows, classes, seed=4, spread=2.0, dtype=teacher_dtype))
    labels = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(5))
    loss = LOSSES[name](2.0)
    keywords = {"labels": labels, "soft_weight": 0.5, "task_weight": 0.5}
    expected = reference(student, teacher, loss, **keywords)
    gain = 2.0**10  # of a loss scaler
    fused = combined_loss(student, teacher, loss, **keywords).total
    assert fused.dtype == torch.float32
    mine = fused.detach(), [x.double() / gain for x in torch.autograd.grad(fused * gain, leaves(student))]
    with torch.autocast("cpu", dtype, enabled=autocast):
        logits = student.head.logits(student.hidden)
    assert logits.dtype == dtype
    total = 0.5 * loss(logits, teacher.logits) + 0.5 * F.cross_entropy(logits.float(), labels)
    eager = total.detach(), [x.double() / gain for x in torch.autograd.grad(total * gain, leaves(student))]
    for key, a, b in zip(
        ["total", "hidden", "weight", "bias"], error(mine, expected), error(eager, expected), strict=True
    ):
        assert a <= 1.15 * b + 1e-6, key
    for x, leaf in zip(
        torch.autograd.grad(combined_loss(student, teacher, loss).total, leaves(student)), leaves(student), strict=True
    ):
        assert x.dtype == leaf.dtype


@losses
def test_small_float16_gradients_survive_until_the_loss_scaler(name: str) -> None:
    """1/tokens of a probability of 1/V is 0 in float16; the scaler's factor comes only in the backward."""
    rows, classes, width = 16, 32768, 16
    hidden, weight = normal(rows, width, seed=1, dtype=torch.float16), normal(classes, width, seed=2, spread=0.02)
    student = learning(LinearStudent(hidden, OutputHead(weight.half()), torch.float16))
    teacher = LogitTargets(normal(rows, classes, seed=3, spread=0.1, dtype=torch.float16))
    tokens = 4096.0
    total = combined_loss(student, teacher, LOSSES[name](1.0), soft_weight=rows / tokens).total
    gradients = [x.double() / 65536 for x in torch.autograd.grad(total * 65536, leaves(student))]
    _, expected = reference(student, teacher, LOSSES[name](1.0), soft_weight=rows / tokens)
    assert all(((x - y).norm() / y.norm()) < 3e-3 for x, y in zip(gradients, expected, strict=True))
    logits = student.head.logits(student.hidden).detach().requires_grad_()
    total = combined_loss(logits, teacher, LOSSES[name](1.0), soft_weight=rows / tokens).total
    (gradient,) = torch.autograd.grad(total * 65536, logits)
    _, (exact,) = reference(logits, teacher, LOSSES[name](1.0), soft_weight=rows / tokens)
    assert ((gradient.double() / 65536 - exact).norm() / exact.norm()) < 3e-3


def test_float16_sums_that_pass_its_largest_number() -> None:
    """All rows push one class by hidden states of 60: 512 rows make a sum of more than 65504 / `BOUNDED_GAIN`."""
    rows, classes = 512, 8
    hidden = torch.full((rows, 4), 60.0, dtype=torch.float16)
    student = learning(LinearStudent(hidden, OutputHead(torch.zeros(classes, 4, dtype=torch.float16)), torch.float16))
    labels = torch.zeros(rows, dtype=torch.int64)
    result = actual(student, None, None, labels=labels, task_weight=1.0)
    close(result, reference(student, None, None, labels=labels, task_weight=1.0), 1e-3)


# --- Banned classes, ties of mass


@every
@pytest.mark.parametrize("temperature", [0.05, 1.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_banned_classes_stay_finite(form: str, name: str, temperature: float, dtype: torch.dtype) -> None:
    """A bias of -inf in the teacher's head, in the student's, and in both."""
    for banned in ("teacher", "student", "both"):
        student = student_of(dtype, bias=True)
        teacher, hidden = teacher_of(dtype, bias=True)
        assert teacher.bias is not None
        assert student.head.bias is not None
        with torch.no_grad():
            if banned != "student":
                teacher.bias[5:20] = -math.inf
            if banned != "teacher":
                student.head.bias[5:20] = -math.inf
        targets = targets_of(form, teacher, hidden, temperature)
        value, gradients = actual(student, targets, LOSSES[name](temperature))
        assert value.isfinite()
        assert all(x.isfinite().all() for x in gradients)
        if banned == "both":  # as if the classes did not exist
            assert gradients[1][5:20].eq(0).all()


@losses
def test_remaining_mass_of_zero(name: str) -> None:
    student = student_of()
    logits = student.head.logits(student.hidden).detach()
    for tail in (-math.inf, -1e5, -60.0):
        top = logits.topk(4, -1).indices
        log_probs = torch.cat([torch.full((*LEAD, 4), math.log(0.25)), torch.full((*LEAD, 1), tail)], -1)
        value, gradients = actual(student, TopKTargets(top, log_probs), LOSSES[name](0.05))
        assert value.isfinite()
        assert value >= 0
        assert all(x.isfinite().all() for x in gradients)
    far = torch.full((1, 6), -400.0)
    far[0, 2] = 0.0  # the student's rest is exp(-400 / 0.05), the teacher's is not: what could be 0 / 0
    targets = TopKTargets(torch.tensor([[2]]), torch.tensor([[math.log(0.5), math.log(0.5)]]))
    leaf = far.requires_grad_()
    value, (gradient,) = actual(leaf, targets, LOSSES[name](0.05))
    assert value.isfinite()
    assert gradient.isfinite().all()


@losses
def test_student_without_a_rest(name: str) -> None:
    """All classes but the k are banned: they have no mass that a gradient could move."""
    logits = normal(3, 9, seed=1)
    logits[:, 4:] = -math.inf
    leaf = logits.requires_grad_()
    targets = TopKTargets(torch.arange(4).expand(3, 4), normal(3, 5, seed=2).log_softmax(-1))
    value, (gradient,) = actual(leaf, targets, LOSSES[name](1.0))
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert gradient[:, 4:].eq(0).all()


@every
def test_padding_of_the_vocabulary_has_no_say(form: str, name: str) -> None:
    """Logits of 1000 beyond ``classes``, next to which all others have no mass; the task loss does see them."""
    student = student_of(bias=True)
    assert student.head.bias is not None
    keywords = COUNTS["padded-both"]
    targets = targets_of(form, *teacher_of(), 1.0, 29)
    plain = combined_loss(student, targets, LOSSES[name](), **keywords)
    with torch.no_grad():
        student.head.bias[29:] += 1000.0
    padded = combined_loss(student, targets, LOSSES[name](), **keywords)
    torch.testing.assert_close(padded.soft, plain.soft, rtol=1e-6, atol=1e-6)
    assert padded.task is not None
    assert padded.task > 100


# --- Bounds


@losses
@pytest.mark.parametrize("seed", range(20))
def test_top_k_is_a_lower_bound_and_equal_at_all(name: str, seed: int) -> None:
    temperature = [0.3, 1.0, 2.5][seed % 3]
    loss = LOSSES[name](temperature)
    student, teacher = (normal(5, 40, seed=100 * seed + s, spread=2.0) for s in (1, 2))
    full = row_values(student.double(), LogitTargets(teacher), loss)
    last = torch.zeros(5)
    for k in (1, 2, 7, 20, 39, 40):
        targets = top_k_targets(teacher, k, temperature)
        values = torch.stack(
            [combined_loss(student, targets, loss, mask=torch.arange(5) == row).soft for row in range(5)]
        )
        assert (values >= 0).all()
        assert (values <= full * (1 + 1e-5) + 1e-6).all()
        assert (values >= last - 1e-5).all()  # more classes, more of the divergence
        last = values
    torch.testing.assert_close(last.double(), full, rtol=1e-5, atol=1e-6)
    leaf = student.requires_grad_()
    value, (gradient,) = actual(leaf, top_k_targets(teacher, 99, temperature), loss)
    whole, (whole_gradient,) = reference(leaf, LogitTargets(teacher), loss)
    torch.testing.assert_close(value.double(), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), whole_gradient, rtol=1e-5, atol=1e-6)


def test_top_k_leaves_something_out() -> None:
    """The bound is not attained by ignoring k: a student that is wrong only among the rest is not seen to be."""
    teacher = torch.tensor([[3.0, 1.0, 0.0, -1.0]])
    student = torch.tensor([[3.0, -1.0, 0.0, 1.0]])
    assert combined_loss(student, top_k_targets(teacher, 1, 1.0), KLDivergenceLoss()).soft < 1e-6
    assert combined_loss(student, top_k_targets(teacher, 2, 1.0), KLDivergenceLoss()).soft > 0.05


def test_sampled_may_be_negative_and_is_not_clamped() -> None:
    student, targets = torch.tensor([[2.0, 0.0]]), SampledTargets(torch.tensor([[0]]), torch.tensor([[-0.7]]))
    expected = -0.7 - torch.log_softmax(student, -1)[0, 0]
    assert expected < 0
    torch.testing.assert_close(combined_loss(student, targets, KLDivergenceLoss()).soft, expected)
