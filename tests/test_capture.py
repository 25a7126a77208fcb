"""Capture: what modules received and returned, by name; hooks are gone afterwards, whatever happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from silverspoon_ray.capture import capturing, named_module
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherRequest
from tests.distillers.kinds import KINDS, Collator


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def batch_of(name: str) -> dict[str, torch.Tensor]:
    batch = Collator(name)(KINDS[name].data(3, 1))
    batch.pop("labels")
    if name == "t5":
        batch["decoder_input_ids"] = batch["input_ids"]
    return batch


def tensor_of(value: Any) -> torch.Tensor:
    """The first tensor of what a module returned."""
    if isinstance(value, torch.Tensor):
        return value
    return tensor_of(next(iter(value.values() if isinstance(value, dict) else value)))


@pytest.mark.parametrize("name", KINDS)
def test_what_modules_get_and_give(name: str) -> None:
    """Against hooks of the test's own, for every module that runs."""
    model = KINDS[name].model(0, 2).eval()
    batch = batch_of(name)
    before = hooks(model)
    calls: dict[str, list[Any]] = {}
    own = [
        module.register_forward_hook(
            lambda m, args, kwargs, output, key=key: calls.setdefault(key, []).append((args, kwargs, output)),
            with_kwargs=True,
        )
        for key, module in model.named_modules()
        if key
    ]
    with torch.no_grad():
        model(**batch)
    for hook in own:
        hook.remove()
    ran = sorted(calls)
    assert len(ran) > 2
    assert hooks(model) == before
    with torch.no_grad(), capturing(model, ran, ran) as seen:
        model(**batch)
    assert hooks(model) == before
    assert sorted(seen.outputs) == sorted(seen.inputs) == ran
    for key in ran:
        args, kwargs, output = calls[key][-1]
        assert torch.equal(tensor_of(seen.outputs[key]), tensor_of(output)), key
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
        assert seen.inputs[key] is None if first is None else torch.equal(seen.inputs[key], first), key


@pytest.mark.parametrize("when", ["in the forward", "in the context", "never"])
def test_no_hook_is_left(when: str) -> None:
    model = KINDS["llama"].model(0, 2)
    before = hooks(model)
    name = "model.layers.0"

    class StopError(Exception):
        pass

    def stop(*_: Any) -> None:
        raise StopError

    def run() -> None:
        with capturing(model, [name, "lm_head"], [name]):
            assert hooks(model) > before
            model(**batch_of("llama"))
            if when == "in the context":
                raise StopError

    handle = model.model.layers[1].register_forward_pre_hook(stop) if when == "in the forward" else None
    before = hooks(model)
    if when == "never":
        run()
    else:
        with pytest.raises(StopError):
            run()
    assert hooks(model) == before
    if handle is not None:
        handle.remove()


@pytest.mark.parametrize("key", ["outputs", "inputs"])
@pytest.mark.parametrize(
    ("wrong", "near"),
    [("model.layer.1", "model.layers.1"), ("lm_heads", "lm_head"), ("model.layers.7", "model.layers.")],
)
def test_unknown_name(key: str, wrong: str, near: str) -> None:
    model = KINDS["llama"].model(0, 2)
    before = hooks(model)
    known = "model.layers.0"
    names = {"outputs": (), "inputs": (), key: (known, wrong)}
    with pytest.raises(ConfigError) as refused, capturing(model, **names):
        pass
    assert refused.value.key == key
    assert refused.value.value == wrong
    assert near in str(refused.value)
    assert hooks(model) == before, "the hook of the name that was right is left behind"
    assert named_module(model, known) is model.model.layers[0]


def test_name_that_is_like_nothing() -> None:
    with pytest.raises(ConfigError, match="near are none"):
        named_module(nn.Sequential(nn.Linear(1, 1)), "zzz")


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(input=x))


def test_a_module_that_runs_twice_keeps_its_last_values() -> None:
    model, x = Twice(), torch.randn(3, 2)
    with torch.no_grad(), capturing(model, ["inner"], ["inner"]) as seen:
        y = model(x)
        assert torch.equal(seen.outputs["inner"], y)
        assert torch.equal(seen.inputs["inner"], model.inner(x))


def test_a_module_that_does_not_run_is_an_error_of_the_teacher() -> None:
    teacher = LocalTeacher(Twice())
    for request in (TeacherRequest(outputs=("unused",)), TeacherRequest(inputs=("unused",))):
        with pytest.raises(ConfigError, match="unused"):
            teacher.open(request).submit({"x": torch.randn(3, 2)})
    assert hooks(teacher.model) == 0


def test_a_teachers_answer_has_what_was_asked_for() -> None:
    model = KINDS["llama"].model(0, 2)
    request = TeacherRequest(logits=None, outputs=("model.layers.0", "model.norm"), inputs=("lm_head",))
    answer = LocalTeacher(model).open(request).submit(batch_of("llama")).result()
    assert answer.logits is None
    assert answer.outputs.keys() == {"model.layers.0", "model.norm"}
    assert torch.equal(answer.outputs["model.norm"], answer.inputs["lm_head"])
    assert not answer.outputs["model.norm"].requires_grad


@pytest.mark.parametrize("kept", ["outputs", "inputs"])
def test_gradients_flow_through_what_is_captured(kept: str) -> None:
    """A student's features are compared: the captured tensor is part of the graph, not a copy."""
    model = KINDS["llama"].model(0, 2)
    with capturing(model, ["model.layers.0"], ["model.layers.1"]) as seen:
        model(**batch_of("llama"))
    value = seen.outputs["model.layers.0"] if kept == "outputs" else seen.inputs["model.layers.1"]
    tensor_of(value).square().mean().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0
    assert model.model.layers[1].mlp.up_proj.weight.grad is None


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def test_checkpointed_module_gives_the_same() -> None:
    """Under gradient checkpointing a module runs again in the backward pass, when nobody listens any more."""
    model, x = Checkpointed(), torch.randn(3, 2, requires_grad=True)
    with capturing(model, ["layer"]) as caught:
        y = model(x)
        seen = caught.outputs["layer"]
    y.sum().backward()
    assert caught.outputs["layer"] is seen
    assert torch.equal(seen, y)
