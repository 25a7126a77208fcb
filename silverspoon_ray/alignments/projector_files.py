"""Alignments and projectors on disk: JSON and safetensors, nothing that needs unpickling."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from silverspoon_ray.alignments.alignment import Alignment
from silverspoon_ray.alignments.describe import loss_label
from silverspoon_ray.alignments.projectors import GenericConv2dProjector, GenericLinearProjector
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.files import write_whole

PROJECTORS_FILE = "projectors.safetensors"
ALIGNMENTS_FILE = "alignments.json"
SETTINGS = ("mode", "apply_to_arg", "apply_to_kwarg")


def save_projectors(
    directory: Path, alignments: Sequence[Alignment], state: Mapping[str, torch.Tensor], **facts: Any
) -> None:
    """Write the alignments' description, and their projectors' weights if there are any.

    Args:
        directory: a checkpoint.
        alignments: in the order that numbers them.
        state: weights as ``<number>.<input or output>_projector.<parameter>``.
        facts: what else the description says.
    """
    described = []
    for alignment in alignments:
        described.append(
            {
                "teacher_model": alignment.teacher_model_name,
                "teacher_module": alignment.teacher_module_name,
                "student_model": alignment.student_model_name,
                "student_module": alignment.student_module_name,
                "loss": loss_label(alignment),
                "loss_weight": alignment.loss_weight,
                **{name: _settings(projector) for name, projector in alignment.projectors.items()},
            }
        )
    write_whole(directory / ALIGNMENTS_FILE, json.dumps({**facts, "alignments": described}, indent=1).encode())
    if state:
        write_whole(directory / PROJECTORS_FILE, safetensors.torch.save(dict(state), metadata={"format": "pt"}))


def load_alignments(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The description that :func:`save_projectors` wrote.

    Raises:
        ConfigError: there is none.
    """
    path = Path(directory) / ALIGNMENTS_FILE
    if not path.is_file():
        raise ConfigError("checkpoint_dir", str(directory), f"a checkpoint of a distiller, with its {ALIGNMENTS_FILE}")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def load_projectors(directory: str | os.PathLike[str]) -> list[dict[str, nn.Module]]:
    """For each alignment of a checkpoint its projectors, by ``input_projector`` and ``output_projector``.

    Raises:
        ConfigError: no such checkpoint, or a projector of a class that is neither linear nor a 1x1 convolution.
    """
    described = load_alignments(directory)["alignments"]
    path = Path(directory) / PROJECTORS_FILE
    state = safetensors.torch.load_file(path) if path.is_file() else {}
    found = []
    for number, entry in enumerate(described):
        made: dict[str, nn.Module] = {}
        for which in ("input_projector", "output_projector"):
            if which in entry:
                prefix = f"{number}.{which}."
                weights = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
                made[which] = _projector(entry[which], weights, path)
        found.append(made)
    return found


def _settings(projector: nn.Module) -> dict[str, Any]:
    given = {name: getattr(projector, name, None) for name in SETTINGS}
    return {"type": type(projector).__name__, **{name: value for name, value in given.items() if value is not None}}


def _projector(entry: Mapping[str, Any], weights: Mapping[str, torch.Tensor], path: Path) -> nn.Module:
    weight = weights.get("weight")
    if weight is None or set(weights) - {"weight", "bias"} or weight.dim() not in (2, 4):
        raise ConfigError("checkpoint_dir", str(path), f"linear or 1x1 convolution projectors; one is {entry['type']}")
    settings = {name: entry[name] for name in SETTINGS if name in entry}
    kind = GenericLinearProjector if weight.dim() == 2 else GenericConv2dProjector
    projector = kind(weight.shape[1], weight.shape[0], bias="bias" in weights, **settings)
    projector.to(weight.dtype).load_state_dict(weights)
    return projector
