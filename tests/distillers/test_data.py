"""Data as people bring it: Hugging Face datasets with further columns, transformers' own collators."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding, PreTrainedTokenizerFast

import silverspoon_ray
from silverspoon_ray.distillers import ResponseBasedDistiller
from tests.distillers.kinds import KINDS, Collator
from tests.support import PrinterCallback, trained, training_arguments, without_times
from tests.teacher.fake import FakeTeacher

WORDS = {"[PAD]": 0, "[MASK]": 1, **{str(number): number for number in range(2, 64)}}


def tokenizer() -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(WORDS, "[PAD]")), pad_token="[PAD]", mask_token="[MASK]"
    )


def unlabelled(samples: int = 24) -> list[dict[str, Any]]:
    return [{"input_ids": sample["input_ids"].clamp(min=2).tolist()} for sample in KINDS["llama"].data(samples, 1)]


def distiller(kind: str, data: Any, collator: Any, remote: bool = False, **keywords: Any) -> ResponseBasedDistiller:
    settings = {"processing_class": keywords.pop("processing_class", None)}
    teacher = KINDS[kind].model(5, 2)
    built = ResponseBasedDistiller(
        KINDS[kind].model(0, 1),
        FakeTeacher(teacher) if remote else teacher,
        train_dataset=data,
        eval_dataset=data,
        data_collator=collator,
        args=training_arguments(silverspoon_ray, **{"max_steps": 4, **keywords}),
        **settings,
    )
    built.remove_callback(PrinterCallback)
    return built


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert_mlm"])
def test_collator_for_language_modeling(kind: str) -> None:
    """It returns a BatchEncoding and, for masked models, draws from torch's global generator."""
    histories = []
    for remote, depth in [(False, 2), (True, 0), (True, 3)]:
        words = tokenizer()
        collator = DataCollatorForLanguageModeling(words, mlm=kind == "bert_mlm", mlm_probability=0.4)
        built = distiller(
            kind, unlabelled(), collator, remote, alpha=0.5, teacher_prefetch=depth, processing_class=words
        )
        histories.append(without_times(trained(built)))
        metrics = built.evaluate()
        assert metrics["eval_loss/soft"] > 0
        assert metrics["eval_loss/hard"] > 0
    losses = [row["loss"] for row in histories[0] if "loss" in row]
    assert len(set(losses)) == 4
    assert histories[1] == histories[0]
    assert histories[2] == histories[0]


def test_collator_without_labels() -> None:
    """Distillation needs no labels: every real token counts."""
    words = tokenizer()
    built = distiller("llama", unlabelled(11), DataCollatorWithPadding(words), processing_class=words)
    trained(built)
    built = distiller("llama", unlabelled(11), DataCollatorWithPadding(words), processing_class=words)
    models = [KINDS["llama"].model(seed, layers).double().eval() for seed, layers in ((0, 1), (5, 2))]
    total, count = 0.0, 0
    for sample in unlabelled(11):
        ids = torch.tensor([sample["input_ids"]])
        student, teacher = (model(input_ids=ids).logits[0].log_softmax(-1) for model in models)
        total += (teacher.exp() * (teacher - student)).sum().item()
        count += ids.numel()
    assert built.evaluate()["eval_loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("kind", ["llama", "bert_classifier"])
def test_further_columns_are_left_out(kind: str) -> None:
    """As in Trainer; the numbers are those of the data without them."""
    data = KINDS[kind].data(24, 1)
    rows = [{key: value.tolist() for key, value in sample.items()} for sample in data]
    wide = datasets.Dataset.from_list([{**row, "title": f"number {n}", "weight": 0.5} for n, row in enumerate(rows)])
    wide.set_format("torch", columns=list(data[0]), output_all_columns=True)
    histories = [without_times(trained(distiller(kind, d, Collator(kind), alpha=0.5))) for d in (wide, data)]
    assert histories[0] == histories[1]


@pytest.mark.parametrize("wide", [False, True], ids=["list", "dataset"])
def test_labels_of_a_plain_module_are_kept(wide: bool) -> None:
    """Its forward takes no labels, so Trainer alone would drop the column."""
    data = KINDS["perceptron"].data(24, 1)
    dataset: Any = data
    if wide:
        rows = [{key: value.tolist() for key, value in sample.items()} for sample in data]
        dataset = datasets.Dataset.from_list([{**row, "title": "text"} for row in rows])
        dataset.set_format("torch", columns=["x", "labels"], output_all_columns=True)
    history = trained(distiller("perceptron", dataset, Collator("perceptron"), alpha=0.5))
    assert all(row["loss/hard"] > 0 for row in history if "loss" in row)


def test_what_compute_metrics_can_ask_for() -> None:
    seen: dict[str, Any] = {}

    def metrics(prediction: Any) -> dict[str, float]:
        seen.update(inputs=prediction.inputs, losses=prediction.losses)
        return {}

    data = KINDS["llama"].data(11, 3)
    built = ResponseBasedDistiller(
        KINDS["llama"].model(0, 1),
        KINDS["llama"].model(5, 2),
        eval_dataset=data,
        data_collator=Collator("llama"),
        compute_metrics=metrics,
        args=training_arguments(silverspoon_ray, include_for_metrics=["inputs", "loss"]),
    )
    built.evaluate()
    assert len(seen["inputs"]) == len(seen["losses"]) == 11
    for sample, ids in zip(data, seen["inputs"], strict=True):
        assert ids[: len(sample["input_ids"])].tolist() == sample["input_ids"].tolist()


def test_a_dataset_of_one_sample() -> None:
    built = distiller("llama", KINDS["llama"].data(1, 3), Collator("llama"))
    assert len([row for row in trained(built) if "loss" in row]) == 4


def test_training_for_epochs() -> None:
    """24 samples in batches of 4, two micro-batches a step: 3 steps an epoch; the last of 22 has fewer."""
    for samples, steps in ((24, 6), (22, 6), (20, 6)):
        built = distiller(
            "llama",
            KINDS["llama"].data(samples, 1),
            Collator("llama"),
            max_steps=-1,
            num_train_epochs=2,
            gradient_accumulation_steps=2,
        )
        rows = [row for row in trained(built) if "loss" in row]
        assert len(rows) == steps
        assert rows[-1]["epoch"] == 2
