"""From Trainer events to Ray Train."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray.train
import torch.distributed as dist
from ray.experimental import tqdm_ray
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from silverspoon_ray.training_arguments import TrainingArguments

CHECKPOINT_SUBDIRECTORY = "checkpoint"
"""Where the Hugging Face checkpoint lies within a Ray Train checkpoint; the same as in Ray's own integration."""

# Files that every rank writes for itself. On nodes other than rank 0's, one rank uploads these and nothing else.
PER_RANK_FILES = ("rng_state_*", "data_position_*", "*.distcp", "*_zero_*", "__*")


class RayReportCallback(TrainerCallback):
    """Every log goes to Ray Train, every saved checkpoint to the run's storage.

    A checkpoint is uploaded by one rank of each node, straight from where the Trainer wrote it: the files are linked,
    not copied.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        self.metrics.update(logs or {})
        self.metrics["step"] = state.global_step
        ray.train.report({**(logs or {}), "step": state.global_step})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if dist.is_initialized() and args.world_size > 1:
            dist.barrier()  # the other ranks of this node have written their files too
        context = ray.train.get_context()
        saved = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        metrics = {**self.metrics, "step": state.global_step}
        if context.get_local_rank() != 0:
            ray.train.report(metrics)
            return
        upload = Path(args.output_dir) / f"upload-{state.global_step}-{context.get_world_rank()}"
        shutil.rmtree(upload, ignore_errors=True)
        everything = context.get_world_rank() == 0
        _link_tree(saved, upload / CHECKPOINT_SUBDIRECTORY, ("*",) if everything else PER_RANK_FILES)
        # Ray Train deletes the links after a synchronous upload only if asked to; the Trainer's own directory stays.
        ray.train.report(
            metrics,
            checkpoint=ray.train.Checkpoint.from_directory(str(upload)),
            delete_local_checkpoint_after_upload=True,
        )
        shutil.rmtree(upload, ignore_errors=True)


class RayProgressCallback(TrainerCallback):
    """A progress bar of rank 0 that Ray shows on the driver."""

    def __init__(self) -> None:
        self._bar: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._bar = tqdm_ray.tqdm(total=state.max_steps, desc="distilling", unit="step")
            self._bar.update(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        loss = (logs or {}).get("loss")
        if self._bar is not None and loss is not None:
            self._bar.set_description(f"distilling, loss {loss:.4f}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _link_tree(source: Path, target: Path, patterns: Iterable[str]) -> None:
    for path in sorted({found for pattern in patterns for found in source.rglob(pattern) if found.is_file()}):
        linked = target / path.relative_to(source)
        linked.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, linked)
    target.mkdir(parents=True, exist_ok=True)
