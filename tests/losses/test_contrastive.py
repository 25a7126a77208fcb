"""Rows against the other model's rows: by hand, the projector, masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses import ContrastiveDistillationLoss, get_loss_function
from tests.losses.kinds import features, value_and_gradient


def test_two_rows_by_hand() -> None:
    """The student's rows against all rows of the teacher; the other way round would be another number."""
    student = torch.tensor([[2.0, 0.0], [3.0, 3.0]])
    teacher = torch.tensor([[0.5, 0.0], [0.0, 7.0]])
    # Cosines (1, 0) and (r, r), r = sqrt(1/2): the second row cannot tell the two apart.
    temperature = 0.5
    expected = (math.log1p(math.exp(-1 / temperature)) + math.log(2)) / 2
    loss = ContrastiveDistillationLoss(temperature=temperature)
    assert loss(student, teacher).item() == pytest.approx(expected, rel=1e-6)


def test_projector_is_learned() -> None:
    torch.manual_seed(0)
    loss = get_loss_function("contrastive", student_dim=4, teacher_dim=6)
    assert isinstance(loss, ContrastiveDistillationLoss)
    assert {name: tuple(p.shape) for name, p in loss.named_parameters()} == {
        "projector.weight": (6, 4),
        "projector.bias": (6,),
    }
    student, teacher = features(3, 5, 4, seed=1), features(3, 5, 6, seed=2)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.05)
    values = []
    for _ in range(30):
        optimizer.zero_grad()
        value = loss(student, teacher)
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < values[0] / 2


@pytest.mark.parametrize("dims", [{}, {"student_dim": 4}, {"teacher_dim": 6}, {"student_dim": 5, "teacher_dim": 5}])
def test_no_projector_where_none_is_needed(dims: dict[str, int]) -> None:
    assert not list(ContrastiveDistillationLoss(**dims).parameters())


@pytest.mark.parametrize("lead", [(6,), (3, 4), (2, 3, 4)], ids=str)
def test_equals_silverspoon_kd_with_projector(lead: tuple[int, ...]) -> None:
    kd = pytest.importorskip("silverspoon_kd")
    ours, theirs = ContrastiveDistillationLoss(0.1, 4, 6), kd.ContrastiveDistillationLoss(0.1, 4, 6)
    theirs.load_state_dict(ours.state_dict())
    student, teacher = features(*lead, 4, seed=1), features(*lead, 6, seed=2)
    value, gradient = value_and_gradient(ours, student, teacher)
    expected, expected_gradient = value_and_gradient(theirs, student, teacher)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-6)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-6)


def test_starts_as_silverspoon_kd_does() -> None:
    kd = pytest.importorskip("silverspoon_kd")
    for seed in (0, 1):
        made = []
        for make in (ContrastiveDistillationLoss, kd.ContrastiveDistillationLoss):
            torch.manual_seed(seed)
            made.append(make(student_dim=4, teacher_dim=6).state_dict())
        assert made[0].keys() == made[1].keys()
        assert all(torch.equal(made[0][key], made[1][key]) for key in made[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("projected", [torch.float32, torch.bfloat16])
def test_projector_of_another_dtype(dtype: torch.dtype, projected: torch.dtype) -> None:
    loss = ContrastiveDistillationLoss(0.5, 4, 6).to(projected)
    student, teacher = features(5, 4, seed=1, dtype=dtype), features(5, 6, seed=2, dtype=torch.bfloat16)
    value, gradient = value_and_gradient(loss, student, teacher)
    expected = loss.double()(student.double(), teacher.double())
    torch.testing.assert_close(value.double(), expected.detach(), rtol=2e-6, atol=0)
    assert value.dtype == torch.promote_types(torch.float32, dtype)
    assert gradient.dtype == dtype


def test_projector_on_another_device() -> None:
    loss = ContrastiveDistillationLoss(0.5, 4, 6)
    assert loss(torch.zeros(5, 4, device="meta"), torch.zeros(5, 6, device="meta")).device.type == "meta"
    assert loss.projector is not None
    assert loss.projector.weight.device.type == "cpu"


def test_projector_gets_no_gradient_from_rows_that_do_not_count() -> None:
    loss = ContrastiveDistillationLoss(0.5, 4, 6)
    student, teacher = features(4, 3, 4, seed=1), features(4, 3, 6, seed=2)
    mask = torch.tensor([True, False, True, True])
    loss(student[mask], teacher[mask]).backward()
    expected = [p.grad.clone() for p in loss.parameters()]
    student[1], teacher[1] = math.nan, math.inf
    loss.zero_grad()
    loss(student, teacher, mask=mask).backward()
    for p, gradient in zip(loss.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    loss.zero_grad()
    loss(student, teacher, mask=torch.zeros(4, dtype=torch.bool)).backward()
    assert all(p.grad.eq(0.0).all() for p in loss.parameters())


@pytest.mark.parametrize(
    ("student", "teacher", "message"),
    [
        ((2, 5), (2, 6), r"student=\(2, 5\).*student_dim=4"),
        ((2, 4), (2, 5), r"teacher=\(2, 5\).*teacher_dim=6"),
        ((2, 3, 4), (2, 6), r"teacher=\(2, 6\).*\(2, 3, 4\)"),
        ((3, 4), (2, 6), r"teacher=\(2, 6\).*\(3, 4\)"),
        ((4,), (6,), r"student=\(4,\)"),
    ],
)
def test_shapes_with_projector(student: Any, teacher: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ContrastiveDistillationLoss(student_dim=4, teacher_dim=6)(torch.zeros(student), torch.zeros(teacher))


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", v) for v in (0, -1, math.nan, math.inf, "1", None, True)]
    + [(k, v) for k in ("student_dim", "teacher_dim") for v in (0, -1, 4.0, "4", True)],
)
def test_bad_keywords(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{key}="):
        ContrastiveDistillationLoss(**{key: value})
