"""One sample of a run's data, to see shapes in before training begins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import Trainer

from silverspoon_ray.errors import AlignmentError
from silverspoon_ray.teacher.random_stream import RandomStream


def one_sample(trainer: Trainer) -> dict[str, Any] | None:
    """The first sample, collated as training collates it; None where there is no dataset.

    Random numbers that reading and collating draw are not the run's.

    Raises:
        AlignmentError: the data can be read only once, so that looking would lose a sample.
    """
    collate: Any = trainer.data_collator
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()), None)
        if dataset is None:
            continue
        if dataset is trainer.train_dataset:
            collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="training")
            dataset = _without_unused_columns(trainer, dataset)
        with RandomStream(trainer.args.seed).active():
            batch: dict[str, Any] = collate([_first(dataset)])
        return batch
    return None


def _without_unused_columns(trainer: Trainer, dataset: Any) -> Any:
    try:
        import datasets
    except ImportError:
        return dataset
    if isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        return trainer._remove_unused_columns(dataset, description="training")
    return dataset


def _first(dataset: Any) -> Any:
    example = getattr(dataset, "example", None)  # of data that another process reads
    if example is not None:
        return example
    streams = isinstance(dataset, torch.utils.data.IterableDataset) or type(dataset).__name__ == "IterableDataset"
    if not streams and hasattr(dataset, "__getitem__"):
        return dataset[0]
    assert isinstance(dataset, Iterable)
    iterator = iter(dataset)
    if iterator is dataset:
        raise AlignmentError(
            "auto_projector", True, "False, with the projectors given: this dataset can be read only once"
        )
    return next(iterator)
