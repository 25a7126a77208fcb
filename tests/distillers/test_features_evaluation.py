"""eval_loss of the feature distillers is that of one pass over the whole set, a sample at a time, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import silverspoon_ray
from silverspoon_ray import BlockwiseDistiller, HolisticDistiller
from tests.distillers.feature_kinds import FEATURES, alignments_of, reference
from tests.distillers.kinds import KINDS, NO_PADDING, Collator, Padding, kind_of
from tests.support import PrinterCallback, trained, training_arguments

BATCH = 4
SIZES = [11, 3]
OBJECTIVES = [("holistic", "mse", 0.0), ("holistic", "cosine", 0.4), ("blockwise", "own", 0.0)]
"""(distiller, loss, alpha)"""


class Numbers:
    """compute_metrics that keeps what it was given."""

    def __init__(self) -> None:
        self.predictions: Any = None
        self.labels: Any = None

    def __call__(self, prediction: Any) -> dict[str, float]:
        self.predictions, self.labels = prediction.predictions, prediction.label_ids
        return {"samples": float(len(prediction.label_ids))}


def evaluator(
    name: str,
    objective: tuple[str, str, float],
    data: Any,
    padding: Padding = NO_PADDING,
    metrics: Any = None,
    train_dataset: Any = None,
    **keywords: Any,
) -> Any:
    distiller, loss, alpha = objective
    kind = FEATURES[name]
    student, teacher = kind.models()
    alignments = alignments_of(name, loss, student, teacher)
    if distiller == "blockwise":
        for number, alignment in enumerate(alignments):
            alignment.input_projector = kind.projector(number, "input")
    build: Any = BlockwiseDistiller if distiller == "blockwise" else HolisticDistiller
    built = build(
        teacher_model=teacher,
        student_model=student,
        alignments=alignments,
        train_dataset=train_dataset,
        eval_dataset=data,
        data_collator=Collator(kind.base, padding),
        compute_metrics=metrics,
        args=training_arguments(
            silverspoon_ray,
            alpha=alpha,
            remove_unused_columns=False,
            per_device_eval_batch_size=BATCH,
            **keywords,
        ),
    )
    built.remove_callback(PrinterCallback)
    return built


def check(metrics: dict[str, float], name: str, objective: tuple[str, str, float], data: list[Any]) -> None:
    distiller, loss, alpha = objective
    wanted = reference(name, loss, distiller, alpha, [data])[0][0]
    found = {key.removeprefix("eval_"): value for key, value in metrics.items() if key.startswith("eval_loss")}
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-5), key


def check_predictions(name: str, data: list[Any], numbers: Numbers) -> None:
    """Each sample once and in order: the logits of the student alone, and its labels."""
    predictions = numbers.predictions[0] if isinstance(numbers.predictions, tuple) else numbers.predictions
    assert len(predictions) == len(numbers.labels) == len(data)
    kind = FEATURES[name]
    student = kind.models()[0].eval()
    for sample, logits, label in zip(data, predictions, numbers.labels, strict=True):
        alone, targets = (tensor.detach().numpy() for tensor in kind_of(kind.base).rows(student, sample))
        assert (np.ravel(label)[: sample["labels"].numel()] == np.ravel(sample["labels"])).all()
        labels = np.ravel(sample["labels"])
        if sample["labels"].dim():
            counted = np.flatnonzero(labels[1:] != -100) if name.endswith(("llama", "gpt2")) else labels != -100
            logits = logits[: len(labels)][counted]
        if len(targets):
            np.testing.assert_allclose(logits.reshape(alone.shape), alone, atol=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FEATURES)
def test_before_training(name: str, size: int, objective: tuple[str, str, float]) -> None:
    data = kind_of(FEATURES[name].base).data(size, 3)
    numbers = Numbers() if size == 11 else None
    check(evaluator(name, objective, data, metrics=numbers).evaluate(), name, objective, data)
    if numbers is not None:
        check_predictions(name, data, numbers)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("padding", [Padding("left", 2, 9), Padding("right", 5, 7)], ids=str)
@pytest.mark.parametrize("name", ["llama", "bert_mlm", "t5"])
def test_padding_changes_nothing(name: str, padding: Padding, objective: tuple[str, str, float]) -> None:
    data = kind_of(FEATURES[name].base).data(11, 3)
    check(evaluator(name, objective, data, padding).evaluate(), name, objective, data)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_the_own_loss_beside(objective: tuple[str, str, float]) -> None:
    """``e2e_eval_loss`` reports the student's loss on the labels whether it is learned from or not."""
    data = KINDS["llama"].data(11, 3)
    metrics = evaluator("llama", objective, data, e2e_eval_loss="forward").evaluate()
    hard = reference("llama", objective[1], "holistic", 0.4, [data])[0][0]["loss/hard"]
    assert metrics.pop("eval_loss/e2e") == pytest.approx(hard, rel=1e-5)
    check(metrics, "llama", objective, data)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_evaluations_amid_training_change_nothing(objective: tuple[str, str, float]) -> None:
    data = KINDS["llama"].data(11, 3)
    histories = []
    for settings in ({}, {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}):
        built = evaluator("wide_llama", objective, data, train_dataset=data, max_steps=4, **settings)
        histories.append([row["loss"] for row in trained(built) if "loss" in row])
    assert histories[0] == histories[1]
