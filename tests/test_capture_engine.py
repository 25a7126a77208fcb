"""ModuleCaptureEngine: callbacks, ids, what is kept and when it goes, and that no hook outlives its use."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from silverspoon_ray import ModuleCaptureEngine
from silverspoon_ray.capture import ForwardTruncated
from tests.distillers.kinds import KINDS
from tests.support import seeded
from tests.test_capture import batch_of, hooks

WIDTH = 3


class Chain(nn.Module):
    """Four layers, one after the other.

    Args:
        how: ``"plain"``; ``"checkpoint"``: all layers in one; ``"in_place"``: what comes out of a layer is doubled in
            place; ``"failing"``: raises in front of the third layer.
    """

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.how = how
        with seeded(0):
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.ran: list[int] = []
        for number, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self.ran.append(number))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (
            checkpoint(self.through, x, scale, use_reentrant=False)
            if self.how == "checkpoint"
            else self.through(x, scale)
        )

    def through(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if self.how == "failing" and number == 2:
                raise RuntimeError("no third layer")
            x = layer(input=x) if number == 1 else layer(x)
            x = x.mul_(2) if self.how == "in_place" else x * scale
        return x


def engine(model: Chain, *numbers: int, **keywords: Any) -> ModuleCaptureEngine:
    return ModuleCaptureEngine(model, [model.layers[number] for number in numbers], **keywords)


X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))


def test_ids_are_positions_in_the_list() -> None:
    model = Chain()
    with engine(model, 2, 0) as seen:
        assert seen.is_registered
        result = seen.forward(X)
    assert torch.equal(result, model(X))
    assert torch.equal(seen.captured_outputs[1], model.layers[0](X))
    args, kwargs, output = seen.get_captured(0)
    assert kwargs == {}
    assert torch.equal(model.layers[2](args[0]), output)
    assert not output.requires_grad


def test_arguments_by_name_are_captured_by_name() -> None:
    model = Chain()
    with engine(model, 1) as seen:
        model(X)
    args, kwargs = seen.pop_captured_inputs(0)
    assert args == ()
    assert torch.equal(kwargs["input"], model.layers[0](X))


def test_what_is_popped_is_gone() -> None:
    model = Chain()
    with engine(model, 0, 1) as seen:
        model(X)
    freed = weakref.ref(seen.captured_outputs[0])
    assert seen.pop_captured_output(0) is freed()
    gc.collect()
    assert freed() is None, "the engine still refers to it"
    with pytest.raises(KeyError):
        seen.pop_captured_output(0)
    with pytest.raises(KeyError):
        seen.get_captured(0)
    seen.pop_captured_inputs(0)
    with pytest.raises(KeyError):
        seen.pop_captured_inputs(0)
    assert set(seen.captured_inputs) == set(seen.captured_outputs) == {1}
    seen.clear_captured()
    assert not seen.captured_inputs
    assert not seen.captured_outputs


@pytest.mark.parametrize("inputs", [True, False, [1]])
@pytest.mark.parametrize("outputs", [True, False, {0}])
def test_only_what_is_asked_for(inputs: Any, outputs: Any) -> None:
    model = Chain()
    with engine(model, 0, 1, capture_inputs=inputs, capture_outputs=outputs) as seen:
        model(X)
    assert set(seen.captured_inputs) == ({0, 1} if inputs is True else set(inputs or []))
    assert set(seen.captured_outputs) == ({0, 1} if outputs is True else set(outputs or []))
    for number in (0, 1):
        args, _, output = seen.get_captured(number)
        assert (args is None) is (number not in seen.captured_inputs)
        assert (output is None) is (number not in seen.captured_outputs)


@pytest.mark.parametrize("detach", [True, False])
def test_callback(detach: bool) -> None:
    """It gets id, arguments and output as modules fire, with their graph whatever is kept."""
    model, calls = Chain(), []
    with engine(model, 3, 0, output_callback=lambda *call: calls.append(call), detach_outputs=detach) as seen:
        model(X)
    assert [call[0] for call in calls] == [1, 0]
    assert torch.equal(calls[0][1][0], X)
    assert all(call[2].requires_grad for call in calls)
    assert all(output.requires_grad is not detach for output in seen.captured_outputs.values())


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("how", ["plain", "checkpoint"])
def test_truncation_skips_later_modules(how: str, truncate: bool) -> None:
    model = Chain(how)
    x = X.clone().requires_grad_()
    with engine(model, 1, 0, auto_truncate=truncate, detach_outputs=False) as seen:
        result = seen.forward(x)
        assert model.ran == ([0, 1] if truncate else [0, 1, 2, 3])
        assert (result is None) is truncate
        if truncate:
            with pytest.raises(ForwardTruncated):
                model(x)
    seen.captured_outputs[0].sum().backward()
    wanted = torch.autograd.grad(model.layers[1](model.layers[0](x)).sum(), model.layers[0].weight)[0]
    torch.testing.assert_close(model.layers[0].weight.grad, wanted)


def test_truncation_after_a_number_of_captures() -> None:
    model = Chain()
    with engine(model, 0, 1, 2, capture_inputs=False, truncate_after=2) as seen:
        assert seen.forward(X) is None
    assert seen.events == 2
    assert set(seen.captured_outputs) == {0, 1}


def test_hooks_come_and_go() -> None:
    model = Chain()
    before = hooks(model)
    seen = engine(model, 0, 1)
    assert hooks(model) == before
    seen.register()
    seen.register()
    assert hooks(model) == before + 2 + 4  # begin and end of the model; arguments and output of two modules
    model(X)
    seen.deregister()
    seen.deregister()
    assert hooks(model) == before
    assert not seen.is_registered
    kept = dict(seen.captured_outputs)
    model(X + 1)
    assert all(seen.captured_outputs[key] is value for key, value in kept.items())
    with seen:  # again
        model(X + 1)
    assert not torch.equal(seen.captured_outputs[0], kept[0])


@pytest.mark.parametrize("where", ["forward", "callback", "context"])
def test_an_exception_leaves_nothing(where: str) -> None:
    model = Chain("failing" if where == "forward" else "plain")
    before = hooks(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("in the callback")

    def work() -> None:
        with engine(model, 0, 3, output_callback=fail if where == "callback" else None) as seen:
            seen.forward(X)
            if where == "context":
                raise RuntimeError("in the context")

    with pytest.raises(RuntimeError):
        work()
    assert hooks(model) == before


def test_a_forward_that_failed_does_not_disturb_the_next() -> None:
    model = Chain("failing")
    with engine(model, 0, 3) as seen:
        with pytest.raises(RuntimeError):
            model(X)
        assert set(seen.captured_outputs) == {0}
        model.how = "plain"
        model(X + 1)
    assert torch.equal(seen.captured_outputs[0], model.layers[0](X + 1))
    assert set(seen.captured_outputs) == {0, 1}


def test_backward_is_not_captured() -> None:
    """Under checkpointing a module runs again in the backward pass; that is no capture, with hooks still in place."""
    model, calls = Chain("checkpoint"), []
    with engine(model, 1, output_callback=lambda *call: calls.append(call)) as seen:
        model(X.clone().requires_grad_()).sum().backward()
        model.layers[1](X)  # nor is a call outside the model's forward
    assert model.ran.count(1) > 1
    assert len(calls) == seen.events / 2 == 1


@pytest.mark.parametrize("copies", [False, True])
def test_models_that_write_in_place(copies: bool) -> None:
    plain, model = Chain(), Chain("in_place")
    with engine(model, 0, 2, deepcopy_captured_args_and_kwargs=copies) as seen:
        model(X)
    assert seen.written_to() == ([] if copies else [0, 1])
    assert torch.equal(seen.captured_outputs[0], plain.layers[0](X)) is copies


def test_copies_are_deep() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = {"seen": [x.clone()], "cache": Cache()}
            result = self.inner((x, [x]), state=state)
            state["seen"][0].zero_()
            state["cache"].size = 7
            return result

    class Cache:
        size = 1

    class Inner(nn.Module):
        def forward(self, pair: Any, state: Any) -> torch.Tensor:
            return pair[0] + pair[1][0]

    model = Nested()
    with ModuleCaptureEngine(model, [model.inner], deepcopy_captured_args_and_kwargs=True) as seen:
        model(X)
    (pair,), kwargs = seen.pop_captured_inputs(0)
    assert torch.equal(pair[1][0], X)
    assert torch.equal(kwargs["state"]["seen"][0], X)
    assert kwargs["state"]["cache"].size == 1


def test_a_module_that_fires_twice_keeps_its_last_values() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(x))

    model, calls = Twice(), []
    with ModuleCaptureEngine(model, [model.inner], output_callback=lambda *call: calls.append(call)) as seen:
        result = model(X)
    assert len(calls) == 2
    assert torch.equal(seen.captured_outputs[0], result)
    with ModuleCaptureEngine(model, [model.inner, model.inner]) as shared:  # one module under two ids
        model(X)
    assert torch.equal(shared.captured_outputs[0], shared.captured_outputs[1])


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert_mlm", "vit", "t5"])
def test_a_hooked_model_can_be_copied(name: str) -> None:
    model = KINDS[name].model(0, 1).eval()
    inner = [module for key, module in model.named_modules() if key.endswith(".0")][:2]
    with ModuleCaptureEngine(model, inner) as seen:
        again = copy.deepcopy(model)
        pickle.dumps(model.state_dict())
        with torch.no_grad():
            model(**batch_of(name))
    assert set(seen.captured_outputs) == set(range(len(inner)))
    assert again.state_dict().keys() == model.state_dict().keys()
