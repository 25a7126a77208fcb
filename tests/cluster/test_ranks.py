"""Tensor-parallel and sharded teachers, on a real Ray."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from silverspoon_ray import TeacherGroup, TeacherPlacement
from silverspoon_ray.errors import ConfigError, TeacherError
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherRequest
from tests.cluster.test_features import history
from tests.cluster.test_group import Raises, nothing_left, reserved
from tests.cluster.test_pipeline import student_history
from tests.support import Pad, gpt2, llama, ragged_data

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

TEACHER = partial(llama, 2, 32, 3)
TOLERANCE = {"tp": 1e-5, "sharded": 0.0}
NAMES = ("model.layers.0", "model.layers.2", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj")
INPUTS = ("model.layers.1", "model.layers.1.mlp.down_proj", "lm_head")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    TEACHER().save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["tp", "sharded"])
def group(request: pytest.FixtureRequest, ray_cluster: Any, directory: Path) -> Any:
    with TeacherGroup.create(str(directory), TeacherPlacement(strategy=request.param, num_devices=2)) as created:
        yield created


def batch(rows: int = 5) -> dict[str, Any]:
    made = Pad()(ragged_data(rows))
    del made["labels"]
    return made


def close(left: Any, right: Any, tolerance: float) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [5, 4, 1])
def test_answers(group: TeacherGroup, rows: int) -> None:
    """Also with rows that cannot be divided, and fewer rows than ranks."""
    local = LocalTeacher(TEACHER().eval()).answer(batch(rows), TeacherRequest(outputs=NAMES, inputs=INPUTS))
    answer = group.handle.forward(batch(rows), outputs=NAMES, inputs=INPUTS)
    tolerance = TOLERANCE[group.placement.strategy]
    close(answer.logits, local.logits, tolerance)
    for kind in ("outputs", "inputs"):
        remote, here = getattr(answer, kind), getattr(local, kind)
        assert remote.keys() == here.keys()
        for name in here:
            close(remote[name], here[name], tolerance)


def test_each_rank_holds_its_share(group: TeacherGroup) -> None:
    whole = sum(p.numel() * 4 for p in TEACHER().parameters())
    stats = group.stats()
    assert [s["device_rank"] for s in stats] == [0, 1]
    assert len({s["pid"] for s in stats}) == 2
    assert max(s["weight_bytes"] for s in stats) < 0.65 * whole
    assert group.handle.structure.config.hidden_size == 32


def test_loss_curves(group: TeacherGroup) -> None:
    tolerance = {"rel": 1e-4, "abs": 1e-6} if group.placement.strategy == "tp" else {"rel": 0, "abs": 0}
    pairs = [(student_history(group.handle, teacher_prefetch=3), student_history(TEACHER()))]
    pairs += [(history(kind, group.handle), history(kind, TEACHER())) for kind in ("holistic", "blockwise")]
    for got, wanted in pairs:
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert one == pytest.approx(other, **tolerance)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strategy", ["tp", "sharded"])
def test_a_rank_that_dies_comes_back(strategy: str, victim: int, directory: Path) -> None:
    before = reserved()
    with TeacherGroup.create(str(directory), TeacherPlacement(strategy=strategy, num_devices=2)) as group:
        expected = group.handle.forward(batch()).logits
        stream = group.handle.open(TeacherRequest())
        answers = [stream.submit(batch()) for _ in range(2)]
        os.kill(group.stats()[victim]["pid"], signal.SIGKILL)
        answers += [stream.submit(batch()) for _ in range(2)]
        for answer in answers:
            assert torch.equal(answer.result().logits, expected)
    nothing_left(before)


def test_a_teacher_that_raises() -> None:
    """On every rank at once; the next batch is answered."""
    with TeacherGroup.create(Raises, TeacherPlacement(strategy="sharded", num_devices=2)) as group:
        with pytest.raises(TeacherError, match="unlucky token"):
            group.handle.forward({"input_ids": torch.full((2, 3), 13)})
        assert group.handle.forward({"input_ids": torch.ones(3, 2, dtype=torch.long)}).logits.shape == (3, 2, 64)


MISTAKES = {
    "no plan": (partial(gpt2, 1, 16), {"strategy": "tp", "num_devices": 2}, "no tensor-parallel plan"),
    "heads": (TEACHER, {"strategy": "tp", "num_devices": 3}, "divides num_attention_heads=4"),
    "key heads": (TEACHER, {"strategy": "tp", "num_devices": 4}, "num_key_value_heads=2"),
    "wrapping": (TEACHER, {"strategy": "sharded", "num_devices": 2, "wrap_cls": "LlamaLayer"}, "LlamaDecoderLayer"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case: str, tmp_path: Path) -> None:
    model, keywords, said = MISTAKES[case]
    model().save_pretrained(tmp_path)
    before = reserved()
    with pytest.raises(ConfigError, match=said):
        TeacherGroup.create(str(tmp_path), TeacherPlacement(**keywords))
    assert reserved() <= before


def test_tensor_parallel_needs_a_directory() -> None:
    with pytest.raises(ConfigError, match="directory or hub id"):
        TeacherGroup.create(TEACHER, TeacherPlacement(strategy="tp", num_devices=2))
