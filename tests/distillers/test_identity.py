"""The same model as teacher and student: loss 0 and gradient 0; and what must stay as it was of the teacher."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

import silverspoon_ray
from silverspoon_ray.distillers import ResponseBasedDistiller
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherRequest
from tests.distillers.kinds import KINDS, Collator, gpt2, llama, mean_squared
from tests.support import PrinterCallback, token_data, trained, training_arguments

DIVERGENCES = {
    "kl": ("kl_divergence", {}),
    "kl-sharp": ("kl_divergence", {"temperature": 0.3}),
    "reverse": ("reverse_kl", {"temperature": 2.0}),
    "jsd": ("jsd", {"beta": 0.2}),
    "own": (mean_squared, {}),
}


def distiller(kind: str, student: Any, teacher: Any, divergence: str = "kl", **keywords: Any) -> Any:
    function, loss_keywords = DIVERGENCES[divergence]
    arguments = {
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.5,
        "remove_unused_columns": False,
        **keywords,
    }
    built = ResponseBasedDistiller(
        student,
        teacher,
        train_dataset=KINDS[kind].data(8, 1),
        eval_dataset=KINDS[kind].data(6, 2),
        data_collator=Collator(kind),
        args=training_arguments(silverspoon_ray, **arguments),
        soft_loss_fn=function,
        soft_loss_fn_kwargs=loss_keywords,
    )
    built.remove_callback(PrinterCallback)
    return built


def test_the_loss_sees_a_difference() -> None:
    """Or zeros below would prove nothing."""
    history = trained(distiller("llama", llama(0, 1), llama(5, 2)))
    assert history[0]["loss"] > 1e-2
    assert history[0]["grad_norm"] > 1e-2


@pytest.mark.parametrize("same_object", [False, True], ids=["copy", "same_object"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_zero(kind: str, divergence: str, same_object: bool) -> None:
    # torch multiplies T5's matrices in another order with and without gradients; all others are equal to the last bit.
    nothing = 1e-6 if kind == "t5" else 1e-9
    student = KINDS[kind].model(0, 2).train()
    start = copy.deepcopy(student.state_dict())
    teacher = student if same_object else copy.deepcopy(student)
    built = distiller(kind, student, teacher, divergence)
    history = [row for row in trained(built) if "loss" in row]
    assert len(history) == 2
    for row in history:
        assert abs(row["loss"]) < nothing
        assert abs(row["loss/soft"]) < nothing
        assert row["grad_norm"] < 1e-6
    assert student.training
    for key, value in student.state_dict().items():
        torch.testing.assert_close(value, start[key], rtol=0, atol=1e-6, msg=key)
    assert abs(built.evaluate()["eval_loss"]) < nothing


# ---- the teacher is left alone -----------------------------------------------------------------------------


class Modes(TrainerCallback):
    """What mode the student's modules have when its gradients are there."""

    def __init__(self) -> None:
        self.student: list[bool] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.student += [module.training for module in model.modules()]


@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["llama", "t5", "vit", "perceptron"])
def test_teacher_is_untouched(kind: str, mode: str, frozen: bool, tmp_path: Path) -> None:
    teacher = KINDS[kind].model(5, 2).train(mode != "eval").requires_grad_(not frozen)
    if mode == "mixed":
        list(teacher.modules())[-1].eval()
    modes = [module.training for module in teacher.modules()]
    weights = copy.deepcopy(teacher.state_dict())
    config = teacher.config.to_dict() if hasattr(teacher, "config") else None
    student = KINDS[kind].model(0, 1)
    built = distiller(kind, student, teacher, alpha=0.5, output_dir=str(tmp_path), save_strategy="steps", save_steps=2)
    watch = Modes()
    built.add_callback(watch)
    trained(built)
    built.evaluate()
    assert watch.student
    assert all(watch.student), "the student does not train in train mode"
    assert [module.training for module in teacher.modules()] == modes
    assert all(parameter.requires_grad is not frozen for parameter in teacher.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())
    for key, value in teacher.state_dict().items():
        assert torch.equal(value, weights[key]), key
    assert config is None or teacher.config.to_dict() == config
    optimized = {id(parameter) for group in built.optimizer.param_groups for parameter in group["params"]}
    assert optimized == {id(parameter) for parameter in student.parameters()}
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert sum(value.numel() for value in saved.values()) == sum(value.numel() for value in student.parameters())


def test_dropout_of_the_teacher_is_off() -> None:
    teacher = gpt2(5, 2, dropout=0.5).train()
    ids = torch.stack([sample["input_ids"] for sample in token_data(4)])
    assert not torch.equal(teacher(input_ids=ids).logits, teacher(input_ids=ids).logits)
    stream = LocalTeacher(teacher).open(TeacherRequest())
    answers = [stream.submit({"input_ids": ids}).result().logits for _ in range(2)]
    assert torch.equal(*answers)
    assert not answers[0].requires_grad
    with torch.no_grad():
        assert torch.equal(answers[0], copy.deepcopy(teacher).eval()(input_ids=ids).logits)


def test_a_failing_teacher_gets_its_mode_back() -> None:
    teacher = llama(5, 1).train()
    stream = LocalTeacher(teacher).open(TeacherRequest())
    with pytest.raises(ValueError, match="input_ids"):
        stream.submit({})
    assert all(module.training for module in teacher.modules())


def test_dropout_of_the_student_is_on() -> None:
    """The same model with dropout differs from itself, because only the teacher runs without."""
    student = gpt2(0, 1, dropout=0.5)
    history = trained(distiller("gpt2", student, copy.deepcopy(student)))
    assert history[0]["loss"] > 1e-3
