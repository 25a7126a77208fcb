"""A part of a model's weights, for a process that holds only a part of the model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn

from silverspoon_ray.models.saved import weight_files
from silverspoon_ray.models.source import ModelSource, architecture_class, build_model

logger = logging.getLogger(__name__)


def load_part(source: ModelSource, own: Iterable[str], device: torch.device, **load_kwargs: Any) -> nn.Module:
    """A model of which only some parameters have memory; the others are on the meta device.

    From a directory of safetensors only the wanted tensors are read. Where that cannot be done (a callable or a module,
    a file whose names transformers has to translate, quantised weights) the whole model is built first, on the CPU, and
    a log line says so.

    Args:
        source: where the model comes from.
        own: dotted names of the parameters and buffers that are wanted.
        device: where they go.
        load_kwargs: as for ``from_pretrained``.

    Returns:
        the model, in eval mode. Buffers that are not saved have the values that the model's constructor gives them.
    """
    own = set(own)
    model, reason = _by_name(source, own, device, load_kwargs)
    if model is None:
        logger.warning("the whole teacher is built before a stage keeps its part: %s", reason)
        model = build_model(source, "teacher", **load_kwargs)
        keep_part(model, own, device)
    return model.eval()


def read_part(source: ModelSource, own: Iterable[str], device: torch.device, **load_kwargs: Any) -> nn.Module | None:
    """As :func:`load_part` where only the wanted tensors have to be read; None where the whole model would be built."""
    return _by_name(source, set(own), device, load_kwargs)[0]


def keep_part(model: nn.Module, own: set[str], device: torch.device) -> None:
    """Move some of a model's parameters and buffers to a device, and the memory of all others to nowhere."""
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = f"{prefix}.{name}" if prefix else name
            moved = parameter.detach().to(device if full in own else "meta")
            setattr(module, name, nn.Parameter(moved, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)


def _by_name(
    source: ModelSource, own: set[str], device: torch.device, load_kwargs: Mapping[str, Any]
) -> tuple[nn.Module | None, str]:
    """The model with the wanted tensors read from files; None and a reason where they cannot be."""
    if not isinstance(source, str | os.PathLike):
        return None, "it is not a directory of safetensors"
    further = set(load_kwargs) - {"dtype", "attn_implementation", "torch_dtype"}
    if further:
        return None, f"loading keyword {sorted(further)[0]}"
    path = os.path.expanduser(os.fspath(source))
    directory = _directory(path)
    files = weight_files(directory) if directory is not None else {}
    if not files:
        return None, "there are no safetensors"
    config = transformers.AutoConfig.from_pretrained(path)
    if getattr(config, "quantization_config", None) is not None:
        return None, "its weights are quantised"
    model_class = architecture_class(config, path)
    dtype = _dtype(load_kwargs.get("dtype", load_kwargs.get("torch_dtype")), config)
    options = {"attn_implementation": load_kwargs.get("attn_implementation"), "dtype": dtype}
    with init_empty_weights(include_buffers=False):
        model: nn.Module = model_class._from_config(config, **{k: v for k, v in options.items() if v is not None})
    if getattr(model, "_keep_in_fp32_modules", None) and dtype not in (None, torch.float32):
        return None, "it keeps some modules in float32"
    aliases = dict(getattr(model, "all_tied_weights_keys", None) or {})
    saved_buffers = {name for name in model.state_dict() if name not in dict(model.named_parameters())}
    wanted: dict[str, str] = {}
    for name in own:
        if name not in saved_buffers and name in dict(model.named_buffers()):
            continue
        found = name if name in files else aliases.get(name)
        if found not in files:
            other = next((alias for alias, target in aliases.items() if target == name and alias in files), None)
            if other is None:
                return None, f"{name} has another name in the file"
            found = other
        wanted[name] = str(found)
    _read(model, wanted, files, device, dtype)
    return model, ""


def _dtype(given: Any, config: Any) -> torch.dtype | None:
    """What ``from_pretrained`` makes of its ``dtype``; None: as it is in the file."""
    chosen = getattr(config, "dtype", None) if given in (None, "auto") else given
    return getattr(torch, chosen.removeprefix("torch.")) if isinstance(chosen, str) else chosen


def _read(
    model: nn.Module,
    wanted: Mapping[str, str],
    files: Mapping[str, Path],
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    by_file: dict[Path, list[str]] = {}
    for name, key in wanted.items():
        by_file.setdefault(files[key], []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as opened:
            for name in names:
                tensor = opened.get_tensor(wanted[name])
                if dtype is not None and tensor.is_floating_point():
                    tensor = tensor.to(dtype)
                parent, _, own = name.rpartition(".")
                module = model.get_submodule(parent)
                if own in module._buffers:
                    module._buffers[own] = tensor.to(device)
                else:
                    setattr(module, own, nn.Parameter(tensor.to(device), requires_grad=False))
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)


def _directory(path: str) -> Path | None:
    if os.path.isdir(path):
        return Path(path)
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.safetensors.index.json", "config.json"]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception:  # whatever the hub's client raises; from_pretrained will say it better
        return None
