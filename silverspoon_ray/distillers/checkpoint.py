"""What a distiller adds to a Hugging Face checkpoint: JSON, never a pickle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.teacher.random_stream import state_from_json, state_to_json

ARGUMENTS_FILE = "training_args.json"
PICKLED_ARGUMENTS_FILE = "training_args.bin"


def write_json(path: Path, content: Any) -> None:
    """Write a whole file or none: it gets its name when it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1, sort_keys=True, default=str), encoding="utf-8")
    partial.replace(path)


def save_data_position(directory: str | Path, rank: int, state: dict[str, Any]) -> None:
    """Remember the random state from which this rank's next batch will be drawn."""
    write_json(_position_file(directory, rank), state_to_json(state))


def load_data_position(directory: str | Path, rank: int) -> dict[str, Any] | None:
    """The state that :func:`save_data_position` wrote; None if there is none for this rank.

    Raises:
        ConfigError: the file is there but is not one of ours.
    """
    path = _position_file(directory, rank)
    if not path.is_file():
        return None
    try:
        return state_from_json(json.loads(path.read_text(encoding="utf-8")))
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ConfigError(
            "resume_from_checkpoint", str(path), f"a whole checkpoint; this file is broken: {error}"
        ) from (error)


def _position_file(directory: str | Path, rank: int) -> Path:
    return Path(directory) / f"data_position_{rank}.json"
