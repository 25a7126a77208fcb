"""Fixtures of the teacher's tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def small_heap() -> Iterator[None]:
    """Everything that is imported by now is out of the garbage collector's sight: accelerate collects at the start of
    every training, which takes half a second with torch and transformers loaded, and a few milliseconds without."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
