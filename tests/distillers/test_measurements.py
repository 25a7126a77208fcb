"""What a run tells about itself: FLOPs, profiles, callbacks."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import silverspoon_ray
from silverspoon_ray.distillers import ResponseBasedDistiller, SilentProgressCallback
from tests.distillers.kinds import KINDS, Collator, llama, text
from tests.support import PrinterCallback, trained, training_arguments
from tests.teacher.fake import FakeTeacher

BATCH = 4


def distiller(student: Any, teacher: Any, kind: str = "perceptron", callbacks: Any = None, **keywords: Any) -> Any:
    built = ResponseBasedDistiller(
        student,
        teacher,
        train_dataset=KINDS[kind].data(24, 1),
        eval_dataset=KINDS[kind].data(8, 2),
        data_collator=Collator(kind),
        callbacks=callbacks,
        args=training_arguments(
            silverspoon_ray,
            **{"remove_unused_columns": False, "per_device_train_batch_size": BATCH, "max_steps": 4, **keywords},
        ),
    )
    built.remove_callback(PrinterCallback)
    return built


# ---- FLOPs ------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Linear layers with these widths: every one is a matrix product."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.widths = widths
        self.layers = nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(widths)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def products(self) -> list[int]:
        """Multiplications and additions of each layer for a batch."""
        return [2 * BATCH * a * b for a, b in pairwise(self.widths)]


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("student", "teacher"), [((6, 8, 4), (6, 16, 4)), ((6, 4), (6, 32, 32, 4)), ((6, 7, 9, 4), (6, 4))]
)
def test_flops_by_hand(student: tuple[int, ...], teacher: tuple[int, ...], accumulation: int, alpha: float) -> None:
    """Forward, gradients of weights and inputs (but for the first layer's inputs), and the teacher's forward."""
    learner, frozen = Layers(*student), Layers(*teacher)
    forward = sum(learner.products())
    backward = forward + sum(learner.products()[1:])
    step = accumulation * (forward + backward + sum(frozen.products()))
    history = trained(
        distiller(learner, frozen, count_flops=True, gradient_accumulation_steps=accumulation, alpha=alpha)
    )
    rows = [row for row in history if "loss" in row]
    assert [row["flops/step"] for row in rows] == [step] * 4
    assert [row["flops/total"] for row in rows] == [step, 2 * step, 3 * step, 4 * step]


def test_flops_of_a_dedicated_teacher_are_not_the_students() -> None:
    settings = {"kind": "llama", "count_flops": True, "max_steps": 1}
    beside = trained(distiller(llama(0, 1), FakeTeacher(llama(5, 2)), **settings))
    inside = trained(distiller(llama(0, 1), llama(5, 2), **settings))
    assert 0 < beside[0]["flops/step"] <= inside[0]["flops/step"]


def test_flops_are_counted_only_on_request() -> None:
    assert not any("flops/" in key for row in trained(distiller(Layers(6, 4), Layers(6, 4))) for key in row)


# ---- profiles -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [None, "elsewhere"])
@pytest.mark.parametrize(
    ("schedule", "files"),
    [
        ({"profiling_wait": 1, "profiling_warmup": 1, "profiling_active": 2, "profiling_repeat": 1}, 1),
        ({"profiling_wait": 1, "profiling_warmup": 0, "profiling_active": 1, "profiling_repeat": 2}, 2),
        ({"profiling_wait": 0, "profiling_warmup": 1, "profiling_active": 50, "profiling_repeat": 1}, 1),
        ({}, 0),
    ],
    ids=["once", "twice", "until the end", "defaults"],
)
def test_profile(schedule: dict[str, int], files: int, where: str | None, tmp_path: Path) -> None:
    """Chrome traces; 'until the end': training is over before the window is."""
    elsewhere = None if where is None else str(tmp_path / where)
    built = distiller(
        Layers(6, 8, 4),
        Layers(6, 4),
        output_dir=str(tmp_path / "run"),
        enable_profiling=True,
        profiling_output_dir=elsewhere,
        max_steps=6,
        **schedule,
    )
    trained(built)
    directory = Path(elsewhere) if elsewhere else tmp_path / "run" / "profiling"
    traces = sorted(directory.glob("*.json")) if directory.exists() else []
    assert len(traces) == files
    for trace in traces:
        assert trace.name.startswith("rank0.")
        events = json.loads(trace.read_text())["traceEvents"]
        names = {event.get("name") for event in events}
        assert "aten::addmm" in names
        steps = {name for name in names if isinstance(name, str) and name.startswith("ProfilerStep#")}
        assert steps
        if files == 1 and schedule["profiling_wait"] == 1:
            assert steps == {"ProfilerStep#2", "ProfilerStep#3"}


def test_no_profile_unless_asked(tmp_path: Path) -> None:
    trained(distiller(Layers(6, 4), Layers(6, 4), output_dir=str(tmp_path)))
    assert not (tmp_path / "profiling").exists()


# ---- callbacks ----------------------------------------------------------------------------------------------------


class Events(TrainerCallback):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.logs: list[dict[str, float]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name != "on_log":
            return lambda *args, **kwargs: self.names.append(name)
        return super().__getattribute__(name)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.names.append("on_log")
        self.logs.append(dict(logs))


def test_callbacks_are_called() -> None:
    events = Events()
    built = distiller(
        Layers(6, 4),
        Layers(6, 4),
        callbacks=[events],
        alpha=0.5,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=4,
    )
    trained(built)
    for name, times in {
        "on_train_begin": 1,
        "on_step_begin": 4,
        "on_substep_end": 4,
        "on_pre_optimizer_step": 4,
        "on_optimizer_step": 4,
        "on_step_end": 4,
        "on_evaluate": 2,
        "on_prediction_step": 4,
        "on_save": 1,
        "on_train_end": 1,
    }.items():
        assert events.names.count(name) == times, name
    training = [logs for logs in events.logs if "loss" in logs]
    assert len(training) == 4
    assert all(logs.keys() >= {"loss/soft", "loss/hard", "grad_norm", "learning_rate"} for logs in training)
    evaluation = [logs for logs in events.logs if "eval_loss" in logs]
    assert all(logs.keys() >= {"eval_loss/soft", "eval_loss/hard"} for logs in evaluation)
    assert len(evaluation) == 2


def test_a_callback_can_stop_training() -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= 2

    built = distiller(Layers(6, 4), Layers(6, 4), callbacks=[Stop()])
    assert max(row["step"] for row in trained(built)) == 2


@pytest.mark.parametrize("every", [1, 2, 4])
def test_components_are_means_over_the_steps_between_logs(every: int) -> None:
    def run(every: int) -> list[dict[str, Any]]:
        built = distiller(llama(0, 1), llama(5, 2), kind="llama", alpha=0.4, logging_steps=every)
        return [row for row in trained(built) if "loss" in row]

    each, rows = run(1), run(every)
    assert [row["step"] for row in rows] == list(range(every, 5, every))
    for number, row in enumerate(rows):
        for key in ("loss", "loss/soft", "loss/hard"):
            wanted = sum(r[key] for r in each[number * every : (number + 1) * every]) / every
            assert row[key] == pytest.approx(wanted, rel=1e-5), key


def test_silent_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """A progress bar, and no line for every log."""
    built = distiller(Layers(6, 4), Layers(6, 4), callbacks=[SilentProgressCallback()])
    assert built.train().global_step == 4
    printed = capsys.readouterr()
    assert "'loss'" not in printed.out + printed.err
    assert "4/4" in printed.err
    assert built.state.log_history[0]["loss"] >= 0


# ---- the user's own inputs ------------------------------------------------------------------------------------------


def scrambled(ids: torch.Tensor) -> torch.Tensor:
    return ids * 7 % 64


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("whose", ["teacher", "student"])
def test_prepared_inputs(whose: str, remote: bool) -> None:
    """Each side can see something else of a batch; what counts, and what is not prepared, stays as it was."""
    seen: list[set[str]] = []

    def prepare(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(set(batch))
        kept = {key: value for key, value in batch.items() if whose == "student" or key != "labels"}
        kept["input_ids"] = scrambled(batch["input_ids"])
        batch.clear()  # it is a dictionary of the function's own
        return kept

    data = text(11, 2)
    teacher = FakeTeacher(llama(5, 2)) if remote else llama(5, 2)
    built = ResponseBasedDistiller(
        llama(0, 1),
        teacher,
        train_dataset=data,
        eval_dataset=data,
        data_collator=Collator("llama"),
        args=training_arguments(silverspoon_ray, alpha=0.4),
        **{f"prepare_{whose}_inputs": prepare},
    )
    built.remove_callback(PrinterCallback)
    metrics = built.evaluate()
    assert all(keys == {"input_ids", "attention_mask", "labels"} for keys in seen)
    assert len(seen) == 3
    soft = hard = 0.0
    count = 0
    models = [llama(0, 1).double(), llama(5, 2).double()]
    for sample in data:
        counted = sample["labels"][1:] != -100
        ids = [
            scrambled(sample["input_ids"]) if side == whose else sample["input_ids"] for side in ("student", "teacher")
        ]
        rows = [model(input_ids=i[None]).logits[0, :-1][counted] for model, i in zip(models, ids, strict=True)]
        logs = [row.log_softmax(-1) for row in rows]
        soft += (logs[1].exp() * (logs[1] - logs[0])).sum().item()
        hard += nn.functional.cross_entropy(rows[0], sample["labels"][1:][counted], reduction="sum").item()
        count += int(counted.sum())
    assert metrics["eval_loss/soft"] == pytest.approx(soft / count, rel=1e-5)
    assert metrics["eval_loss/hard"] == pytest.approx(hard / count, rel=1e-5)
    trained(built)
    assert len(seen) > 3


def test_a_teacher_with_a_tokenizer_of_its_own() -> None:
    """Its ids are a column of their own; nobody sees the other's."""
    data = [{**sample, "teacher_ids": scrambled(sample["input_ids"])} for sample in text(8, 1)]
    collate = Collator("llama")

    def collator(samples: list[Any]) -> dict[str, torch.Tensor]:
        ids = [{"input_ids": s["teacher_ids"]} for s in samples]
        rest = [{key: value for key, value in sample.items() if key != "teacher_ids"} for sample in samples]
        return {**collate(rest), "teacher_ids": collate(ids)["input_ids"]}

    built = ResponseBasedDistiller(
        llama(0, 1),
        llama(5, 2),
        train_dataset=data,
        data_collator=collator,
        args=training_arguments(silverspoon_ray, max_steps=2, remove_unused_columns=False),
        prepare_teacher_inputs=lambda b: {"input_ids": b["teacher_ids"], "attention_mask": b["attention_mask"]},
        prepare_student_inputs=lambda b: {key: value for key, value in b.items() if key != "teacher_ids"},
    )
    built.remove_callback(PrinterCallback)
    assert trained(built)[0]["loss"] > 0
