"""A cache that is filled beforehand, on a real Ray: what the run would have asked for, and nothing twice."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import RunConfig, ScalingConfig

from silverspoon_ray import DistillationTrainer
from silverspoon_ray.errors import CacheError, ConfigError, PlacementError
from silverspoon_ray.train.cache_job import fill_cache
from tests.support import Pad, gpt2, llama, ragged_data, without_times

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

TEACHER = partial(llama, 2, 32, 3)
STUDENT = partial(gpt2, 1, dropout=0.0)


def only_on_the_driver() -> Any:
    if ray.get_runtime_context().worker.mode != 0:
        raise RuntimeError("the teacher was loaded in a worker")
    return TEACHER()


def make(tmp_path: Path, name: str, kind: str = "response_based", **keywords: Any) -> DistillationTrainer:
    arguments = {
        "max_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "output_dir": str(tmp_path / "out"),
        "save_strategy": "no",
        "teacher_cache": str(tmp_path / "cache"),
        **keywords.pop("args", {}),
    }
    settings: dict[str, Any] = {
        "teacher": TEACHER,
        "student": STUDENT,
        "train_dataset": ragged_data(16),
        "eval_dataset": ragged_data(5, seed=5),
        "data_collator": Pad(),
        "run_config": RunConfig(name=name, storage_path=str(tmp_path / "storage")),
        "scaling_config": ScalingConfig(num_workers=1),
        **keywords,
    }
    return DistillationTrainer(kind, args=arguments, **settings)


def rows(result: ray.train.Result) -> list[dict[str, Any]]:
    records = result.metrics_dataframe.to_dict("records")
    return without_times([{k: v for k, v in row.items() if v == v} for row in records])


CASES: dict[str, dict[str, Any]] = {
    "top_k": {"args": {"teacher_logits": "top_k", "teacher_top_k": 8, "teacher_placement": {"replicas": 2}}},
    "bf16": {"args": {"bf16": True}},
    "holistic": {
        "kind": "holistic",
        "student": partial(llama, 1, 32, 2),
        "alignments": {"modules": {r"model\.layers\.2": r"model\.layers\.1"}, "loss_function": "mse"},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_then_train_without_a_teacher(case: str, tmp_path: Path) -> None:
    """Two actors fill it; the second job has nothing to do; the run's workers load no teacher, and learn the same."""
    lines: list[str] = []
    report = fill_cache(make(tmp_path, "job", **CASES[case]), actors=2, say=lines.append)
    # A distiller that has to see shapes asks for an example before it begins.
    assert (report.samples, report.answered) == (21, 20 if case == "holistic" else 21)
    assert lines[0].startswith("21 samples")
    assert lines[-1].startswith("21 of 21 samples")
    again = fill_cache(make(tmp_path, "job", **CASES[case]), say=lines.append)
    assert (again.samples, again.answered) == (21, 0)
    warm = make(tmp_path, "warm", **{**CASES[case], "teacher": only_on_the_driver})
    plain = dict(CASES[case])
    plain["args"] = {**plain.get("args", {}), "teacher_cache": None}
    got, expected = rows(warm.fit()), rows(make(tmp_path, "plain", **plain).fit())
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=2e-2 if case == "bf16" else 1e-4, abs=1e-6)


def test_ray_data_and_the_estimate(tmp_path: Path) -> None:
    """From rows of Ray Data; the size is announced, and about right."""
    TEACHER().save_pretrained(tmp_path / "teacher")
    items = [{key: value.numpy() for key, value in row.items()} for row in ragged_data(40)]
    lines: list[str] = []
    settings = {"teacher": str(tmp_path / "teacher"), "eval_dataset": None}
    off = {"eval_strategy": "no", "teacher_logits": "top_k", "teacher_top_k": 16}
    trainer = make(tmp_path, "job", train_dataset=ray.data.from_items(items), args=off, **settings)
    report = fill_cache(trainer, say=lines.append)
    assert (report.samples, report.answered) == (40, 40)
    found = re.fullmatch(r"40 samples x ([\d.]+) tokens x (\d+) bytes: about .* MiB", lines[0])
    assert found is not None
    expected = 40 * float(found[1]) * int(found[2])
    size = sum(file.stat().st_size for file in (tmp_path / "cache").glob("*.arrow"))
    assert expected < size < 1.2 * expected + 5000


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"args\.teacher_cache=None"):
        fill_cache(make(tmp_path, "job", args={"teacher_cache": None}))
    with pytest.raises(ConfigError, match=r"num_devices=2: 1: each actor"):
        fill_cache(make(tmp_path, "job", args={"teacher_placement": {"num_devices": 2}}))
    with pytest.raises(ConfigError, match="actors=0"):
        fill_cache(make(tmp_path, "job"), actors=0)
    with pytest.raises(PlacementError, match=r"100 teacher\(s\)"):
        fill_cache(make(tmp_path, "job"), actors=100)
    fill_cache(make(tmp_path, "job", eval_dataset=None, args={"eval_strategy": "no"}))
    with pytest.raises(CacheError, match=r"request\.logits 'hidden'"):
        fill_cache(make(tmp_path, "job", args={"teacher_logits": "hidden"}))
