"""The collective transport: the object store's answers, bit for bit."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from silverspoon_ray import TeacherGroup, TeacherPlacement
from silverspoon_ray.cluster.transport import choice, inbox
from silverspoon_ray.errors import ConfigError, TeacherError
from silverspoon_ray.teacher.protocol import TeacherOutput, TeacherRequest
from tests.cluster import test_features, test_group
from tests.cluster.collective import COLLECTIVE, Sized, silent, sized, threads
from tests.cluster.test_group import nothing_left, reserved, wait_until
from tests.support import Pad, llama, ragged_data

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

TEACHER = partial(llama, 2, 32, 3)
IDS = torch.arange(1, 13).view(2, 6)


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
