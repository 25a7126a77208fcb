"""Weights that ``save_pretrained`` wrote, on their way back into a model that is there already."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from silverspoon_ray.errors import ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(directory: Path) -> dict[str, Path]:
    """The file of each tensor in a model directory; empty where it has no safetensors of a whole model."""
    if (directory / INDEX).is_file():
        found = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / file for name, file in found.items()}
    if (directory / WEIGHTS).is_file():
        with safe_open(directory / WEIGHTS, framework="pt") as file:
            return dict.fromkeys(file.keys(), directory / WEIGHTS)
    return {}


def saved_names(directory: Path) -> set[str]:
    """Names of the tensors in a model directory. Raises ConfigError for a file that is cut off."""
    try:
        return set(weight_files(directory))
    except SafetensorError as error:
        raise ConfigError("checkpoint_dir", str(directory / WEIGHTS), f"a whole file; {error}") from error


def names_differ(model: nn.Module, directory: Path) -> bool:
    """Whether a file names weights otherwise than the model does.

    transformers keeps the names of a format that is older than a class; ``from_pretrained`` translates them, while
    ``load_state_dict`` would find nothing and say so in a warning only.
    """
    return bool(saved_names(directory) - set(model.state_dict()))


def load_saved(model: nn.Module, directory: Path, strict: bool = True) -> dict[str, list[str]]:
    """Load a model directory into a model of its architecture; devices and dtypes stay the model's.

    Args:
        model: where the weights go.
        directory: with ``model.safetensors``, whole or in several files.
        strict: raise where the weights are not exactly the model's.

    Returns:
        ``{"missing_keys": [...], "unexpected_keys": [...]}``; of tied weights only one has to be there.

    Raises:
        ConfigError: no weights there, weights of other shapes, or with ``strict`` too few or too many.
    """
    if not saved_names(directory):
        raise ConfigError("checkpoint_dir", str(directory), f"a directory with {WEIGHTS}")
    state, found = _translated(model, directory) if _is_pretrained(model, directory) else (_read(directory), None)
    try:
        result = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConfigError("checkpoint_dir", str(directory), f"weights of this model's shapes; {reason}") from error
    if found is None:
        tensors = model.state_dict(keep_vars=True)
        loaded = {tensor.data_ptr() for name, tensor in tensors.items() if name in state}
        missing = [key for key in result.missing_keys if key not in tensors or tensors[key].data_ptr() not in loaded]
        found = {"missing_keys": missing, "unexpected_keys": list(result.unexpected_keys)}
    if strict and any(found.values()):
        raise ConfigError("checkpoint_dir", str(directory), f"the weights of this model, no more and no fewer; {found}")
    return found


def _is_pretrained(model: nn.Module, directory: Path) -> bool:
    return isinstance(model, PreTrainedModel) and (directory / "config.json").is_file()


def _translated(model: Any, directory: Path) -> tuple[Mapping[str, torch.Tensor], dict[str, list[str]]]:
    dtype = next(model.parameters()).dtype
    options = {"config": copy.deepcopy(model.config), "dtype": dtype, "output_loading_info": True}
    try:
        loaded, info = type(model).from_pretrained(directory, local_files_only=True, **options)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConfigError("checkpoint_dir", str(directory), f"weights of this model's shapes; {reason}") from error
    if info.get("mismatched_keys"):
        raise ConfigError(
            "checkpoint_dir", str(directory), f"weights of this model's shapes; {sorted(info['mismatched_keys'])[:3]}"
        )
    found = {key: sorted(info.get(key, ())) for key in ("missing_keys", "unexpected_keys")}
    return loaded.state_dict(), found


def _read(directory: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for file in sorted(set(weight_files(directory).values())):
        state |= safetensors.torch.load_file(file)
    return state
