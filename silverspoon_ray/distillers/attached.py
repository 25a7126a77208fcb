"""Projectors that live in the student while it is trained, and leave no trace in what is saved of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from silverspoon_ray.alignments.alignment import Alignment

NAME = "distillation_projectors"
"""The student's submodule that holds them: as a part of the student they are seen by its optimizer, DDP and FSDP."""

_HANDLES = "_distillation_projector_hooks"


def attach_projectors(student: nn.Module, alignments: Sequence[Alignment]) -> None:
    """Make the alignments' projectors part of the student; those of an earlier distiller leave it.

    The student's ``state_dict`` does not show them and its ``load_state_dict`` does not ask for them.
    """
    detach_projectors(student)
    held = nn.ModuleDict()
    for number, alignment in enumerate(alignments):
        if alignment.trained_modules:
            held[str(number)] = nn.ModuleDict(alignment.trained_modules)
    if not len(held):
        return
    student.add_module(NAME, held)
    handles = [
        student.register_state_dict_post_hook(_leave_out),
        student.register_load_state_dict_post_hook(_not_missing),
    ]
    object.__setattr__(student, _HANDLES, handles)


def detach_projectors(student: nn.Module) -> None:
    """Take projectors away from the student, with the hooks that hid them."""
    student._modules.pop(NAME, None)
    for handle in student.__dict__.pop(_HANDLES, ()):
        handle.remove()


def attached_projectors(student: nn.Module) -> nn.Module | None:
    """The projectors that the student holds; None if there are none."""
    return student._modules.get(NAME)


def projector_state(student: nn.Module) -> dict[str, torch.Tensor]:
    """Their weights on the CPU, as ``<number of the alignment>.output_projector.weight``.

    To be called on every rank: of a sharded tensor each holds a part.
    """
    projectors = attached_projectors(student)
    return {} if projectors is None else {name: _whole(tensor) for name, tensor in projectors.state_dict().items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().to("cpu", copy=True).contiguous()


def _leave_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for key in [key for key in state_dict if key.startswith(f"{prefix}{NAME}.")]:
        del state_dict[key]


def _not_missing(module: nn.Module, incompatible_keys: Any) -> None:
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if NAME not in key.split(".")]
