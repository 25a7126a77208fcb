"""From Trainer events to Ray Train."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import threading
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


class Reporter:
    """Sends reports to Ray Train from a thread of its own, in order.

    ``ray.train.report`` returns when the run's controller has fetched the previous report, and it looks for one only
    every so often: called from the training thread, each log would stop the training for that long, and a checkpoint
    for as long as its upload takes. Every rank sends the same sequence, so the barrier in ``report`` still matches.
    """

    QUEUED_AT_MOST = 1024
    CLOSE_TIMEOUT_S = 1800.0

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[dict[str, Any], Path | None] | None] = queue.Queue(self.QUEUED_AT_MOST)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="silverspoon-reporter", daemon=True)
        self._thread.start()

    def send(self, metrics: dict[str, Any], upload: Path | None = None) -> None:
        """Queue a report.

        Args:
            metrics: plain values.
            upload: a directory to store as the checkpoint; it is deleted afterwards.

        Raises:
            the error of an earlier report, e.g. of an upload.
        """
        self._raise_failure()
        self._queue.put((metrics, upload), timeout=self.CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Wait until everything has been sent.

        Raises:
            TimeoutError: that took longer than :attr:`CLOSE_TIMEOUT_S`.
        """
        self._queue.put(None, timeout=self.CLOSE_TIMEOUT_S)
        self._thread.join(self.CLOSE_TIMEOUT_S)
        self._raise_failure()
        if self._thread.is_alive():
            raise TimeoutError(f"reports to Ray Train were not taken within {self.CLOSE_TIMEOUT_S:g} s")

    def drain(self, timeout_s: float) -> None:
        """After a failure: give what has been queued, perhaps a checkpoint, this long to arrive. Raises nothing."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (report := self._queue.get()) is not None:
            metrics, upload = report
            if self._failure is not None:
                continue  # keep taking reports, so that the training thread comes to where it sees the failure
            try:
                checkpoint = ray.train.Checkpoint.from_directory(str(upload)) if upload is not None else None
                ray.train.report(metrics, checkpoint=checkpoint)
            except BaseException as error:
                self._failure = error
            finally:
                if upload is not None:
                    shutil.rmtree(upload, ignore_errors=True)


class RayReportCallback(TrainerCallback):
    """Every log goes to Ray Train, every saved checkpoint to the run's storage.

    A checkpoint is uploaded by one rank of each node, straight from where the Trainer wrote it: the files are linked,
    not copied.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.reporter = Reporter()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        report = {**(logs or {}), "step": state.global_step}
        self.metrics.update(report)
        self.reporter.send(report)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if dist.is_initialized() and args.world_size > 1:
            dist.barrier()  # the other ranks of this node have written their files too
        context = ray.train.get_context()
        metrics = {**self.metrics, "step": state.global_step}
        if context.get_local_rank() != 0:
            self.reporter.send(metrics)
            return
        saved = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        upload = Path(args.output_dir) / f"upload-{state.global_step}-{context.get_world_rank()}"
        shutil.rmtree(upload, ignore_errors=True)
        everything = context.get_world_rank() == 0
        _link_tree(saved, upload / CHECKPOINT_SUBDIRECTORY, ("*",) if everything else PER_RANK_FILES)
        self.reporter.send(metrics, upload)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.reporter.close()


class ProgressLinesCallback(TrainerCallback):
    """What the progress bar shows, as a line for every log: for files and job logs."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        told = [
            f"{name} {value:.4f}"
            for name, value in (logs or {}).items()
            if ("loss" in name or name.startswith("eval_")) and not name.endswith(("_runtime", "_per_second"))
        ]
        if state.is_world_process_zero and told:
            # Not print: Ray Train copies what is printed into its log, which comes to the driver as well.
            logger = logging.getLogger("silverspoon_ray.progress")
            logger.info("step %d of %d: %s", state.global_step, state.max_steps, ", ".join(told))


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
