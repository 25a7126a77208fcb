"""Chunks, layouts, memory and graphs of `combined_loss`: what must not change the loss; and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses import (
    JSDLoss,
    KLDivergenceLoss,
    LinearStudent,
    LogitTargets,
    OutputHead,
    SampledTargets,
    TopKTargets,
    chunks,
    combined_loss,
)
from silverspoon_ray.losses.counted import CountedRows
from tests.losses.fused_kinds import LOSSES, actual, close, every, head, learning, leaves, normal, targets_of

LEAD, CLASSES, WIDTH = (4, 9), 53, 12
MASK = torch.rand(LEAD, generator=torch.Generator().manual_seed(1)) > 0.3
LABELS = torch.randint(0, CLASSES, LEAD, generator=torch.Generator().manual_seed(2))
LABELS[torch.rand(LEAD, generator=torch.Generator().manual_seed(3)) > 0.7] = -100
BOTH = {"mask": MASK, "labels": LABELS, "soft_weight": 0.6, "task_weight": 0.4}


def student_of(dtype: torch.dtype = torch.float32, lead: tuple[int, ...] = LEAD, **parts: Any) -> LinearStudent:
    parts = {"bias": True, "scale": 0.8, "softcap": 7.0, **parts}
    return learning(
        LinearStudent(normal(*lead, WIDTH, seed=10, dtype=dtype), head(CLASSES, WIDTH, 11, dtype, **parts), dtype)
    )


def teacher_of(lead: tuple[int, ...] = LEAD) -> tuple[OutputHead, torch.Tensor]:
    return head(CLASSES, 5, 20), normal(*lead, 5, seed=22)


# --- Chunks and layouts


@every
@pytest.mark.parametrize("chunk_size", [1, 2, 5, 36, 1000])
@pytest.mark.parametrize("inner", [1, 3, 1000])
def test_chunks_change_nothing(
    form: str, name: str, chunk_size: int, inner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = targets_of(form, head(CLASSES, 5, 20, torch.float64), normal(*LEAD, 5, seed=22, dtype=torch.float64), 2.0)
    student = student_of(torch.float64)
    expected = actual(student, targets, LOSSES[name](2.0), **BOTH)
    monkeypatch.setattr(chunks, "AUTO_BYTES_PER_CPU_THREAD", 4 * 8 * CLASSES * inner)
    close(actual(student, targets, LOSSES[name](2.0, chunk_size=chunk_size), **BOTH), expected, 1e-13)
    # In float32 sums over rows are added up in another order.
    small, single = student_of(), LOSSES[name](2.0, chunk_size=chunk_size)
    value, gradients = actual(small, targets, single)
    whole, whole_gradients = actual(small, targets, LOSSES[name](2.0))
    close((value, gradients), (whole.double(), [x.double() for x in whole_gradients]), 2e-6)


@every
@pytest.mark.parametrize("mask", [None, MASK[:, :-1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_change_nothing(form: str, name: str, mask: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Shifted, transposed, strided and expanded: the rows of `logits[:, :-1]` are no matrix."""
    loss, teacher = LOSSES[name](2.0), teacher_of()
    labels = LABELS[:, 1:]
    full = targets_of(form, teacher[0], teacher[1], 2.0)
    cut: dict[str, Any] = {}
    for key, x in vars(full).items():
        cut[key] = x[:, :-1] if isinstance(x, torch.Tensor) else x
    shifted = type(full)(**cut)
    plain = type(full)(**{k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in cut.items()})
    keywords = {"mask": mask, "labels": labels, "task_weight": 0.5}
    hidden = normal(4, 9, WIDTH, seed=1, dtype=dtype)
    weight = normal(CLASSES, WIDTH, seed=2, dtype=dtype)
    logits = OutputHead(weight).logits(hidden)

    def run(h: torch.Tensor, w: torch.Tensor, z: torch.Tensor, targets: Any) -> list[torch.Tensor]:
        out = []
        for made, used in ((h, LinearStudent(h, OutputHead(w), dtype)), (z, z)):
            total = combined_loss(used, targets, loss, **keywords).total
            out += [total.detach(), *torch.autograd.grad(total, [made])]
        return out

    expected = run(*(x.clone().requires_grad_() for x in (hidden[:, :-1], weight, logits[:, :-1])), plain)
    variants = [
        [hidden[:, :-1], weight, logits[:, :-1]],
        [x.transpose(0, 1).contiguous().transpose(0, 1)[:, :-1] for x in (hidden, logits)],
        [x.repeat_interleave(2, -1)[:, :-1, ::2] for x in (hidden, logits)],
        [x.transpose(1, 2).contiguous().transpose(1, 2)[:, :-1] for x in (hidden, logits)],
    ]
    for h, *middle, z in variants:
        w = middle[0] if middle else weight.T.contiguous().T
        result = run(*(x.detach().requires_grad_() for x in (h, w, z)), shifted)
        for a, b in zip(result, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6 if dtype == torch.float32 else 2e-2, atol=1e-7)


def test_counted_rows() -> None:
    base = torch.arange(2 * 5 * 3 * 4).view(2, 5, 3, 4).float()
    for x in (
        base,
        base[:, :-1],
        base[:, 1:, :2],
        base[::2],
        base[..., :3],
        base.transpose(0, 1),
        base[..., ::2],
        base.transpose(0, 3),
        base[:1, :1].expand(2, 5, 3, 4),
        base[:0],
        base[0, 0],
        base[0, 0, 0],
        base[1:, 2:, 1:],
    ):
        rows = x.reshape(-1, x.shape[-1])
        index = torch.arange(len(rows))[1::2]
        for chosen, expected in ((None, rows), (index, rows[index])):
            counted = CountedRows(x, chosen)
            assert len(counted) == len(expected)
            assert torch.equal(counted.read(slice(0, len(expected))), expected)
            part = slice(len(expected) // 2, len(expected))
            out = torch.empty_like(expected[part])
            assert torch.equal(counted.read(part, out), expected[part])
    assert CountedRows(base, None).read(slice(3, 6)).data_ptr() == base.view(-1, 4)[3].data_ptr()


@every
def test_micro_batches_add_up(form: str, name: str) -> None:
    """With weights count / count of all, as the distiller gives them."""
    student, loss, total = (
        student_of(torch.float64),
        LOSSES[name](2.0),
        {"soft": MASK.sum(), "task": (LABELS >= 0).sum()},
    )
    targets: Any = targets_of(form, *teacher_of(), 2.0)
    expected = actual(student, targets, loss, mask=MASK, labels=LABELS, task_weight=0.5)
    sums: list[Any] = [0.0] * 4
    for i in range(4):
        piece = type(targets)(**{k: v[i] if isinstance(v, torch.Tensor) else v for k, v in vars(targets).items()})
        part = LinearStudent(student.hidden[i], student.head, student.dtype)
        result = combined_loss(
            part,
            piece,
            loss,
            mask=MASK[i],
            labels=LABELS[i],
            soft_weight=MASK[i].sum() / total["soft"].double(),
            task_weight=0.5 * (LABELS[i] >= 0).sum() / total["task"].double(),
        )
        grads = torch.autograd.grad(result.total, leaves(student))
        sums = [a + b for a, b in zip(sums, [result.total.detach(), *grads], strict=True)]
    close((sums[0], sums[1:]), expected, 1e-12)


# --- Memory


class Recorder(TorchDispatchMode):
    """Notes the bytes of every array that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.made.append(x.untyped_storage().nbytes())
        return result


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counted", ["all", "some"])
def test_no_array_grows_with_tokens_times_vocabulary(form: str, name: str, dtype: torch.dtype, counted: str) -> None:
    classes, width, chunk = 400, 8, 16
    sizes = []
    for rows in (64, 512):
        student = learning(
            LinearStudent(normal(rows, width, seed=1, dtype=dtype), head(classes, width, 2, dtype, bias=True), dtype)
        )
        targets = targets_of(form, head(classes, 4, 3, dtype), normal(rows, 4, seed=4, dtype=dtype), 2.0)
        mask = torch.ones(rows, dtype=torch.bool)
        mask[::7] = counted == "all"
        labels = torch.zeros(rows, dtype=torch.int64).masked_fill(~mask, -100)
        with Recorder() as recorder:
            result = combined_loss(
                student, targets, LOSSES[name](2.0, chunk_size=chunk), mask=mask, labels=labels, task_weight=0.5
            )
            torch.autograd.grad(result.total, leaves(student))
        sizes.append(max(recorder.made))
        allowed = max(5 * chunk * classes * 4, classes * width * 4, rows * width * 8)  # workspace, dW, dHidden
        assert sizes[-1] <= allowed
    assert sizes[-1] < 512 * classes * dtype.itemsize / 2


@pytest.mark.parametrize("form", ["full", "top_k", "hidden"])
def test_peak_memory_is_flat(form: str) -> None:
    """By torch's own account: at 1k, 4k, 16k rows of 2000 classes the peak beyond inputs and gradients is the same."""
    classes, width, peaks = 2000, 16, []
    for rows in (1024, 4096, 16384):
        student = learning(LinearStudent(normal(rows, width, seed=1), head(classes, width, 2), torch.float32))
        targets: Any
        if form == "top_k":
            indices = torch.arange(8).expand(rows, 8).contiguous()
            targets = TopKTargets(indices.to(torch.uint16), torch.full((rows, 9), -math.log(9)))
        elif form == "hidden":
            targets = targets_of("hidden", head(classes, 4, 3), normal(rows, 4, seed=4), 2.0)
        else:
            targets = LogitTargets(torch.zeros(rows, classes))
        labels = torch.zeros(rows, dtype=torch.int64)
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            result = combined_loss(student, targets, KLDivergenceLoss(2.0), labels=labels, task_weight=0.5)
            result.total.backward()
        now = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                peak = max(peak, now)
        gradients = (rows * width + classes * width) * 4
        peaks.append(peak - gradients)
        assert peak > gradients  # the profiler did count
    small = 100 * 16384  # values, labels and masks of a row
    assert peaks[2] - peaks[0] < small
    assert peaks[2] < 16384 * classes * 4 / 4


# --- Graphs


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_second_backward_of_a_retained_graph(form: str, name: str, dtype: torch.dtype) -> None:
    student = student_of(dtype)
    total = combined_loss(student, targets_of(form, *teacher_of(), 2.0), LOSSES[name](2.0), **BOTH).total * 3.0
    first = torch.autograd.grad(total, leaves(student), retain_graph=True)
    kept = [x.clone() for x in first]
    second = torch.autograd.grad(total, leaves(student), retain_graph=True)
    third = torch.autograd.grad(total, leaves(student))
    for a, b, c, d in zip(first, kept, second, third, strict=True):
        assert b.ne(0).any()
        assert torch.equal(a, b)
        assert torch.equal(c, b)
        assert torch.equal(d, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, leaves(student))


@every
@pytest.mark.parametrize("needs", ["hidden", "weight", "bias", "hidden,bias", "weight,bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_what_is_asked_for(form: str, name: str, needs: str, dtype: torch.dtype) -> None:
    """A frozen head, a frozen body: the same gradients for the rest, and none for these."""
    student, targets, loss = student_of(dtype), targets_of(form, *teacher_of(), 2.0), LOSSES[name](2.0)
    expected = dict(zip(("hidden", "weight", "bias"), actual(student, targets, loss, **BOTH)[1], strict=True))
    parts = {"hidden": student.hidden, "weight": student.head.weight, "bias": student.head.bias}
    for key, x in parts.items():
        assert x is not None
        x.requires_grad_(key in needs.split(","))
    total = combined_loss(student, targets, loss, **BOTH).total
    total.backward()
    for key, x in parts.items():
        assert x is not None
        if key in needs.split(","):
            assert x.grad is not None
            assert torch.equal(x.grad, expected[key])
        else:
            assert x.grad is None


@every
def test_no_graph_where_no_gradient_is_asked_for(form: str, name: str) -> None:
    student, targets, loss = student_of(), targets_of(form, *teacher_of(), 2.0), LOSSES[name](2.0)
    expected, _ = actual(student, targets, loss, **BOTH)
    with torch.no_grad():
        result = combined_loss(student, targets, loss, **BOTH)
    assert torch.equal(result.total, expected)
    assert result.total.grad_fn is None
    for x in leaves(student):
        x.requires_grad_(False)
    assert combined_loss(student, targets, loss, **BOTH).total.grad_fn is None
    logits = student.head.logits(student.hidden)
    assert combined_loss(logits, targets, loss, **BOTH).total.grad_fn is None


@every
def test_inputs_are_left_alone(form: str, name: str) -> None:
    student, targets = student_of(), targets_of(form, *teacher_of(), 2.0)
    logits = student.head.logits(student.hidden).detach()
    inputs = [*leaves(student), logits, *(x for x in vars(targets).values() if isinstance(x, torch.Tensor))]
    before = [x.detach().clone() for x in inputs]
    actual(student, targets, LOSSES[name](2.0), **BOTH)
    actual(logits.requires_grad_(), targets, LOSSES[name](2.0))
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@every
def test_autocast_changes_nothing(form: str, name: str) -> None:
    """The student's dtype says what the products are in; autocast has been asked for it already."""
    student, targets = student_of(), targets_of(form, *teacher_of(), 2.0)
    value, gradients = actual(student, targets, LOSSES[name](2.0), **BOTH)
    with torch.autocast("cpu", torch.bfloat16):
        again, others = actual(student, targets, LOSSES[name](2.0), **BOTH)
    assert torch.equal(value, again)
    assert all(torch.equal(x, y) for x, y in zip(gradients, others, strict=True))


def test_tied_head_and_outer_graph() -> None:
    """A weight that is also the embedding gets both gradients; a factor of the outer graph applies to all."""
    weight, ids = normal(20, 6, seed=1).requires_grad_(), torch.tensor([[1, 2, 3]])
    targets = LogitTargets(normal(1, 3, 20, seed=2))
    hidden = weight[ids] * 2
    total = combined_loss(LinearStudent(hidden, OutputHead(weight), torch.float32), targets, KLDivergenceLoss()).total
    (gradient,) = torch.autograd.grad(total * 0.25, weight, retain_graph=True)
    (expected,) = torch.autograd.grad(KLDivergenceLoss()(hidden @ weight.T, targets.logits) * 0.25, weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)


def test_second_derivative_is_refused() -> None:
    student = student_of()
    total = combined_loss(student, targets_of("full", *teacher_of(), 1.0), KLDivergenceLoss()).total
    (gradient,) = torch.autograd.grad(total.square(), student.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# --- Refusals

Z = torch.zeros(2, 5)
FULL = LogitTargets(Z)
KL = KLDivergenceLoss()


@pytest.mark.parametrize(
    ("student", "targets", "loss", "keywords", "message"),
    [
        (Z, None, None, {}, "^targets=None.*nothing"),
        (Z, FULL, None, {}, "^loss=None"),
        (Z, None, KL, {"labels": torch.zeros(2).long()}, "^loss=KL"),
        (Z.long(), FULL, KL, {}, "^student=torch.int64"),
        (torch.zeros(()), FULL, KL, {}, r"^student=\(\)"),
        (Z, LogitTargets(torch.zeros(3, 5)), KL, {}, r"^targets=\(3,\).*\(2,\)"),
        (Z, LogitTargets(torch.zeros(2, 6)), KL, {}, "^classes=None.*5.*6"),
        (Z, LogitTargets(torch.zeros(2, 3)), KL, {"classes": 4}, "^classes=4.*5.*3"),
        (Z, FULL, KL, {"classes": 6}, "^classes=6.*5"),
        (Z, FULL, KL, {"classes": 0}, "^classes=0"),
        (Z, FULL, KL, {"classes": True}, "^classes=True"),
        (Z, LogitTargets(torch.zeros(2, 5, device="meta")), KL, {}, "^targets=.*meta.*cpu"),
        (Z, FULL, KL, {"mask": torch.ones(2)}, "^mask=torch.float32"),
        (Z, FULL, KL, {"mask": torch.ones(3).bool()}, r"^mask=\(3,\).*\(2,\)"),
        (Z, FULL, KL, {"mask": torch.ones(2, device="meta").bool()}, "^mask=.*meta.*cpu"),
        (Z, FULL, KL, {"labels": torch.zeros(2)}, "^labels=torch.float32"),
        (Z, FULL, KL, {"labels": torch.zeros(3).long()}, r"^labels=\(3,\).*\(2,\)"),
        (Z, FULL, KL, {"labels": torch.tensor([1, 5])}, "^labels=5.*0..4"),
        (Z, FULL, KL, {"labels": torch.tensor([1, -1])}, "^labels=-1.*0..4.*-100"),
        (Z, FULL, KL, {"soft_weight": math.nan}, "^soft_weight=nan"),
        (Z, FULL, KL, {"soft_weight": torch.ones(1)}, r"^soft_weight=\(1,\)"),
        (Z, FULL, KL, {"labels": torch.tensor([1, 2]), "task_weight": "1"}, "^task_weight='1'"),
        (Z, TopKTargets(torch.tensor([[1], [5]]), torch.zeros(2, 2)), KL, {}, "^targets.indices=5.*0..4"),
        (Z, TopKTargets(torch.tensor([[1], [4]]), torch.zeros(2, 2)), KL, {"classes": 4}, "^targets.indices=4.*0..3"),
        (Z, SampledTargets(torch.tensor([[1], [-1]]), torch.zeros(2, 1)), KL, {}, "^targets.indices=-1.*0..4"),
        (Z, SampledTargets(torch.tensor([[1], [2]]), torch.zeros(2, 1)), JSDLoss(), {}, "^loss=JSD.*forward KL only"),
        (
            Z,
            SampledTargets(torch.tensor([[1], [2]]), torch.zeros(2, 1)),
            KLDivergenceLoss(reverse=True),
            {},
            "^loss=KL.*forward KL only",
        ),
        (LinearStudent(Z, OutputHead(torch.zeros(5, 4)), torch.float32), FULL, KL, {}, r"^student.hidden=\(2, 5\).*4"),
        (LinearStudent(Z, OutputHead(torch.zeros(5, 5)), torch.int64), FULL, KL, {}, "^student.dtype=torch.int64"),
        (
            LinearStudent(Z, OutputHead(torch.zeros(5, 5, device="meta")), torch.float32),
            FULL,
            KL,
            {},
            "^student.head=.*meta.*cpu",
        ),
    ],
)
def test_refusals(student: Any, targets: Any, loss: Any, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        combined_loss(student, targets, loss, **keywords)
