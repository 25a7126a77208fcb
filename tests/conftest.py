"""Fixtures: one Ray for all cluster tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray deletes unreferenced objects in batches of a hundred, or every second (until then they may be evicted, so they
# cost nobody anything). One at a time, the bytes in the store are those of live objects, and a test can count them.
os.environ.setdefault("RAY_free_objects_batch_size", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A local Ray with more CPU slots than the machine has cores."""
    import ray

    ray.init(
        address="local",
        num_cpus=8,
        object_store_memory=600 * 2**20,
        include_dashboard=True,
        logging_level="warning",
        log_to_driver=False,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}},
    )
    yield ray
    ray.shutdown()
