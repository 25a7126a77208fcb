"""The teacher cache on a real Ray: dedicated teachers in every layout, several workers, and runs without a teacher."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.train import RunConfig, ScalingConfig

from silverspoon_ray import DistillationTrainer, RandomInit, TeacherGroup, TeacherPlacement
from silverspoon_ray.errors import CacheError
from silverspoon_ray.teacher.cache.identity import teacher_identity
from silverspoon_ray.teacher.local import LocalTeacher
from tests.cluster.test_group import nothing_left, reserved
from tests.distillers.kinds import KINDS
from tests.distillers.test_soft_targets import distiller
from tests.support import Pad, gpt2, llama, ragged_data, trained, without_times

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

TEACHER = partial(llama, 2, 32, 3)
STUDENT = partial(gpt2, 1, dropout=0.0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp": {"num_devices": 2},
    "tp": {"strategy": "tp", "num_devices": 2},
    "sharded": {"strategy": "sharded", "num_devices": 2},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    TEACHER().save_pretrained(path)
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_identity_in_every_layout(layout: str, directory: Path) -> None:
    with TeacherGroup.create(str(directory), TeacherPlacement(**LAYOUTS[layout])) as group:
        assert teacher_identity(group.handle) == teacher_identity(LocalTeacher(TEACHER().eval()))


def test_a_handle_and_a_local_teacher_share_a_cache(directory: Path, tmp_path: Path) -> None:
    """Filled from one, the other is not asked; a dedicated teacher's batches are counted, and what came from disk."""

    def run(teacher: Any) -> list[dict[str, Any]]:
        student = KINDS["llama"].model(0, 1)
        return trained(distiller("llama", student, teacher, teacher_cache=str(tmp_path), max_steps=8))

    with TeacherGroup.create(str(directory), TeacherPlacement()) as group:
        cold = run(group.handle)
        forwards = group.stats()[0]["forwards"]
        warm = run(group.handle)
        assert group.stats()[0]["forwards"] == forwards
    local = run(TEACHER())
    assert without_times(cold) == without_times(warm) == without_times(local)
    logs = [[row for row in history if "teacher/forwards" in row] for history in (cold, warm)]
    assert [row["teacher/forwards"] for row in logs[0]] == [1.0] * 4 + [0.0] * 4
    assert [row["teacher/cache_hits"] for row in logs[0]] == [0.0] * 4 + [4.0] * 4
    assert sum(row["teacher/bytes_per_step"] for row in logs[0]) > 0
    assert [row["teacher/cache_hits"] for row in logs[1]] == [4.0] * 8
    assert sum(row["teacher/bytes_per_step"] for row in logs[1]) == 0


# ---- DistillationTrainer -------------------------------------------------------------------------------------


def make(tmp_path: Path, name: str, cache: Path | str | None, **keywords: Any) -> DistillationTrainer:
    arguments = {
        "max_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "output_dir": str(tmp_path / "out"),
        "save_strategy": "no",
        "teacher_cache": cache if cache is None else str(cache),
        **keywords.pop("args", {}),
    }
    settings: dict[str, Any] = {
        "teacher": TEACHER,
        "student": STUDENT,
        "train_dataset": ragged_data(24),
        "eval_dataset": ragged_data(7, seed=5),
        "data_collator": Pad(),
        "run_config": RunConfig(name=name, storage_path=str(tmp_path / "storage")),
        "scaling_config": ScalingConfig(num_workers=1),
        **keywords,
    }
    return DistillationTrainer("response_based", args=arguments, **settings)


def rows(result: ray.train.Result) -> list[dict[str, Any]]:
    records = result.metrics_dataframe.to_dict("records")
    return without_times([{k: v for k, v in row.items() if v == v} for row in records])


def nearly(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("source", "placement"), [("callable", {"num_devices": 1}), ("directory", {"num_devices": 1}), ("module", None)]
)
def test_no_teacher_is_started(
    placement: Any, source: str, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where every sample is there; the run says so, has the curve of the one before, and holds no teacher's device."""
    teacher: Any = {"callable": TEACHER, "directory": str(directory), "module": TEACHER()}[source]
    before = reserved()
    cache, placed = tmp_path / "cache", {"args": {"teacher_placement": placement}}
    cold = make(tmp_path, "cold", cache, teacher=teacher, **placed)
    first = cold.fit()
    assert (cold.teacher_stats is None) is (placement is None)
    caplog.clear()
    warm = make(tmp_path, "warm", cache, teacher=teacher, **placed)
    with caplog.at_level(logging.INFO):
        second = warm.fit()
    assert "every one of 31 samples is in the cache: no teacher is started" in caplog.text
    assert warm.teacher_stats is None
    assert rows(second) == rows(first)
    assert second.metrics["teacher/forwards"] == 0
    assert second.metrics["teacher/cache_hits"] == 4
    nothing_left(before)


def breaks_in_workers() -> Any:
    """A teacher that only the driver can build."""
    if ray.get_runtime_context().worker.mode != 0:
        raise RuntimeError("the teacher was loaded in a worker")
    return TEACHER()


def test_workers_load_no_teacher(tmp_path: Path) -> None:
    first = make(tmp_path, "cold", tmp_path / "cache").fit()
    nearly(rows(make(tmp_path, "warm", tmp_path / "cache", teacher=breaks_in_workers).fit()), rows(first))


def test_more_workers_and_other_batches(tmp_path: Path) -> None:
    """Two workers fill it; one with other batches needs no teacher, nor do two with hidden states' head on disk."""
    form = {"teacher_logits": "hidden"}
    two = {"scaling_config": ScalingConfig(num_workers=2)}
    args = {**form, "per_device_train_batch_size": 2}
    make(tmp_path, "cold", tmp_path / "cache", args={**args, "max_steps": 6}, **two).fit()
    plain = make(tmp_path, "plain", None, args=form).fit()
    warm = make(tmp_path, "warm", tmp_path / "cache", args=form, teacher=breaks_in_workers).fit()
    nearly(rows(warm), rows(plain))
    again = make(tmp_path, "again", tmp_path / "cache", args=args, teacher=breaks_in_workers, **two).fit()
    nearly(rows(again), rows(plain))


def test_an_incomplete_cache_starts_the_teacher(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, "first", tmp_path / "cache", args={"max_steps": 2, "eval_steps": 2}).fit()
    with caplog.at_level(logging.INFO):
        result = make(tmp_path, "second", tmp_path / "cache").fit()
    assert "is not in the cache" in caplog.text
    nearly(rows(result), rows(make(tmp_path, "plain", None).fit()))


def _as_it_is(row: dict[str, Any]) -> dict[str, Any]:
    return row


@pytest.mark.parametrize("kind", ["materialized", "stream"])
def test_ray_data(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A materialized dataset can be looked at beforehand; any other starts the teacher, and does not ask it."""
    items = [{key: value.numpy() for key, value in row.items()} for row in ragged_data(24)]

    def data() -> Any:
        dataset = ray.data.from_items(items)
        return dataset.materialize() if kind == "materialized" else dataset.map(_as_it_is)

    settings = {"eval_dataset": None, "args": {"eval_strategy": "no", "teacher_placement": {"num_devices": 1}}}
    make(tmp_path, "cold", tmp_path / "cache", train_dataset=data(), **settings).fit()
    with caplog.at_level(logging.INFO):
        warm = make(tmp_path, "warm", tmp_path / "cache", train_dataset=data(), **settings)
        result = warm.fit()
    assert ("no teacher is started" in caplog.text) is (kind == "materialized")
    assert result.metrics["teacher/cache_hits"] == 4
    assert result.metrics["teacher/forwards"] == 0


def test_other_teachers_are_refused_before_devices_are_taken(tmp_path: Path, directory: Path) -> None:
    make(tmp_path, "cold", tmp_path / "cache", teacher=str(directory)).fit()
    other, before = RandomInit(str(directory), seed=3), reserved()
    trainer = make(tmp_path, "other", tmp_path / "cache", teacher=other, args={"teacher_placement": {"num_devices": 1}})
    with pytest.raises(CacheError, match=r"teacher\.weights"):
        trainer.fit()
    nothing_left(before)


def test_another_form_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "cold", tmp_path / "cache").fit()
    with pytest.raises(CacheError, match=r"request\.logits 'top_k'"):
        make(tmp_path, "other", tmp_path / "cache", args={"teacher_logits": "top_k"}).fit()


def test_places_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "x", "nowhere://bucket/x"):
        with pytest.raises(CacheError) as refused:
            make(tmp_path, "never", place)
        assert refused.value.value == str(place)


class Augmented(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Gives every sample as it is when it is looked at first, and with another token ever after."""

    def __init__(self) -> None:
        self.data = ragged_data(24)
        self.looks = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.looks += 1
        row = dict(self.data[index])
        if self.looks > 24:
            row["input_ids"] = row["input_ids"] + 1
        return row


def test_samples_that_change(tmp_path: Path) -> None:
    """They were all there when the run began: no teacher, and an error that says what to do."""
    settings: dict[str, Any] = {"eval_dataset": None, "args": {"eval_strategy": "no"}}
    make(tmp_path, "cold", tmp_path / "cache", **settings).fit()

    changed = Augmented()
    with pytest.raises(CacheError, match=r"there is one that is not.*augmentation"):
        make(tmp_path, "warm", tmp_path / "cache", train_dataset=changed, **settings).fit()
