"""A teacher in stages, on a real Ray."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import LlamaConfig

import silverspoon_ray
from silverspoon_ray import ResponseBasedDistiller, TeacherGroup, TeacherPlacement
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import TeacherRequest
from tests.cluster.test_features import history
from tests.cluster.test_group import nothing_left, reserved, wait_until
from tests.support import Pad, gpt2, llama, ragged_data, trained, training_arguments, without_times

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

TEACHER = partial(llama, 2, 32, 3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    TEACHER().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def group(ray_cluster: Any, directory: Path) -> Any:
    with TeacherGroup.create(str(directory), TeacherPlacement(num_devices=3)) as created:
        yield created


def batch() -> dict[str, Any]:
    made = Pad()(ragged_data(5))
    del made["labels"]
    return made


def test_answers(group: TeacherGroup) -> None:
    """Logits and every layer, the same bits as in one piece."""
    names = tuple(f"model.layers.{number}" for number in range(3))
    request = TeacherRequest(outputs=(*names, "model.norm"), inputs=(*names, "lm_head"))
    local = LocalTeacher(TEACHER().eval()).answer(batch(), request)
    answer = group.handle.forward(batch(), outputs=request.outputs, inputs=request.inputs)
    assert torch.equal(answer.logits, local.logits)
    for kind in ("outputs", "inputs"):
        remote, here = getattr(answer, kind), getattr(local, kind)
        assert remote.keys() == here.keys()
        assert all(torch.equal(remote[name], here[name]) for name in here)


def test_each_stage_holds_its_share(group: TeacherGroup) -> None:
    stats = group.stats()
    assert [s["stage"] for s in stats] == [0, 1, 2]
    assert len({s["pid"] for s in stats}) == 3
    whole = sum(p.numel() * 4 for p in TEACHER().parameters())
    assert sum(s["weight_bytes"] for s in stats) == whole
    assert max(s["weight_bytes"] for s in stats) < 0.6 * whole


def test_later_stages_do_not_run_for_early_outputs(group: TeacherGroup) -> None:
    before = [s["forwards"] for s in group.stats()]
    group.handle.forward(batch(), logits=None, outputs=["model.layers.0"])
    assert [s["forwards"] - b for s, b in zip(group.stats(), before, strict=True)] == [1, 0, 0]


def student_history(teacher: Any, **arguments: Any) -> list[dict[str, Any]]:
    distiller = ResponseBasedDistiller(
        student_model=gpt2(1),
        teacher_model=teacher,
        train_dataset=ragged_data(24),
        eval_dataset=ragged_data(7, seed=5),
        data_collator=Pad(),
        args=training_arguments(
            silverspoon_ray, max_steps=6, eval_strategy="steps", eval_steps=3, alpha=0.3, **arguments
        ),
    )
    return without_times(trained(distiller))


def test_loss_curves(group: TeacherGroup) -> None:
    assert student_history(group.handle, teacher_prefetch=4) == student_history(TEACHER())
    for kind in ("holistic", "blockwise"):
        assert history(kind, group.handle, teacher_prefetch=3) == history(kind, TEACHER())


def test_a_stage_that_dies_comes_back(directory: Path) -> None:
    before = reserved()
    with TeacherGroup.create(str(directory), TeacherPlacement(num_devices=2)) as group:
        expected = group.handle.forward(batch()).logits
        stream = group.handle.open(TeacherRequest())
        answers = [stream.submit(batch()) for _ in range(3)]
        pid = group.stats()[1]["pid"]
        os.kill(pid, signal.SIGKILL)
        answers += [stream.submit(batch()) for _ in range(3)]
        assert all(torch.equal(answer.result().logits, expected) for answer in answers)
        wait_until(lambda: group.stats()[1]["pid"] != pid)
    nothing_left(before)


@pytest.mark.parametrize("source", ["callable", "module"])
def test_other_sources(source: str) -> None:
    teacher = TEACHER if source == "callable" else TEACHER().eval()
    with TeacherGroup.create(teacher, TeacherPlacement(num_devices=2, replicas=1)) as group:
        local = LocalTeacher(TEACHER().eval()).answer(batch(), TeacherRequest())
        assert torch.equal(group.handle.forward(batch()).logits, local.logits)
        whole = sum(p.numel() * 4 for p in TEACHER().parameters())
        assert max(s["weight_bytes"] for s in group.stats()) < 0.8 * whole


class Sums(torch.nn.Module):
    """Like a Hugging Face model to look at; what it gives is the sum of what its layers give."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(vocab_size=64, hidden_size=8, num_attention_heads=2)
        self.embed = torch.nn.Embedding(64, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = total = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
            total = total + hidden
        return total


class Needs(Sums):
    """It needs more than its main input, so that nobody can try it; besides, its layers follow on each other."""

    def forward(self, input_ids: torch.Tensor, scale: float) -> torch.Tensor:  # type: ignore[override]
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden * scale


def test_a_model_that_cannot_be_cut_is_refused_at_the_start() -> None:
    """Not at the first training batch."""
    before = reserved()
    with pytest.raises(ConfigError, match="used beside the hidden state") as refused:
        TeacherGroup.create(Sums, TeacherPlacement(num_devices=2))
    assert (refused.value.key, refused.value.value) == ("num_devices", 2)
    assert "1 for Sums, or strategy 'sharded'" in str(refused.value)
    nothing_left(before)


def test_a_model_that_cannot_be_tried_starts() -> None:
    with TeacherGroup.create(Needs, TeacherPlacement(num_devices=2)) as group:
        assert [s["forwards"] for s in group.stats()] == [0, 0]
        ids = torch.ones(2, 3, dtype=torch.long)
        assert group.handle.forward({"input_ids": ids, "scale": 2.0}).logits.shape == (2, 3, 8)


def test_more_stages_than_layers(directory: Path) -> None:
    before = ray.util.placement_group_table().keys()
    with pytest.raises(ConfigError, match="at most 3"):
        TeacherGroup.create(str(directory), TeacherPlacement(num_devices=4))
    assert ray.util.placement_group_table().keys() == before
