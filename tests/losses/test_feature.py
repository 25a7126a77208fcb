"""mse, normalized_mse, smooth_l1, cosine and angular_magnitude: by hand, their keywords, their feature dimension."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses import (
    AngularMagnitudeLoss,
    CosineLoss,
    MSELoss,
    NormalizedMSELoss,
    SmoothL1Loss,
    angular_magnitude_loss,
    cosine_loss,
    mse_loss,
    normalized_mse_loss,
    smooth_l1_loss,
)
from tests.losses.kinds import features, value_and_gradient


@pytest.mark.parametrize(
    ("loss", "expected", "gradient"),
    [
        # s = (3, 4), t = (4, 3): differences -1, 1
        (mse_loss(), 1.0, (-1.0, 1.0)),
        (mse_loss(reduction="sum"), 2.0, (-2.0, 2.0)),
        (smooth_l1_loss(beta=4.0), 1 / 8, (-1 / 8, 1 / 8)),
        (smooth_l1_loss(beta=0.5), 3 / 4, (-1 / 2, 1 / 2)),
        (smooth_l1_loss(beta=0), 1.0, (-1 / 2, 1 / 2)),
        # 1 - 24/25; -(t - 24/25 s) / 25
        (cosine_loss(), 1 / 25, (-28 / 625, 21 / 625)),
        (angular_magnitude_loss(), 1 / 25, (-28 / 625, 21 / 625)),  # both are 5 long
        # std = sqrt(1/2): rows are (-1/2, 1/2) and (1/2, -1/2) over sqrt(1/2) + 1/2
        (normalized_mse_loss(eps=0.5), 1 / (0.5**0.5 + 0.5) ** 2, None),
    ],
)
def test_two_entries_by_hand(loss: Callable[..., torch.Tensor], expected: float, gradient: Any) -> None:
    """One row that differs, one that agrees, one that does not count: the mean is over two."""
    student = torch.tensor([[3.0, 4.0], [-1.0, 2.0], [math.nan, 0.0]])
    teacher = torch.tensor([[4.0, 3.0], [-1.0, 2.0], [0.0, math.inf]])
    rows = 1 if getattr(loss, "reduction", "mean") == "sum" else 2
    value, actual = value_and_gradient(loss, student, teacher, mask=torch.tensor([True, True, False]))
    assert value.item() == pytest.approx(expected / rows, rel=1e-6)
    if gradient:
        assert actual[0].tolist() == pytest.approx([g / rows for g in gradient], rel=1e-5)
    assert actual[1:].eq(0.0).all()


def test_length_counts_beside_the_angle() -> None:
    student, teacher = torch.tensor([[0.0, 3.0]]), torch.tensor([[2.0, 0.0]])
    assert angular_magnitude_loss(alpha=0.5, beta=2.0)(student, teacher).item() == pytest.approx(0.5 + 2.0)
    value, gradient = value_and_gradient(angular_magnitude_loss(), torch.zeros(1, 2), teacher)
    assert value.item() == pytest.approx(1.0 + 4.0)
    assert gradient.eq(0.0).all()


@pytest.mark.parametrize("make", [cosine_loss, angular_magnitude_loss])
@pytest.mark.parametrize(("dim", "shape"), [(1, (2, 5, 3, 4)), (-3, (2, 5, 3, 4)), (0, (5, 3)), (1, (3, 5))])
def test_other_feature_dimension(make: Callable[..., Any], dim: int, shape: tuple[int, ...]) -> None:
    """A convolutional map has its channels second; its positions are masked by [B, H, W]."""
    kd = pytest.importorskip("silverspoon_kd")
    student, teacher = features(*shape, seed=1), features(*shape, seed=2)
    loss = make(dim=dim)
    name = {CosineLoss: "cosine", AngularMagnitudeLoss: "angular_magnitude"}[type(loss)]
    value, gradient = value_and_gradient(loss, student, teacher)
    expected, expected_gradient = value_and_gradient(kd.get_loss_function(name, dim=dim), student, teacher)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-6)

    last = [x.movedim(dim, -1).contiguous() for x in (student, teacher)]
    mask = features(*last[0].shape[:-1], seed=3) > 0
    student.movedim(dim, -1)[~mask] = math.nan
    masked, masked_gradient = value_and_gradient(loss, student, teacher, mask=mask)
    expected, expected_gradient = value_and_gradient(make(), *last, mask=mask)
    torch.testing.assert_close(masked, expected)
    torch.testing.assert_close(masked_gradient.movedim(dim, -1), expected_gradient)


@pytest.mark.parametrize("name", ["mse", "smooth_l1"])
def test_unreduced(name: str) -> None:
    kd = pytest.importorskip("silverspoon_kd")
    student, teacher = features(2, 3, 5, seed=1), features(2, 3, 5, seed=2)
    loss = {"mse": mse_loss, "smooth_l1": smooth_l1_loss}[name](reduction="none")
    expected = kd.get_loss_function(name, reduction="none")(student, teacher)
    torch.testing.assert_close(loss(student, teacher), expected)
    mask = torch.tensor([True, False])
    student[1] = math.nan
    actual = loss(student, teacher, mask=mask, num_items=7)
    assert torch.equal(actual[0], expected[0])
    assert actual[1].eq(0.0).all()


@pytest.mark.parametrize("make", [cosine_loss, lambda: angular_magnitude_loss(beta=0.0)])
def test_cosine_near_agreement_is_not_rounding(make: Callable[..., Any]) -> None:
    """1 - 0.99999999 in float32 is 0 or 6e-8; the distance there is 5e-9."""
    teacher = torch.tensor([[1.0, 0.0, 0.0]])
    student = torch.tensor([[1.0, 1e-4, 0.0]])
    value, gradient = value_and_gradient(make(), student, teacher)
    assert value.item() == pytest.approx(5e-9, rel=1e-4)
    assert gradient[0, 1].item() == pytest.approx(1e-4, rel=1e-4)


def test_shorter_than_can_be_divided_by() -> None:
    """As in torch: the length is at least 1e-8."""
    student, teacher = torch.tensor([[6e-9, 8e-10]]).double(), torch.tensor([[0.6, 0.8]]).double()
    expected = 1 - torch.cosine_similarity(student, teacher)
    torch.testing.assert_close(cosine_loss()(student, teacher), expected[0])
    torch.testing.assert_close(cosine_loss()(teacher, student), expected[0])


def test_standardized_takes_no_notice_of_scale_and_offset() -> None:
    student, teacher = features(4, 9, seed=1), features(4, 9, seed=2)
    loss = normalized_mse_loss(eps=1e-12)
    torch.testing.assert_close(loss(student * 7 - 3, teacher), loss(student, teacher), rtol=1e-5, atol=0)
    constant, gradient = value_and_gradient(loss, torch.full((1, 4), 5.0), torch.tensor([[1.0, 2, 3, 4]]))
    assert constant.item() == pytest.approx(3 / 4)  # the teacher's standardised squares sum up to D - 1
    assert gradient.isfinite().all()
    value, gradient = value_and_gradient(loss, torch.tensor([[2.0]]), torch.tensor([[5.0]]))
    assert value.item() == 0.0  # one entry has no spread
    assert gradient.eq(0.0).all()


@pytest.mark.parametrize(
    "loss",
    [
        MSELoss(reduction="sum"),
        NormalizedMSELoss(eps=0.1),
        SmoothL1Loss(beta=0.3, reduction="none"),
        CosineLoss(dim=1),
        AngularMagnitudeLoss(alpha=0.3, beta=2.0, dim=0),
    ],
)
def test_shows_itself(loss: Any) -> None:
    assert eval(repr(loss)) == loss
    with pytest.raises(AttributeError):
        loss.reduction = "mean"


@pytest.mark.parametrize(
    ("make", "kwargs"),
    [(make, {"reduction": v}) for make in (mse_loss, smooth_l1_loss) for v in ("batchmean", None, "", 3)]
    + [(normalized_mse_loss, {"eps": v}) for v in (0, -1e-5, math.nan, math.inf, "1", None, True)]
    + [(smooth_l1_loss, {"beta": v}) for v in (-1, math.nan, math.inf, "1", None, True)]
    + [(angular_magnitude_loss, {k: v}) for k in ("alpha", "beta") for v in (-1, math.nan, math.inf, "1", None)]
    + [(make, {"dim": v}) for make in (cosine_loss, angular_magnitude_loss) for v in (1.0, "1", None, True)],
)
def test_bad_keywords(make: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(kwargs))}="):
        make(**kwargs)


@pytest.mark.parametrize("dim", [2, -3])
def test_dimension_that_is_not_there(dim: int) -> None:
    with pytest.raises(ConfigError, match=rf"^dim={dim}: .*\(2, 3\)"):
        cosine_loss(dim=dim)(torch.zeros(2, 3), torch.zeros(2, 3))
