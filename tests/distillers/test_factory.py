"""Distillers by name, and what their constructors refuse."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

import silverspoon_ray
from silverspoon_ray.distillers import (
    BaseDistiller,
    BlockwiseDistiller,
    Distiller,
    HolisticDistiller,
    ResponseBasedDistiller,
    distiller_class,
)
from silverspoon_ray.errors import ConfigError, NotYetError
from silverspoon_ray.teacher.protocol import Teacher
from tests.distillers.kinds import llama, text
from tests.support import PrinterCallback, training_arguments
from tests.teacher.fake import FakeTeacher


class Own(ResponseBasedDistiller):
    pass


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("response_based", ResponseBasedDistiller),
        ("reskd", ResponseBasedDistiller),
        ("holistic", HolisticDistiller),
        ("hkd", HolisticDistiller),
        ("blockwise", BlockwiseDistiller),
        ("bkd", BlockwiseDistiller),
        (Own, Own),
    ],
)
def test_names(name: Any, wanted: type) -> None:
    assert distiller_class(name) is wanted


@pytest.mark.parametrize("name", ["response", "Response_Based", "kd", None, 3, dict, transformers.Trainer, {}])
def test_unknown(name: Any) -> None:
    with pytest.raises(ConfigError, match="response_based") as refused:
        distiller_class(name)
    assert refused.value.value == name
    assert not isinstance(refused.value, NotYetError)


def test_near_names_are_offered() -> None:
    with pytest.raises(ConfigError, match="did you mean response_based"):
        distiller_class("responsebased")


def test_build_by_name() -> None:
    built = Distiller(
        "reskd",
        student_model=llama(0, 1),
        teacher_model=llama(5, 2),
        train_dataset=text(8, 1),
        args=training_arguments(silverspoon_ray),
    )
    built.remove_callback(PrinterCallback)
    assert type(built) is ResponseBasedDistiller
    assert isinstance(built, transformers.Trainer)


@pytest.mark.parametrize("teacher", ["a path", None, 3, transformers.Trainer])
def test_what_is_no_teacher(teacher: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        ResponseBasedDistiller(llama(0, 1), teacher, args=training_arguments(silverspoon_ray))
    assert refused.value.key == "teacher_model"


def test_whoever_answers_is_a_teacher() -> None:
    fake = FakeTeacher(llama(5, 2))
    assert isinstance(fake, Teacher)
    built = ResponseBasedDistiller(llama(0, 1), fake, args=training_arguments(silverspoon_ray))
    assert built.teacher is fake


@pytest.mark.parametrize("wire", [None, "bfloat16", "float32"])
def test_the_wire_dtype_is_asked_for(wire: str | None) -> None:
    fake = FakeTeacher(llama(5, 2))
    ResponseBasedDistiller(llama(0, 1), fake, args=training_arguments(silverspoon_ray, teacher_wire_dtype=wire))
    assert fake.request is not None
    assert (str(fake.request.wire_dtype).removeprefix("torch.") if fake.request.wire_dtype else None) == wire


def test_arguments_of_the_parent_are_refused() -> None:
    args = transformers.TrainingArguments(use_cpu=True, report_to="none")
    with pytest.raises(ConfigError) as refused:
        ResponseBasedDistiller(llama(0, 1), llama(5, 2), args=args)  # type: ignore[arg-type]
    assert refused.value.key == "args"


@pytest.mark.parametrize(
    ("loss", "keywords"),
    [
        ("kl_divergenc", {}),
        ("kl_divergence", {"temprature": 2}),
        ("kl_divergence", {"temperature": 0}),
        ("jsd", {"beta": 1.0}),
    ],
)
def test_losses_that_are_refused(loss: str, keywords: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ResponseBasedDistiller(
            llama(0, 1),
            llama(5, 2),
            args=training_arguments(silverspoon_ray),
            soft_loss_fn=loss,
            soft_loss_fn_kwargs=keywords,
        )


def test_a_distiller_must_say_what_it_compares() -> None:
    built = BaseDistiller(
        llama(5, 2), args=training_arguments(silverspoon_ray), model=llama(0, 1), eval_dataset=text(4, 1)
    )
    with pytest.raises(NotImplementedError, match="BaseDistiller must say"):
        built.distillation_terms(None, None, None)  # type: ignore[arg-type]


def test_overlap_that_cannot_be_is_said(caplog: pytest.LogCaptureFixture) -> None:
    ResponseBasedDistiller(
        llama(0, 1), llama(5, 2), args=training_arguments(silverspoon_ray, overlap_teacher_forward=True)
    )
    assert "no effect" in caplog.text
