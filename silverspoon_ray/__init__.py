"""Knowledge distillation on Ray: Hugging Face Trainers as students, the teacher on devices of its own.

Names are imported when they are first used, so that the command line answers a misspelt key without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from silverspoon_ray.alignments import (
        Alignment,
        GenericConv2dProjector,
        GenericLinearProjector,
        OutputSelector,
        create_alignments,
        fuse_projectors_into_module,
    )
    from silverspoon_ray.capture import ModuleCaptureEngine
    from silverspoon_ray.cluster import TeacherGroup, TeacherHandle
    from silverspoon_ray.distillers import (
        BaseDistiller,
        BlockwiseDistiller,
        Distiller,
        HolisticDistiller,
        ResponseBasedDistiller,
        SilentProgressCallback,
    )
    from silverspoon_ray.distillers.loading_students import (
        load_student_weights_from_checkpoint,
        load_student_with_projectors_from_checkpoint,
    )
    from silverspoon_ray.losses import ContrastiveDistillationLoss, get_loss_function, jsd_loss, kl_divergence_loss
    from silverspoon_ray.models.freeze import freeze_parameters
    from silverspoon_ray.models.prune import prune_model
    from silverspoon_ray.models.reconfig import reconfig_model
    from silverspoon_ray.models.source import RandomInit
    from silverspoon_ray.models.summary import partial_summarize_layer_names, summarize_layer_names
    from silverspoon_ray.teacher.placement import TeacherPlacement
    from silverspoon_ray.train import DistillationTrainer
    from silverspoon_ray.training_arguments import TrainingArguments

__version__ = "0.1.0"

_HOME = {
    "Alignment": "silverspoon_ray.alignments",
    "BaseDistiller": "silverspoon_ray.distillers",
    "BlockwiseDistiller": "silverspoon_ray.distillers",
    "ContrastiveDistillationLoss": "silverspoon_ray.losses",
    "DistillationTrainer": "silverspoon_ray.train",
    "Distiller": "silverspoon_ray.distillers",
    "GenericConv2dProjector": "silverspoon_ray.alignments",
    "GenericLinearProjector": "silverspoon_ray.alignments",
    "HolisticDistiller": "silverspoon_ray.distillers",
    "ModuleCaptureEngine": "silverspoon_ray.capture",
    "OutputSelector": "silverspoon_ray.alignments",
    "RandomInit": "silverspoon_ray.models.source",
    "ResponseBasedDistiller": "silverspoon_ray.distillers",
    "SilentProgressCallback": "silverspoon_ray.distillers",
    "TeacherGroup": "silverspoon_ray.cluster",
    "TeacherHandle": "silverspoon_ray.cluster",
    "TeacherPlacement": "silverspoon_ray.teacher.placement",
    "TrainingArguments": "silverspoon_ray.training_arguments",
    "create_alignments": "silverspoon_ray.alignments",
    "freeze_parameters": "silverspoon_ray.models.freeze",
    "fuse_projectors_into_module": "silverspoon_ray.alignments",
    "get_loss_function": "silverspoon_ray.losses",
    "jsd_loss": "silverspoon_ray.losses",
    "kl_divergence_loss": "silverspoon_ray.losses",
    "load_student_weights_from_checkpoint": "silverspoon_ray.distillers.loading_students",
    "load_student_with_projectors_from_checkpoint": "silverspoon_ray.distillers.loading_students",
    "partial_summarize_layer_names": "silverspoon_ray.models.summary",
    "prune_model": "silverspoon_ray.models.prune",
    "reconfig_model": "silverspoon_ray.models.reconfig",
    "summarize_layer_names": "silverspoon_ray.models.summary",
}

__all__ = [
    "Alignment",
    "BaseDistiller",
    "BlockwiseDistiller",
    "ContrastiveDistillationLoss",
    "DistillationTrainer",
    "Distiller",
    "GenericConv2dProjector",
    "GenericLinearProjector",
    "HolisticDistiller",
    "ModuleCaptureEngine",
    "OutputSelector",
    "RandomInit",
    "ResponseBasedDistiller",
    "SilentProgressCallback",
    "TeacherGroup",
    "TeacherHandle",
    "TeacherPlacement",
    "TrainingArguments",
    "create_alignments",
    "freeze_parameters",
    "fuse_projectors_into_module",
    "get_loss_function",
    "jsd_loss",
    "kl_divergence_loss",
    "load_student_weights_from_checkpoint",
    "load_student_with_projectors_from_checkpoint",
    "partial_summarize_layer_names",
    "prune_model",
    "reconfig_model",
    "summarize_layer_names",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
