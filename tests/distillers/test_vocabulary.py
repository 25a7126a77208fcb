"""Vocabularies that differ by padding are aligned and logged; others are refused before the first batch."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import silverspoon_ray
from silverspoon_ray.distillers import ResponseBasedDistiller
from silverspoon_ray.distillers.vocabulary import common_vocabulary, vocabulary_size
from silverspoon_ray.errors import VocabularyError
from tests.distillers.kinds import KINDS, SPREAD, Collator, bert_classifier, causal_rows, jsd, kl, text
from tests.support import Perceptron, PrinterCallback, seeded, trained, training_arguments
from tests.teacher.fake import FakeTeacher


def model(seed: int, vocabulary: int) -> Any:
    with seeded(seed):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=2,
                initializer_range=SPREAD,
            )
        )


def tokenizer(words: int | None) -> Any:
    if words is None:
        return None
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({str(n): n for n in range(words)}, "0")))


class Untouchable(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a batch was read")


def distiller(teacher: Any, student: Any, words: int | None = None, data: Any = None, **settings: Any) -> Any:
    alpha = settings.pop("alpha", 0.0)
    built = ResponseBasedDistiller(
        student,
        teacher,
        train_dataset=data,
        eval_dataset=data,
        data_collator=Collator("llama"),
        processing_class=tokenizer(words),
        args=training_arguments(silverspoon_ray, max_steps=2, alpha=alpha),
        **settings,
    )
    built.remove_callback(PrinterCallback)
    return built


ALIGNED = [(64, 65, None), (65, 64, None), (64, 64, None), (64, 80, 60), (80, 64, 64), (128, 64, 50), (64, 64, 70)]
"""(teacher's vocabulary, student's, words of the tokenizer): the sizes alone decide where there is no tokenizer."""


@pytest.mark.parametrize("divergence", ["kl_divergence", "jsd"])
@pytest.mark.parametrize(("theirs", "ours", "words"), ALIGNED)
def test_aligned(theirs: int, ours: int, words: int | None, divergence: str, caplog: pytest.LogCaptureFixture) -> None:
    """The common entries are compared, as softmaxes of their own; the task loss still sees the whole vocabulary."""
    data = text(11, 1)
    for sample in data:
        sample["input_ids"] = sample["input_ids"].clamp(max=49)
        sample["labels"] = sample["labels"].clamp(max=49)
    student, teacher = model(0, ours), model(5, theirs)
    built = distiller(teacher, student, words, data, soft_loss_fn=divergence, alpha=0.5)
    with caplog.at_level(logging.WARNING, "silverspoon_ray"):
        metrics = built.evaluate()
        trained(built)
    common = min(theirs, ours)
    soft, hard, count = 0.0, 0.0, 0
    exact_student, exact_teacher = model(0, ours).double(), model(5, theirs).double()
    for sample in data:
        student_rows, targets = causal_rows(exact_student, sample)
        teacher_rows, _ = causal_rows(exact_teacher, sample)
        formula = kl if divergence == "kl_divergence" else jsd
        soft += formula(student_rows[:, :common], teacher_rows[:, :common]).item()
        hard += torch.nn.functional.cross_entropy(student_rows, targets, reduction="sum").item()
        count += len(targets)
    assert metrics["eval_loss/soft"] == pytest.approx(soft / count, rel=1e-5)
    assert metrics["eval_loss/hard"] == pytest.approx(hard / count, rel=1e-5)
    lines = [record.getMessage() for record in caplog.records if "ocabular" in record.getMessage()]
    if theirs == ours:
        assert lines == []
    else:
        assert len(lines) == 1, "logged once, not with every batch"
        assert all(str(number) in lines[0] for number in (theirs, ours, common))


REFUSED = [(64, 80, None), (80, 64, None), (64, 80, 70), (64, 65, 65), (1000, 64, 512)]


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(("theirs", "ours", "words"), REFUSED)
def test_refused_before_the_first_batch(theirs: int, ours: int, words: int | None, remote: bool) -> None:
    teacher = FakeTeacher(model(5, theirs)) if remote else model(5, theirs)
    with pytest.raises(VocabularyError) as refused:
        distiller(teacher, model(0, ours), words, Untouchable())
    assert refused.value.value == (theirs, ours)
    assert f"({theirs}, {ours})" in str(refused.value)
    assert isinstance(refused.value, ValueError)
    if words is not None:
        assert str(words) in str(refused.value)
    if remote:
        assert teacher.asked == []


def test_padding_changes_nothing_of_the_students_gradient() -> None:
    """What is compared does not depend on what the teacher's padding entries hold."""
    data = text(8, 1)
    teacher = model(5, 65)
    other = copy.deepcopy(teacher)
    with torch.no_grad():
        other.lm_head.weight[64] = 100.0
    runs = [trained(distiller(t, model(0, 64), None, data)) for t in (teacher, other)]
    assert runs[0][0]["loss"] == pytest.approx(runs[1][0]["loss"], rel=1e-6)
    assert runs[0][0]["grad_norm"] == pytest.approx(runs[1][0]["grad_norm"], rel=1e-6)


# ---- other logits -----------------------------------------------------------------------------------------------


def test_classes_are_no_vocabulary() -> None:
    """A classifier's vocabulary may be any; its classes must be the teacher's."""
    student, teacher = bert_classifier(0, 1), bert_classifier(5, 2)
    with seeded(5):
        fewer = type(teacher)(type(teacher.config)(**{**teacher.config.to_dict(), "num_labels": 3}))
    data = KINDS["bert_classifier"].data(8, 1)
    settings: dict[str, Any] = {
        "train_dataset": data,
        "data_collator": Collator("bert_classifier"),
        "args": training_arguments(silverspoon_ray, max_steps=1),
    }
    trained(ResponseBasedDistiller(student, teacher, **settings))
    with pytest.raises(VocabularyError):
        trained(ResponseBasedDistiller(student, fewer, **settings))


def test_shapes_that_do_not_belong_together() -> None:
    data = KINDS["perceptron"].data(8, 1)

    class Cut(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[:1]

    built = ResponseBasedDistiller(
        Perceptron(0),
        Cut(5),
        train_dataset=data,
        data_collator=Collator("perceptron"),
        args=training_arguments(silverspoon_ray, max_steps=1, remove_unused_columns=False),
    )
    with pytest.raises(VocabularyError, match="one shape") as refused:
        trained(built)
    assert refused.value.key == "logits"


@pytest.mark.parametrize(
    ("teacher", "student", "tokens", "wanted"),
    [
        (151936, 152064, None, 151936),
        (152064, 151936, None, 151936),
        (152064, 151936, 151643, 151936),
        (32000, 32000, None, 32000),
        (50257, 50304, None, 50257),
    ],
)
def test_common_vocabulary(teacher: int, student: int, tokens: int | None, wanted: int) -> None:
    assert common_vocabulary(teacher, student, tokens) == wanted


@pytest.mark.parametrize(
    ("teacher", "student", "tokens"), [(32000, 50257, None), (151936, 128256, None), (151936, 152064, 152000)]
)
def test_no_common_vocabulary(teacher: int, student: int, tokens: int | None) -> None:
    with pytest.raises(VocabularyError):
        common_vocabulary(teacher, student, tokens)


def test_vocabulary_size(tmp_path: Path) -> None:
    assert vocabulary_size(model(0, 80).config) == 80
    assert vocabulary_size(None) is None
    assert vocabulary_size(object()) is None
    assert vocabulary_size(KINDS["vit"].model(0, 1).config) is None
