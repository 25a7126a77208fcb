"""bf16: the student's forward runs under the Trainer's autocast, the teacher's as the teacher is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import silverspoon_ray
from silverspoon_ray.distillers import ResponseBasedDistiller
from tests.distillers.kinds import KINDS, Collator, mean_squared
from tests.distillers.ranks import on_ranks
from tests.support import PrinterCallback, trained, training_arguments


class Dtypes:
    """The dtypes that the linear layers of a model give."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: set[torch.dtype] = set()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda module, args, output: self.seen.add(output.dtype))


def distiller(name: str, teacher: Any = None, student: Any = None, **keywords: Any) -> Any:
    loss = keywords.pop("soft_loss_fn", mean_squared if name == "bert_regression" else None)
    built = ResponseBasedDistiller(
        student or KINDS[name].model(0, 1),
        teacher or KINDS[name].model(5, 2),
        train_dataset=KINDS[name].data(24, 1),
        eval_dataset=KINDS[name].data(11, 2),
        data_collator=Collator(name),
        soft_loss_fn=loss,
        args=training_arguments(
            silverspoon_ray, max_steps=3, per_device_train_batch_size=8, remove_unused_columns=False, **keywords
        ),
    )
    built.remove_callback(PrinterCallback)
    return built


def losses(history: list[dict[str, Any]], key: str = "loss") -> list[float]:
    return [row[key] for row in history if key in row]


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("name", KINDS)
def test_autocast(name: str, alpha: float) -> None:
    student, teacher = KINDS[name].model(0, 1), KINDS[name].model(5, 2)
    inside, beside = Dtypes(student), Dtypes(teacher)
    built = distiller(name, teacher, student, alpha=alpha, bf16=True)
    history = trained(built)
    assert inside.seen == {torch.bfloat16}
    assert beside.seen == {torch.float32}
    assert {parameter.dtype for parameter in student.parameters()} == {torch.float32}
    exact_run = distiller(name, alpha=alpha)
    exact = trained(exact_run)
    for key in ("loss", "loss/soft", *(["loss/hard"] if alpha else [])):
        assert len(losses(history, key)) == 3
        assert all(map(math.isfinite, losses(history, key)))
        assert losses(history, key) == pytest.approx(losses(exact, key), rel=0.05)
        assert losses(history, key) != losses(exact, key)
    assert built.evaluate()["eval_loss"] == pytest.approx(exact_run.evaluate()["eval_loss"], rel=0.05)


@pytest.mark.parametrize("name", ["llama", "bert_mlm", "vit"])
def test_teacher_in_bf16(name: str) -> None:
    """Logits of two dtypes meet in the loss."""
    teacher = KINDS[name].model(5, 2).to(torch.bfloat16)
    if name == "vit":  # its input is a picture, not token ids
        teacher.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {k: v.to(torch.bfloat16) for k, v in kwargs.items()}), with_kwargs=True
        )
    history, exact = trained(distiller(name, teacher)), trained(distiller(name))
    assert losses(history) == pytest.approx(losses(exact), rel=0.05)
    assert {parameter.dtype for parameter in teacher.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("match", [False, True])
def test_auto_dtype_match(match: bool) -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def loss(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        seen.append((student.dtype, teacher.dtype))
        return (student - teacher).square().mean()

    trained(distiller("llama", KINDS["llama"].model(5, 2).double(), soft_loss_fn=loss, auto_dtype_match=match))
    assert set(seen) == {(torch.float32, torch.float32 if match else torch.float64)}


@pytest.mark.parametrize("divergence", ["kl_divergence", "reverse_kl", "jsd"])
def test_whole_student_in_bf16(divergence: str) -> None:
    """No autocast: the student's own weights have that dtype; the divergence is still computed in float32."""
    student = KINDS["llama"].model(0, 1).to(torch.bfloat16)
    history = trained(distiller("llama", student=student, soft_loss_fn=divergence))
    exact = trained(distiller("llama", soft_loss_fn=divergence))
    assert losses(history)[0] == pytest.approx(losses(exact)[0], rel=0.05)


def train_on_a_rank() -> list[float]:
    return losses(trained(distiller("llama", alpha=0.5, bf16=True, gradient_accumulation_steps=1)))


def test_two_ranks_in_bf16() -> None:
    """Ranks with unequal numbers of tokens, under autocast and DDP: the loss of one rank with batches of both."""
    one = distiller("llama", alpha=0.5)
    one.args.per_device_train_batch_size = 16
    one._train_batch_size = 16
    exact = losses(trained(one))
    for ranks_losses in on_ranks(train_on_a_rank):
        assert ranks_losses[0] == pytest.approx(exact[0], rel=0.05)
        assert all(map(math.isfinite, ranks_losses))
