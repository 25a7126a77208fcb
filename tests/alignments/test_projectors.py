"""Projectors: what they return in each mode, when one is needed, how they start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from silverspoon_ray.alignments.projectors import (
    GenericConv2dProjector,
    GenericLinearProjector,
    init_projector,
    projector_between,
)
from silverspoon_ray.errors import ConfigError
from tests.support import seeded

KINDS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (GenericLinearProjector, (2, 3, 4), (2, 3, 6)),
    "conv2d": (GenericConv2dProjector, (2, 4, 5, 5), (2, 6, 5, 5)),
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_output_mode(kind: str) -> None:
    made, shape, result = KINDS[kind]
    projector = made(4, 6, bias=True)
    x = random(*shape)
    y = projector(x)
    assert y.shape == result
    function = nn.functional.linear if kind == "linear" else nn.functional.conv2d
    assert torch.equal(y, function(x, projector.weight, projector.bias))
    assert torch.equal(projector(input=x), y)
    assert torch.equal(projector(x, 1, mask=2), y), "a forward hook may pass more than the output"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("settings", "args", "kwargs", "changed"),
    [
        ({}, 2, ("mask",), 0),
        ({"apply_to_arg": 0}, 1, (), 0),
        ({"apply_to_arg": 1}, 2, ("hidden_states",), 1),
        ({"apply_to_arg": -1}, 3, (), 2),
        ({"apply_to_kwarg": "hidden_states"}, 0, ("hidden_states", "mask"), "hidden_states"),
        ({"apply_to_kwarg": "hidden_states"}, 1, ("hidden_states",), "hidden_states"),
        ({"apply_to_kwarg": "input"}, 0, ("input",), "input"),
    ],
)
def test_input_mode(
    kind: str, settings: dict[str, Any], args: int, kwargs: tuple[str, ...], changed: int | str
) -> None:
    """One argument is projected; every other is the very object that came in."""
    made, shape, result = KINDS[kind]
    projector = made(4, 6, mode="input", **settings)
    given_args = tuple(random(*shape, seed=position) for position in range(args))
    given_kwargs = {name: random(*shape, seed=9) for name in kwargs}
    before = dict(given_kwargs)
    new_args, new_kwargs = projector(*given_args, **given_kwargs)
    assert isinstance(new_args, tuple)
    assert isinstance(new_kwargs, dict)
    assert (len(new_args), list(new_kwargs)) == (args, list(kwargs))
    assert given_kwargs == before
    for key, old, new in [
        *((position, given_args[position], new_args[position]) for position in range(args)),
        *((name, given_kwargs[name], new_kwargs[name]) for name in kwargs),
    ]:
        assert (new is not old) == (key == changed), key
        assert new.shape == (result if key == changed else shape)


def test_what_is_none_keeps_its_place() -> None:
    """The reference loses a first argument that is None, and the block is then called with one too few."""
    x = random(2, 4)
    args, kwargs = GenericLinearProjector(4, 6, mode="input", apply_to_arg=1)(None, x, mask=None)
    assert args[0] is None
    assert args[1].shape == (2, 6)
    assert kwargs == {"mask": None}
    args, kwargs = GenericLinearProjector(4, 6, mode="input", apply_to_kwarg="h")(None, h=x)
    assert args == (None,)


@pytest.mark.parametrize("kind", KINDS)
def test_same_as_silverspoon_kd(kind: str) -> None:
    kd = pytest.importorskip("silverspoon_kd")
    made, shape, _ = KINDS[kind]
    x = random(*shape)
    for settings in ({}, {"bias": True}, {"mode": "input"}, {"mode": "input", "apply_to_arg": 0}):
        with seeded(3):
            ours = made(4, 6, **settings)
        with seeded(3):
            theirs = getattr(kd, made.__name__)(4, 6, **settings)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        a, b = ours(x), theirs(x)
        if settings.get("mode") == "input":
            (a,), (b,) = a[0], b[0]
        assert torch.equal(a, b), settings


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"mode": "outputs"}, "mode"),
        ({"mode": None}, "mode"),
        ({"mode": "input", "apply_to_arg": 0, "apply_to_kwarg": "x"}, "apply_to_arg"),
        ({"mode": "input", "apply_to_arg": "x"}, "apply_to_arg"),
        ({"mode": "input", "apply_to_arg": True}, "apply_to_arg"),
        ({"mode": "input", "apply_to_kwarg": 1}, "apply_to_kwarg"),
        ({"apply_to_arg": 1}, "apply_to_arg"),
        ({"apply_to_kwarg": "x"}, "apply_to_kwarg"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_settings_that_do_not_go_together(kind: str, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        KINDS[kind][0](4, 6, **settings)
    assert refused.value.key == key


@pytest.mark.parametrize("sizes", [(0, 6), (4, 0), (4, 6.0), (True, 6), (-1, 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes(kind: str, sizes: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        KINDS[kind][0](*sizes)


@pytest.mark.parametrize(
    ("settings", "args", "kwargs", "message"),
    [
        ({}, (), {}, "without"),
        ({}, ((random(2, 4), None),), {}, "an output selector picks one"),
        ({}, (None,), {}, "a tensor"),
        ({}, (random(2, 5),), {}, "last dimension of 4"),
        ({"mode": "input"}, (), {"hidden_states": random(2, 4)}, r"gets 0, and the keywords hidden_states"),
        ({"mode": "input", "apply_to_arg": 1}, (random(2, 4),), {}, "it gets 1"),
        ({"mode": "input", "apply_to_kwarg": "hidden"}, (), {"hidden_states": 1}, "did you mean 'hidden_states'"),
        ({"mode": "input", "apply_to_kwarg": "h"}, (), {"h": None}, "a tensor"),
    ],
)
def test_calls_that_cannot_work(settings: dict[str, Any], args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GenericLinearProjector(4, 6, **settings)(*args, **kwargs)


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4, 4), (4, 2, 5, 5)])
def test_channels_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"\[B, 4, H, W\]"):
        GenericConv2dProjector(4, 6)(random(*shape))


def test_gradients_reach_weight_and_input() -> None:
    x = random(2, 3, 4).requires_grad_()
    projector = GenericLinearProjector(4, 6, mode="input", apply_to_kwarg="x")
    projector(x=x)[1]["x"].sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is not None for parameter in projector.parameters())


# ---- which projector ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("teacher", "student", "kind", "sizes"),
    [
        ((2, 5, 6), (2, 5, 3), GenericLinearProjector, (3, 6)),
        ((2, 6), (2, 3), GenericLinearProjector, (3, 6)),
        ((10, 3), (10, 6), GenericLinearProjector, (6, 3)),
        ((2, 6, 4, 4), (2, 3, 4, 4), GenericConv2dProjector, (3, 6)),
        ((2, 4, 4, 6), (2, 4, 4, 3), GenericLinearProjector, (3, 6)),
        (torch.Size([2, 6]), torch.Size([2, 3]), GenericLinearProjector, (3, 6)),
    ],
)
def test_projector_between(teacher: Any, student: Any, kind: type[Any], sizes: tuple[int, int]) -> None:
    projector = projector_between(teacher, student)
    assert type(projector) is kind
    assert tuple(projector.weight.shape[:2]) == sizes[::-1]
    assert projector(random(*student)).shape == tuple(teacher)
    assert projector.mode == "output"


@pytest.mark.parametrize("shape", [(2, 5, 6), (2, 6), (2, 6, 4, 4), ()])
def test_no_projector_between_equal_shapes(shape: tuple[int, ...]) -> None:
    assert projector_between(shape, list(shape)) is None


@pytest.mark.parametrize(
    ("teacher", "student", "message"),
    [
        ((2, 7, 6), (2, 5, 3), r"dimension 1 \(sequence length\) is 5, the teacher's 7"),
        ((2, 7, 6), (2, 5, 6), r"dimension 1 \(sequence length\)"),
        ((3, 5, 6), (2, 5, 3), r"dimension 0 \(batch\) is 2, the teacher's 3"),
        ((2, 6, 8, 8), (2, 3, 4, 4), r"dimension 2 \(height\) is 4, the teacher's 8, dimension 3 \(width\)"),
        ((2, 6, 8, 4), (2, 6, 4, 4), r"dimension 2 \(height\)"),
        ((2, 5, 6), (10, 6), r"2 dimensions cannot be projected onto 3"),
        ((2, 6, 4, 4), (2, 16, 6), r"3 dimensions cannot be projected onto 4"),
    ],
)
def test_what_no_projector_bridges(teacher: tuple[int, ...], student: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        projector_between(teacher, student)
    assert refused.value.value == student
    assert str(teacher) in str(refused.value)


# ---- how it starts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["normal", "xavier"])
def test_named_inits_are_those_of_silverspoon_kd(how: str) -> None:
    kd = pytest.importorskip("silverspoon_kd")
    ours, theirs = GenericLinearProjector(30, 60), kd.GenericLinearProjector(30, 60)
    alignment = kd.Alignment(nn.Linear(2, 60), nn.Linear(2, 30), auto_projector=True, projector_init=how)
    with seeded(5):
        assert init_projector(ours, how) is ours
    with seeded(5):
        alignment._apply_projector_init(theirs)
    assert torch.equal(ours.weight, theirs.weight)
    assert not ours.bias.any()


@pytest.mark.parametrize("how", ["normal", "xavier"])
def test_named_inits_reach_every_layer(how: str) -> None:
    """Convolutions too, which the reference leaves as they are."""
    projector = nn.Sequential(GenericConv2dProjector(4, 40, bias=True), nn.GELU(), nn.Conv2d(40, 60, 1))
    before = [module.weight.clone() for module in projector if hasattr(module, "weight")]
    init_projector(projector, how)
    for module, old in zip((projector[0], projector[2]), before, strict=True):
        assert not torch.equal(module.weight, old)
        assert not module.bias.any()


def test_no_init_and_a_callable() -> None:
    projector = GenericLinearProjector(4, 6)
    before = projector.weight.clone()
    assert init_projector(projector, None) is projector
    assert torch.equal(projector.weight, before)
    assert init_projector(projector, lambda module: nn.init.zeros_(module.weight)) is projector
    assert not projector.weight.any()


@pytest.mark.parametrize(
    ("how", "message"), [("xaver", "did you mean 'xavier'"), ("", "'normal', 'xavier'"), (3, "or a callable")]
)
def test_unknown_init(how: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        init_projector(GenericLinearProjector(4, 6), how)
    assert refused.value.key == "projector_init"
