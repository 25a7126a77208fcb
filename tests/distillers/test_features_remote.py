"""A dedicated teacher changes nothing in feature-based distillation: however far ahead it is asked, and though its
answers lie in memory that others read too."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import silverspoon_ray
from silverspoon_ray import BlockwiseDistiller, HolisticDistiller, create_alignments
from silverspoon_ray.cluster.codec import encode
from silverspoon_ray.teacher.local import LocalTeacher
from tests.distillers.feature_kinds import FEATURES, bend
from tests.distillers.kinds import Collator, kind_of
from tests.support import trained, training_arguments, without_times
from tests.teacher.fake import FakeTeacher


def spoiling(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """A user's loss that writes to what it gets of the teacher."""
    return teacher.sub_(student).square().mean()


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "holistic": ("holistic", {}),
    "holistic-alpha": ("holistic", {"alpha": 0.4}),
    "holistic-first": ("holistic", {"overlap_teacher_forward": False}),
    "blockwise": ("blockwise", {}),
    "blockwise-per_block": ("blockwise", {"backward_per_block": True}),
}


def run(name: str, case: str, loss: Any, teacher: Any = None, **arguments: Any) -> tuple[Any, list[torch.Tensor]]:
    distiller, settings = RUNS[case]
    kind = FEATURES[name]
    student, local = kind.models()
    teacher = FakeTeacher(local, borrowed=True) if teacher is FakeTeacher else local
    build: Any = BlockwiseDistiller if distiller == "blockwise" else HolisticDistiller
    built = build(
        teacher_model=teacher,
        student_model=student,
        alignments=create_alignments(teacher, student, kind.modules, loss_function=loss),
        train_dataset=kind_of(kind.base).data(32, 1),
        eval_dataset=kind_of(kind.base).data(11, 2),
        data_collator=Collator(kind.base),
        args=training_arguments(
            silverspoon_ray,
            max_steps=4,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            **settings,
            **arguments,
        ),
    )
    versions: list[tuple[torch.Tensor, int]] = []
    if isinstance(teacher, FakeTeacher):
        teacher.given = Given(versions)
    rows = [row for row in without_times(trained(built)) if "train_loss" not in row]
    assert all(tensor._version == version for tensor, version in versions), "a borrowed tensor has been written to"
    if isinstance(teacher, FakeTeacher):
        assert versions
        assert teacher.live == 0
    return rows, [value.detach() for value in student.parameters()]


class Given(list[torch.Tensor]):
    """Remembers the version of what is put into it."""

    def __init__(self, versions: list[tuple[torch.Tensor, int]]) -> None:
        super().__init__()
        self.versions = versions

    def append(self, tensor: torch.Tensor) -> None:
        self.versions.append((tensor, tensor._version))


@functools.cache
def locally(name: str, case: str, loss: Any) -> Any:
    return run(name, case, loss)


def cases() -> Iterator[Any]:
    for number, (name, loss) in enumerate(
        [("llama", "mse"), ("wide_llama", "cosine"), ("bert_mlm", bend), ("t5", "mse"), ("llama", spoiling)]
    ):
        for turn, case in enumerate(RUNS):
            prefetch = (0, 1, 3)[(number + turn) % 3]
            label = loss if isinstance(loss, str) else loss.__name__
            yield pytest.param(name, case, loss, prefetch, id=f"{name}-{case}-{label}-{prefetch}")


@pytest.mark.parametrize(("name", "case", "loss", "prefetch"), cases())
def test_it_is_the_local_run(name: str, case: str, loss: Any, prefetch: int) -> None:
    """Bit for bit: every logged loss and norm, and all parameters."""
    rows, parameters = run(name, case, loss, FakeTeacher, teacher_prefetch=prefetch)
    wanted_rows, wanted = locally(name, case, loss)
    assert rows == wanted_rows
    assert all(torch.equal(here, there) for here, there in zip(parameters, wanted, strict=True))


@pytest.mark.parametrize("name", ["llama", "bert_mlm", "vit", "t5"])
def test_what_two_blocks_share_travels_once(name: str) -> None:
    """A block's output is the next one's input; of an output that is a tuple only what is compared travels."""
    kind = FEATURES[name]
    student, teacher = kind.models()
    built = BlockwiseDistiller(
        teacher_model=teacher,
        alignments=create_alignments(teacher, student, kind.modules),
        train_dataset=kind_of(kind.base).data(4, 1),
        data_collator=Collator(kind.base),
        args=training_arguments(silverspoon_ray),
    )
    batch = built._teacher_batch(Collator(kind.base)(kind_of(kind.base).data(4, 1)))
    answer = LocalTeacher(teacher).open(built.teacher_request()).submit(batch).result()
    assert answer.logits is None
    assert all(isinstance(output, torch.Tensor) for output in answer.outputs.values())
    first = [value for name, value in answer.inputs.items() if name.endswith(".1")]
    assert len(first) == len(answer.inputs) / 2
    wanted = sum(value.nbytes for value in (*answer.outputs.values(), *first))
    assert encode({"outputs": answer.outputs, "inputs": answer.inputs}).nbytes == wanted
