"""The collective transport: the object store's answers, bit for bit, and what happens when somebody dies."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.train import FailureConfig, RunConfig

from silverspoon_ray import TeacherGroup, TeacherHandle, TeacherPlacement
from silverspoon_ray.cluster.transport import choice, inbox
from silverspoon_ray.cluster.transport.pair import Pair
from silverspoon_ray.errors import ConfigError, TeacherError
from silverspoon_ray.teacher.protocol import TeacherOutput, TeacherRequest
from tests.cluster import test_features, test_group, test_trainer
from tests.cluster.test_group import nothing_left, reserved, wait_until
from tests.support import Pad, llama, ragged_data

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

TEACHER = partial(llama, 2, 32, 3)
IDS = torch.arange(1, 13).view(2, 6)
COLLECTIVE = TeacherRequest(transport="collective")


class Assorted(torch.nn.Module):
    """Its modules return every kind of tensor; one fills the same memory anew in each forward."""

    class Gives(torch.nn.Module):
        def __init__(self, what: str) -> None:
            super().__init__()
            self.what = what
            self.workspace = torch.zeros(4, 5)

        def forward(self, x: torch.Tensor) -> Any:
            y = x.float().mean() + torch.arange(20.0).view(4, 5)
            return {
                "bf16": lambda: y.bfloat16(),
                "fp16": lambda: y.half(),
                "fp8": lambda: y.to(torch.float8_e4m3fn),
                "int": lambda: (y * 7).long(),
                "bool": lambda: y > 3,
                "empty": lambda: y[:0],
                "0-d": lambda: y.sum(),
                "non-contiguous": lambda: y.t()[::2],
                "part": lambda: y[1:3],
                "nested": lambda: {"a": (y + 1, [y.long(), None]), "b": "text", "c": y[:0].int()},
                "twice": lambda: (y, y),
                "workspace": lambda: self.workspace.copy_(y),
                "large": lambda: y.sum() + torch.arange(float(2**20)),
            }[self.what]()

    KINDS = (
        *("bf16", "fp16", "fp8", "int", "bool", "empty", "0-d", "non-contiguous", "part", "nested", "twice"),
        *("workspace", "large"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.gives = torch.nn.ModuleList(self.Gives(kind) for kind in self.KINDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.gives:
            module(x)
        return x.float() * 2


class Sized(torch.nn.Module):
    """Its answer is as large as asked for."""

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.arange(int(numbers[0]), dtype=torch.float32) + float(numbers[1])


def sized(megabytes: float, marked: float = 0.0) -> dict[str, torch.Tensor]:
    return {"numbers": torch.tensor([int(megabytes * 2**18), int(marked)])}


def same(left: Any, right: Any) -> bool:
    """The same types, dtypes, shapes and bits, however nested."""
    if isinstance(left, TeacherOutput):
        left, right = ({k: v for k, v in vars(x).items() if k != "borrowed"} for x in (left, right))
    if isinstance(left, torch.Tensor):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (left, right)))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, tuple | list):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("silverspoon")]


def silent(group: TeacherGroup) -> bool:
    """No stream is served, nothing waits to be sent."""
    return all((worker["streams"], worker["unsent_bytes"]) == (0, 0) for worker in group.stats())


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    wait_until(lambda: not threads())


@pytest.fixture(scope="module")
def group(ray_cluster: Any) -> Any:
    with TeacherGroup.create(TEACHER, TeacherPlacement(replicas=2)) as created:
        yield created


@pytest.fixture(scope="module")
def plain(ray_cluster: Any) -> Any:
    """One process, of answers that can be large."""
    with TeacherGroup.create(Sized) as created:
        yield created


# ---- the same answers ---------------------------------------------------------------------------------------


def test_every_kind_of_tensor() -> None:
    names = tuple(f"gives.{number}" for number in range(len(Assorted.KINDS)))
    with TeacherGroup.create(Assorted) as group:
        streams = {
            transport: group.handle.open(TeacherRequest(outputs=names, inputs=("gives.0",), transport=transport))
            for transport in ("object_store", "collective")
        }
        batches = [{"x": torch.arange(6) + start} for start in (0, 10, 20)]
        answers = {t: [stream.submit(batch) for batch in batches] for t, stream in streams.items()}
        wait_until(lambda: group.stats()[0]["forwards"] == 6)  # what the model still holds has been overwritten
        for stored, received in zip(*answers.values(), strict=True):
            assert same(stored.result(), received.result())
            assert stored.nbytes == received.nbytes > 2**22
            assert stored.result().borrowed
            whole = received.result().owned()
            whole.outputs["gives.10"][0].zero_()  # the same tensor twice: it travels once, and is two when it is owned
            assert whole.outputs["gives.10"][1].any()


FORMS: list[dict[str, Any]] = [
    {"logits": "full"},
    {"logits": "full", "wire_dtype": torch.bfloat16},
    {"logits": "hidden"},
    {"logits": "top_k", "top_k": 5},
    {"logits": "sampled", "top_k": 12, "temperature": 2.0},
    {"logits": None, "outputs": ("model.layers.0", "model.norm"), "inputs": ("model.layers.1", "lm_head")},
]


@pytest.mark.parametrize("form", FORMS, ids=[str(i) for i in range(len(FORMS))])
def test_every_form_of_soft_targets(form: dict[str, Any], group: TeacherGroup) -> None:
    expected = group.handle.forward({"input_ids": IDS}, **form)
    got = group.handle.forward({"input_ids": IDS}, **form, transport="collective")
    assert same(expected, got)
    wait_until(lambda: silent(group))


@pytest.mark.parametrize("strategy", ["pp", "tp", "sharded"])
def test_every_layout(strategy: str, tmp_path: Path) -> None:
    """Ten batches in flight, with parts from every rank that has some."""
    TEACHER().save_pretrained(tmp_path)
    before = reserved()
    inputs = ("model.layers.1", "lm_head")
    request = {"outputs": ("model.layers.0", "model.layers.2"), "inputs": inputs}
    with TeacherGroup.create(str(tmp_path), TeacherPlacement(strategy=strategy, num_devices=2)) as group:
        streams = [group.handle.open(TeacherRequest(**request, transport=t)) for t in ("object_store", "collective")]
        batches = [Pad()(ragged_data(rows, seed=rows)) for rows in (5, 4, 1, 3)]
        for batch in batches:
            del batch["labels"]
        pairs = [[stream.submit(batch) for stream in streams] for batch in batches]
        for stored, received in pairs:
            assert same(stored.result(), received.result())
            assert stored.nbytes == received.nbytes
        sending = [worker["streams"] for worker in group.stats()]
        assert sending == ([1, 0] if strategy == "tp" else [1, 1])
        del streams, pairs, stored, received
        wait_until(lambda: silent(group))
    nothing_left(before)


@pytest.mark.parametrize("kind", ["response_based", "holistic", "blockwise"])
def test_loss_curves(kind: str, group: TeacherGroup) -> None:
    arguments = {"teacher_prefetch": 3}
    if kind == "response_based":
        history = partial(test_group.student_history, group.handle, **arguments)
    else:
        history = partial(test_features.history, kind, group.handle, **arguments)
    sent = sum(worker["bytes_sent"] for worker in group.stats())
    expected = history(teacher_transport="object_store")
    once = sum(worker["bytes_sent"] for worker in group.stats())
    assert history(teacher_transport="collective") == expected
    assert sum(worker["bytes_sent"] for worker in group.stats()) - once == once - sent


# ---- order, and what nobody wants -----------------------------------------------------------------------------


def test_any_order_and_answers_that_nobody_reads(group: TeacherGroup) -> None:
    stream = group.handle.open(COLLECTIVE)
    batches = [{"input_ids": IDS + i} for i in range(8)]
    expected = [group.handle.forward(batch).logits for batch in batches]
    answers = [stream.submit(batch) for batch in batches]
    answers.pop(3).release()
    answers.pop(3)  # dropped without a word
    del batches[3:5], expected[3:5]
    for place in (5, 0, 3, 1, 4, 2):
        assert torch.equal(answers[place].result().logits, expected[place])
        assert torch.equal(answers[place].result().logits, expected[place])  # again
    for answer in answers:
        answer.release()
    unread = [stream.submit(batch) for batch in batches]
    for answer in unread:
        answer.release()
    assert torch.equal(stream.submit(batches[0]).result().logits, expected[0])
    wait_until(lambda: sum(worker["unsent_bytes"] for worker in group.stats()) == 0)
    del stream, answers, unread, answer
    wait_until(lambda: silent(group))


def test_a_stream_that_is_dropped_ends(plain: TeacherGroup) -> None:
    """With answers on their way: its threads end, and the actor forgets it."""
    stream = plain.handle.open(COLLECTIVE)
    stream.submit(sized(1)).result()
    answers = [stream.submit(sized(8)) for _ in range(4)]
    assert threads()
    assert plain.stats()[0]["streams"] == 1
    del stream, answers
    gc.collect()
    wait_until(lambda: not threads(), 3)
    wait_until(lambda: silent(plain), 3)


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


# ---- the choice ---------------------------------------------------------------------------------------------------


def test_what_auto_means(
    plain: TeacherGroup, group: TeacherGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On CPUs the object store. Otherwise what a trial shows."""
    auto = TeacherRequest(transport="auto")
    assert auto == COLLECTIVE, "a teacher need not prepare for both"
    assert plain.handle.open(auto).inbox is None
    monkeypatch.setattr(choice, "on_gpu", lambda: True)
    for teacher in (plain, group):
        assert teacher.handle.open(auto).inbox is not None
    answer = plain.handle.forward(sized(1, 3), transport="auto")
    assert answer.logits[0] == 3

    monkeypatch.setattr(choice, "known_bytes", lambda: torch.zeros(3))
    with caplog.at_level(logging.WARNING):
        assert plain.handle.open(auto).inbox is None
    assert "come through the object store; the collective transport: what arrived is not" in caplog.text
    with pytest.raises(ConfigError, match="object_store, collective or auto"):
        plain.handle.open(TeacherRequest(transport="nccl"))
    wait_until(lambda: silent(plain) and silent(group))


def test_a_process_that_cannot_receive(plain: TeacherGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever insists on the transport gets an error, not another transport."""

    def refused(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no port is free")

    monkeypatch.setattr(inbox, "TCPStore", refused)
    with pytest.raises(TeacherError, match="cannot receive by the collective transport: no port is free"):
        plain.handle.open(COLLECTIVE)


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
