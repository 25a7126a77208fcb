"""What the driver tells the training workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from torch import nn

from silverspoon_ray.models.source import ModelSource, build_model
from silverspoon_ray.teacher.protocol import Teacher


@dataclass(frozen=True)
class Shipped:
    """An object of the user's (a module, a dataset) that travels once, through the object store."""

    ref: ray.ObjectRef

    @classmethod
    def put(cls, value: Any) -> Shipped:
        return cls(ray.put(value))

    def get(self) -> Any:
        return ray.get(self.ref)


@dataclass(frozen=True)
class WorkerPlan:
    """Everything a training worker needs; small, whatever the size of models and data.

    Attributes:
        distiller: the class.
        arguments: keywords of TrainingArguments.
        student: where the student comes from.
        teacher: a handle, or where a teacher of this worker's own comes from.
        teacher_kwargs: keywords of ``from_pretrained`` for that one.
        datasets: by name (``"train"``, ``"eval"``): a zero-argument callable, a shipped dataset, or None for a
            ``ray.data`` shard.
        ray_data_rows: by name, rows in the whole ``ray.data`` dataset where they had to be counted.
        distiller_kwargs: further keywords of the distiller.
        alignments: keywords of ``create_alignments`` or a callable, for distillers that compare features.
        example: a row of a ``ray.data`` training set, where shapes have to be seen before training.
        resume_from_checkpoint: a Hugging Face checkpoint directory to go on from, if the run has none of its own yet.
        progress_bar: the driver has a terminal to show one; else progress comes as lines.
        run_key: names the scratch directory of this ``fit()``.
    """

    distiller: type
    arguments: Mapping[str, Any]
    student: ModelSource | Shipped
    teacher: Teacher | ModelSource | Shipped
    datasets: Mapping[str, Any]
    ray_data_rows: Mapping[str, int] = field(default_factory=dict)
    distiller_kwargs: Mapping[str, Any] = field(default_factory=dict)
    teacher_kwargs: Mapping[str, Any] = field(default_factory=dict)
    alignments: Any = None
    example: Mapping[str, Any] | None = None
    resume_from_checkpoint: str | None = None
    progress_bar: bool = False
    run_key: str = ""


def ship_model(source: ModelSource) -> ModelSource | Shipped:
    """A module goes through the object store; descriptions go as they are."""
    return Shipped.put(source) if isinstance(source, nn.Module) else source


def unpack_model(source: ModelSource | Shipped, key: str, **load_kwargs: Any) -> nn.Module:
    """Build the model in this process; keywords are those of ``from_pretrained``."""
    if isinstance(source, Shipped):
        model: nn.Module = source.get()
        return model
    return build_model(source, key, **load_kwargs)
