"""What holds for every loss between features: formulas, masks, denominators, dtypes, gradients."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses import accepts_mask
from silverspoon_ray.losses.registry import LOSS_FACTORIES
from tests.losses.kinds import SHAPES, SIZE, Kind, features, having, kinds, shapes, value_and_gradient

DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float64, torch.float32),
    (torch.float32, torch.float64),
]


def pair(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return features(*shape, seed=1, dtype=dtype), features(*shape, seed=2, dtype=dtype)


def double(*tensors: torch.Tensor) -> list[np.ndarray]:
    return [x.detach().double().numpy() for x in tensors]


# --- Values


@kinds
@shapes
def test_equals_silverspoon_kd(kind: Kind, shape: tuple[int, ...]) -> None:
    kd = pytest.importorskip("silverspoon_kd")
    value, gradient = value_and_gradient(kind.made(), *pair(*shape))
    expected, expected_gradient = value_and_gradient(kind.made(factory=kd.get_loss_function), *pair(*shape))
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-6)


def test_takes_what_silverspoon_kd_takes() -> None:
    registry = pytest.importorskip("silverspoon_kd.losses.registry").LOSS_REGISTRY
    assert set(registry) <= set(LOSS_FACTORIES)
    for name, theirs in registry.items():
        ours = inspect.signature(LOSS_FACTORIES[name]).parameters
        for key, parameter in inspect.signature(theirs).parameters.items():
            assert (name, key, ours[key].default) == (name, key, parameter.default)


@kinds
@shapes
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x).removeprefix("torch.") for x in d))
def test_equals_float64_formula(kind: Kind, shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    student, teacher = features(*shape, seed=1, dtype=dtypes[0]), features(*shape, seed=2, dtype=dtypes[1])
    value, gradient = value_and_gradient(kind.made(), student, teacher)
    assert value.shape == ()
    assert value.dtype == (torch.float64 if dtypes[0] == torch.float64 else torch.float32)
    assert gradient.dtype == dtypes[0]
    assert value.item() == pytest.approx(kind.formula(*double(student, teacher)), rel=5e-6)


@kinds
@shapes
def test_gradcheck(kind: Kind, shape: tuple[int, ...]) -> None:
    student, teacher = pair(*shape, dtype=torch.float64)
    mask = torch.rand(shape[:-1], generator=torch.Generator().manual_seed(3)) < 0.8
    loss = kind.made(torch.float64)
    student[~mask], teacher[~mask] = math.nan, math.nan
    leaf = student.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda s: loss(torch.where(mask.unsqueeze(-1), s, math.nan), teacher, mask=mask, num_items=3),
        (leaf.detach().nan_to_num().requires_grad_(),),
    )


@having(lambda kind: kind.zero_at_identity)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_identity(kind: Kind, scale: float) -> None:
    for shape, dtype in zip(SHAPES, (torch.float32, torch.bfloat16, torch.float32), strict=True):
        same = (features(*shape, seed=4) * scale).to(dtype)
        value, gradient = value_and_gradient(kind.made(), same, same.clone())
        assert value.item() == 0.0
        assert gradient.abs().max().item() == 0.0


# --- Masks and denominators


@kinds
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize(
    ("shape", "masked"), [(s, ndim) for s in SHAPES for ndim in range(1, len(s))], ids=lambda x: str(x)
)
def test_what_does_not_count_may_hold_anything(kind: Kind, junk: float, shape: tuple[int, ...], masked: int) -> None:
    mask = torch.rand(shape[:masked], generator=torch.Generator().manual_seed(5)) < 0.6
    mask.view(-1)[:2] = torch.tensor([True, False])
    (student, teacher), loss = pair(*shape), kind.made()
    zeroed, zeroed_gradient = value_and_gradient(
        loss, *(x.masked_fill(~mask[(...,) + (None,) * (x.ndim - masked)], 0.0) for x in (student, teacher)), mask=mask
    )
    student[~mask], teacher[~mask] = junk, -junk
    value, gradient = value_and_gradient(loss, student, teacher, mask=mask)
    assert torch.equal(value, zeroed)
    assert torch.equal(gradient, zeroed_gradient)
    assert gradient[~mask].eq(0.0).all()
    if kind.sums:  # two samples are always at one distance
        assert gradient[mask].ne(0.0).any()


@kinds
@shapes
def test_masked_samples_are_absent(kind: Kind, shape: tuple[int, ...]) -> None:
    """A mask [B] leaves out whole samples, at any rank; the same as a full mask, and as a smaller batch."""
    (student, teacher), loss = pair(*shape), kind.made()
    mask = torch.arange(len(student)) != 1
    value, gradient = value_and_gradient(loss, student, teacher, mask=mask)
    full = mask[(...,) + (None,) * (student.ndim - 2)].expand(shape[:-1])
    torch.testing.assert_close(loss(student, teacher, mask=full), value)
    expected, expected_gradient = value_and_gradient(loss, student[mask], teacher[mask])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient[mask], expected_gradient)


@having(lambda kind: not kind.name.startswith("relkd"))  # there a sample is one vector: see test_relational
def test_masked_rows_are_absent(kind: Kind) -> None:
    """Positions of a sequence, ragged: as if the other rows were not there."""
    (student, teacher), loss = pair(3, 4, SIZE), kind.made()
    mask = torch.tensor([[True, True, False, False], [True] * 4, [True, False, False, False]])
    value, gradient = value_and_gradient(loss, student, teacher, mask=mask)
    expected, expected_gradient = value_and_gradient(loss, student[mask], teacher[mask])
    factor = 7 / 3 if kind.per_sample else 1.0
    torch.testing.assert_close(value, expected * factor)
    torch.testing.assert_close(gradient[mask], expected_gradient * factor)


@kinds
@shapes
def test_everything_counts_is_no_mask(kind: Kind, shape: tuple[int, ...]) -> None:
    (student, teacher), loss = pair(*shape), kind.made()
    for ndim in range(1, len(shape)):
        everything = loss(student, teacher, mask=torch.ones(shape[:ndim], dtype=torch.bool))
        torch.testing.assert_close(everything, loss(student, teacher))


@having(lambda kind: kind.sums)
@pytest.mark.parametrize("kind_of_number", [int, float, torch.tensor, lambda n: torch.tensor(float(n))])
@pytest.mark.parametrize("ndim", [0, 1, 2, 3])
def test_micro_batches_add_up(kind: Kind, kind_of_number: Any, ndim: int) -> None:
    shape = (6, 2, 3, SIZE)
    (student, teacher), loss = pair(*shape), kind.made()
    mask = torch.rand(shape[:ndim], generator=torch.Generator().manual_seed(6)) < 0.6 if ndim else None
    items = kind_of_number(36 if mask is None else int(mask.sum()))
    whole, gradient = value_and_gradient(loss, student, teacher, mask=mask, num_items=items)
    if not kind.per_sample:
        torch.testing.assert_close(whole, loss(student, teacher, mask=mask))
    for cut in ([6], [2, 4], [1] * 6):
        parts = [x.split(cut) for x in (student, teacher)]
        masks = [None] * len(cut) if mask is None else mask.split(cut)
        results = [
            value_and_gradient(loss, s, t, mask=m, num_items=items) for s, t, m in zip(*parts, masks, strict=True)
        ]
        torch.testing.assert_close(sum(value for value, _ in results), whole)
        torch.testing.assert_close(torch.cat([g for _, g in results]), gradient)


@having(lambda kind: not kind.sums)
def test_denominator_weighs_a_batch_that_compares(kind: Kind) -> None:
    (student, teacher), loss = pair(4, 3, SIZE), kind.made()
    mask = torch.tensor([[True] * 3, [True, False, False], [False] * 3, [True] * 3])
    for kwargs, rows in (({"mask": mask}, 7), ({"mask": mask[:, 0]}, 3), ({}, 12)):
        value, gradient = value_and_gradient(loss, student, teacher, **kwargs)
        weighed, weighed_gradient = value_and_gradient(loss, student, teacher, num_items=28, **kwargs)
        torch.testing.assert_close(weighed, value * rows / 28)
        torch.testing.assert_close(weighed_gradient, gradient * rows / 28)


@kinds
@shapes
@pytest.mark.parametrize("items", [None, 7, 0, torch.tensor(0)])
def test_nothing_counts(kind: Kind, shape: tuple[int, ...], items: Any) -> None:
    (student, teacher), loss = pair(*shape), kind.made()
    student[0], teacher[1] = math.nan, math.inf
    for ndim in range(1, len(shape)):
        mask = torch.zeros(shape[:ndim], dtype=torch.bool)
        value, gradient = value_and_gradient(loss, student, teacher, mask=mask, num_items=items)
        assert value.item() == 0.0
        assert gradient.eq(0.0).all()
    value, _ = value_and_gradient(loss, student[:0], teacher[:0], num_items=items)
    assert value.item() == 0.0


# --- Numbers that are hard


@kinds
@pytest.mark.parametrize("who", ["student", "teacher", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_zero_rows_and_equal_rows(kind: Kind, who: str, dtype: torch.dtype) -> None:
    student, teacher = pair(5, SIZE, dtype=dtype)
    for side, x in (("student", student), ("teacher", teacher)):
        if who in (side, "both"):
            x[0], x[1], x[3] = 0.0, 2.0, x[2]
    value, gradient = value_and_gradient(kind.made(), student, teacher)
    assert 0.0 <= value.item() < 200.0
    assert gradient.isfinite().all()
    assert gradient.abs().max() < 3e4  # not 1 / eps
    for x in (student, teacher):
        x.zero_()
    value, gradient = value_and_gradient(kind.made(), student, teacher)
    assert value.isfinite()
    assert gradient.isfinite().all()


@kinds
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e4])
def test_small_and_large_features(kind: Kind, scale: float) -> None:
    (student, teacher), loss = pair(4, SIZE), kind.made()
    value, gradient = value_and_gradient(loss, student * scale, teacher * scale)
    assert value.item() >= 0.0
    assert gradient.isfinite().all()
    # An overflow of float16 squares: arithmetic is in float32 before anything else.
    value, gradient = value_and_gradient(loss, (student * 2e4).half(), (teacher * 2e4).half(), num_items=4)
    assert value.isfinite()


@kinds
def test_autocast_changes_nothing(kind: Kind) -> None:
    (student, teacher), loss = pair(3, 4, SIZE), kind.made()
    expected, expected_gradient = value_and_gradient(loss, student, teacher)
    leaf = student.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(leaf, teacher)
    (gradient,) = torch.autograd.grad(value, leaf)
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)
    assert torch.equal(gradient, expected_gradient)


# --- The teacher


@kinds
@pytest.mark.parametrize("masked", [False, True])
def test_teacher_may_be_read_only(kind: Kind, masked: bool) -> None:
    student, teacher = pair(4, 3, SIZE)
    shared = teacher.numpy().copy()
    shared.flags.writeable = False
    mask = torch.ones(4, 3, dtype=torch.bool) if masked else None
    if mask is not None:
        mask[1, 1:] = False
    with warnings.catch_warnings(action="ignore"):  # torch warns that writing would be undefined; nothing writes
        view = torch.from_numpy(shared)
    before = student.clone()
    value, gradient = value_and_gradient(kind.made(), student, view, mask=mask)
    assert np.array_equal(shared, teacher.numpy())
    assert torch.equal(student, before)
    expected, expected_gradient = value_and_gradient(kind.made(), student, teacher, mask=mask)
    assert torch.equal(value, expected)
    assert torch.equal(gradient, expected_gradient)


@kinds
def test_gradient_of_the_teacher(kind: Kind) -> None:
    student, teacher = pair(4, SIZE)
    learned = teacher.clone().requires_grad_()
    loss = kind.made()
    loss(student.clone().requires_grad_(), learned).backward()
    assert (learned.grad is not None) == kind.teacher_learns
    if kind.teacher_learns:
        assert learned.grad.ne(0.0).any()
    with torch.no_grad():
        assert loss(student.requires_grad_(), teacher).grad_fn is None


# --- Objects and refusals


@kinds
def test_copies(kind: Kind) -> None:
    loss, (student, teacher) = kind.made(), pair(4, SIZE)
    expected = loss(student, teacher)
    assert accepts_mask(loss)
    for again in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        assert torch.equal(again(student, teacher), expected)
    assert len(repr(loss)) < 200


@kinds
@pytest.mark.parametrize(
    ("student", "teacher", "kwargs", "message"),
    [
        ((2, SIZE), (2, 6), {}, r"teacher=\(2, 6\).*\(2, 5\).*projector.*auto_projector=True"),
        ((2, SIZE), (1, SIZE), {}, r"teacher=\(1, 5\).*\(2, 5\).*projector"),
        ((2, 3, SIZE), (2, SIZE), {}, r"teacher=\(2, 5\).*\(2, 3, 5\).*projector"),
        ((), (), {}, r"\(\)"),
        ((3, 0), (3, 0), {}, r"student=\(3, 0\)"),
        ((2, SIZE), torch.zeros(2, SIZE).long(), {}, "teacher=torch.int64"),
        ((2, SIZE), torch.zeros(2, SIZE, device="meta"), {}, "teacher=.*meta.*cpu"),
        ((2, SIZE), (2, SIZE), {"mask": torch.ones(3).bool()}, r"mask=\(3,\).*\(2,\).*\(2, 5\)"),
        ((2, SIZE), (2, SIZE), {"mask": torch.ones(2, SIZE).bool()}, r"mask=\(2, 5\).*\(2,\)"),
        ((2, 3, SIZE), (2, 3, SIZE), {"mask": torch.ones(3).bool()}, r"mask=\(3,\).*\(2, 3\).*\(2, 3, 5\)"),
        ((2, SIZE), (2, SIZE), {"mask": torch.ones(2).long()}, "mask=torch.int64.*torch.bool"),
        ((2, SIZE), (2, SIZE), {"mask": torch.ones(2, device="meta").bool()}, "mask=.*meta.*cpu"),
    ],
)
def test_bad_inputs(kind: Kind, student: Any, teacher: Any, kwargs: dict[str, Any], message: str) -> None:
    tensors = (x if isinstance(x, torch.Tensor) else torch.zeros(x) for x in (student, teacher))
    with pytest.raises(ConfigError, match=message):
        kind.made()(*tensors, **kwargs)


@kinds
@pytest.mark.parametrize("items", [-1, math.nan, math.inf, "3", True, torch.ones(2)])
def test_bad_denominator(kind: Kind, items: Any) -> None:
    with pytest.raises(ConfigError, match=r"^num_items="):
        kind.made()(*pair(2, SIZE), num_items=items)
