"""A fused layer computes what projector, layer, projector computed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from silverspoon_ray.alignments.fusion import fuse_projectors_into_module
from silverspoon_ray.alignments.projectors import GenericConv2dProjector, GenericLinearProjector
from silverspoon_ray.errors import ConfigError
from tests.support import seeded

LINEAR = {
    "linear": lambda: nn.Linear(4, 5),
    "linear_no_bias": lambda: nn.Linear(4, 5, bias=False),
    "conv1d": lambda: Conv1D(5, 4),
    "projector": lambda: GenericLinearProjector(4, 5),
}
CONVOLUTIONS = {
    "conv": lambda: nn.Conv2d(4, 6, 3),
    "no_bias": lambda: nn.Conv2d(4, 6, 1, bias=False),
    "strided": lambda: nn.Conv2d(4, 6, 3, stride=2, dilation=2),
    "padded": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "same": lambda: nn.Conv2d(4, 6, (1, 3), padding="same"),
    "reflect": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    "circular": lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="circular"),
    "grouped": lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "padded_grouped": lambda: nn.Conv2d(4, 6, 3, padding=(1, 0), groups=2, bias=False),
}
ZERO_PADDED = {"padded", "same", "depthwise", "padded_grouped"}


def made(build: Any, seed: int = 0) -> Any:
    with seeded(seed):
        module = build()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn_like(parameter))
    return module


def image(channels: int) -> torch.Tensor:
    return torch.randn(2, channels, 7, 8, generator=torch.Generator().manual_seed(1))


def check(module: Any, before: Any, after: Any, x: torch.Tensor, **keywords: Any) -> Any:
    """The fused layer's output is that of the three in a row; the module given is left as it was."""
    state = {key: value.clone() for key, value in module.state_dict().items()}
    expected = x if before is None else before(x)
    if isinstance(expected, tuple):
        expected = expected[0][0]
    expected = module(expected) if after is None else after(module(expected))
    fused = fuse_projectors_into_module(module, before, after, **keywords)
    torch.testing.assert_close(fused(x), expected, rtol=1e-5, atol=1e-5)
    if not keywords.get("inplace"):
        assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
        pointers = {parameter.data_ptr() for parameter in module.parameters()}
        assert not pointers & {parameter.data_ptr() for parameter in fused.parameters()}
    return fused


@pytest.mark.parametrize("projector_bias", [True, False])
@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str, projector_bias: bool) -> None:
    module = made(LINEAR[name])
    before = made(lambda: GenericLinearProjector(3, 4, projector_bias, mode="input"), 1)
    after = made(lambda: GenericLinearProjector(5, 7, projector_bias), 2)
    wide, narrow = torch.randn(2, 3, 4), torch.randn(2, 3, 3)
    for first, second, x in ((before, None, narrow), (None, after, wide), (before, after, narrow)):
        fused = check(module, first, second, x)
        assert type(fused) is type(module)
        assert (fused.bias is None) == (module.bias is None and not projector_bias)
        if isinstance(fused, nn.Linear):
            assert (fused.in_features, fused.out_features) == (x.shape[-1], 7 if second else 5)
        else:
            assert (fused.nx, fused.nf) == (x.shape[-1], 7 if second else 5)


def test_square_output_projector() -> None:
    """Equal widths are the case in which a product the wrong way round goes unseen, as it does in the reference."""
    check(made(lambda: nn.Linear(4, 4)), None, made(lambda: GenericLinearProjector(4, 4), 1), torch.randn(3, 4))
    check(made(lambda: nn.Conv2d(4, 4, 3)), None, made(lambda: GenericConv2dProjector(4, 4), 1), image(4))


@pytest.mark.parametrize("projector_bias", [True, False])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str, projector_bias: bool) -> None:
    module = made(CONVOLUTIONS[name])
    before = made(lambda: GenericConv2dProjector(3, 4, projector_bias, mode="input"), 1)
    after = made(lambda: GenericConv2dProjector(module.out_channels, 7, projector_bias), 2)
    check(module, None, after, image(4))
    for second in (None, after):
        if projector_bias and name in ZERO_PADDED:
            with pytest.raises(ConfigError, match="pads with zeros") as refused:
                fuse_projectors_into_module(module, before, second)
            assert refused.value.key == "input_projector"
        else:
            fused = check(module, before, second, image(3))
            assert (fused.in_channels, fused.groups) == (3, 1)
            assert fused.out_channels == (7 if second else module.out_channels)


def test_a_bias_of_zeros_may_go_before_zero_padding() -> None:
    before = made(lambda: GenericConv2dProjector(3, 4, bias=True), 1)
    nn.init.zeros_(before.bias)
    check(made(CONVOLUTIONS["padded"]), before, None, image(3))


@pytest.mark.parametrize("name", ["linear", "conv"])
def test_plain_layers_as_projectors(name: str) -> None:
    if name == "linear":
        check(
            made(LINEAR["linear"]), made(lambda: nn.Linear(3, 4), 1), made(lambda: nn.Linear(5, 7), 2), torch.ones(2, 3)
        )
    else:
        grouped = made(lambda: nn.Conv2d(6, 4, 1, groups=2), 2)
        check(made(CONVOLUTIONS["conv"]), made(lambda: nn.Conv2d(3, 4, 1), 1), grouped, image(3))


def test_nothing_to_fuse() -> None:
    module = nn.Linear(4, 5)
    assert fuse_projectors_into_module(module) is module
    assert fuse_projectors_into_module(module, nn.Identity(), nn.Identity()) is module


@pytest.mark.parametrize("name", ["linear", "conv"])
def test_inplace(name: str) -> None:
    module = made(LINEAR["linear"] if name == "linear" else CONVOLUTIONS["grouped"])
    if name == "linear":
        parts, x = (GenericLinearProjector(3, 4), GenericLinearProjector(5, 7)), torch.randn(2, 3)
    else:
        parts, x = (GenericConv2dProjector(3, 4), GenericConv2dProjector(6, 7)), image(3)
    assert check(module, *parts, x, inplace=True) is module


def test_inplace_refused_changes_nothing() -> None:
    module = nn.Linear(4, 5)
    state = copy.deepcopy(module.state_dict())
    with pytest.raises(ConfigError, match="takes the 5 features"):
        fuse_projectors_into_module(module, GenericLinearProjector(3, 4), GenericLinearProjector(6, 7), inplace=True)
    assert module.in_features == 4
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", ["linear", "conv1d", "linear_no_bias"])
def test_what_the_layer_keeps(name: str) -> None:
    module = made(LINEAR[name]).to(torch.bfloat16).eval()
    module.weight.requires_grad_(False)
    fused = fuse_projectors_into_module(module, None, GenericLinearProjector(5, 7))
    assert {parameter.dtype for parameter in fused.parameters()} == {torch.bfloat16}
    assert not fused.training
    assert not fused.weight.requires_grad
    assert fused.bias.requires_grad == (name != "linear_no_bias")
    assert fused.weight.is_leaf
    assert fused.weight.is_contiguous()


def test_bfloat16_is_rounded_once() -> None:
    """Rounding of the factors' product only: what float64 arithmetic gives, to the last bit of bfloat16."""
    module = made(lambda: nn.Linear(64, 64)).to(torch.bfloat16)
    before = made(lambda: GenericLinearProjector(64, 64), 1).to(torch.bfloat16)
    fused = fuse_projectors_into_module(module, before, before)
    exact = before.weight.double() @ module.weight.double() @ before.weight.double()
    assert (fused.weight == exact.to(torch.bfloat16)).float().mean() > 0.99


@pytest.mark.parametrize("name", ["linear", "conv", "no_bias"])
def test_input_projectors_as_in_silverspoon_kd(name: str) -> None:
    kd = pytest.importorskip("silverspoon_kd")
    module = made({**LINEAR, **CONVOLUTIONS}[name])
    kind = "GenericLinearProjector" if name == "linear" else "GenericConv2dProjector"
    theirs = made(lambda: getattr(kd, kind)(3, 4, bias=True), 1)
    ours = made(lambda: globals()[kind](3, 4, bias=True), 1)
    a = fuse_projectors_into_module(module, ours).state_dict()
    b = kd.fuse_projectors_into_module(module, theirs).state_dict()
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-5, atol=1e-5)


class _Squared(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).square()


@pytest.mark.parametrize(
    ("module", "before", "after", "key", "message"),
    [
        (nn.GELU(), None, nn.Linear(5, 7), "module", "one of Linear, Conv2d, Conv1D"),
        (nn.Sequential(nn.Linear(4, 5)), None, None, "module", "one of"),
        (_Squared(4, 5), None, nn.Linear(5, 7), "module", "computes what Linear does"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), None, nn.Linear(5, 7), "module", "plain"),
        (nn.Linear(4, 5), None, nn.Linear(6, 7), "output_projector", "takes the 5 features"),
        (nn.Linear(4, 5), nn.Linear(3, 6), None, "input_projector", "gives the 4 features"),
        (nn.Linear(4, 5), None, nn.Conv2d(5, 7, 1), "output_projector", "nn.Linear"),
        (nn.Linear(4, 5), None, nn.Sequential(nn.Linear(5, 7)), "output_projector", "nn.Linear"),
        (nn.Conv2d(4, 5, 3), nn.Linear(3, 4), None, "input_projector", "nn.Conv2d"),
        (nn.Conv2d(4, 5, 3), None, nn.Conv2d(5, 7, 3), "output_projector", "1x1"),
        (nn.Conv2d(4, 5, 3), None, nn.Conv2d(5, 7, 1, stride=2), "output_projector", "stride 1"),
        (nn.Conv2d(4, 5, 3), nn.Conv2d(3, 4, 1, padding=1), None, "input_projector", "no padding"),
        (nn.Linear(4, 5), None, GenericLinearProjector(5, 7, mode="input"), "output_projector", "mode='output'"),
        (
            nn.Linear(4, 5),
            GenericLinearProjector(3, 4, mode="input", apply_to_arg=1),
            None,
            "input_projector",
            "only argument",
        ),
        (
            nn.Linear(4, 5),
            GenericLinearProjector(3, 4, mode="input", apply_to_kwarg="mask"),
            None,
            "input_projector",
            "only argument",
        ),
    ],
)
def test_what_cannot_be_fused(module: Any, before: Any, after: Any, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        fuse_projectors_into_module(module, before, after)
    assert refused.value.key == key
