"""``teacher_placement="sharded"``: the teacher spread over the student's own ranks teaches what a copy on each does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import silverspoon_ray
from silverspoon_ray import HolisticDistiller, ResponseBasedDistiller, create_alignments
from silverspoon_ray.errors import ConfigError
from tests.distillers.ranks import on_ranks
from tests.support import Pad, gpt2, llama, ragged_data, trained, training_arguments, without_times
from tests.teacher.fake import FakeTeacher


def run(kind: str, placement: str | None) -> tuple[list[dict[str, Any]], int]:
    """The history, and how many parameters of the teacher this rank holds."""
    teacher, student = llama(2, 32, 3), llama(1, 16, 2)
    common: dict[str, Any] = {
        "train_dataset": ragged_data(24),
        "eval_dataset": ragged_data(7, seed=5),
        "data_collator": Pad(),
        "args": training_arguments(
            silverspoon_ray,
            teacher_placement=placement,
            max_steps=4,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            eval_strategy="steps",
            eval_steps=2,
        ),
    }
    if kind == "holistic":
        alignments = create_alignments(teacher, student, {r"model\.layers\.2": r"model\.layers\.1"})
        built: Any = HolisticDistiller(student, teacher, alignments, **common)
    else:
        built = ResponseBasedDistiller(student, teacher, **common)
    history = without_times(trained(built))
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in teacher.parameters())
    return history, held


@pytest.mark.parametrize("kind", ["response_based", "holistic"])
def test_the_same_curve(kind: str) -> None:
    whole = on_ranks(run, kind, "replicated")
    shared = on_ranks(run, kind, "sharded")
    assert [history for history, _ in shared] == [history for history, _ in whole]
    assert all(held < 0.6 * all_of_it for (_, held), (_, all_of_it) in zip(shared, whole, strict=True))


def test_alone_there_is_nothing_to_spread() -> None:
    assert run("response_based", "sharded") == run("response_based", None)


def test_a_teacher_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="teacher_placement='sharded'"):
        ResponseBasedDistiller(
            gpt2(0), FakeTeacher(llama(1)), args=training_arguments(silverspoon_ray, teacher_placement="sharded")
        )
    assert not torch.distributed.is_initialized()
