"""Distances and angles between samples: by hand, masks, many rows, rows that coincide."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses import RelationalLoss, relational, relkd_angle_loss, relkd_da_loss, relkd_distance_loss
from tests.losses.kinds import KINDS, features, value_and_gradient

MAKERS = {"distance": relkd_distance_loss, "angle": relkd_angle_loss, "both": relkd_da_loss}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def test_triangles_by_hand() -> None:
    """Student: 3, 4, 5 with its right angle at the origin. Teacher: equal sides."""
    student = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
    teacher = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 3**0.5]])
    # Distances over their mean 4: 3/4, 1, 5/4 against 1, 1, 1; each pair twice among 9.
    expected = 2 * (0.5 / 16 + 0.5 / 16) / 9
    assert relkd_distance_loss()(student, teacher).item() == pytest.approx(expected, rel=1e-5)
    # Cosines 0, 3/5, 4/5 against 1/2 three times; each twice among 27. A side with itself is 1 in both.
    angles = 2 * 0.5 * (0.25 + 0.01 + 0.09) / 27
    assert relkd_angle_loss()(student, teacher).item() == pytest.approx(angles, rel=1e-5)
    both = relkd_da_loss(dist_weight=3.0, angle_weight=0.5)(student, teacher)
    assert both.item() == pytest.approx(3 * expected + 0.5 * angles, rel=1e-5)


@makers
def test_only_relations_count(make: Callable[..., Any]) -> None:
    """Moved, turned and scaled the samples are related as before; a squared error would be far from 0."""
    teacher = features(6, 3, seed=1).double()
    turn, _ = torch.linalg.qr(features(3, 3, seed=2).double())
    value, gradient = value_and_gradient(make(), 2.5 * teacher @ turn + 4.0, teacher)
    assert value.item() == pytest.approx(0.0, abs=1e-20)
    assert gradient.abs().max() < 1e-12


@makers
def test_padded_positions_are_zeros_of_their_sample(make: Callable[..., Any]) -> None:
    """[B, T] masks positions. A sample is compared by those that it has; one without any takes no part."""
    student, teacher = features(4, 3, 5, seed=1), features(4, 3, 5, seed=2)
    mask = torch.tensor([[True] * 3, [True, False, False], [False] * 3, [True, True, False]])
    value, gradient = value_and_gradient(
        make(), *(x.masked_fill(~mask[..., None], 9e9) for x in (student, teacher)), mask=mask
    )
    keep = mask.any(-1)
    zeroed = [x.masked_fill(~mask[..., None], 0.0)[keep] for x in (student, teacher)]
    expected, expected_gradient = value_and_gradient(make(), *zeroed)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient[mask], expected_gradient[mask[keep]])
    longer = [torch.cat([x, torch.full((4, 6, 5), math.nan)], 1) for x in (student, teacher)]
    padded = make()(*longer, mask=torch.cat([mask, torch.zeros(4, 6, dtype=torch.bool)], 1))
    torch.testing.assert_close(padded, expected)


@makers
@pytest.mark.parametrize("rows", [26, 40])
def test_many_rows_are_as_exact(make: Callable[..., Any], rows: int) -> None:
    """torch.cdist turns to inner products from 26 rows on: then a row is not at distance 0 from itself."""
    student, teacher = features(rows, 8, seed=1) + 10, features(rows, 8, seed=2) + 10
    value, gradient = value_and_gradient(make(), student, teacher)
    kind = KINDS[next(name for name, maker in MAKERS.items() if maker is make)]
    expected = kind.formula(student.double().numpy(), teacher.double().numpy())
    assert value.item() == pytest.approx(expected, rel=2e-5)
    _, exact_gradient = value_and_gradient(make(), student.double(), teacher.double())
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-3, atol=1e-7)


@makers
def test_samples_that_coincide(make: Callable[..., Any]) -> None:
    teacher = features(5, 4, seed=1)
    student = teacher.clone()
    student[1] = student[0]
    value, gradient = value_and_gradient(make(), student, teacher)
    assert value.item() > 0.0
    assert gradient.abs().max() < 10.0
    value, gradient = value_and_gradient(make(), torch.ones(5, 4), teacher)  # no distance that is not 0
    assert value.isfinite()
    assert gradient.eq(0.0).all()


@makers
def test_single_sample_is_zero_and_said_once(make: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    relational._warn_of_single_sample.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            value, gradient = value_and_gradient(make(), features(1, 4, seed=1), features(1, 4, seed=2))
            assert value.item() == 0.0
            assert gradient.eq(0.0).all()
    assert len(caplog.records) == 1


def test_weight_zero_is_not_computed_but_connected() -> None:
    student, teacher = features(4, 5, seed=1), features(4, 5, seed=2)
    value, gradient = value_and_gradient(relkd_da_loss(dist_weight=0, angle_weight=0), student, teacher)
    assert value.item() == 0.0
    assert gradient.eq(0.0).all()
    one = relkd_da_loss(dist_weight=0.5, angle_weight=0)(student, teacher)
    torch.testing.assert_close(one, relkd_distance_loss()(student, teacher) / 2)


def test_shows_itself() -> None:
    loss = relkd_da_loss(dist_weight=0.5)
    assert eval(repr(loss)) == loss == RelationalLoss(0.5, 2.0)


@pytest.mark.parametrize("key", ["dist_weight", "angle_weight"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "1", None, True])
def test_bad_weights(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{key}="):
        relkd_da_loss(**{key: value})


@makers
def test_one_vector_has_no_samples(make: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"student=\(5,\)"):
        make()(torch.zeros(5), torch.zeros(5))
