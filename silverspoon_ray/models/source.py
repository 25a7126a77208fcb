"""Where a model comes from, and how it is built where it is needed.

Only descriptions cross process borders: a directory or hub id, a callable, a :class:`RandomInit`. The model itself is
built in the worker or actor that uses it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.models.structure import structure_of

ModelSource = str | os.PathLike[str] | Callable[[], nn.Module] | nn.Module
"""A model directory or hub id, a callable without arguments that returns a module, or the module itself."""


@dataclass(frozen=True)
class RandomInit:
    """A zero-argument callable: the architecture of a saved model, freshly initialised.

    Args:
        path: model directory or hub id whose configuration is taken.
        overrides: configuration values to replace, e.g. ``{"num_hidden_layers": 2}``.
        seed: seeds the initialisation, so that every rank and every restart builds the same weights.
    """

    path: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __call__(self) -> nn.Module:
        config = transformers.AutoConfig.from_pretrained(self.path, **self.overrides)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model: nn.Module = architecture_class(config, self.path)._from_config(config)
        return model


def architecture_class(config: transformers.PretrainedConfig, source: str) -> Any:
    """The transformers class that a configuration names as its own.

    Raises:
        ConfigError: the configuration names none, or one that the installed transformers does not have.
    """
    names = getattr(config, "architectures", None) or []
    if not names:
        raise ConfigError("model", source, "a model whose config.json names its class under `architectures`")
    model_class = getattr(transformers, names[0], None)
    if model_class is None:
        raise ConfigError("model", source, f"transformers {transformers.__version__} has no class {names[0]}")
    return model_class


def check_source(key: str, source: object) -> None:
    """Refuse what cannot be a model, without loading it.

    Raises:
        ConfigError: naming ``key``.
    """
    if isinstance(source, nn.Module):
        return
    if isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        looks_local = text.startswith(("/", "./", "../", "~")) or Path(text).expanduser().exists()
        if looks_local and not (Path(text).expanduser() / "config.json").is_file():
            raise ConfigError(key, text, "a model directory with a config.json, as save_pretrained writes it")
        return
    if not callable(source):
        raise ConfigError(key, source, "a model directory or hub id, a callable without arguments, or an nn.Module")
    try:
        parameters = inspect.signature(source).parameters.values()
    except (TypeError, ValueError):
        return  # some callables that are built in C do not tell
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required:
        raise ConfigError(key, source, f"a callable without arguments; this one needs {', '.join(required)}")


def located(source: Any) -> Any:
    """The source with a directory's path made absolute: who loads it has another working directory."""
    if isinstance(source, str | os.PathLike):
        path = Path(os.fspath(source)).expanduser()
        return str(path.absolute()) if path.exists() else os.fspath(source)
    return source


def known_config(source: Any) -> Any:
    """The configuration of a source that shows it without being loaded; None of any other."""
    try:
        if isinstance(source, RandomInit):
            return transformers.AutoConfig.from_pretrained(source.path, **source.overrides)
        if isinstance(source, str | os.PathLike) and Path(source).expanduser().is_dir():
            return transformers.AutoConfig.from_pretrained(Path(source).expanduser())
    except (OSError, ValueError):
        return None  # the one who loads it will say what is wrong with it
    return getattr(source, "config", None)


def known_structure(source: Any) -> nn.Module | None:
    """The model on the meta device, of a source that shows it without being loaded; None of any other."""
    if isinstance(source, nn.Module):
        return structure_of(source)
    config = known_config(source)
    if config is None:
        return None
    try:
        with torch.device("meta"):
            model: nn.Module = architecture_class(config, str(source))._from_config(config)
    except Exception:  # whatever this architecture's own checks raise; the one who loads it will say it better
        return None
    return model


def build_model(source: ModelSource, key: str = "model", **load_kwargs: Any) -> nn.Module:
    """Build the model that ``source`` describes.

    Args:
        source: see :data:`ModelSource`. A directory or id is loaded with the class that its configuration names.
        key: the name used in errors, ``"teacher"`` or ``"student"``.
        load_kwargs: passed to ``from_pretrained`` (dtype, attn_implementation, ...); directories and ids only.

    Raises:
        ConfigError: the source is none of these, or does not give a module.
    """
    check_source(key, source)
    if isinstance(source, nn.Module):
        return source
    if isinstance(source, str | os.PathLike):
        path = os.path.expanduser(os.fspath(source))
        try:
            config = transformers.AutoConfig.from_pretrained(path)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(key, path, f"a model directory or hub id that can be read ({reason})") from error
        model: nn.Module = architecture_class(config, path).from_pretrained(path, **load_kwargs)
        return model
    model = source()
    if not isinstance(model, nn.Module):
        raise ConfigError(key, source, f"a callable that returns an nn.Module; it returned {type(model).__name__}")
    return model
