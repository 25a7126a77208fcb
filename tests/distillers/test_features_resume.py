"""A feature run that stops and goes on is the run that was never interrupted: projectors, own optimizers and learned
losses included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import silverspoon_ray
from silverspoon_ray import BlockwiseDistiller, ContrastiveDistillationLoss, HolisticDistiller, create_alignments
from silverspoon_ray.errors import ConfigError
from tests.distillers import kinds
from tests.distillers.kinds import KINDS, Collator
from tests.distillers.widths import WIDTHS
from tests.support import PrinterCallback, seeded, trained, training_arguments, without_times

STEPS, STOP = 6, 3


@dataclass(frozen=True)
class Setting:
    """A run.

    Attributes:
        distiller: ``"holistic"`` or ``"blockwise"``.
        models: the makers of student and teacher.
        modules: the alignments' patterns.
        data: name in :data:`tests.distillers.kinds.KINDS`.
        arguments: keywords of TrainingArguments.
        loss: makes the loss of every alignment.
        own: the alignments bring optimizers of their own, the first a scheduler too.
    """

    distiller: str
    models: tuple[Callable[[], nn.Module], Callable[[], nn.Module]]
    modules: dict[str, str]
    data: str = "llama"
    arguments: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[], Any] = lambda: None
    own: bool = False

    def build(self, directory: Path | str, eval_data: Any = None, **arguments: Any) -> Any:
        student, teacher = (make() for make in self.models)
        alignments = create_alignments(teacher, student, self.modules)
        for number, alignment in enumerate(alignments):
            with seeded(number):
                alignment.loss_function = self.loss() or alignment.loss_function
            if self.own:
                alignment.optimizer = torch.optim.AdamW(alignment.student_block.parameters(), lr=1e-2 * (number + 1))
                if number == 0:
                    alignment.scheduler = torch.optim.lr_scheduler.ExponentialLR(alignment.optimizer, 0.8)
        build: Any = BlockwiseDistiller if self.distiller == "blockwise" else HolisticDistiller
        built = build(
            teacher_model=teacher,
            student_model=student,
            alignments=alignments,
            train_dataset=KINDS[self.data].data(16, 1),
            eval_dataset=eval_data or KINDS[self.data].data(5, 2),
            data_collator=Collator(self.data),
            args=training_arguments(
                silverspoon_ray,
                **{
                    "output_dir": str(directory),
                    "max_steps": STEPS,
                    "per_device_train_batch_size": 2,
                    "gradient_accumulation_steps": 2,
                    "save_strategy": "steps",
                    "save_steps": 1,
                    "eval_strategy": "steps",
                    "eval_steps": 2,
                    "remove_unused_columns": False,
                    **self.arguments,
                    **arguments,
                },
            ),
        )
        built.remove_callback(PrinterCallback)
        return built


LLAMA, VIT = WIDTHS["llama"], WIDTHS["vit"]
WIDE = (LLAMA.student, LLAMA.teacher)
DROPOUT = (lambda: kinds.gpt2(0, 2, dropout=0.2), lambda: kinds.gpt2(5, 3))
GPT2 = {r"transformer\.h\.[12]": r"transformer\.h\.[01]"}


def contrastive() -> nn.Module:
    return ContrastiveDistillationLoss(student_dim=48, teacher_dim=64)


SETTINGS = {
    "holistic": Setting("holistic", WIDE, LLAMA.modules),
    "holistic-alpha": Setting("holistic", WIDE, LLAMA.modules, arguments={"alpha": 0.4}),
    "holistic-own": Setting("holistic", WIDE, LLAMA.modules, own=True),
    "holistic-dropout": Setting("holistic", DROPOUT, GPT2, arguments={"alpha": 0.4}),
    "holistic-names": Setting("holistic", (VIT.student, VIT.teacher), VIT.modules, "vit"),
    "blockwise": Setting("blockwise", WIDE, LLAMA.modules),
    "blockwise-per_block": Setting("blockwise", WIDE, LLAMA.modules, arguments={"backward_per_block": True}),
    "blockwise-own": Setting("blockwise", WIDE, LLAMA.modules, own=True),
    "blockwise-dropout": Setting("blockwise", DROPOUT, GPT2),
    "blockwise-names": Setting("blockwise", (VIT.student, VIT.teacher), VIT.modules, "vit"),
    "blockwise-sgd": Setting("blockwise", WIDE, LLAMA.modules, arguments={"optim": "sgd", "max_grad_norm": 0}),
}


def rows(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in without_times(history) if "train_loss" not in row]


def everything(built: Any) -> dict[str, torch.Tensor]:
    """The student's parameters and, among them, projectors and learned losses."""
    return {key: value.detach() for key, value in built.student_model.named_parameters()}


def check_resumed(setting: Setting, directory: Path) -> None:
    whole = setting.build(directory / "whole")
    history = rows(trained(whole))
    assert len({row["loss"] for row in history if "loss" in row}) == STEPS
    resumed = setting.build(directory / "resumed")
    resumed_history = rows(trained(resumed, resume_from_checkpoint=str(directory / "whole" / f"checkpoint-{STOP}")))
    assert resumed_history == history
    wanted = everything(whole)
    assert wanted.keys() == everything(resumed).keys()
    for key, value in everything(resumed).items():
        assert torch.equal(value, wanted[key]), key
    torch.load(directory / "whole" / f"checkpoint-{STOP}" / "optimizer.pt", weights_only=True)
    torch.load(directory / "whole" / f"checkpoint-{STOP}" / "scheduler.pt", weights_only=True)
    assert not list(directory.rglob("*.bin"))


@pytest.mark.parametrize("name", SETTINGS)
def test_resumed_run_is_the_undisturbed_run(name: str, tmp_path: Path) -> None:
    check_resumed(SETTINGS[name], tmp_path)


@pytest.mark.parametrize("distiller", ["holistic", "blockwise"])
def test_a_loss_that_learns(distiller: str, tmp_path: Path) -> None:
    """Its projection takes the projector's place, is trained beside the student, resumes with it, and is not saved as
    the student's."""
    student, teacher = (make() for make in WIDE)
    setting = Setting(distiller, WIDE, LLAMA.modules, loss=contrastive)
    built = setting.build(tmp_path / "first")
    before = {key: value.clone() for key, value in everything(built).items() if "loss_function" in key}
    assert len(before) == 4
    trained(built)
    for key, value in before.items():
        assert not torch.equal(value, everything(built)[key]), key
    saved = load_file(tmp_path / "first" / "checkpoint-6" / "model.safetensors")
    assert not [key for key in saved if "projector" in key or "loss" in key]
    assert sum(value.numel() for value in saved.values()) == sum(p.numel() for p in student.parameters())
    assert teacher.training
    check_resumed(setting, tmp_path)


@pytest.mark.parametrize("name", ["holistic", "holistic-names", "blockwise", "blockwise-own"])
def test_best_model_is_loaded_with_its_projectors(name: str, tmp_path: Path) -> None:
    setting = SETTINGS[name]
    built = setting.build(
        tmp_path,
        learning_rate=0.2,
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # any step but the last will do
    )
    history = trained(built)
    losses = {row["step"]: row["eval_loss"] for row in history if "eval_loss" in row}
    best = max(losses, key=losses.__getitem__)
    assert best != STEPS, "the last step is the best, so this shows nothing"
    assert built.evaluate()["eval_loss"] == pytest.approx(losses[best], rel=1e-6)
    for key, value in load_file(tmp_path / f"checkpoint-{best}" / "projectors.safetensors").items():
        assert torch.equal(built.student_model.get_parameter(f"distillation_projectors.{key}"), value), key


def test_projectors_of_other_alignments_are_refused(tmp_path: Path) -> None:
    trained(SETTINGS["holistic"].build(tmp_path / "run", max_steps=1))
    checkpoint = tmp_path / "run" / "checkpoint-1"
    other = Setting("holistic", WIDE, {r"model\.layers\.2": r"model\.layers\.1"})
    with pytest.raises(ConfigError, match="a checkpoint of the same alignments"):
        trained(other.build(tmp_path / "other"), resume_from_checkpoint=str(checkpoint))
    (checkpoint / "projectors.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"projectors\.safetensors"):
        trained(SETTINGS["holistic"].build(tmp_path / "again"), resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("steps", [4, 6])
def test_a_run_that_is_done_stays_as_it_is(steps: int, tmp_path: Path) -> None:
    """Trainer itself would train one step more each time it resumes a run that ended in the middle of an epoch."""
    student = kinds.llama(0, 1)

    def build() -> Any:
        teacher = kinds.llama(5, 2)
        arguments = training_arguments(
            silverspoon_ray, max_steps=steps, output_dir=str(tmp_path), save_strategy="steps", save_steps=2
        )
        return HolisticDistiller(
            student,
            teacher,
            create_alignments(teacher, student, {r"model\.layers\.1": r"model\.layers\.0"}),
            train_dataset=KINDS["llama"].data(40, 1),
            data_collator=Collator("llama"),
            args=arguments,
        )

    first = trained(build())
    weights = {name: value.clone() for name, value in student.state_dict().items()}
    again = build()
    assert again.train(resume_from_checkpoint=True).global_step == steps
    losses = [[row["loss"] for row in history if "loss" in row] for history in (first, again.state.log_history)]
    assert losses[0] == losses[1]
    assert all(torch.equal(value, weights[name]) for name, value in student.state_dict().items())
