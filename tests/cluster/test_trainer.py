"""DistillationTrainer on a real Ray Train."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import transformers
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import silverspoon_ray
from silverspoon_ray import DistillationTrainer, ResponseBasedDistiller, TrainingArguments
from silverspoon_ray.errors import ConfigError, PlacementError, TeacherError
from tests.cluster.test_group import Raises, nothing_left, reserved, wait_until
from tests.support import Pad, gpt2, llama, ragged_data, trained, training_arguments, without_times

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

ARGUMENTS: dict[str, Any] = {
    "max_steps": 8,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_steps": 2,
    "alpha": 0.3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "seed": 0,
}
TEACHER = partial(llama, 2, 32, 2)
STUDENT = partial(gpt2, 1)  # with dropout: its random numbers must survive a restart


def make(tmp_path: Path, name: str = "run", **keywords: Any) -> DistillationTrainer:
    arguments = {**ARGUMENTS, "output_dir": str(tmp_path / "out"), **keywords.pop("args", {})}
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The run without Ray."""
    distiller = ResponseBasedDistiller(
        student_model=STUDENT(),
        teacher_model=TEACHER(),
        train_dataset=ragged_data(24),
        eval_dataset=ragged_data(7, seed=5),
        data_collator=Pad(),
        args=training_arguments(silverspoon_ray, **{**ARGUMENTS, "save_strategy": "no"}),
    )
    return without_times(trained(distiller))


def curve(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without ``train_loss``: Trainer gives it for the steps of its last call only."""
    return [{key: value for key, value in row.items() if key != "train_loss"} for row in history]


def close(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=1e-4, abs=1e-6), (key, one["step"])


class KillOnce(transformers.TrainerCallback):
    """Kills a process at a step, once.

    Args:
        step: when.
        marker: a file that says it has happened.
        run: the run's directory; the kill waits for two checkpoints there, so that there is something to resume from.
    """

    def __init__(self, step: int, marker: Path, run: Path) -> None:
        self.step, self.marker, self.run = step, marker, run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self.marker.with_suffix(".starts").open("a") as starts:
            starts.write(f"{state.global_step}\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and not self.marker.exists():
            snapshot = self.run / "checkpoint_manager_snapshot.json"
            wait_until(lambda: snapshot.is_file() and len(json.loads(snapshot.read_text())["checkpoint_results"]) >= 2)
            self.marker.write_text("killed")
            os.kill(os.getpid(), signal.SIGKILL)

    def starts(self) -> list[int]:
        """The steps at which training began, once for each start of a worker."""
        return [int(line) for line in self.marker.with_suffix(".starts").read_text().split()]


def test_a_run_with_a_dedicated_teacher(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    before = reserved()
    trainer = make(tmp_path, args={"teacher_placement": {"replicas": 2}})
    assert isinstance(trainer, TorchTrainer)
    result = trainer.fit()
    assert rows(result) == undisturbed
    assert result.metrics["step"] == 8
    assert {"loss", "eval_loss", "loss/soft", "loss/hard", "teacher/wait_fraction"} <= result.metrics.keys()
    assert result.metrics["loss"] == undisturbed[-3]["loss"]
    assert result.metrics["teacher/bytes_per_step"] > 0
    assert 0 <= result.metrics["teacher/wait_fraction"] <= 1
    teacher_pids = {replica["pid"] for replica in trainer.teacher_stats}
    assert len(teacher_pids | {result.return_value["process"]["pid"], os.getpid()}) == 4
    assert sum(replica["forwards"] for replica in trainer.teacher_stats) >= 8
    assert (Path(result.path) / "log_history.json").is_file()
    with result.checkpoint.as_directory() as directory:
        model = transformers.AutoModelForCausalLM.from_pretrained(os.path.join(directory, "checkpoint"))
        assert set(model.state_dict()) == set(STUDENT().state_dict())
        files = {path.name for path in Path(directory, "checkpoint").iterdir()}
    assert "training_args.bin" not in files
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= files
    nothing_left(before)


def test_without_placement_every_worker_has_a_copy(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    result = make(tmp_path, args={"save_strategy": "no"}).fit()
    assert rows(result) == undisturbed
    assert result.checkpoint is None
    assert result.metrics["step"] == 8


def test_two_workers_equal_one(tmp_path: Path) -> None:
    """Without dropout, whose masks depend on how a batch is divided. The last evaluation batch is uneven."""
    histories = {}
    for workers in (1, 2):
        trainer = make(
            tmp_path,
            name=f"{workers}",
            student=partial(gpt2, 1, dropout=0.0),
            scaling_config=ScalingConfig(num_workers=workers),
            args={"per_device_train_batch_size": 4 // workers, "teacher_placement": {}, "save_strategy": "no"},
        )
        histories[workers] = rows(trainer.fit())
    close(histories[1], histories[2])


def test_a_killed_worker_resumes_on_the_same_curve(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    kill = KillOnce(5, tmp_path / "killed", tmp_path / "storage" / "run")
    result = make(
        tmp_path,
        args={"teacher_placement": {}},
        callbacks=[kill],
        run_config=RunConfig(
            name="run", storage_path=str(tmp_path / "storage"), failure_config=FailureConfig(max_failures=2)
        ),
    ).fit()
    assert kill.starts() == [0, 4]
    assert curve(rows(result)) == curve(undisturbed)


def test_a_later_fit_of_that_name_goes_on(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    """The first run ends after five of eight steps, as if its driver had been killed."""

    class StopAtFive(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                raise RuntimeError("the machine is needed elsewhere")

    with pytest.raises(ray.train.TrainingFailedError, match="needed elsewhere"):
        make(tmp_path, callbacks=[StopAtFive()]).fit()
    result = make(tmp_path).fit()
    assert curve(rows(result)) == curve(undisturbed)
    other = make(
        tmp_path, name="other", resume_from_checkpoint=sorted((tmp_path / "storage" / "run").glob("checkpoint_*"))[1]
    )
    assert curve(rows(other.fit())) == curve(undisturbed)


def test_a_teachers_error_reaches_the_user(tmp_path: Path) -> None:
    before = reserved()
    data = [{"input_ids": torch.full((4,), 13 if i == 5 else 1), "labels": torch.ones(4).long()} for i in range(8)]
    trainer = make(
        tmp_path,
        teacher=Raises,
        train_dataset=data,
        data_collator=None,
        eval_dataset=None,
        args={"teacher_placement": {}, "per_device_train_batch_size": 1, "eval_strategy": "no"},
    )
    with pytest.raises(TeacherError) as caught:
        trainer.fit()
    assert "unlucky token" in caught.value.remote_traceback
    assert caught.value.rank == 0
    assert "input_ids int64[1, 4]" in caught.value.batch
    nothing_left(before)


def test_no_room_for_students_is_an_error_with_numbers(tmp_path: Path) -> None:
    before = reserved()
    trainer = make(
        tmp_path,
        args={"teacher_placement": {"startup_timeout_s": 20}},
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1000}),
    )
    with pytest.raises(PlacementError, match="1001 CPU") as caught:
        trainer.fit()
    assert caught.value.total["CPU"] == ray.cluster_resources()["CPU"]
    nothing_left(before)


def test_two_workers_with_compute_metrics_and_samples_grouped_by_length(tmp_path: Path) -> None:
    """23 samples: the last batch of an epoch is uneven, in training and in evaluation."""
    results = {}
    for workers in (1, 2):
        shapes = tmp_path / f"shapes-{workers}"

        def accuracy(prediction: Any, shapes: Path = shapes) -> dict[str, float]:
            shapes.write_text(str(prediction.predictions.shape[0]))
            return {"rows": float(len(prediction.label_ids))}

        results[workers] = make(
            tmp_path,
            name=f"grouped-{workers}",
            student=partial(gpt2, 1, dropout=0.0),
            train_dataset=ragged_data(23),
            compute_metrics=accuracy,
            scaling_config=ScalingConfig(num_workers=workers),
            args={
                "max_steps": 7,
                "train_sampling_strategy": "group_by_length",
                "per_device_train_batch_size": 4 // workers,
                "save_strategy": "no",
                "teacher_placement": {},
            },
        ).fit()
        assert results[workers].metrics["eval_rows"] == 7
        assert shapes.read_text() == "7"
    sequential = {workers: rows(result) for workers, result in results.items()}
    # LengthGroupedSampler orders for the batch size of one rank, so only the evaluations see the same samples.
    assert [row["step"] for row in sequential[1]] == [row["step"] for row in sequential[2]]


def test_an_uneven_last_training_batch_counts_nothing_twice(tmp_path: Path) -> None:
    histories = {}
    for workers in (1, 2):
        histories[workers] = rows(
            make(
                tmp_path,
                name=f"uneven-{workers}",
                student=partial(gpt2, 1, dropout=0.0),
                train_dataset=ragged_data(21),
                scaling_config=ScalingConfig(num_workers=workers),
                args={"per_device_train_batch_size": 4 // workers, "save_strategy": "no", "teacher_placement": {}},
            ).fit()
        )
    close(histories[1], histories[2])


@pytest.mark.parametrize("kind", ["callable", "hugging face", "ray.data"])
def test_every_kind_of_dataset(tmp_path: Path, kind: str) -> None:
    samples = [{key: value.tolist() for key, value in row.items()} for row in ragged_data(24)]
    if kind == "callable":
        dataset: Any = partial(ragged_data, 24)
    elif kind == "hugging face":
        import datasets

        dataset = datasets.Dataset.from_list(samples)
    else:
        dataset = ray.data.from_items(samples)
    trainer = make(
        tmp_path,
        train_dataset=dataset,
        eval_dataset=dataset,
        scaling_config=ScalingConfig(num_workers=2),
        args={
            "max_steps": -1,
            "num_train_epochs": 1,
            "save_strategy": "no",
            "per_device_train_batch_size": 3,
            "eval_strategy": "epoch",
            "teacher_placement": {},
        },
    )
    result = trainer.fit()
    assert result.metrics["step"] == 4  # 24 samples, two workers, three each
    assert result.metrics["epoch"] == 1
    assert result.metrics["eval_loss"] > 0


def test_ray_data_resumes_without_skipping_or_repeating(tmp_path: Path) -> None:
    samples = [{key: value.tolist() for key, value in row.items()} for row in ragged_data(32)]
    keywords: dict[str, Any] = {"train_dataset": ray.data.from_items(samples), "eval_dataset": None}
    args = {"eval_strategy": "no", "teacher_placement": {}}
    expected = rows(make(tmp_path, name="whole", args=args, **keywords).fit())
    kill = KillOnce(5, tmp_path / "killed", tmp_path / "storage" / "cut")
    resumed = make(
        tmp_path,
        args=args,
        callbacks=[kill],
        run_config=RunConfig(
            name="cut", storage_path=str(tmp_path / "storage"), failure_config=FailureConfig(max_failures=1)
        ),
        **keywords,
    ).fit()
    assert kill.starts() == [0, 4]
    assert curve(rows(resumed)) == curve(expected)


def test_arguments_travel_as_an_instance_too(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        save_total_limit=3,
    )
    args.learning_rate = 0.5  # assigned later, must arrive
    trainer = DistillationTrainer(
        "reskd", teacher=llama(2, 32, 2), student=llama(1), args=args, train_dataset=ragged_data(8), data_collator=Pad()
    )
    assert trainer.run_config.checkpoint_config.num_to_keep == 3
    result = trainer.fit()
    assert result.metrics_dataframe["learning_rate"].max() == 0.5
    assert Path(result.path).parent == tmp_path / "out"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"args": {"alpha": 2}}, "alpha=2"),
        ({"args": {"alhpa": 0.5}}, r"args\.alhpa=0\.5: unknown keyword; did you mean alpha"),
        ({"student": "./no/such/student"}, "student='./no/such/student'"),
        ({"train_dataset": None}, "train_dataset=None"),
        ({"train_dataset": 3}, "train_dataset='int'"),
        ({"eval_dataset": None}, r"args\.eval_strategy='steps'"),
        ({"distiller_kwargs": {"soft_loss_fn": "kl_divergance"}}, "kl_divergence"),
        ({"resume_from_checkpoint": "/no/such/place"}, "resume_from_checkpoint='/no/such/place'"),
    ],
)
def test_what_cannot_work_is_refused_at_once(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    before = reserved()
    with pytest.raises(ConfigError, match=expected):
        make(tmp_path, **change)
    assert reserved() == before


def test_unknown_distillers() -> None:
    with pytest.raises(ConfigError, match="did you mean response_based"):
        DistillationTrainer("response_base", teacher=TEACHER, student=STUDENT, train_dataset=[])


def test_ray_data_needs_a_cpu_to_read_with(tmp_path: Path) -> None:
    """Teacher and student hold all eight slots; a lazy dataset could never be read."""
    lazy = ray.data.from_items([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8).map(lambda row: row)
    trainer = make(
        tmp_path,
        train_dataset=lazy,
        eval_dataset=None,
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 7}),
        args={"teacher_placement": {}, "eval_strategy": "no"},
    )
    with pytest.raises(PlacementError, match="Ray Data to read with"):
        trainer.fit()


def test_vocabularies_are_compared_before_any_device_is_taken(tmp_path: Path) -> None:
    llama(2, vocabulary=128).save_pretrained(tmp_path / "teacher")
    llama(1).save_pretrained(tmp_path / "student")
    with pytest.raises(ConfigError, match=r"vocab_size=\(128, 64\)"):
        make(tmp_path, teacher=str(tmp_path / "teacher"), student=str(tmp_path / "student"))


def test_a_name_alone_stores_under_output_dir(tmp_path: Path) -> None:
    assert make(tmp_path, run_config=RunConfig(name="x")).run_config.storage_path == str(tmp_path / "out")
    assert make(tmp_path).run_config.storage_path == str(tmp_path / "storage")


@pytest.mark.parametrize("dedicated", [True, False])
def test_how_the_teacher_is_loaded(dedicated: bool, tmp_path: Path) -> None:
    """In half the bytes, where the run says so."""
    TEACHER().save_pretrained(tmp_path / "teacher")
    placement = {"teacher_placement": {}} if dedicated else {}
    args = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no", "alpha": 0.0, **placement}
    losses = []
    for keywords in ({}, {"dtype": "bfloat16"}):
        trainer = make(tmp_path, str(keywords), args=args, teacher=str(tmp_path / "teacher"), teacher_kwargs=keywords)
        result = trainer.fit()
        losses.append(result.metrics_dataframe["loss"].dropna().tolist())
        if dedicated:
            assert trainer.teacher_stats is not None
            whole = sum(p.numel() * (2 if keywords else 4) for p in TEACHER().parameters())
            assert trainer.teacher_stats[0]["weight_bytes"] == whole
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    with pytest.raises(ConfigError, match="teacher_kwargs"):
        make(tmp_path, teacher_kwargs={"dtype": "bfloat16"})
