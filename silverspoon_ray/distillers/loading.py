"""Data loaders of the distillers: how a lookahead gets into accelerate's loader."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate.data_loader import SkipBatchSampler, prepare_data_loader
from torch.utils.data import DataLoader

from silverspoon_ray.teacher.lookahead import LookaheadLoader, Window
from silverspoon_ray.teacher.random_stream import set_global_state
from silverspoon_ray.training_arguments import TrainingArguments


class ResumedOrder:
    """A batch sampler whose first batches only pass by; behind them the random state is the one of the stopped run.

    Args:
        batches: the sampler, which may draw its order from the global generators as iteration begins.
        skipped: so many batches will be thrown away unread.
        position: the random state after those batches had been drawn and collated.
    """

    def __init__(self, batches: Iterable[Any], skipped: int, position: dict[str, Any]) -> None:
        self.batches = batches
        self.skipped = skipped
        self.position = position

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches):
            if number == self.skipped:
                set_global_state(self.position)
            yield batch

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)


def loader_of(epoch_iterator: Any) -> Any:
    """The accelerate loader behind an iterator whose first batch has not been asked for yet; else None.

    Trainer makes a loader of its own to skip what a resumed run has seen, and hands on nothing but its iterator.
    """
    if not isinstance(epoch_iterator, types.GeneratorType):
        return None
    if inspect.getgeneratorstate(epoch_iterator) != inspect.GEN_CREATED:
        return None
    return inspect.getgeneratorlocals(epoch_iterator).get("self")


def own_rows_loader(dataset: Any, batch_size: int, collate: Callable[..., Any], args: TrainingArguments) -> Any:
    """A loader for a dataset that gives this rank rows of its own already.

    accelerate would divide those among the ranks once more and lose most of them, so it is told that this rank is the
    only one.
    """
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=batch_size,
        collate_fn=collate,
        drop_last=args.dataloader_drop_last,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory,
    )
    return prepare_data_loader(
        loader, device=args.device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
    )


def install_lookahead(
    loader: Any,
    args: TrainingArguments,
    *,
    training: bool,
    teacher_inputs: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    window: Callable[[], Window] | None,
    depth: int,
    resume_position: dict[str, Any] | None,
) -> Any:
    """Put a lookahead beneath an accelerate loader, once.

    Args:
        loader: as accelerate prepared it; any other is left as it is.
        args: for seeds.
        training: not an evaluation.
        teacher_inputs: see :class:`LookaheadLoader`.
        window: makes the window of one iteration; None where the teacher cannot be asked ahead.
        depth: how many batches ahead.
        resume_position: the data's random state after the last batch that a resumed run has seen.
    """
    base = getattr(loader, "base_dataloader", None)
    if base is None or isinstance(base, LookaheadLoader):
        return loader
    # A resumed run begins with a loader that skips what was seen. In a data stream the batches are drawn once more, and
    # with them their random numbers. In a set the sampler draws its order once more, but the batches are left out, so
    # the random state has to be brought to where they would have left it. A run that resumes at the end of an epoch has
    # nothing to skip: the next begins as always.
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(loader, name, None)
        if training and resume_position is not None and isinstance(sampler, SkipBatchSampler):
            sampler.batch_sampler = ResumedOrder(sampler.batch_sampler, sampler.skip_batches, resume_position)
    seed = args.data_seed if args.data_seed is not None else args.seed

    def iteration_seed() -> int:
        # The same on every rank, as Trainer seeds them all alike: samplers that shuffle with the global generators
        # must give one order everywhere. An evaluation draws the same numbers every time, so that two can be compared.
        return hash((seed, loader.iteration if training else -1)) % 2**63

    loader.base_dataloader = LookaheadLoader(
        base,
        seed=iteration_seed,
        window=window,
        teacher_inputs=teacher_inputs,
        depth=depth if window is not None else 0,
        skip=getattr(loader, "skip_batches", 0),
    )
    return loader


def predictions(outputs: Any, ignored: list[str]) -> torch.Tensor | tuple[Any, ...]:
    """What ``compute_metrics`` gets of a model's outputs: all but the loss and the ignored keys, as in Trainer."""
    if isinstance(outputs, torch.Tensor):
        return outputs.detach()
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    names = outputs.keys() if isinstance(outputs, Mapping) else [""] * len(outputs)
    kept = tuple(value for name, value in zip(names, values, strict=True) if name not in (*ignored, "loss"))
    return kept[0] if len(kept) == 1 else kept
