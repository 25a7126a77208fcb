"""Seeing what modules receive and return during a forward."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from silverspoon_ray.errors import ConfigError


def named_module(model: nn.Module, name: str, key: str = "outputs") -> nn.Module:
    """The submodule of that dotted name.

    Raises:
        ConfigError: there is none; the nearest names are listed.
    """
    modules = dict(model.named_modules())
    if name not in modules:
        near = difflib.get_close_matches(name, [known for known in modules if known], n=5, cutoff=0.3)
        raise ConfigError(key, name, f"no module of that name; near are {', '.join(near) or 'none'}")
    return modules[name]


@contextmanager
def captured(
    model: nn.Module, outputs: Sequence[str] = (), inputs: Sequence[str] = ()
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Hooks on the named modules while the context lasts; none is left behind, also after an exception.

    Yields:
        Two dictionaries that fill as the modules fire: outputs by name (as returned), and inputs by name (the first
        tensor argument: positional ones first, then keywords). A module that runs twice keeps its last values.

    Raises:
        ConfigError: a name matches no module.
    """
    seen_outputs: dict[str, Any] = {}
    seen_inputs: dict[str, Any] = {}
    with ExitStack() as hooks:
        for name in outputs:

            def keep_output(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                seen_outputs[name] = output

            handle = named_module(model, name, "outputs").register_forward_hook(keep_output, with_kwargs=True)
            hooks.callback(handle.remove)
        for name in inputs:

            def keep_input(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                seen_inputs[name] = _first_tensor(args, kwargs)

            pre_handle = named_module(model, name, "inputs").register_forward_pre_hook(keep_input, with_kwargs=True)
            hooks.callback(pre_handle.remove)
        yield seen_outputs, seen_inputs


def _first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
