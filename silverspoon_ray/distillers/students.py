"""Which model, or models, the blocks of a blockwise run belong to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from silverspoon_ray.alignments.alignment import Alignment
from silverspoon_ray.errors import ConfigError

WEIGHT_FILES = ("model", "pytorch_model", "adapter_model")


class StudentModels(nn.Module):
    """Several students that are trained side by side.

    Args:
        models: by name.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.names = list(models)
        self.held = nn.ModuleList(models.values())

    @property
    def models(self) -> dict[str, nn.Module]:
        return dict(zip(self.names, self.held, strict=True))

    def forward(self, **batch: Any) -> dict[str, Any]:
        """Each student's outputs, by name."""
        return {name: model(**batch) for name, model in self.models.items()}


def the_student(
    alignments: Sequence[Alignment], student_models: Mapping[str, nn.Module], student_model: nn.Module | None
) -> nn.Module:
    """The module to train.

    Args:
        alignments: whose student blocks are trained.
        student_models: as given to the distiller.
        student_model: the same.

    Raises:
        ConfigError: nobody says which model the blocks belong to.
    """
    if student_model is not None:
        return student_model
    models = dict(student_models)
    if not models:
        known = {id(a.student_model): a.student_model for a in alignments if a.student_model is not None}
        unknown = [alignment for alignment in alignments if alignment.student_model is None]
        if unknown or not known:
            raise ConfigError(
                "student_models",
                None,
                "{name: model} with the model that the student blocks belong to, where the alignments were not made by "
                "create_alignments",
            )
        if len(known) == 1:
            return next(iter(known.values()))
        models = {a.student_model_name: a.student_model for a in alignments if a.student_model is not None}
        distinct = {id(model) for model in models.values()}
        if distinct != set(known):
            raise ConfigError("student_models", None, "{name: model}, because the students' names are not distinct")
        models = {name: model for number, (name, model) in enumerate(models.items()) if _first(models, number)}
    if len(models) == 1:
        return next(iter(models.values()))
    return StudentModels(models)


def _first(models: Mapping[str, nn.Module], number: int) -> bool:
    """No model before this one is the same."""
    listed = list(models.values())
    return all(listed[number] is not earlier for earlier in listed[:number])


def save_named_students(directory: str, students: Mapping[str, nn.Module], trained: nn.Module) -> None:
    """Write each student to ``student_model_<name>``.

    The one that the checkpoint itself holds is linked, not written twice.
    """
    for name, student in students.items():
        target = Path(directory) / f"student_model_{name.replace(os.sep, '_')}"
        if student is trained and not target.exists():
            target.mkdir()
            for file in Path(directory).iterdir():
                if file.name.startswith(WEIGHT_FILES) or file.name.endswith("config.json"):
                    try:
                        os.link(file, target / file.name)
                    except OSError:  # a file system without links
                        shutil.copyfile(file, target / file.name)
        else:
            save: Any = getattr(student, "save_pretrained", None)
            if save is None:
                raise ConfigError("student_models", name, "models with save_pretrained")
            save(target)
