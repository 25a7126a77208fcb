"""Values that hold tensors somewhere inside: what modules take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply ``function`` to each tensor in nested tuples, lists, mappings and dataclasses; all else passes unchanged.

    Mappings of any type, model outputs among them, come back as plain dictionaries.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{name: map_tensors(function, getattr(value, name)) for name in fields})
    return value
