"""Knowledge distillation on Ray: Hugging Face Trainers as students, the teacher on devices of its own.

Names are imported when they are first used, so that the command line answers a misspelt key without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from silverspoon_ray.cluster import TeacherGroup, TeacherHandle
    from silverspoon_ray.distillers import BaseDistiller, Distiller, ResponseBasedDistiller, SilentProgressCallback
    from silverspoon_ray.losses import get_loss_function, jsd_loss, kl_divergence_loss
    from silverspoon_ray.models.source import RandomInit
    from silverspoon_ray.teacher.placement import TeacherPlacement
    from silverspoon_ray.train import DistillationTrainer
    from silverspoon_ray.training_arguments import TrainingArguments

__version__ = "0.1.0"

_HOME = {
    "BaseDistiller": "silverspoon_ray.distillers",
    "DistillationTrainer": "silverspoon_ray.train",
    "Distiller": "silverspoon_ray.distillers",
    "RandomInit": "silverspoon_ray.models.source",
    "ResponseBasedDistiller": "silverspoon_ray.distillers",
    "SilentProgressCallback": "silverspoon_ray.distillers",
    "TeacherGroup": "silverspoon_ray.cluster",
    "TeacherHandle": "silverspoon_ray.cluster",
    "TeacherPlacement": "silverspoon_ray.teacher.placement",
    "TrainingArguments": "silverspoon_ray.training_arguments",
    "get_loss_function": "silverspoon_ray.losses",
    "jsd_loss": "silverspoon_ray.losses",
    "kl_divergence_loss": "silverspoon_ray.losses",
}

__all__ = [
    "BaseDistiller",
    "DistillationTrainer",
    "Distiller",
    "RandomInit",
    "ResponseBasedDistiller",
    "SilentProgressCallback",
    "TeacherGroup",
    "TeacherHandle",
    "TeacherPlacement",
    "TrainingArguments",
    "get_loss_function",
    "jsd_loss",
    "kl_divergence_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
