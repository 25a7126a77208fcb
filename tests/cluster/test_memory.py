"""A thousand steps: resident memory is flat, and answers take no more of the object store than the window allows."""

from __future__ import annotations

from functools import partial
from typing import Any

import psutil
import pytest
import ray
import torch
import transformers
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

import silverspoon_ray
from silverspoon_ray import ResponseBasedDistiller, TeacherGroup
from tests.support import llama, trained, training_arguments

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

VOCABULARY, BATCH, LENGTH = 2048, 4, 16
PAYLOAD = BATCH * LENGTH * VOCABULARY * 4  # bytes of one answer; far above what Ray keeps out of the store
STEPS, SETTLED = 1000, 300


class Watch(transformers.TrainerCallback):
    """Bytes in the object store and resident memory of student and teacher, every few steps."""

    def __init__(self, teacher_pid: int) -> None:
        self.processes = [psutil.Process(), psutil.Process(teacher_pid)]
        self.state = get_state_from_address(ray.get_runtime_context().gcs_address)
        self.store: list[int] = []
        self.resident: dict[int, list[int]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % 20 == 0:
            self.store.append(get_memory_info_reply(self.state).store_stats.object_store_bytes_used)
            # Without the pages of the object store that the process has ever touched; those are counted above.
            infos = [process.memory_info() for process in self.processes]
            self.resident[state.global_step] = [info.rss - info.shared for info in infos]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("prefetch", [2])
def test_a_thousand_steps(prefetch: int) -> None:
    with TeacherGroup.create(partial(llama, 2, 16, 1, VOCABULARY)) as group:
        watch = Watch(group.stats()[0]["pid"])
        before = get_memory_info_reply(watch.state).store_stats.object_store_bytes_used
        ids = torch.arange(1, LENGTH + 1)
        distiller = ResponseBasedDistiller(
            student_model=llama(1, 16, 1, VOCABULARY),
            teacher_model=group.handle,
            train_dataset=[{"input_ids": ids + i, "labels": ids + i} for i in range(64)],
            args=training_arguments(
                silverspoon_ray, max_steps=STEPS, logging_steps=100, teacher_prefetch=prefetch, learning_rate=1e-4
            ),
            callbacks=[watch],
        )
        history = trained(distiller)
        forwards = group.stats()[0]["forwards"]
    assert history[-1]["step"] == STEPS
    assert history[0]["teacher/bytes_per_step"] == PAYLOAD
    # The batches that were asked for and not used are those in flight when training ended.
    assert STEPS <= forwards <= STEPS + prefetch
    slack = 64 * 1024  # headers and alignment of the objects
    assert max(watch.store) - before <= prefetch * (PAYLOAD + slack)
    assert max(watch.store) - before > 0, "the store was never seen in use: this test would prove nothing"
    for index, name in enumerate(("student", "teacher")):
        settled, end = watch.resident[SETTLED][index], watch.resident[STEPS][index]
        assert end - settled < 12 * PAYLOAD, f"the {name} grew by {end - settled} bytes in {STEPS - SETTLED} steps"
