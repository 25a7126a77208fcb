"""Callbacks that look at a run from outside: its weights' spectra, and its memory."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import json
import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)


class WeightWatcherCallback(TrainerCallback):
    """WeightWatcher's analysis of the student's layers at each evaluation (Martin et al. 2021, doi:
    10.1038/s41467-021-24025-8), as ``weightwatcher/alpha``, ``weightwatcher/log_norm`` and so on in the logs.

    Args:
        log: the distiller's ``log``.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, log: Callable[[dict[str, float]], None]) -> None:
        if importlib.util.find_spec("weightwatcher") is None:
            raise ConfigError("use_weightwatcher", True, "False, or pip install 'silverspoon-ray[weightwatcher]'")
        self.log = log

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        import weightwatcher

        with contextlib.redirect_stdout(io.StringIO()):  # it prints a line for each layer that is small
            watcher = weightwatcher.WeightWatcher(model=model)
            summary = watcher.get_summary(watcher.analyze(plot=False))
        self.log({f"weightwatcher/{name}": float(value) for name, value in summary.items()})


@dataclass(frozen=True)
class MemorySample:
    """Memory of this process at the end of a step.

    Attributes:
        step: the optimizer step.
        resident_bytes: physical memory of the process.
        cuda_bytes: memory that torch has given out on this process's GPU; 0 without one.
        tensors: tensors that Python's garbage collector knows.
        tensor_bytes: their bytes, each storage once.
    """

    step: int
    resident_bytes: int
    cuda_bytes: int
    tensors: int
    tensor_bytes: int


class MemoryDiagnosticsCallback(TrainerCallback):
    """Watches for memory that grows from step to step, as it does where something keeps tensors that it should not.

    At the end of training ``memory.json`` in the output directory has all samples. If the number of live tensors grew
    in every one of the last samples, a warning names how fast, and which shapes.

    Args:
        every: sample each so many optimizer steps; looking at all tensors takes some milliseconds.
        patience: over so many samples, and by at least one tensor for each.
    """

    FILE = "memory.json"

    def __init__(self, every: int = 50, patience: int = 5) -> None:
        for key, value in (("every", every), ("patience", patience)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(key, value, "a whole number of 1 or more")
        self.every = every
        self.patience = patience
        self.samples: list[MemorySample] = []
        self.warned = False
        self._shapes: deque[Counter[str]] = deque(maxlen=patience + 1)  # of the last samples

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every:
            return
        tensors = live_tensors()
        self.samples.append(sample_memory(state.global_step, tensors))
        self._shapes.append(shapes_of(tensors))
        del tensors
        recent = self.samples[-self.patience - 1 :]
        # Not in every single one: a few tensors come and go.
        grown = (
            len(recent) > self.patience
            and all(before.tensors <= after.tensors for before, after in pairwise(recent))
            and recent[-1].tensors - recent[0].tensors >= self.patience
        )
        if grown and not self.warned:
            self.warned = True
            steps = recent[-1].step - recent[0].step
            logger.warning(
                "Live tensors grew over the last %d samples: %.1f tensors and %.0f bytes per step: %s.",
                self.patience,
                (recent[-1].tensors - recent[0].tensors) / steps,
                (recent[-1].tensor_bytes - recent[0].tensor_bytes) / steps,
                _grown(self._shapes[0], self._shapes[-1]),
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.samples and state.is_world_process_zero:
            directory = Path(args.output_dir)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / self.FILE).write_text(json.dumps([asdict(sample) for sample in self.samples], indent=1))


def sample_memory(step: int, tensors: Sequence[torch.Tensor]) -> MemorySample:
    """Memory of this process now, of which ``tensors`` are all that live."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    cuda = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return MemorySample(step, resident_bytes(), cuda, len(tensors), sum(storages.values()))


def live_tensors() -> list[torch.Tensor]:
    """Every tensor that Python knows, with memory of its own; what only waits to be collected is collected first."""
    gc.collect()
    found = []
    for thing in gc.get_objects():
        with contextlib.suppress(Exception):  # half-made and dying objects raise what they like
            if isinstance(thing, torch.Tensor) and thing.device.type != "meta":
                found.append(thing)
    return found


def shapes_of(tensors: Iterable[torch.Tensor]) -> Counter[str]:
    """How many there are of each dtype and shape."""
    return Counter(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)


def _grown(before: Counter[str], after: Counter[str], most: int = 3) -> str:
    return ", ".join(f"{count} more {shape}" for shape, count in (after - before).most_common(most))


def resident_bytes() -> int:
    """Physical memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * (os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 4096)
