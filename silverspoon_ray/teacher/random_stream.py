"""Random numbers for the data that do not depend on when the data is read."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def global_state() -> dict[str, Any]:
    """The state of the generators that collators and datasets draw from: Python's, NumPy's and torch's on the CPU."""
    return {"python": random.getstate(), "numpy": np.random.get_state(legacy=True), "torch": torch.get_rng_state()}


def set_global_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


class RandomStream:
    """A random state of its own for drawing batches.

    A collator that masks tokens at random and a student with dropout draw from the same global generators. If batches
    were drawn from those, a batch read two steps early would get other random numbers than one read in time, and the
    depth of the prefetch would change the training. Here batches draw from a stream of their own, and the student
    from the global one, so neither depth nor placement of the teacher changes a number.

    Args:
        seed: seeds the stream.
    """

    def __init__(self, seed: int) -> None:
        self.state = _seeded(seed)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Random numbers come from this stream while the context lasts."""
        outside = global_state()
        set_global_state(self.state)
        try:
            yield
        finally:
            self.state = global_state()
            set_global_state(outside)


def _seeded(seed: int) -> dict[str, Any]:
    outside = global_state()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # Not torch.manual_seed: that would seed every CUDA device as well, and those belong to the student.
        torch.random.default_generator.manual_seed(seed)
        return global_state()
    finally:
        set_global_state(outside)


def state_to_json(state: dict[str, Any]) -> dict[str, Any]:
    """A state as JSON values; nothing needs unpickling to read it."""
    version, internal, gauss = state["python"]
    name, keys, position, has_gauss, cached = state["numpy"]
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": base64.b64encode(state["torch"].numpy().tobytes()).decode("ascii"),
    }


def state_from_json(saved: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`state_to_json`.

    Raises:
        LookupError, TypeError, ValueError, ArithmeticError, RuntimeError: it is no state that the generators take.
    """
    version, internal, gauss = saved["python"]
    name, keys, position, has_gauss, cached = saved["numpy"]
    raw = base64.b64decode(saved["torch"], validate=True)
    state = {
        "python": (version, tuple(internal), gauss),
        "numpy": (name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached),
        "torch": torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy()),
    }
    outside = global_state()
    try:
        set_global_state(state)
    finally:
        set_global_state(outside)
    return state
