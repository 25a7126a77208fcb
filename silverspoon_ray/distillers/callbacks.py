"""Trainer callbacks of the distillers: the step clock, the profiler, and a progress bar that keeps quiet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState

from silverspoon_ray.training_arguments import TrainingArguments


class StepClock(TrainerCallback):
    """Counts optimizer steps and the seconds spent in them; evaluation and saving are not part of a step."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0
        self._begin: float | None = None

    def start(self) -> None:
        """A step begins where its first batch is asked for."""
        self._begin = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.steps += 1
        if self._begin is not None:
            self.seconds += time.perf_counter() - self._begin
            self._begin = None

    def take(self) -> tuple[float, int]:
        """Seconds and steps since the last call."""
        taken = (self.seconds, self.steps)
        self.seconds, self.steps = 0.0, 0
        return taken


class CacheCallback(TrainerCallback):
    """Writes to the teacher cache what is only in memory, whenever a run could be gone on with from there.

    Args:
        flush: writes it.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self.flush = flush

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.flush()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.flush()

    def on_predict(self, *args: Any, **kwargs: Any) -> None:
        self.flush()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.flush()


class ProfilerCallback(TrainerCallback):
    """torch.profiler around the training steps; writes Chrome traces, one file for each active window and rank.

    Args:
        output_dir: where traces go.
    """

    def __init__(self, output_dir: str) -> None:
        self.output_dir = output_dir
        self._profiler: torch.profiler.profile | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=args.profiling_wait,
                warmup=args.profiling_warmup,
                active=args.profiling_active,
                repeat=args.profiling_repeat,
            ),
            on_trace_ready=torch.profiler.tensorboard_trace_handler(
                self.output_dir, worker_name=f"rank{args.process_index}"
            ),
            with_stack=args.profiling_with_stack,
        )
        self._profiler.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


class AlignmentClipping(TrainerCallback):
    """Clips per alignment in a run where Trainer itself clips nothing, and so never asks the distiller to.

    Args:
        clip: clips the gradients as they are now.
    """

    def __init__(self, clip: Callable[[], Any]) -> None:
        self.clip = clip

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.clip()


class SilentProgressCallback(ProgressCallback):
    """transformers' progress bar without a printed line for every log; the logs are in ``state.log_history``."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        return None
