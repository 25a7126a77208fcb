"""Hidden states behind an output head: the denominator, the head's gradient, its dtype and device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses import get_loss_function, kl_divergence_loss, logit_lens_kl_loss
from tests.losses.kinds import features, linear, value_and_gradient


def test_by_hand() -> None:
    """Two samples of two positions; one position differs: teacher (1/2, 1/2), student (1/5, 4/5)."""
    head = torch.nn.Identity()
    student = torch.tensor([[0.2, 0.8], [0.3, 0.7]]).log().expand(2, 2, 2).contiguous()
    teacher = student.clone()
    teacher[1, 0] = 5.0
    divergence = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.5 / 0.8)
    loss = logit_lens_kl_loss(output_head=head)
    assert loss(student, teacher).item() == pytest.approx(divergence / 2, rel=1e-5)  # samples, not positions
    mask = torch.tensor([[False, False], [True, True]])
    assert loss(student, teacher, mask=mask).item() == pytest.approx(divergence, rel=1e-5)
    assert loss(student, teacher, mask=mask, num_items=2).item() == pytest.approx(divergence / 2, rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_is_the_divergence_of_the_logits(temperature: float) -> None:
    head = linear(5, 7, 3)
    student, teacher = features(2, 4, 5, seed=1), features(2, 4, 5, seed=2)
    mask = features(2, 4, seed=4) > -0.5
    loss = logit_lens_kl_loss(output_head=head, temperature=temperature)
    plain = kl_divergence_loss(temperature=temperature)
    for kwargs in ({"num_items": 8}, {"mask": mask, "num_items": 5}):
        value, gradient = value_and_gradient(loss, student, teacher, **kwargs)
        expected, expected_gradient = value_and_gradient(
            lambda s, t, **k: plain(head(s), head(t), **k), student, teacher.detach(), **kwargs
        )
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradient, expected_gradient)


def test_head_learns_from_the_students_side_only() -> None:
    kd = pytest.importorskip("silverspoon_kd")
    head = linear(5, 7, 3)
    student, teacher = features(2, 4, 5, seed=1), features(2, 4, 5, seed=2)
    gradients = []
    for make in (get_loss_function, kd.get_loss_function):
        head.zero_grad()
        make("logit_lens_kl", output_head=head)(student, teacher).backward()
        gradients.append([p.grad.clone() for p in head.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    head.requires_grad_(False)
    value_and_gradient(logit_lens_kl_loss(output_head=head), student, teacher)
    assert not any(p.requires_grad for p in head.parameters())


def test_head_gets_no_nan_from_rows_that_do_not_count() -> None:
    head = torch.nn.Sequential(torch.nn.LayerNorm(5), linear(5, 7, 3))
    student, teacher = features(2, 4, 5, seed=1), features(2, 4, 5, seed=2)
    student[0, 1], teacher[1, 1] = math.nan, math.inf
    mask = torch.tensor([True, False, True, True]).expand(2, 4)
    loss = logit_lens_kl_loss(output_head=head)(student, teacher, mask=mask)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() and p.grad.ne(0.0).any() for p in head.parameters())


@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_head_of_another_dtype(dtype: torch.dtype, head_dtype: torch.dtype) -> None:
    head = linear(5, 7, 3).to(head_dtype)
    student, teacher = features(4, 5, seed=1, dtype=dtype), features(4, 5, seed=2)
    value, gradient = value_and_gradient(logit_lens_kl_loss(output_head=head), student, teacher)
    expected = logit_lens_kl_loss(output_head=head.double())(student.double(), teacher.double())
    rtol = 0.05 if head_dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(value.double(), expected.detach(), rtol=rtol, atol=0)
    assert value.dtype == torch.promote_types(torch.float32, dtype)
    assert gradient.dtype == dtype


def test_head_on_another_device_stays_there() -> None:
    head = linear(5, 7, 3)
    there = torch.zeros(4, 5, device="meta")
    assert logit_lens_kl_loss(output_head=head)(there, there).device.type == "meta"
    assert head.weight.device.type == "cpu"


def test_head_without_parameters() -> None:
    student, teacher = features(4, 5, seed=1), features(4, 5, seed=2)
    expected = kl_divergence_loss()(student * 2, teacher * 2)
    torch.testing.assert_close(logit_lens_kl_loss(output_head=lambda x: x * 2)(student, teacher), expected)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "^output_head=None: logit_lens_kl needs"),
        ({"output_head": 3}, "^output_head=3"),
        ({"output_head": torch.nn.Identity(), "temperature": 0}, "^temperature=0"),
        ({"output_head": torch.nn.Identity(), "temperature": math.nan}, "^temperature=nan"),
        ({"head": 3}, "^head=3: no keyword of logit_lens_kl.*output_head, temperature"),
    ],
)
def test_bad_keywords(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_loss_function("logit_lens_kl", **kwargs)
