"""Datasets on their way into a training worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ray.data
import ray.train
from torch.utils.data import IterableDataset

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.train.plan import Shipped, WorkerPlan


class RayDataRows(IterableDataset[dict[str, Any]]):
    """This worker's rows of a ``ray.data`` dataset, one sample each; the Trainer batches and collates them as usual.

    Args:
        name: the dataset's name in the run.
        example: a row of it, for who must see one before training.
    """

    divided_by_rank = True
    """Ranks see different rows already: see ``BaseDistiller.get_train_dataloader``."""

    def __init__(self, name: str, example: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.example = example

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from ray.train.get_dataset_shard(self.name).iter_rows()


class CountedRayDataRows(RayDataRows):
    """The same where the number of rows is known: then it has a length, and epochs can be counted.

    Args:
        name: the dataset's name in the run.
        rows: rows that this worker gets in an epoch.
        example: see :class:`RayDataRows`.
    """

    def __init__(self, name: str, rows: int, example: Mapping[str, Any] | None = None) -> None:
        super().__init__(name, example)
        self.rows = rows

    def __len__(self) -> int:
        return self.rows


def is_ray_dataset(dataset: Any) -> bool:
    return isinstance(dataset, ray.data.Dataset)


def check_dataset(name: str, dataset: Any) -> None:
    """Refuse what the Trainer could not read.

    Raises:
        ConfigError: naming the dataset.
    """
    if dataset is None or callable(dataset) or is_ray_dataset(dataset):
        return
    if isinstance(dataset, str) or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        expected = "a torch or Hugging Face dataset, a ray.data.Dataset, or a callable without arguments"
        raise ConfigError(f"{name}_dataset", type(dataset).__name__, expected)


def ship_dataset(dataset: Any) -> Any:
    """A dataset through the object store; a callable as it is; None for ``ray.data``, which Ray Train delivers."""
    if dataset is None or is_ray_dataset(dataset) or (callable(dataset) and not hasattr(dataset, "__getitem__")):
        return None if is_ray_dataset(dataset) else dataset
    return Shipped.put(dataset)


def unpack_dataset(plan: WorkerPlan, name: str, world_size: int) -> Any:
    """The dataset in this process.

    Args:
        plan: the worker's plan.
        name: ``"train"`` or ``"eval"``.
        world_size: number of workers.
    """
    if name not in plan.datasets:
        return None
    given = plan.datasets[name]
    if given is not None:
        return given.get() if isinstance(given, Shipped) else given()
    if name == "eval":
        # Whole, and with an index: only then can ranks divide an uneven set so that every sample counts exactly once.
        return list(ray.train.get_dataset_shard(name).iter_rows())
    rows = plan.ray_data_rows.get(name)
    if rows is None:
        return RayDataRows(name, plan.example)
    return CountedRayDataRows(name, rows // world_size, plan.example)
