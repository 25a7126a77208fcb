"""The same model as teacher and student: the features agree, so loss and gradient are exactly 0."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import silverspoon_ray
from silverspoon_ray import BlockwiseDistiller, HolisticDistiller, create_alignments
from tests.distillers.feature_kinds import FEATURES, head
from tests.distillers.kinds import Collator, kind_of, mean_squared
from tests.support import trained, training_arguments

# Contrastive is left out: the other rows of a batch are never infinitely far.
LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mse": ("mse", {}),
    "normalized_mse": ("normalized_mse", {}),
    "smooth_l1": ("smooth_l1", {"beta": 0.5}),
    "cosine": ("cosine", {}),
    "angular_magnitude": ("angular_magnitude", {}),
    "mahalanobis_mse": ("mahalanobis_mse", {"metric_matrix": 2 * torch.eye(16)}),
    "relkd_da": ("relkd_da", {}),
    "logit_lens_kl": ("logit_lens_kl", {}),
    "own": (mean_squared, {}),
}
CASES = [(name, loss) for name in FEATURES for loss in LOSSES if name == "llama" or loss in ("mse", "cosine")]


def distiller(name: str, build: Any, loss: str, student: Any, teacher: Any, **arguments: Any) -> Any:
    kind = FEATURES[name]
    function, keywords = LOSSES[loss]
    if loss == "logit_lens_kl":
        keywords = {"output_head": head(16)}
    patterns = [pattern.replace(r"\1", "(encoder|decoder)") for pattern in kind.modules.values()]
    return build(
        teacher_model=teacher,
        student_model=student,
        alignments=create_alignments(
            teacher, student, patterns, loss_function=function, loss_function_kwargs=keywords or None
        ),
        train_dataset=kind_of(kind.base).data(8, 1),
        eval_dataset=kind_of(kind.base).data(6, 2),
        data_collator=Collator(kind.base),
        args=training_arguments(
            silverspoon_ray,
            **{"max_steps": 2, "optim": "sgd", "learning_rate": 0.05, "remove_unused_columns": False, **arguments},
        ),
    )


@pytest.mark.parametrize("same_object", [False, True], ids=["copy", "same_object"])
@pytest.mark.parametrize("build", [HolisticDistiller, BlockwiseDistiller], ids=["holistic", "blockwise"])
@pytest.mark.parametrize(("name", "loss"), CASES)
def test_loss_and_gradient_are_zero(name: str, loss: str, build: Any, same_object: bool) -> None:
    # Student and teacher are equal to the last bit, but for T5, whose matrices torch multiplies in another order with
    # and without gradients. A cosine is 1 only as far as squares and roots are rounded.
    nothing = 1e-5 if name == "t5" or loss in ("cosine", "angular_magnitude") else 0.0
    student = FEATURES[name].models()[0].train()
    start = copy.deepcopy(student.state_dict())
    teacher = student if same_object else copy.deepcopy(student)
    built = distiller(name, build, loss, student, teacher)
    rows = [row for row in trained(built) if "loss" in row]
    assert len(rows) == 2
    for row in rows:
        found = {key: value for key, value in row.items() if key.split("/")[0] in ("loss", "grad_norm")}
        assert len(found) >= 3
        for key, value in found.items():
            assert abs(value) <= nothing, key
    assert student.training
    for key, value in student.state_dict().items():
        torch.testing.assert_close(value, start[key], rtol=0, atol=nothing, msg=key)
    assert abs(built.evaluate()["eval_loss"]) <= nothing


@pytest.mark.parametrize("build", [HolisticDistiller, BlockwiseDistiller], ids=["holistic", "blockwise"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_losses_see_a_difference(loss: str, build: Any) -> None:
    """Or zeros above would prove nothing."""
    student, teacher = FEATURES["llama"].models()
    row = trained(distiller("llama", build, loss, student, teacher, learning_rate=1e-3))[0]
    assert row["loss"] > 1e-4
    assert row["grad_norm"] > 1e-4


@pytest.mark.parametrize("build", [HolisticDistiller, BlockwiseDistiller], ids=["holistic", "blockwise"])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", ["llama", "t5", "vit", "conv"])
def test_the_teacher_is_untouched(name: str, mode: str, build: Any) -> None:
    student, teacher = FEATURES[name].models()
    teacher.train(mode == "train")
    weights = copy.deepcopy(teacher.state_dict())
    config = teacher.config.to_dict() if hasattr(teacher, "config") else None
    built = distiller(name, build, "mse", student, teacher)
    trained(built)
    built.evaluate()
    assert all(module.training is (mode == "train") for module in teacher.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in teacher.parameters())
    assert teacher.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[key]) for key, value in teacher.state_dict().items())
    assert config is None or teacher.config.to_dict() == config
    optimized = {id(parameter) for group in built.optimizer.param_groups for parameter in group["params"]}
    assert not optimized & {id(parameter) for parameter in teacher.parameters()}
