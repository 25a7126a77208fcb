"""torch.compile of a teacher changes its speed only: not its answers, and not what can be captured."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import silverspoon_ray
from silverspoon_ray import ResponseBasedDistiller
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.models.partial import keep_part
from silverspoon_ray.teacher.compiled import CompiledLayers, check_compile_settings, compile_settings, stacked_layers
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.pipeline import PipelineStage, own_tensors
from silverspoon_ray.teacher.protocol import TeacherRequest
from silverspoon_ray.teacher.stages import plan_pipeline
from tests.support import Pad, bert_mlm, gpt2, llama, ragged_data, trained, training_arguments, vit, without_times
from tests.teacher.test_stages import CPU, through

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(3, 16, 3),
    "gpt2": lambda: gpt2(3, 16, 3),
    "bert": lambda: bert_mlm(3, 16, 3),
    "vit": lambda: vit(3, 16, 3),
}
INNER = {
    "llama": "model.layers.1.mlp.up_proj",
    "gpt2": "transformer.h.1.mlp.c_fc",
    "bert": "bert.encoder.layer.1.intermediate",
    "vit": "vit.layers.1.mlp",
}


class Counting:
    """A backend that runs graphs as they are, and counts."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return graph(*arguments)

        return run


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


def batches(name: str, count: int = 3) -> list[dict[str, Any]]:
    """Ragged, and each of another length (images: of another number)."""
    if name == "vit":
        return [{"pixel_values": torch.randn(2 + n, 1, 8, 8)} for n in range(count)]
    made = [Pad("left")(ragged_data(4 - n, seed=n, low=5 + n, high=10 + 3 * n)) for n in range(count)]
    assert len({one["input_ids"].shape for one in made}) == count
    return [{k: v for k, v in one.items() if k != "labels"} for one in made]


def close(one: Any, other: Any) -> None:
    if isinstance(other, tuple):
        one, other = one[0], other[0]
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def compare(compiled: LocalTeacher, name: str, request: TeacherRequest, count: int = 3) -> None:
    plain = LocalTeacher(MODELS[name]().eval())
    for batch in batches(name, count):
        for _ in range(2):  # where a forward may end early, the second does
            answer, expected = compiled.answer(dict(batch), request), plain.answer(dict(batch), request)
            assert (answer.logits is None) == (expected.logits is None)
            if expected.logits is not None:
                close(answer.logits, expected.logits)
            for kind in ("outputs", "inputs"):
                got, wanted = getattr(answer, kind), getattr(expected, kind)
                assert got.keys() == wanted.keys()
                for module in wanted:
                    close(got[module], wanted[module])


@pytest.mark.parametrize("logits", ["full", None])
@pytest.mark.parametrize("name", MODELS)
def test_answers(name: str, logits: str | None) -> None:
    """Logits, layers and modules inside them, in requests that follow on each other in every order."""
    backend = Counting()
    teacher = LocalTeacher(MODELS[name]().eval())
    teacher.compiled = CompiledLayers(teacher.model, backend)
    layers = stacked_layers(teacher.model)
    assert len(layers) == 3
    inner = (INNER[name],)
    # How many layers run compiled, and how many of those where the forward may end early, behind the first batch.
    for request, whole, early in (
        (TeacherRequest(logits, outputs=layers, inputs=layers), 3, 3),
        (TeacherRequest(logits, outputs=inner), 2, 1),
        (TeacherRequest(logits, outputs=layers[1:2], inputs=inner), 2, 1),
        (TeacherRequest(logits, outputs=layers[-1:], inputs=layers[:1]), 3, 3),
    ):
        before = backend.runs
        compare(teacher, name, request)
        assert backend.runs - before == whole + 5 * (whole if logits else early)
    assert backend.graphs >= 1
    assert all("forward" not in vars(module) for module in teacher.model.modules())


def test_hooks_inside_compiled_code_would_not_fire() -> None:
    """Why a layer that somebody looks into runs as it is: torch does not see a hook that came after it compiled."""
    model = llama(3, 16, 1).eval()
    compiled = CompiledLayers(model, "eager")
    layer, inner = model.model.layers[0], model.model.layers[0].mlp.up_proj
    ids, fired = torch.arange(1, 9).view(1, 8), []
    with torch.no_grad(), compiled.active():
        model(ids, use_cache=False)
        with_hook = layer.forward
        handle = inner.register_forward_hook(lambda *_: fired.append("inside"))
        layer.register_forward_hook(lambda *_: fired.append("layer"))
        model(ids, use_cache=False)
    assert fired == ["layer"]
    with torch.no_grad(), compiled.active():
        assert layer.forward != with_hook
        model(ids, use_cache=False)
    assert fired == ["layer", "inside", "layer"]
    handle.remove()
    with torch.no_grad(), compiled.active(["model.layers.0"]):
        assert layer.forward == with_hook
    with torch.no_grad(), compiled.active(["model.layers.0.mlp"]):
        assert layer.forward != with_hook


def test_an_error_leaves_the_forwards_as_they_were() -> None:
    model = llama(3, 16, 2).eval()
    compiled = CompiledLayers(model, "eager")

    def mine(*arguments: Any, **keywords: Any) -> Any:
        return type(model.model.layers[1]).forward(model.model.layers[1], *arguments, **keywords)

    model.model.layers[1].forward = mine
    with pytest.raises(RuntimeError, match="in the middle"), compiled.active():
        raise RuntimeError("in the middle")
    assert "forward" not in vars(model.model.layers[0])
    assert model.model.layers[1].forward is mine


@pytest.mark.parametrize("cache", [True, False])
def test_many_layers_are_all_compiled(cache: bool) -> None:
    """With a cache each is code of its own, of which torch would compile eight and no more."""
    model, backend = llama(3, 16, 12), Counting()
    compiled = CompiledLayers(model.eval(), backend)
    for length in (5, 6, 7):
        with torch.no_grad(), compiled.active():
            model(torch.ones(2, length, dtype=torch.long), use_cache=cache)
    assert compiled.calls == backend.runs == 36
    assert backend.graphs == (24 if cache else 2)


def test_nothing_is_compiled_at_construction() -> None:
    backend = Counting()
    teacher = LocalTeacher(llama(3, 16, 2).eval())
    teacher.compiled = CompiledLayers(teacher.model, backend)
    assert (backend.graphs, teacher.compiled.calls) == (0, 0)


def test_a_model_without_a_stack_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    teacher = LocalTeacher(nn.Linear(2, 3).eval())
    with caplog.at_level(logging.WARNING):
        teacher.compiled = CompiledLayers(teacher.model, "eager")
    assert any("torch_compile leaves Linear as it is" in record.getMessage() for record in caplog.records)
    assert teacher.answer({"input": torch.ones(1, 2)}, TeacherRequest()).logits.shape == (1, 3)


@pytest.mark.parametrize("name", MODELS)
def test_stages(name: str) -> None:
    """Only a stage's own layers are compiled: those that stand for other stages' do what they did."""
    stages, backends = [], []
    for number in range(2):
        model = MODELS[name]().eval()
        plan = plan_pipeline(model, 2)
        keep_part(model, own_tensors(model, plan, number), CPU)
        stages.append(PipelineStage(model, plan, number))
        backends.append(Counting())
        stages[-1].compiled = CompiledLayers(model, backends[-1], layers=plan.stages[number].layers)
    for request in (
        TeacherRequest(outputs=plan.layers, inputs=plan.layers),
        TeacherRequest(outputs=(INNER[name],)),
        TeacherRequest(),
    ):
        for batch in batches(name):
            expected = LocalTeacher(MODELS[name]().eval()).answer(dict(batch), request)
            answer = through(stages, batch, request)
            close(answer.logits, expected.logits)
            assert answer.outputs.keys() == expected.outputs.keys()
            for module in expected.outputs:
                close(answer.outputs[module], expected.outputs[module])
    inside = next(number for number in range(2) if plan.stage_of(INNER[name]) == number)
    for number, stage in enumerate(stages):
        own = len(plan.stages[number].layers)
        assert backends[number].runs == 3 * (3 * own - (number == inside))
        other = plan.stages[1 - number].layers[0]
        assert vars(stage.model.get_submodule(other))["forward"] in (stage._stop, stage._pass_over)


def distilled(**arguments: Any) -> list[dict[str, Any]]:
    distiller = ResponseBasedDistiller(
        student_model=gpt2(1),
        teacher_model=llama(2, 16, 2),
        train_dataset=ragged_data(24),
        data_collator=Pad(),
        args=training_arguments(silverspoon_ray, max_steps=4, alpha=0.3, **arguments),
    )
    compiled = distiller.teacher.compiled
    history = without_times(trained(distiller))
    assert (compiled is not None) == ("torch_compile" in arguments)
    assert compiled is None or compiled.calls == 8  # per step and layer
    return history


def test_a_local_teacher_is_compiled_with_the_student(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # which transformers' arguments set, for good
    expected = distilled()
    got = distilled(torch_compile=True, torch_compile_backend="aot_eager")
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and there is no g++")
def test_inductor() -> None:
    teacher = LocalTeacher(MODELS["llama"]().eval())
    teacher.compiled = CompiledLayers(teacher.model)
    layers = stacked_layers(teacher.model)
    compare(teacher, "llama", TeacherRequest(outputs=layers, inputs=layers), count=2)
    assert teacher.compiled.calls == 12


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        ({"backend": "inductr"}, "torch_compile.backend", "inductor"),
        ({"mode": "fast"}, "torch_compile.mode", "reduce-overhead"),
        ({"bakend": "eager"}, "torch_compile.bakend", "backend, mode"),
    ],
)
def test_mistakes(settings: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_compile_settings(settings)
    assert caught.value.key == key


def test_settings_are_the_students(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    assert compile_settings(training_arguments(silverspoon_ray)) is None
    given = training_arguments(silverspoon_ray, torch_compile_backend="aot_eager", torch_compile_mode="default")
    assert compile_settings(given) == {"backend": "aot_eager", "mode": "default"}
    plain = training_arguments(silverspoon_ray, torch_compile=True)
    assert compile_settings(plain) == {"backend": "inductor", "mode": None}
