"""Two ranks compute what one does: DDP's search for unused parameters, the averaging of ``backward_per_block`` by hand,
projectors that are made on the way, gradient checkpointing, and an uneven end of an evaluation."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import silverspoon_ray
from silverspoon_ray import BlockwiseDistiller, HolisticDistiller, create_alignments
from tests.distillers.feature_kinds import FEATURES
from tests.distillers.kinds import KINDS, NO_PADDING, Collator, kind_of
from tests.distillers.ranks import on_ranks
from tests.distillers.test_features_cutting import BATCH, STEPS, Case, check, expected, ident, order, train
from tests.distillers.test_features_evaluation import Numbers, check_predictions, evaluator
from tests.distillers.test_features_evaluation import check as check_evaluation
from tests.support import trained, training_arguments

CUT_CASES: list[Case] = [
    ("llama", "holistic", (4, 1), NO_PADDING, "mse", 0.4, False),
    ("llama", "holistic", (2, 2), NO_PADDING, "logit_lens", 0.0, False),
    ("t5", "holistic", (2, 2), NO_PADDING, "cosine", 0.0, False),
    ("wide_llama", "holistic", (4, 1), NO_PADDING, "cosine", 0.0, False),
    ("conv", "holistic", (4, 1), NO_PADDING, "own", 0.4, False),
    ("bert_mlm", "blockwise", (4, 1), NO_PADDING, "mse", 0.0, False),
    ("wide_llama", "blockwise", (2, 2), NO_PADDING, "cosine", 0.0, False),
    ("wide_llama", "blockwise", (1, 4), NO_PADDING, "mse", 0.0, True),
    ("t5", "blockwise", (2, 2), NO_PADDING, "own", 0.0, True),
    ("conv", "blockwise", (4, 1), NO_PADDING, "mse", 0.0, True),
]
EVALUATIONS = [
    (name, objective, size)
    for name, objective in (
        ("llama", ("holistic", "mse", 0.4)),
        ("t5", ("blockwise", "own", 0.0)),
        ("vit", ("holistic", "cosine", 0.0)),
    )
    for size in (11, 1)
]
"""(kind, objective, size of the set); of 1 sample one rank has none."""
AUTOMATIC: dict[str, tuple[str, dict[str, Any]]] = {
    "holistic": ("holistic", {}),
    "holistic-alpha": ("holistic", {"alpha": 0.4}),
    "holistic-checkpointing": ("holistic", {"activation_checkpointing": True}),
    "holistic-checkpointing-alpha": ("holistic", {"activation_checkpointing": True, "alpha": 0.4}),
    "blockwise": ("blockwise", {}),
    "blockwise-per_block": ("blockwise", {"backward_per_block": True}),
    "blockwise-checkpointing": ("blockwise", {"activation_checkpointing": True}),
    "blockwise-per_block-checkpointing": ("blockwise", {"activation_checkpointing": True, "backward_per_block": True}),
    "blockwise-clipped": ("blockwise", {"backward_per_block": True, "max_grad_norm": 0.05}),
}
Run = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def automatic(case: str, batch: int) -> Run:
    """Losses and final parameters of a run whose projectors the distiller makes; evaluated on the way."""
    distiller, arguments = AUTOMATIC[case]
    kind = FEATURES["wide_llama"]
    student, teacher = kind.models()
    build: Any = BlockwiseDistiller if distiller == "blockwise" else HolisticDistiller
    built = build(
        teacher_model=teacher,
        student_model=student,
        alignments=create_alignments(teacher, student, kind.modules),
        train_dataset=KINDS["llama"].data(STEPS * BATCH, 1),
        eval_dataset=KINDS["llama"].data(11, 3),
        data_collator=Collator("llama"),
        args=training_arguments(
            silverspoon_ray,
            max_steps=STEPS,
            per_device_train_batch_size=batch,
            eval_strategy="steps",
            eval_steps=1,
            optim="sgd",
            learning_rate=0.1,
            train_sampling_strategy="sequential",
            **arguments,
        ),
    )
    history = trained(built)
    losses = [{k: v for k, v in row.items() if "loss" in k or "norm" in k} for row in history]
    return losses[:-1], {key: value.detach() for key, value in student.named_parameters()}


def everything_on_a_rank() -> dict[str, list[Any]]:
    evaluations = []
    for name, objective, size in EVALUATIONS:
        numbers = Numbers()
        data = kind_of(FEATURES[name].base).data(size, 3)
        evaluations.append((evaluator(name, objective, data, metrics=numbers).evaluate(), numbers))
    return {
        "cut": [train(case) for case in CUT_CASES],
        "automatic": [automatic(case, BATCH // 2) for case in AUTOMATIC],
        "evaluation": evaluations,
    }


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, list[Any]]]:
    return on_ranks(everything_on_a_rank)


@pytest.mark.parametrize("case", range(len(CUT_CASES)), ids=[ident(case) for case in CUT_CASES])
def test_training(case: int, on_two_ranks: Any) -> None:
    name, distiller, _, _, loss, alpha, _ = CUT_CASES[case]
    results = [rank["cut"][case] for rank in on_two_ranks]
    half = BATCH // 2
    for step in range(STEPS):
        parts = [seen[step * half : (step + 1) * half] for _, _, seen in results]
        assert sorted(parts[0] + parts[1]) == sorted(order(name)[step * BATCH : (step + 1) * BATCH])
    for history, parameters, _ in results:
        check(history, parameters, expected(name, distiller, loss, alpha))


@functools.cache
def on_one_rank(case: str) -> Run:
    return automatic(case, BATCH)


@pytest.mark.parametrize("case", AUTOMATIC)
def test_projectors_made_by_the_distiller(case: str, on_two_ranks: Any) -> None:
    losses, parameters = on_one_rank(case)
    assert any("distillation_projectors" in key for key in parameters)
    for rank in on_two_ranks:
        rank_losses, rank_parameters = rank["automatic"][list(AUTOMATIC).index(case)]
        assert len(rank_losses) == len(losses) == 2 * STEPS
        for there, here in zip(rank_losses, losses, strict=True):
            assert there == pytest.approx(here, rel=1e-4)
        assert rank_parameters.keys() == parameters.keys()
        for key, value in parameters.items():
            torch.testing.assert_close(rank_parameters[key], value, rtol=0, atol=2e-6, msg=key)


@pytest.mark.parametrize("case", [case for case in AUTOMATIC if "checkpointing" in case])
def test_checkpointing_changes_nothing(case: str) -> None:
    losses, parameters = on_one_rank(case)
    plain_losses, plain_parameters = on_one_rank(case.replace("-checkpointing", ""))
    for row, wanted in zip(losses, plain_losses, strict=True):
        assert row == pytest.approx(wanted, rel=1e-5)
    for key, value in plain_parameters.items():
        torch.testing.assert_close(parameters[key], value, rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize("case", range(len(EVALUATIONS)), ids=[f"{n}-{o[0]}-{size}" for n, o, size in EVALUATIONS])
def test_evaluation(case: int, on_two_ranks: Any) -> None:
    name, objective, size = EVALUATIONS[case]
    data = kind_of(FEATURES[name].base).data(size, 3)
    for rank in on_two_ranks:
        metrics, numbers = rank["evaluation"][case]
        assert metrics["eval_samples"] == size
        check_evaluation(metrics, name, objective, data)
        check_predictions(name, data, numbers)
