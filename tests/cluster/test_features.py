"""Features that travel: a dedicated teacher gives what a local one gives, and each tensor travels once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.train import RunConfig, ScalingConfig

import silverspoon_ray
from silverspoon_ray import (
    BlockwiseDistiller,
    DistillationTrainer,
    HolisticDistiller,
    TeacherGroup,
    TeacherPlacement,
    create_alignments,
)
from silverspoon_ray.alignments import Alignment
from silverspoon_ray.errors import AlignmentError, ConfigError
from silverspoon_ray.models.source import RandomInit
from tests.cluster.test_group import nothing_left, reserved
from tests.support import Pad, llama, ragged_data, token_data, trained, training_arguments, without_times

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

TEACHER = partial(llama, 2, 32, 3)
STUDENT = partial(llama, 1, 16, 2)
MODULES = {r"model\.layers\.([12])": r"model\.layers\.[01]"}
KINDS = ("holistic", "blockwise")
ARGUMENTS: dict[str, Any] = {
    "max_steps": 6,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "no",
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "seed": 0,
}


@pytest.fixture(scope="module")
def group(ray_cluster: Any) -> Any:
    with TeacherGroup.create(TEACHER, TeacherPlacement(replicas=2)) as created:
        yield created


def history(kind: str, teacher: Any, modules: Any = MODULES, **arguments: Any) -> list[dict[str, Any]]:
    student = STUDENT()
    distiller: Any = {"holistic": HolisticDistiller, "blockwise": BlockwiseDistiller}[kind]
    built = distiller(
        teacher_model=teacher,
        alignments=create_alignments(teacher, student, modules),
        train_dataset=ragged_data(24),
        eval_dataset=ragged_data(7, seed=5),
        data_collator=Pad(),
        args=training_arguments(silverspoon_ray, **{**ARGUMENTS, **arguments}),
        **({"student_model": student} if kind == "holistic" else {}),
    )
    return without_times(trained(built))


@pytest.mark.parametrize("kind", KINDS)
def test_remote_equals_local(kind: str, group: TeacherGroup) -> None:
    local = history(kind, TEACHER())
    assert len([row for row in local if "loss" in row]) == 6
    assert local[0]["loss"] > 0
    for prefetch in (0, 1, 4):
        assert history(kind, group.handle, teacher_prefetch=prefetch) == local, prefetch
    if kind == "blockwise":
        assert history(kind, group.handle, backward_per_block=True) == local


def run(tmp_path: Path, kind: str, **keywords: Any) -> ray.train.Result:
    settings: dict[str, Any] = {
        "teacher": TEACHER,
        "student": STUDENT,
        "args": {**ARGUMENTS, "output_dir": str(tmp_path / "out"), **keywords.pop("args", {})},
        "train_dataset": ragged_data(24),
        "eval_dataset": ragged_data(7, seed=5),
        "data_collator": Pad(),
        "alignments": {"modules": MODULES},
        "scaling_config": ScalingConfig(num_workers=1),
        "run_config": RunConfig(name=kind, storage_path=str(tmp_path / "storage")),
        **keywords,
    }
    return DistillationTrainer(kind, **settings).fit()


def rows(result: ray.train.Result) -> list[dict[str, Any]]:
    records = result.metrics_dataframe.to_dict("records")
    return without_times([{k: v for k, v in row.items() if v == v} for row in records])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run(kind: str, tmp_path: Path) -> None:
    """On Ray Train with a dedicated teacher: the curve of a run without Ray; resumes with its projectors."""
    before = reserved()
    expected = history(kind, TEACHER())
    args = {"teacher_placement": {"replicas": 1}, "save_strategy": "steps", "save_steps": 3}
    first = run(tmp_path, kind, args={**args, "max_steps": 3, "lr_scheduler_type": "constant"})
    assert first.checkpoint is not None
    whole = Path(first.checkpoint.path) / "checkpoint"
    assert {"projectors.safetensors", "alignments.json", "model.safetensors"} <= {p.name for p in whole.iterdir()}
    assert not [p.name for p in whole.iterdir() if p.suffix in (".bin", ".pkl")]
    student = type(STUDENT()).from_pretrained(whole)
    assert student.config.hidden_size == 16

    through = run(tmp_path, kind, args={**args, "lr_scheduler_type": "constant"})  # goes on from step 3
    undisturbed = history(kind, TEACHER(), lr_scheduler_type="constant")
    got = [row for row in rows(through) if "train_loss" not in row]
    wanted = [row for row in undisturbed if "train_loss" not in row]
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=1e-4, abs=1e-6), (key, one["step"])
    assert through.metrics["teacher/bytes_per_step"] > 0
    if kind == "holistic":
        done = run(tmp_path, kind, args={**args, "lr_scheduler_type": "constant"})  # has nothing left to do
        assert [row for row in rows(done) if "train_loss" not in row] == got
        assert done.checkpoint is not None
        assert done.checkpoint.path == through.checkpoint.path
    assert expected[0].keys() == undisturbed[0].keys()
    nothing_left(before)


def aligned(teacher: torch.nn.Module, student: torch.nn.Module) -> list[Alignment]:
    assert all(p.device.type == "meta" for p in teacher.parameters()), "the worker has weights of the teacher"
    first, second = r"model\.layers\.1", r"model\.layers\.2"
    made = create_alignments(teacher, student, {first: r"model\.layers\.0"}, loss_function="cosine", loss_weight=3.0)
    return made + create_alignments(teacher, student, {second: r"model\.layers\.1"}, loss_function="cosine")


def test_alignments_from_a_callable_and_a_stream_of_rows(tmp_path: Path) -> None:
    """The worker knows the teacher's structure only; shapes are seen in a row of the stream, which is not lost."""
    data = ray.data.from_items([{k: v.numpy() for k, v in row.items()} for row in token_data(16)])
    result = run(
        tmp_path,
        "holistic",
        args={"teacher_placement": {}, "eval_strategy": "no", "max_steps": -1, "num_train_epochs": 1},
        train_dataset=data,
        eval_dataset=None,
        alignments=aligned,
    )
    first = rows(result)[0]
    parts = [value for key, value in first.items() if key.startswith("loss/")]
    assert first["loss"] == pytest.approx(3 * parts[0] + parts[1], rel=1e-5)
    assert len([row for row in rows(result) if "loss" in row]) == 4


def test_two_workers_learn_what_one_learns(tmp_path: Path) -> None:
    args = {"teacher_placement": {}, "eval_strategy": "no", "max_steps": 3, "optim": "sgd"}
    two = run(
        tmp_path,
        "blockwise",
        args={**args, "per_device_train_batch_size": 2, "backward_per_block": True},
        scaling_config=ScalingConfig(num_workers=2),
    )
    one = history("blockwise", TEACHER(), eval_strategy="no", max_steps=3, optim="sgd")
    for left, right in zip(one, rows(two), strict=True):
        if "loss" in left:
            assert right["loss"] == pytest.approx(left["loss"], rel=1e-4), left["step"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_travels_once(kind: str, group: TeacherGroup) -> None:
    """Three blocks in a row have three inputs and three outputs, but only four different hidden states."""
    modules = r"model\.layers\.\d"
    batch = {"input_ids": torch.arange(1, 25).view(4, 6)}
    student = llama(1, 32, 3)
    made = create_alignments(group.handle, student, modules)
    distiller: Any = {"holistic": HolisticDistiller, "blockwise": BlockwiseDistiller}[kind]
    built = distiller(
        teacher_model=group.handle,
        alignments=made,
        train_dataset=token_data(4),
        args=training_arguments(silverspoon_ray, max_steps=1),
        **({"student_model": student} if kind == "holistic" else {}),
    )
    pending = built.stream.submit(batch)
    pending.result()
    state = 4 * 6 * 32 * 4
    assert pending.nbytes == state * (3 if kind == "holistic" else 4)
    pending.release()


def test_alignments_from_several_descriptions(tmp_path: Path) -> None:
    """Two losses on one module, with weights."""
    modules = {r"model\.layers\.2": r"model\.layers\.1"}
    both = [{"modules": modules, "loss_weight": 2.0}, {"modules": modules, "loss_function": "cosine"}]
    result = run(tmp_path, "holistic", args={"max_steps": 1, "eval_strategy": "no"}, alignments=both)
    first = rows(result)[0]
    parts = [value for key, value in first.items() if key.startswith("loss/")]
    assert first["loss"] == pytest.approx(2 * parts[0] + parts[1], rel=1e-5)


WRONG = {
    "no alignments": ("holistic", {"alignments": None}, "alignments"),
    "not for logits": ("response_based", {}, "alignments"),
    "unknown keyword": ("holistic", {"alignments": {"modules": MODULES, "los_function": "mse"}}, "alignments.los"),
    "unknown loss": ("holistic", {"alignments": {"modules": MODULES, "loss_function": "msee"}}, "msee"),
    "no modules": ("blockwise", {"alignments": {"loss_function": "mse"}}, "alignments.modules"),
    "per block": ("holistic", {"args": {"backward_per_block": True}}, "backward_per_block"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_before_devices_are_taken(case: str, tmp_path: Path) -> None:
    kind, keywords, said = WRONG[case]
    before = reserved()
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, kind, **keywords)
    assert reserved() <= before


def test_widths_are_checked_where_the_models_are_known(tmp_path: Path) -> None:
    with pytest.raises(AlignmentError, match=r"32 features, model\.layers\.1 16"):
        DistillationTrainer(
            "holistic",
            teacher=TEACHER(),
            student=STUDENT(),
            args={"output_dir": str(tmp_path)},
            train_dataset=token_data(4),
            alignments={"modules": {r"model\.layers\.2": r"model\.layers\.1"}, "auto_projector": False},
        )


def test_patterns_are_checked_where_the_models_are_known(tmp_path: Path) -> None:
    TEACHER().save_pretrained(tmp_path / "teacher")
    student = RandomInit(str(tmp_path / "teacher"), overrides={"num_hidden_layers": 2})
    with pytest.raises(AlignmentError, match=r"model\.layers\.2"):
        DistillationTrainer(
            "holistic",
            teacher=str(tmp_path / "teacher"),
            student=student,
            args={"output_dir": str(tmp_path)},
            train_dataset=token_data(4),
            alignments={"modules": r"model\.layers\.\d"},
        )
