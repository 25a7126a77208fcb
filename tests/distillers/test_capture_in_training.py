"""Features are seen once a step and with the right gradient, however a model is put together: checkpointed, in place,
shared, under autocast, with tuples and dataclasses as outputs."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import silverspoon_ray
from silverspoon_ray import Alignment, BlockwiseDistiller, HolisticDistiller, create_alignments
from silverspoon_ray.distillers.holistic import Comparison
from silverspoon_ray.errors import AlignmentError, ConfigError
from silverspoon_ray.teacher.lookahead import Ticket
from tests.distillers.feature_kinds import FEATURES, alignments_of
from tests.distillers.kinds import Collator, kind_of, vectors
from tests.support import seeded, trained, training_arguments
from tests.test_capture import hooks

WIDTH = 6


@dataclass
class Pair:
    """What a module may return."""

    hidden: torch.Tensor
    extra: torch.Tensor


class Layer(nn.Module):
    """A linear layer with a tanh, and what it returns put into something.

    Args:
        gives: ``"tensor"``, ``"tuple"``, ``"nested"``, ``"dict"`` or ``"dataclass"``.
    """

    def __init__(self, gives: str = "tensor") -> None:
        super().__init__()
        self.gives, self.linear = gives, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(torch.tanh(x))
        return {
            "tensor": y,
            "tuple": (y, 2 * y),
            "nested": ((3 * y, [y]), 2 * y),
            "dict": {"other": 2 * y, "hidden": y},
            "dataclass": Pair(y, 2 * y),
        }[self.gives]


PICK: dict[str, Any] = {
    "tensor": lambda output: output,
    "tuple": lambda output: output[0],
    "nested": lambda output: output[0][1][0],
    "dict": lambda output: output["hidden"],
    "dataclass": lambda output: output.hidden,
}


class Stack(nn.Module):
    """Two layers and a head.

    Args:
        how: ``"plain"``; ``"checkpoint"``, ``"reentrant"``: the layers run in torch.utils.checkpoint; ``"in_place"``:
            what a layer gives is halved in place behind it; ``"twice"``: the second layer runs twice.
    """

    def __init__(self, seed: int, how: str = "plain", gives: str = "tensor") -> None:
        super().__init__()
        self.how, self.gives = how, gives
        self.calls: Counter[str] = Counter()
        with seeded(seed):
            self.first, self.second, self.head = Layer(gives), Layer(gives), nn.Linear(WIDTH, 4)
        for name, module in (("first", self.first), ("second", self.second), ("head", self.head)):
            # Before the forward: what is computed again for a gradient ends before the module does.
            module.register_forward_pre_hook(lambda *_, name=name: self.calls.update([name]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, *([self.second] if self.how == "twice" else [])):
            if self.how in ("checkpoint", "reentrant"):
                x = x if x.requires_grad else x.detach().requires_grad_()
                output = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
            else:
                output = layer(x)
            x = PICK[self.gives](output)
            x = x.mul_(0.5) if self.how == "in_place" else x * 0.5
        return self.head(x)


def run(
    distiller: str,
    student: nn.Module,
    teacher: nn.Module,
    names: Any = "first|second",
    pick: Any = None,
    arguments: dict[str, Any] | None = None,
    **keywords: Any,
) -> list[float]:
    alignments = create_alignments(teacher, student, names, auto_projector=False)
    for alignment in alignments:
        alignment.teacher_output_selector = pick or PICK["tensor"]
        alignment.student_output_selector = pick or PICK["tensor"]
    build: Any = HolisticDistiller if distiller == "holistic" else BlockwiseDistiller
    built = build(
        teacher_model=teacher,
        student_model=student,
        alignments=alignments,
        train_dataset=vectors(16),
        args=training_arguments(
            silverspoon_ray, max_steps=4, remove_unused_columns=False, optim="sgd", learning_rate=0.1, **arguments or {}
        ),
        **keywords,
    )
    for model in (student, teacher):
        getattr(model, "calls", Counter()).clear()  # before training a distiller looks at the shapes of one sample
    before = hooks(student) + hooks(teacher)
    losses = [row["loss"] for row in trained(built) if "loss" in row]
    assert hooks(student) + hooks(teacher) == before
    return losses


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = dict(other.named_parameters())
    return all(torch.equal(value, theirs[key]) for key, value in one.named_parameters())


@pytest.mark.parametrize("alpha", [0.0, 0.4])
@pytest.mark.parametrize("distiller", ["holistic", "blockwise"])
@pytest.mark.parametrize("gives", ["tuple", "nested", "dict", "dataclass"])
def test_outputs_of_any_form(gives: str, distiller: str, alpha: float) -> None:
    plain, formed = Stack(0), Stack(0, gives=gives)
    wanted = run(distiller, plain, Stack(5), arguments={"alpha": alpha})
    found = run(distiller, formed, Stack(5, gives=gives), pick=PICK[gives], arguments={"alpha": alpha})
    assert found == wanted
    assert same(formed, plain)


@pytest.mark.parametrize("alpha", [0.0, 0.4])
@pytest.mark.parametrize("distiller", ["holistic", "blockwise"])
def test_a_checkpoint_around_a_module(distiller: str, alpha: float) -> None:
    plain, checkpointed = Stack(0), Stack(0, "checkpoint")
    wanted = run(distiller, plain, Stack(5), arguments={"alpha": alpha})
    assert run(distiller, checkpointed, Stack(5), arguments={"alpha": alpha}) == wanted
    assert same(checkpointed, plain)
    if distiller == "holistic":
        assert checkpointed.calls["first"] == 2 * plain.calls["first"], "nothing was computed again"


def test_reentrant_checkpoints_are_refused() -> None:
    """Inside them nothing has a graph, so the features would teach nothing."""
    with pytest.raises((AlignmentError, ConfigError), match="use_reentrant"):
        run("holistic", Stack(0, "reentrant"), Stack(5), arguments={"alpha": 0.4})


@pytest.mark.parametrize("distiller", ["holistic", "blockwise"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert_mlm", "vit"])
def test_one_capture_a_step_under_activation_checkpointing(
    name: str, distiller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired: Counter[int] = Counter()
    original = Comparison.fired

    def counting(self: Any, number: int, *rest: Any) -> None:
        fired.update([number])
        original(self, number, *rest)

    monkeypatch.setattr(Comparison, "fired", counting)
    kind = FEATURES[name]
    runs = []
    for checkpointing in (False, True):
        student, teacher = kind.models()
        build: Any = HolisticDistiller if distiller == "holistic" else BlockwiseDistiller
        built = build(
            teacher_model=teacher,
            student_model=student,
            alignments=alignments_of(name, "mse", student, teacher),
            train_dataset=kind_of(name).data(16, 1),
            data_collator=Collator(name),
            args=training_arguments(
                silverspoon_ray, max_steps=3, activation_checkpointing=checkpointing, optim="sgd", learning_rate=0.1
            ),
        )
        losses = [row["loss"] for row in trained(built) if "loss" in row]
        assert student.is_activation_checkpointing is checkpointing
        runs.append((losses, student))
        assert set(fired.values()) == ({3} if distiller == "holistic" else set())
        fired.clear()
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-6)
    for key, value in runs[0][1].named_parameters():
        torch.testing.assert_close(runs[1][1].get_parameter(key), value, rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize("distiller", ["holistic", "blockwise"])
def test_models_that_write_in_place(distiller: str) -> None:
    plain, in_place = Stack(0), Stack(0, "in_place")
    wanted = run(distiller, plain, Stack(5), arguments={"alpha": 0.4})
    settings = {"alpha": 0.4, "deepcopy_captured_args_and_kwargs": True}
    assert run(distiller, in_place, Stack(5, "in_place"), arguments=settings) == pytest.approx(wanted, rel=1e-6)
    for key, value in plain.named_parameters():
        torch.testing.assert_close(in_place.get_parameter(key), value, rtol=0, atol=1e-6, msg=key)


class Activated(nn.Module):
    """Layers whose activation may write into what it gets."""

    def __init__(self, seed: int, in_place: bool) -> None:
        super().__init__()
        with seeded(seed):
            self.act = nn.Sequential(nn.ReLU(inplace=in_place), nn.Linear(WIDTH, WIDTH))
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x)))


@pytest.mark.parametrize("whose", ["teacher", "student", "both"])
@pytest.mark.parametrize("distiller", ["holistic", "blockwise", "per_block"])
def test_modules_that_write_into_their_input(distiller: str, whose: str) -> None:
    """The teacher's output of one module is its input of the next: with copies nobody spoils it, without it is an
    error and not another loss."""
    arguments: dict[str, Any] = {"deepcopy_captured_args_and_kwargs": True}
    if distiller == "per_block":
        distiller, arguments["backward_per_block"] = "blockwise", True
    plain, student = Activated(0, False), Activated(0, whose != "teacher")
    wanted = run(distiller, plain, Activated(5, False), "act|first", arguments=arguments)
    assert run(distiller, student, Activated(5, whose != "student"), "act|first", arguments=arguments) == wanted
    assert same(student, plain)
    teacher = Activated(5, whose != "student")
    with pytest.raises(ConfigError, match="deepcopy_captured_args_and_kwargs"):
        run(distiller, Activated(0, whose != "teacher"), teacher, "act|first")


@pytest.mark.parametrize("remote", [False, True], ids=["at_once", "at_the_end"])
def test_a_module_that_runs_twice_is_compared_once(remote: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its last output, from the first step on."""
    if remote:
        monkeypatch.setattr(Ticket, "is_there", False)
    student, teacher = Stack(0, "twice"), Stack(5, "twice")
    start = copy.deepcopy(student)
    losses = run("holistic", student, teacher, "second", arguments={"train_sampling_strategy": "sequential"})
    optimizer = torch.optim.SGD(start.parameters(), 0.1)
    factors = torch.linspace(1, 0, 5)[:4]  # the schedule of four steps
    for step, factor in enumerate(factors):
        x = torch.stack([sample["x"] for sample in vectors(16)[4 * step : 4 * step + 4]])
        features = [m.second(m.second(m.first(x) * 0.5) * 0.5) for m in (start, teacher)]
        loss = (features[0] - features[1].detach()).square().mean()
        optimizer.param_groups[0]["lr"] = 0.1 * factor.item()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(start.parameters(), 1.0)
        optimizer.step()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-5)
    for key, value in start.named_parameters():
        torch.testing.assert_close(student.get_parameter(key), value, rtol=0, atol=1e-6, msg=key)


def test_a_module_under_two_names() -> None:
    """Shared between teacher and student, or in two places of one model: one module, one output."""
    student, teacher = Stack(0), Stack(5)
    student.second = student.first  # type: ignore[assignment]
    teacher.second = teacher.first  # type: ignore[assignment]
    built = HolisticDistiller(
        student,
        teacher,
        [Alignment(teacher.first, student.first, auto_projector=False) for _ in range(2)],
        train_dataset=vectors(8),
        args=training_arguments(silverspoon_ray, max_steps=2, remove_unused_columns=False),
    )
    rows = trained(built)
    assert rows[0]["loss/.first"] == rows[0]["loss/.first#mse"] > 0
    assert rows[0]["loss"] == pytest.approx(2 * rows[0]["loss/.first"])


@pytest.mark.parametrize("distiller", ["holistic", "blockwise"])
@pytest.mark.parametrize("name", ["llama", "bert_mlm", "vit", "wide_llama"])
def test_autocast(name: str, distiller: str) -> None:
    """Under bf16 the losses are float32's within bf16's precision, and weights stay float32."""
    kind = FEATURES[name]
    runs = []
    for bf16 in (False, True):
        student, teacher = kind.models()
        build: Any = HolisticDistiller if distiller == "holistic" else BlockwiseDistiller
        seen: list[torch.dtype] = []
        alignments = create_alignments(teacher, student, kind.modules)
        handle = student.get_submodule(alignments[1].student_module_name).register_forward_hook(
            lambda m, a, output, seen=seen: seen.append(next(m.parameters()).dtype)
        )
        built = build(
            teacher_model=teacher,
            student_model=student,
            alignments=alignments,
            train_dataset=kind_of(kind.base).data(16, 1),
            eval_dataset=kind_of(kind.base).data(8, 2),
            data_collator=Collator(kind.base),
            args=training_arguments(silverspoon_ray, max_steps=4, bf16=bf16, eval_strategy="steps", eval_steps=2),
        )
        history = trained(built)
        handle.remove()
        runs.append([row[key] for row in history for key in ("loss", "eval_loss", "grad_norm") if key in row])
        assert set(seen) == {torch.float32}
        assert all(value.dtype == torch.float32 for value in student.parameters())
    assert runs[0] != runs[1], "autocast was not on"
    assert runs[1] == pytest.approx(runs[0], rel=0.05)


# ---- stopping early ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distiller", ["holistic", "blockwise"])
def test_the_teacher_stops_after_what_is_wanted(distiller: str) -> None:
    """How often modules fire was seen before training, with one sample, when it ran whole."""
    student, teacher = Stack(0), Stack(5)
    run(distiller, student, teacher, "first")
    assert teacher.calls["first"] == 4
    assert teacher.calls["second"] == teacher.calls["head"] == 0


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_truncated_student(alpha: float) -> None:
    """Same curve and weights; with a task loss there is nothing to leave out."""
    runs = []
    for truncate in (False, True):
        student = Stack(0)
        losses = run("holistic", student, Stack(5), "first", arguments={"alpha": alpha}, auto_truncate=truncate)
        assert student.calls["first"] == 4
        # The first batch runs whole, to see that the module fires once.
        assert student.calls["head"] == (1 if truncate and alpha == 0 else 4)
        runs.append((losses, student))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


@pytest.mark.parametrize("name", FEATURES)
def test_truncated_student_of_every_kind(name: str) -> None:
    kind = FEATURES[name]
    runs = []
    for truncate in (False, True):
        student, teacher = kind.models()
        built = HolisticDistiller(
            student,
            teacher,
            alignments_of(name, "cosine", student, teacher)[:1],
            train_dataset=kind_of(kind.base).data(8, 1),
            eval_dataset=kind_of(kind.base).data(5, 2),
            data_collator=Collator(kind.base),
            auto_truncate=truncate,
            args=training_arguments(
                silverspoon_ray,
                max_steps=3,
                eval_strategy="steps",
                eval_steps=1,
                remove_unused_columns=False,
                activation_checkpointing=hasattr(student, "config") and name != "t5",
            ),
        )
        runs.append(([r.get("loss", r.get("eval_loss")) for r in trained(built)], copy.deepcopy(student)))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


def test_a_module_that_does_not_run() -> None:
    student, teacher = Stack(0), Stack(5)
    student.aside = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(AlignmentError, match=r"aside.*runs in the student's forward"):
        run("holistic", student, teacher, {"second": "aside"})
