"""Which part of a module's output is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OutputSelector:
    """Picks an entry of a tuple, list or mapping; a tensor passes as it is.

    Args:
        index: position of the entry, or its key in a mapping (of a model output, say).
    """

    index: int | str = 0

    def __call__(self, output: Any) -> Any:
        if isinstance(output, Mapping):
            return output[self.index] if isinstance(self.index, str) else list(output.values())[self.index]
        if isinstance(output, tuple | list) and isinstance(self.index, int):
            return output[self.index]
        return output


def identity(output: Any) -> Any:
    """The output as the module returned it."""
    return output
