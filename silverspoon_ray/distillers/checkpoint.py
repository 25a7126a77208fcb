"""What a distiller adds to a Hugging Face checkpoint, JSON and never a pickle, and how it reads one."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerState
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.files import write_whole
from silverspoon_ray.models.saved import load_saved, names_differ
from silverspoon_ray.teacher.random_stream import state_from_json, state_to_json
from silverspoon_ray.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

ARGUMENTS_FILE = "training_args.json"
PICKLED_ARGUMENTS_FILE = "training_args.bin"


class SafeCheckpoints(Trainer):
    """The part of a distiller that writes and reads checkpoints."""

    args: TrainingArguments
    data_position: dict[str, Any] | None = None
    """The data's random state after the last batch that was learned from."""

    _resume_position: dict[str, Any] | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trainer's; but a run that resumes where it had ended is done, where Trainer would train one more step."""
        checkpoint = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.args.output_dir)
        state_file = Path(checkpoint) / "trainer_state.json" if isinstance(checkpoint, str | os.PathLike) else None
        if state_file is not None and self.args.max_steps > 0 and state_file.is_file():
            state = TrainerState.load_from_json(str(state_file))
            if state.global_step >= self.args.max_steps:
                logger.warning("The run is at step %d of %d already.", state.global_step, self.args.max_steps)
                self._load_from_checkpoint(str(checkpoint))
                self.state = state
                return TrainOutput(state.global_step, float("nan"), {})
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            directory = Path(output_dir if output_dir is not None else self.args.output_dir)
            # Trainer pickles the arguments; nothing that we write may need unpickling.
            (directory / PICKLED_ARGUMENTS_FILE).unlink(missing_ok=True)
            write_json(directory / ARGUMENTS_FILE, self.args.to_sanitized_dict())

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.data_position is not None:
            save_data_position(output_dir, self.args.process_index, self.data_position)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._resume_position = load_data_position(checkpoint, self.args.process_index)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        target = self.model if model is None else model
        if self._needs_translation(resume_from_checkpoint):
            load_saved(target, Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and self._needs_translation(best):
            load_saved(self.model, Path(best))
        else:
            super()._load_best_model()

    def _needs_translation(self, checkpoint: str) -> bool:
        """Trainer would load nothing: see :func:`names_differ`."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return False
        return names_differ(self.model, Path(checkpoint))


def write_json(path: Path, content: Any) -> None:
    """Write a whole file or none: it gets its name when it is complete."""
    write_whole(path, json.dumps(content, indent=1, sort_keys=True, default=str).encode())


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
