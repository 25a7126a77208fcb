"""Losses by name, and what a callable can be given."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses import (
    accepts_mask,
    angular_magnitude_loss,
    cosine_loss,
    get_loss_function,
    jsd_loss,
    kl_divergence_loss,
    loss_keywords,
    mse_loss,
    normalized_mse_loss,
    relkd_angle_loss,
    relkd_da_loss,
    relkd_distance_loss,
    smooth_l1_loss,
)

BOTH = {"mask", "num_items"}


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("kl_divergence", {}, kl_divergence_loss()),
        ("kl_div", {"temperature": 2.0, "chunk_size": 3}, kl_divergence_loss(temperature=2.0, chunk_size=3)),
        ("kl_div", {"reverse": True}, kl_divergence_loss(reverse=True)),
        ("reverse_kl", {"temperature": 2.0}, kl_divergence_loss(temperature=2.0, reverse=True)),
        ("jsd", {"beta": 0.2}, jsd_loss(beta=0.2)),
        ("mse", {"reduction": "sum"}, mse_loss(reduction="sum")),
        ("normalized_mse", {"eps": 0.1}, normalized_mse_loss(eps=0.1)),
        ("smooth_l1", {"beta": 0.1}, smooth_l1_loss(beta=0.1)),
        ("cosine", {"dim": 1}, cosine_loss(dim=1)),
        ("angular_magnitude", {"alpha": 0.1}, angular_magnitude_loss(alpha=0.1)),
        ("relkd_distance", {}, relkd_distance_loss()),
        ("relkd_angle", {}, relkd_angle_loss()),
        ("relkd_distance_angle", {"dist_weight": 0.1}, relkd_da_loss(dist_weight=0.1)),
        ("relkd_da", {"angle_weight": 0.1}, relkd_da_loss(angle_weight=0.1)),
    ],
)
def test_names(name: str, kwargs: dict[str, Any], expected: object) -> None:
    assert get_loss_function(name, **kwargs) == expected


@pytest.mark.parametrize("name", ["kl_divergence", "kl_div", "jsd"])
def test_same_values_as_silverspoon_kd(name: str) -> None:
    kd = pytest.importorskip("silverspoon_kd")
    student, teacher = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(1)).unbind()
    ours, theirs = (f(name, temperature=3.0)(student, teacher) for f in (get_loss_function, kd.get_loss_function))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "hints"),
    [
        ("kl_divergance", ["did you mean 'kl_divergence'"]),
        ("JSD", ["known:"]),
        ("nothing like it", ["known:"]),
        (None, ["known:"]),
        (["jsd"], ["known:"]),
    ],
)
def test_unknown_name(name: Any, hints: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        get_loss_function(name)
    assert caught.value.key == "loss_type"
    for hint in [*hints, repr(name), "kl_div, kl_divergence, logit_lens_kl", "mse", "reverse_kl, smooth_l1"]:
        assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key", "hints"),
    [
        ("jsd", "temprature", ["did you mean 'temperature'", "beta, chunk_size, temperature"]),
        ("kl_div", "beta", ["kl_div", "chunk_size, reverse, temperature"]),
        ("reverse_kl", "reverse", ["reverse_kl", "chunk_size, temperature"]),
        ("mse", "temperature", ["no keyword of mse", "reduction"]),
        ("mahal_cosine", "weights", ["did you mean 'weight_matrix'", "eps, metric_matrix, pre_norm, weight_matrix"]),
        ("contrastive", "dim", ["student_dim, teacher_dim, temperature"]),
        ("relkd_angle", "angle_weight", ["no keyword of relkd_angle"]),
    ],
)
def test_unknown_keyword(name: str, key: str, hints: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        get_loss_function(name, **{key: 0.5})
    assert caught.value.key == key
    for hint in hints:
        assert hint in str(caught.value)


def test_bad_value_names_the_keyword() -> None:
    with pytest.raises(ConfigError, match=r"^beta=1\.5"):
        get_loss_function("jsd", beta=1.5)


def _plain(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return (student - teacher).square().mean()


def _masked(student: torch.Tensor, teacher: torch.Tensor, mask: Any = None) -> torch.Tensor:
    return _plain(student, teacher)


def _full(student: torch.Tensor, teacher: torch.Tensor, *, mask: Any, num_items: Any) -> torch.Tensor:
    return _plain(student, teacher)


def _anything(student: torch.Tensor, teacher: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return _plain(student, teacher)


def _positional(student: torch.Tensor, mask: Any, num_items: Any, /) -> torch.Tensor:
    return student.mean()


class _Module(torch.nn.Module):
    def forward(self, student: torch.Tensor, teacher: torch.Tensor, mask: Any = None, num_items: Any = None) -> Any:
        return _plain(student, teacher)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (kl_divergence_loss(), BOTH),
        (jsd_loss(), BOTH),
        (_full, BOTH),
        (functools.partial(_full, num_items=3), BOTH),
        (_Module(), BOTH),
        (torch.compile(_Module(), backend="eager"), BOTH),
        (_masked, {"mask"}),
        (functools.partial(_full, num_items=3).func, BOTH),
        (_plain, set()),
        (_anything, set()),
        (_positional, set()),
        (torch.nn.MSELoss(), set()),
        (torch.nn.functional.mse_loss, set()),
        (min, set()),
    ],
)
def test_loss_keywords(loss: Any, expected: set[str]) -> None:
    assert loss_keywords(loss) == expected
    assert accepts_mask(loss) == (expected == BOTH)
