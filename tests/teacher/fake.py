"""A dedicated teacher without Ray: it keeps a list of what it was asked and computes an answer when that is awaited."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherOutput, TeacherRequest


class FakeTeacher:
    """Counts answers that are asked for and neither released nor forgotten.

    Attributes:
        asked: ``input_ids`` of every batch, in the order of submission.
        answered: the numbers of the submissions in the order in which their answers were awaited.
        live: answers of now.
        most: the largest ``live`` since it was last set.
        fails_at: the number of a submission that raises.
    """

    dedicated = True
    nbytes = 1000

    def __init__(self, model: nn.Module, borrowed: bool = False) -> None:
        self.local = LocalTeacher(model)
        self.borrowed = borrowed
        self.request: TeacherRequest | None = None
        self.asked: list[torch.Tensor] = []
        self.answered: list[int] = []
        self.given: list[torch.Tensor] = []
        self.live = 0
        self.most = 0
        self.fails_at: int | None = None

    @property
    def structure(self) -> nn.Module:
        return self.local.structure

    def open(self, request: TeacherRequest) -> FakeTeacher:
        self.request = request
        return self

    def submit(self, batch: Mapping[str, Any]) -> FakeAnswer:
        answer = FakeAnswer(self, len(self.asked), dict(batch))
        self.asked.append(batch["input_ids"].clone())
        self.live += 1
        self.most = max(self.most, self.live)
        return answer

    def gone(self) -> None:
        self.live -= 1


class FakeAnswer:
    def __init__(self, teacher: FakeTeacher, number: int, batch: dict[str, Any]) -> None:
        self.teacher, self.number, self.batch = teacher, number, batch
        self.nbytes = 0
        self.release = weakref.finalize(self, teacher.gone)  # runs once: when called, or when nobody has the answer

    def ready(self) -> bool:
        return False

    def result(self) -> TeacherOutput:
        teacher = self.teacher
        teacher.answered.append(self.number)
        if self.number == teacher.fails_at:
            raise RuntimeError(f"no answer to batch {self.number}")
        self.nbytes = teacher.nbytes
        assert teacher.request is not None
        output = teacher.local.answer(self.batch, teacher.request)
        output.borrowed = teacher.borrowed
        if teacher.borrowed:
            output.map(lambda tensor: teacher.given.append(tensor) or tensor)
        return output
