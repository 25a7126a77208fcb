"""The collective transport where students and teachers are slow, stand still or die."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.train import FailureConfig, RunConfig

from silverspoon_ray import TeacherGroup, TeacherHandle
from silverspoon_ray.cluster.transport.pair import Pair
from silverspoon_ray.errors import TeacherError
from tests.cluster import test_trainer
from tests.cluster.collective import COLLECTIVE, Sized, silent, sized, threads
from tests.cluster.test_group import nothing_left, reserved, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    wait_until(lambda: not threads())


@pytest.fixture(scope="module")
def plain(ray_cluster: Any) -> Any:
    """One process, of answers that can be large."""
    with TeacherGroup.create(Sized) as created:
        yield created


# ---- students that are slow, or die ---------------------------------------------------------------------------


@ray.remote(num_cpus=0)
class Student:
    """A student in a process of its own."""

    def __init__(self, handle: TeacherHandle) -> None:
        self.stream = handle.open(COLLECTIVE)
        self.answers: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def submit(self, batches: list[dict[str, Any]]) -> None:
        self.answers += [self.stream.submit(batch) for batch in batches]

    def results(self) -> list[tuple[float, float]]:
        found = [answer.result().logits for answer in self.answers]
        self.answers.clear()
        return [(float(logits[0]), float(logits[-1])) for logits in found]


def test_one_student_stands_still_and_another_dies(plain: TeacherGroup) -> None:
    """Neither holds up a third, nor does the teacher keep what a dead one had asked for."""
    students = [Student.remote(plain.handle) for _ in range(2)]
    pids = ray.get([student.pid.remote() for student in students], timeout=60)
    for student in students:
        ray.get(student.submit.remote([sized(1)]), timeout=60)
        ray.get(student.results.remote(), timeout=60)
    before = plain.stats()[0]["forwards"]
    # They have asked, and do not take a byte any more.
    asked = [student.submit.remote([sized(4, 1), sized(4, 2), sized(4, 3)]) for student in students]
    ray.get(asked, timeout=60)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        stream = plain.handle.open(COLLECTIVE)
        begin = time.monotonic()
        for i in range(20):
            assert float(stream.submit(sized(1, i)).result().logits[0]) == i
        assert time.monotonic() - begin < 20
        assert plain.stats()[0]["forwards"] == before + 26, "a forward waited for a student"
        assert plain.stats()[0]["streams"] == 3
    finally:
        os.kill(pids[1], signal.SIGKILL)
        os.kill(pids[0], signal.SIGCONT)
    assert [first for first, _ in ray.get(students[0].results.remote(), timeout=60)] == [1, 2, 3]
    wait_until(lambda: plain.stats()[0]["streams"] == 2)
    ray.kill(students[0])
    del stream
    wait_until(lambda: silent(plain))
    assert plain.handle.forward(sized(1, 7), transport="collective").logits[0] == 7


# ---- a teacher that dies --------------------------------------------------------------------------------------


def when_ordered(monkeypatch: pytest.MonkeyPatch, before: Any, after: Any = lambda: None) -> None:
    """Have something happen, once, when the student orders the next answer: before it is sent, or as it is sent."""
    order = Pair._order
    happened = threading.Event()

    def ordered(self: Pair, what: int, number: int) -> None:
        first = not happened.is_set()
        happened.set()
        if first:
            before()
        order(self, what, number)
        if first:
            after()

    monkeypatch.setattr(Pair, "_order", ordered)


@pytest.mark.parametrize("moment", ["computing", "answered", "sending"])
def test_a_teacher_that_is_killed(moment: str, plain: TeacherGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = plain.handle.open(COLLECTIVE)
    assert float(stream.submit(sized(1, 5)).result().logits[0]) == 5
    pid = plain.stats()[0]["pid"]

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)

    answers: list[Any] = []

    def kill_when_answered() -> None:
        """All that was asked for is computed, and Ray's part of it is on the student's side."""
        wait_until(lambda: len(answers) == 6)
        refs = [answer._refs[0] for answer in answers]
        assert len(ray.wait(refs, num_returns=6, timeout=30)[0]) == 6
        kill()
        time.sleep(0.2)

    if moment == "answered":
        when_ordered(monkeypatch, kill_when_answered)
    elif moment == "sending":
        when_ordered(monkeypatch, lambda: None, kill)
    answers += [stream.submit(sized(24, i)) for i in range(4)]
    if moment == "computing":
        kill()
    answers += [stream.submit(sized(2, i)) for i in range(4, 6)]
    begin = time.monotonic()
    for i, answer in enumerate(answers):
        assert float(answer.result().logits[0]) == i
        assert float(answer.result().logits[-1]) == i + len(answer.result().logits) - 1
    assert time.monotonic() - begin < 60
    assert plain.stats()[0]["pid"] != pid
    assert plain.handle.forward(sized(1, 7), transport="collective").logits[0] == 7
    answers.clear()
    del stream, answer
    wait_until(lambda: silent(plain))


@pytest.mark.parametrize("moment", ["computing", "answered"])
def test_a_teacher_that_stands_still(moment: str, plain: TeacherGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error within the limit that names the replica, the batch and the time; the next stream works."""
    handle = TeacherHandle(plain.handle.replicas, 4.0)
    stream = handle.open(COLLECTIVE)
    stream.submit(sized(1)).result()
    pid = plain.stats()[0]["pid"]
    if moment == "answered":
        when_ordered(monkeypatch, lambda: os.kill(pid, signal.SIGSTOP))
    else:
        os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        with pytest.raises(TeacherError, match=r"within 4 s.*did not answer") as caught:
            stream.submit(sized(8)).result()
        assert time.monotonic() - begin < 4 + 5 + 3  # with the search for who is silent
        assert caught.value.rank == 0
        assert "numbers int64[2]" in caught.value.batch
    finally:
        os.kill(pid, signal.SIGCONT)
    assert handle.forward(sized(1, 7), transport="collective").logits[0] == 7
    del stream, caught
    wait_until(lambda: silent(plain))


# ---- memory -----------------------------------------------------------------------------------------------------


def test_memory_is_flat(plain: TeacherGroup) -> None:
    """Hundreds of steps with batches of many lengths: both processes stay as they are, Ray's store stays empty."""
    processes = [psutil.Process(), psutil.Process(plain.stats()[0]["pid"])]
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    payload, depth = 2.0, 3
    stream = plain.handle.open(COLLECTIVE)
    waiting = [stream.submit(sized(payload)) for _ in range(depth)]
    store, resident = [], []
    for step in range(1500):
        pending = waiting.pop(0)
        assert pending.result().logits[1] == 1
        pending.release()
        waiting.append(stream.submit(sized(payload * (1 - step % 7 / 20))))
        if step % 20 == 0:
            store.append(get_memory_info_reply(state).store_stats.object_store_bytes_used)
            resident.append([p.memory_info().rss - p.memory_info().shared for p in processes])
    assert max(store) - min(store) < 2**20
    for number, name in enumerate(("student", "teacher")):
        sizes = [row[number] for row in resident]
        grown = max(sizes[50:]) - max(sizes[25:50])
        assert grown < 3 * payload * 2**20, f"the {name} grew by {grown} bytes: {sizes}"
    assert plain.stats()[0]["unsent_bytes"] <= depth * payload * 2**20
    del pending, waiting, stream


# ---- on Ray Train -------------------------------------------------------------------------------------------------


def test_a_run_whose_student_is_killed(tmp_path: Path) -> None:
    """The same curve as through the object store without a kill."""
    before = reserved()
    args: dict[str, Any] = {"teacher_placement": {}, "teacher_transport": "object_store"}
    expected = test_trainer.rows(test_trainer.make(tmp_path, name="stored", args=args).fit())
    kill = test_trainer.KillOnce(5, tmp_path / "killed", tmp_path / "storage" / "run")
    storage = str(tmp_path / "storage")
    config = RunConfig(name="run", storage_path=storage, failure_config=FailureConfig(max_failures=2))
    args["teacher_transport"] = "collective"
    result = test_trainer.make(tmp_path, args=args, callbacks=[kill], run_config=config).fit()
    assert kill.starts() == [0, 4]
    assert test_trainer.curve(test_trainer.rows(result)) == test_trainer.curve(expected)
    assert result.metrics["teacher/bytes_per_step"] > 0
    nothing_left(before)
