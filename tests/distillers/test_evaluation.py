"""eval_loss is that of one pass over the whole set, however it falls into batches and over ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import silverspoon_ray
from silverspoon_ray.distillers import ResponseBasedDistiller
from tests.distillers.kinds import KINDS, NO_PADDING, Collator, Padding, batch_losses, kl, llama, mean_squared, squared
from tests.distillers.ranks import on_ranks
from tests.support import PrinterCallback, trained, training_arguments
from tests.teacher.fake import FakeTeacher

BATCH = 4
SIZES = [12, 11, 13, 3, 1]
"""Sizes of evaluation sets: even, uneven at the end, and less than a batch (on 2 ranks: one rank has no sample)."""


class Numbers:
    """compute_metrics that keeps what it was given."""

    def __init__(self) -> None:
        self.predictions: Any = None
        self.labels: Any = None

    def __call__(self, prediction: Any) -> dict[str, float]:
        self.predictions, self.labels = prediction.predictions, prediction.label_ids
        return {"samples": float(len(prediction.label_ids))}


def evaluator(
    name: str, data: Any, padding: Padding = NO_PADDING, metrics: Any = None, remote: bool = False, **keywords: Any
) -> Any:
    kind = KINDS[name]
    teacher = kind.model(5, 2)
    built = ResponseBasedDistiller(
        kind.model(0, 1),
        FakeTeacher(teacher) if remote else teacher,
        eval_dataset=data,
        data_collator=Collator(name, padding),
        soft_loss_fn=mean_squared if name == "bert_regression" else None,
        compute_metrics=metrics,
        args=training_arguments(
            silverspoon_ray, remove_unused_columns=False, per_device_eval_batch_size=BATCH, **keywords
        ),
    )
    built.remove_callback(PrinterCallback)
    return built


def by_hand(name: str, data: list[Any]) -> tuple[float, float]:
    """Soft and hard loss of the whole set in float64."""
    kind = KINDS[name]
    models = [copy.deepcopy(kind.model(seed, layers)).double().eval() for seed, layers in ((0, 1), (5, 2))]
    soft, hard = batch_losses(kind, *models, data, squared if name == "bert_regression" else kl)
    return soft.item(), hard.item()


def check(metrics: dict[str, float], name: str, data: list[Any], alpha: float, prefix: str = "eval") -> None:
    soft, hard = by_hand(name, data)
    assert metrics[f"{prefix}_loss/soft"] == pytest.approx(soft, rel=1e-5)
    assert metrics[f"{prefix}_loss"] == pytest.approx((1 - alpha) * soft + alpha * hard, rel=1e-5)
    if alpha > 0:
        assert metrics[f"{prefix}_loss/hard"] == pytest.approx(hard, rel=1e-5)
    else:
        assert f"{prefix}_loss/hard" not in metrics


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", KINDS)
def test_one_rank(name: str, size: int, alpha: float) -> None:
    data = KINDS[name].data(size, 3)
    if sum(int((sample["labels"] != -100).sum()) for sample in data[:size]) == 0:
        pytest.skip("nothing counts in this set")
    check(evaluator(name, data, alpha=alpha).evaluate(), name, data, alpha)


@pytest.mark.parametrize("padding", [Padding("left", 2, 9), Padding("right", 5, 7)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert_mlm", "t5"])
def test_padding_changes_nothing(name: str, padding: Padding) -> None:
    data = KINDS[name].data(11, 3)
    check(evaluator(name, data, padding, alpha=0.4).evaluate(), name, data, 0.4)


def test_a_mean_of_batch_means_would_be_wrong() -> None:
    """Or the tests above would not tell the two apart."""
    data = KINDS["llama"].data(11, 3)
    means = [by_hand("llama", data[start : start + BATCH])[0] for start in range(0, 11, BATCH)]
    whole = by_hand("llama", data)[0]
    assert abs(sum(means) / len(means) - whole) > 1e-3 * whole


def test_a_set_in_which_nothing_counts() -> None:
    data = [{**sample, "labels": torch.full_like(sample["labels"], -100)} for sample in KINDS["llama"].data(5, 3)]
    metrics = evaluator("llama", data, alpha=0.4).evaluate()
    assert np.isnan(metrics["eval_loss"])


# ---- two ranks ---------------------------------------------------------------------------------------------

RANK_CASES = [(name, size, False) for name in ("llama", "t5", "bert_classifier", "perceptron") for size in SIZES]
RANK_CASES += [("llama", size, True) for size in SIZES]
"""(kind, size of the set, whether the teacher is asked ahead, with whole batches)"""


def evaluate_all_on_a_rank() -> list[Any]:
    found = []
    for name, size, remote in RANK_CASES:
        numbers = Numbers()
        metrics = evaluator(name, KINDS[name].data(size, 3), metrics=numbers, remote=remote, alpha=0.4).evaluate()
        found.append((metrics, numbers.predictions, numbers.labels))
    return found


@pytest.fixture(scope="module")
def on_two_ranks() -> list[Any]:
    return list(zip(*on_ranks(evaluate_all_on_a_rank), strict=True))


@pytest.mark.parametrize("case", range(len(RANK_CASES)), ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in RANK_CASES])
def test_two_ranks(case: int, on_two_ranks: list[Any]) -> None:
    name, size, _ = RANK_CASES[case]
    data = KINDS[name].data(size, 3)
    for metrics, predictions, labels in on_two_ranks[case]:
        check(metrics, name, data, 0.4)
        check_predictions(name, data, predictions, labels)
        assert metrics["eval_samples"] == size


# ---- what compute_metrics sees -----------------------------------------------------------------------------


def check_predictions(name: str, data: list[Any], predictions: Any, labels: Any) -> None:
    """Each sample once, in order: its labels, and the logits that the student gives for it alone."""
    if isinstance(predictions, tuple):  # encoder-decoder models return more than logits
        predictions = predictions[0]
    assert len(predictions) == len(labels) == len(data)
    student = KINDS[name].model(0, 1).eval()
    shifted = name in ("llama", "gpt2")
    for sample, logits, label in zip(data, predictions, labels, strict=True):
        wanted = sample["labels"].numpy()
        assert (label[: len(wanted)] == wanted).all() if wanted.ndim else label == wanted
        with torch.no_grad():
            alone, _ = KINDS[name].rows(student, sample)
        if wanted.ndim:
            counted = np.flatnonzero(wanted[1:] != -100) if shifted else np.flatnonzero(wanted != -100)
            assert logits.shape[-1] == 64
            logits = logits[counted]
        elif wanted == -100:
            continue
        np.testing.assert_allclose(logits.reshape(alone.shape), alone.numpy(), atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", KINDS)
def test_compute_metrics(name: str, size: int) -> None:
    data = KINDS[name].data(size, 3)
    numbers = Numbers()
    metrics = evaluator(name, data, metrics=numbers).evaluate()
    assert metrics["eval_samples"] == size
    check_predictions(name, data, numbers.predictions, numbers.labels)


@pytest.mark.parametrize("alpha", [0.0, 0.4])
@pytest.mark.parametrize("name", ["llama", "bert_mlm", "vit", "perceptron"])
def test_predict_without_labels(name: str, alpha: float) -> None:
    """The distillation loss is then that of every real token, or of every sample."""
    data = [{k: v for k, v in sample.items() if k != "labels"} for sample in KINDS[name].data(11, 3)]
    output = evaluator(name, data, alpha=alpha).predict(data)
    assert len(output.predictions) == 11
    assert output.label_ids is None
    labelled = [dict(sample) for sample in data]
    for sample in labelled:
        # Labels that count everywhere; a causal model's last token counts too, so one more is appended for the rows.
        sample["labels"] = torch.zeros_like(sample["input_ids"]) if "input_ids" in sample else torch.tensor(0)
    if name == "llama":
        kind = KINDS[name]
        models = [kind.model(seed, layers).double().eval() for seed, layers in ((0, 1), (5, 2))]
        rows = [[model(input_ids=s["input_ids"][None]).logits[0].detach() for s in data] for model in models]
        soft = (kl(torch.cat(rows[0]), torch.cat(rows[1])) / sum(len(row) for row in rows[0])).item()
    else:
        soft = by_hand(name, labelled)[0]
    assert output.metrics["test_loss/soft"] == pytest.approx(soft, rel=1e-5)
    assert output.metrics["test_loss"] == pytest.approx((1 - alpha) * soft, rel=1e-5)
    assert "test_loss/hard" not in output.metrics


def test_end_to_end_loss_is_the_students_own() -> None:
    data = KINDS["llama"].data(11, 3)
    metrics = evaluator("llama", data, alpha=0.0, e2e_eval_loss="forward").evaluate()
    check(metrics, "llama", data, 0.0)
    assert metrics["eval_loss/e2e"] == pytest.approx(by_hand("llama", data)[1], rel=1e-5)


def test_several_evaluation_sets() -> None:
    sets = {"short": KINDS["llama"].data(5, 3), "long": KINDS["llama"].data(9, 4)}
    metrics = evaluator("llama", sets, alpha=0.4).evaluate()
    for name, data in sets.items():
        check(metrics, "llama", data, 0.4, prefix=f"eval_{name}")


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def test_evaluation_set_without_a_length() -> None:
    data = KINDS["llama"].data(11, 3)
    check(evaluator("llama", Stream(data), alpha=0.4).evaluate(), "llama", data, 0.4)


def test_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    kind = KINDS["llama"]
    built = ResponseBasedDistiller(
        llama(0, 1),
        llama(5, 2),
        train_dataset=kind.data(8, 1),
        eval_dataset=kind.data(11, 3),
        data_collator=Collator("llama"),
        args=training_arguments(
            silverspoon_ray,
            output_dir=str(tmp_path),
            max_steps=6,
            alpha=1.0,  # on labels that are drawn at random: soon the student only learns this training set by heart
            learning_rate=0.05,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            greater_is_better=False,
        ),
    )
    history = trained(built)
    losses = {row["step"]: row["eval_loss"] for row in history if "eval_loss" in row}
    best = min(losses, key=losses.__getitem__)
    assert built.state.best_metric == losses[best]
    assert Path(built.state.best_model_checkpoint).name == f"checkpoint-{best}"
    assert built.evaluate()["eval_loss"] == pytest.approx(losses[best], rel=1e-6)
    for key, value in load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors").items():
        assert torch.equal(built.student_model.state_dict()[key], value), key
    assert best != max(losses), "the last step is the best, so this shows nothing"
