"""Losses in the metric of an output head: by hand, the matrix, the norm before it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses import cosine_loss, mahalanobis_cosine_loss, mahalanobis_mse_loss
from tests.losses.kinds import features, value_and_gradient

MAKERS = {"mahalanobis_mse": mahalanobis_mse_loss, "mahalanobis_cosine": mahalanobis_cosine_loss}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def test_by_hand() -> None:
    weight = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 1.0]])  # M = diag(4, 2)
    student, teacher = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 2.0]])
    value, gradient = value_and_gradient(mahalanobis_mse_loss(weight_matrix=weight), student, teacher)
    assert value.item() == 4 * 4 + 2 * 1  # a sum over the entries, not a mean
    assert gradient.tolist() == [[2 * 4 * 2, 2 * 2 * -1]]
    value = mahalanobis_cosine_loss(metric_matrix=torch.diag(torch.tensor([4.0, 2.0])))(student, teacher)
    assert value.item() == pytest.approx(1 - (4 * 3 + 2 * 2) / math.sqrt((4 * 9 + 2) * (4 + 2 * 4)), rel=1e-6)


@makers
@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_norm_before(make: Callable[..., Any], norm: Any) -> None:
    kd = pytest.importorskip("silverspoon_kd")
    name = next(n for n, m in MAKERS.items() if m is make)
    module, weight = norm(5), features(7, 5, seed=3)
    for p, seed in zip(module.parameters(), (4, 5), strict=False):
        p.data = features(5, seed=seed)
    ours, theirs = (f(name, weight_matrix=weight, pre_norm=module) for f in (_ours, kd.get_loss_function))
    for shape in ((4, 5), (3, 2, 5)):
        student, teacher = features(*shape, seed=1), features(*shape, seed=2)
        results = []
        for loss in (ours, theirs):
            module.zero_grad()
            learned = teacher.clone().requires_grad_()
            results.append([*value_and_gradient(loss, student, learned), *(p.grad for p in module.parameters())])
            assert learned.grad is None
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-6)
    student[0, 1], mask = math.nan, torch.tensor([[True, False], [True, True], [True, True]])
    module.zero_grad()
    value, gradient = value_and_gradient(ours, student, teacher, mask=mask)
    torch.testing.assert_close(value, ours(student[mask], teacher[mask]).detach())
    assert gradient.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def _ours(name: str, **kwargs: Any) -> Any:
    return MAKERS[name](**kwargs)


@makers
def test_which_matrix(make: Callable[..., Any]) -> None:
    student, teacher, weight = features(4, 5, seed=1), features(4, 5, seed=2), features(7, 5, seed=3)
    expected = make(weight_matrix=weight)(student, teacher)
    torch.testing.assert_close(make(metric_matrix=weight.mT @ weight)(student, teacher), expected)
    torch.testing.assert_close(make(weight_matrix=weight, metric_matrix=torch.eye(5))(student, teacher), expected)
    learned = weight.clone().requires_grad_()
    loss = make(weight_matrix=learned)
    with torch.no_grad():
        learned.zero_()  # the matrix is the one at construction, and is not learned
    torch.testing.assert_close(loss(student, teacher), expected)
    assert loss(student, teacher).grad_fn is None


def test_identity_metric_is_plain_cosine() -> None:
    student, teacher = features(4, 5, seed=1), features(4, 5, seed=2)
    loss = mahalanobis_cosine_loss(metric_matrix=torch.eye(5))
    torch.testing.assert_close(loss(student, teacher), cosine_loss()(student, teacher))


@makers
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_matrix_of_another_dtype_and_device(make: Callable[..., Any], dtype: torch.dtype) -> None:
    weight = features(7, 5, seed=3, dtype=dtype)
    student, teacher = features(4, 5, seed=1, dtype=torch.bfloat16), features(4, 5, seed=2)
    loss = make(weight_matrix=weight)
    expected = make(weight_matrix=weight.double())(student.double(), teacher.double())
    torch.testing.assert_close(loss(student, teacher).double(), expected, rtol=1e-5, atol=0)
    assert loss(student.double(), teacher).dtype == torch.float64
    assert loss(student.to("meta"), teacher.to("meta")).device.type == "meta"
    again = pickle.loads(pickle.dumps(loss))  # without the copies for other devices
    torch.testing.assert_close(again(student, teacher), loss(student, teacher))


@makers
def test_head_narrower_than_the_features(make: Callable[..., Any]) -> None:
    """What the head does not see costs nothing."""
    loss = make(weight_matrix=torch.eye(2, 5))
    teacher = features(4, 5, seed=2)
    student = teacher.clone()
    student[:, 2:] = 99.0
    value, gradient = value_and_gradient(loss, student, teacher)
    assert value.item() == pytest.approx(0.0, abs=1e-6)
    assert gradient[:, 2:].eq(0.0).all()
    student[0, :2] = 0.0  # no length in the metric
    value, gradient = value_and_gradient(loss, student, teacher)
    assert value.item() > 0.0
    assert gradient.isfinite().all()


def test_cosine_in_what_is_no_metric_is_finite() -> None:
    loss = mahalanobis_cosine_loss(metric_matrix=-torch.eye(5))
    value, gradient = value_and_gradient(loss, features(4, 5, seed=1), features(4, 5, seed=2))
    assert value.item() == 1.0
    assert gradient.eq(0.0).all()


@makers
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "^weight_matrix=None: .*metric_matrix"),
        ({"weight_matrix": torch.zeros(5)}, r"^weight_matrix=\(5,\): .*\(V, D\)"),
        ({"weight_matrix": torch.zeros(0, 5)}, r"^weight_matrix=\(0, 5\)"),
        ({"weight_matrix": [[1.0]]}, "^weight_matrix="),
        ({"weight_matrix": torch.ones(5, 5).long()}, "^weight_matrix="),
        ({"metric_matrix": torch.zeros(5, 4)}, r"^metric_matrix=\(5, 4\): .*\(D, D\)"),
        ({"metric_matrix": "eye"}, "^metric_matrix='eye'"),
        ({"metric_matrix": torch.eye(5), "pre_norm": 3}, "^pre_norm=3"),
    ],
)
def test_bad_keywords(make: Callable[..., Any], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**kwargs)


@pytest.mark.parametrize("eps", [0, -1.0, math.nan, math.inf, "1", None, True])
def test_bad_eps(eps: Any) -> None:
    with pytest.raises(ConfigError, match=r"^eps="):
        mahalanobis_cosine_loss(metric_matrix=torch.eye(5), eps=eps)


@makers
def test_features_of_another_size(make: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"^student=\(2, 4\): .*5"):
        make(metric_matrix=torch.eye(5))(torch.zeros(2, 4), torch.zeros(2, 4))
