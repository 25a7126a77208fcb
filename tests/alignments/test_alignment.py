"""One alignment: what it picks, compares and refuses."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import silverspoon_ray
from silverspoon_ray import Alignment, BlockwiseDistiller, HolisticDistiller, OutputSelector
from silverspoon_ray.errors import AlignmentError, ConfigError
from tests.distillers.kinds import vectors
from tests.support import Perceptron, trained, training_arguments

A, B = torch.zeros(2, 3), torch.ones(2, 3)
Named = namedtuple("Named", "first second")


@pytest.mark.parametrize(
    ("index", "output", "wanted"),
    [
        (0, A, A),
        (1, A, A),  # a tensor passes as it is
        (0, (A, B), A),
        (1, (A, B), B),
        (-1, [A, B], B),
        (1, Named(A, B), B),
        ("b", {"a": A, "b": B}, B),
        (1, {"a": A, "b": B}, B),
        ("last_hidden_state", BaseModelOutput(last_hidden_state=B), B),
        (0, BaseModelOutput(last_hidden_state=B), B),
    ],
)
def test_selector(index: Any, output: Any, wanted: torch.Tensor) -> None:
    assert OutputSelector(index)(output) is wanted
    assert hash(OutputSelector(index)) == hash(OutputSelector(index))


def alignment(**keywords: Any) -> Alignment:
    return Alignment(nn.Linear(3, 3), nn.Linear(3, 3), **keywords)


@pytest.mark.parametrize("whose", ["teacher", "student"])
@pytest.mark.parametrize(
    ("selector", "output", "said"),
    [
        (OutputSelector(2), (A, B), "a tuple of 2"),
        (OutputSelector("c"), {"a": A}, "a mapping with a"),
        (OutputSelector(0), (None, B), "the selector gives NoneType"),
        (lambda output: output, (A, B), "the selector gives tuple"),
        (lambda output: output.hidden, A, "hidden"),
    ],
)
def test_selector_that_picks_no_tensor(whose: str, selector: Any, output: Any, said: str) -> None:
    made = alignment(**{f"{whose}_output_selector": selector})
    with pytest.raises(AlignmentError, match=f"{whose}_output_selector") as refused:
        (made.teacher_features if whose == "teacher" else made.student_features)(output)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("keywords", "key"),
    [
        ({"loss_weight": -1.0}, "loss_weight"),
        ({"loss_weight": float("nan")}, "loss_weight"),
        ({"loss_weight": True}, "loss_weight"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm"),
        ({"max_grad_norm": "1"}, "max_grad_norm"),
        ({"loss_function": "no such"}, "loss_type"),
        ({"loss_function": 3}, "loss_function"),
        ({"loss_function": "mse", "loss_function_kwargs": {"dimension": 1}}, "dimension"),
    ],
)
def test_values_that_cannot_be_used(keywords: Any, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        alignment(**keywords)
    assert refused.value.key == key


def test_blocks_are_modules() -> None:
    with pytest.raises(ConfigError, match="create_alignments finds modules by name"):
        Alignment("layers.0", nn.Linear(1, 1))  # type: ignore[arg-type]


def summed(student: torch.Tensor, teacher: torch.Tensor, power: float = 2.0) -> torch.Tensor:
    """A user's loss: a mean over what it gets."""
    return (student - teacher).abs().pow(power).mean()


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_a_users_loss_gets_the_rows_that_count(power: float) -> None:
    made = alignment(loss_function=summed, loss_function_kwargs={"power": power})
    student, teacher = torch.randn(2, 4, 3, requires_grad=True), torch.randn(2, 4, 3)
    mask = torch.tensor([[True, True, False, False], [True, False, False, False]])
    wanted = (student[mask] - teacher[mask]).abs().pow(power).mean()
    assert torch.equal(made.loss(student, teacher, mask), wanted)
    nothing = made.loss(student, teacher, torch.zeros_like(mask))
    assert nothing == 0
    nothing.backward()
    assert student.grad is not None
    assert not student.grad.any()


@pytest.mark.parametrize("name", ["mse", "cosine", "smooth_l1", "normalized_mse", "relkd_distance", "contrastive"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_may_differ(name: str, dtype: torch.dtype) -> None:
    made = alignment(loss_function=name)
    student, teacher = torch.randn(2, 4, 3, requires_grad=True), torch.randn(2, 4, 3).to(dtype)
    mask = torch.ones(2, 4, dtype=torch.bool)
    value = made.loss(student, teacher, mask)
    assert value.dtype == torch.float32
    assert value.isfinite()
    torch.testing.assert_close(value, made.loss(student, teacher.float(), mask), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["logit_lens_kl", "relkd_distance"])
def test_losses_over_samples_ignore_how_long_they_are(name: str) -> None:
    """Of samples that do not count at all the mean is taken as 0, so that cutting a batch changes nothing."""
    keywords = {"output_head": nn.Linear(3, 7)} if name == "logit_lens_kl" else {}
    made = alignment(loss_function=name, loss_function_kwargs=keywords)
    student, teacher = torch.randn(3, 4, 3), torch.randn(3, 4, 3)
    mask = torch.tensor([[True, True, False, False], [True, False, False, False], [False] * 4])
    two = made.loss(student[:2], teacher[:2], mask[:2])
    torch.testing.assert_close(made.loss(student, teacher, mask), two * 2 / 3)
    whole = made.loss(student, teacher, torch.ones_like(mask))
    torch.testing.assert_close(whole, made.loss(student, teacher, None))


def many(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return (student - teacher).square()


@pytest.mark.parametrize("loss", [many, lambda s, t: 1.0, "mse"])
def test_a_loss_that_gives_no_number(loss: Any) -> None:
    keywords = {"loss_function_kwargs": {"reduction": "none"}} if loss == "mse" else {}
    with pytest.raises(AlignmentError, match="loss_function"):
        alignment(loss_function=loss, **keywords).loss(torch.randn(2, 3), torch.randn(2, 3), None)


def test_shared_memory_is_not_written_to() -> None:
    def spoiling(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        return teacher.sub_(student).square().mean()

    teacher = torch.randn(2, 3)
    before = teacher.clone()
    alignment(loss_function=spoiling).loss(torch.randn(2, 3), teacher, None, teacher_is_shared=True)
    assert torch.equal(teacher, before)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("build", [HolisticDistiller, BlockwiseDistiller])
def test_alignments_built_by_hand(build: Any, named: bool) -> None:
    """Names that are left out are looked up; projectors and selectors are the user's."""
    student, teacher = Perceptron(0, 8), Perceptron(5, 12)
    names = {"teacher_module_name": "layers.0", "student_module_name": "layers.0"} if named else {}
    first = Alignment(
        teacher.layers[0],
        student.layers[0],
        student_model_name="small",
        teacher_output_selector=lambda output: output[..., :8],
        **names,
    )
    second = Alignment(teacher.layers[0], student.layers[0], output_projector=nn.Linear(8, 12), loss_weight=0.5)
    built = build(
        teacher_model=teacher,
        student_model=student,
        alignments=[first, second],
        train_dataset=vectors(8),
        args=training_arguments(silverspoon_ray, max_steps=2, remove_unused_columns=False),
    )
    assert first.teacher_module_name == second.student_module_name == "layers.0"
    start = second.output_projector.weight.detach().clone()  # type: ignore[union-attr]
    row = trained(built)[0]
    assert row["loss"] == pytest.approx(row["loss/small.layers.0"] + 0.5 * row["loss/.layers.0"], rel=1e-6)
    assert not torch.equal(second.output_projector.weight, start)  # type: ignore[union-attr]
    other = Alignment(Perceptron(1).layers[0], student.layers[0])
    with pytest.raises(AlignmentError, match="teacher_block"):
        build(
            teacher_model=teacher,
            student_model=student,
            alignments=[other],
            train_dataset=vectors(8),
            args=training_arguments(silverspoon_ray, remove_unused_columns=False),
        )
