"""The teacher's output head beside the entries: hidden states are worth nothing without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import safetensors.torch
from safetensors import SafetensorError

from silverspoon_ray.errors import CacheError
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.teacher.cache.place import KEY, Place

HEAD = "output_head.safetensors"


def write_head(place: Place, head: Callable[[], OutputHead]) -> None:
    """Keep the head if it is not there yet.

    Args:
        place: the cache's.
        head: gives it; called only where it is needed.
    """
    if HEAD in place.names():
        return
    fields: dict[str, Any] = vars(head())
    tensors = {name: value.detach().cpu().contiguous() for name, value in fields.items() if hasattr(value, "detach")}
    numbers = {name: value for name, value in fields.items() if name not in tensors}
    with place.writing(HEAD, exclusive=True) as stream:
        stream.write(safetensors.torch.save(tensors, {"numbers": json.dumps(numbers)}))


def read_head(place: Place) -> OutputHead:
    """The head, on the CPU.

    Raises:
        CacheError: it is not there or damaged.
    """
    raw = place.read(HEAD)
    if raw is None:
        raise CacheError(KEY, place.uri, f"a cache with the teacher's {HEAD}; start the run with the teacher once")
    try:
        tensors = safetensors.torch.load(raw)
        length = int.from_bytes(raw[:8], "little")
        numbers = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["numbers"])
        return OutputHead(**tensors, **numbers)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CacheError(KEY, place.uri, f"a cache whose {HEAD} can be read ({error})") from error
