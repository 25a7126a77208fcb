"""Cutting changes nothing: 8 samples as 8x1, 4x2, 2x4 or 1x8, over 1 or 2 ranks, however padded, are one batch.

The yardstick is :func:`tests.distillers.kinds.reference_steps`: float64, one sample at a time, no padding, no mask.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import silverspoon_ray
from silverspoon_ray.distillers import ResponseBasedDistiller
from tests.distillers.kinds import (
    KINDS,
    SOFT,
    Collator,
    Padding,
    class_rows,
    mean_squared,
    numbered,
    reference_steps,
)
from tests.distillers.ranks import on_ranks
from tests.support import trained, training_arguments

STEPS, BATCH, LEARNING_RATE = 3, 8, 0.1
CUTS = [(1, 8), (2, 4), (4, 2), (8, 1)]
"""(samples in a micro-batch, micro-batches in a step)"""
PADDINGS = [
    ((8, 1), Padding("left")),
    ((2, 4), Padding("left", extra=3, garbage=9)),
    ((4, 2), Padding("right", extra=5, garbage=7)),
]
DIVERGENCES = [
    ("kl_divergence", {}),
    ("kl_divergence", {"temperature": 2.0}),
    ("jsd", {"beta": 0.3}),
]
OBJECTIVES = [(0.0, 0), (0.4, 1), (1.0, 0), (0.0, 2), (0.4, 2)]
"""(alpha, number of the divergence)"""


def cases() -> list[Any]:
    found = []
    for name, kind in KINDS.items():
        variants = [(cut, Padding()) for cut in CUTS] + (PADDINGS if kind.fill else [])
        objectives = [(0.0, None), (0.4, None), (1.0, None)] if name == "bert_regression" else OBJECTIVES
        for cut, padding in variants:
            for alpha, divergence in objectives:
                ident = f"{name}-{cut[0]}x{cut[1]}-{padding}-alpha{alpha}-{divergence}"
                found.append(pytest.param(name, cut, padding, alpha, divergence, id=ident))
    return found


def soft_loss(divergence: int | None) -> tuple[Any, dict[str, float]]:
    return (mean_squared, {}) if divergence is None else DIVERGENCES[divergence]


def train(
    name: str, cut: tuple[int, int], padding: Padding, alpha: float, divergence: int | None, **keywords: Any
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], list[int]]:
    """Logs, final parameters, and the numbers of the samples in the order in which they were read."""
    kind = KINDS[name]
    function, loss_keywords = soft_loss(divergence)
    collator = Collator(name, padding)
    args = training_arguments(
        silverspoon_ray,
        alpha=alpha,
        max_steps=STEPS,
        per_device_train_batch_size=cut[0],
        gradient_accumulation_steps=cut[1],
        optim="sgd",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        remove_unused_columns=False,
        **keywords,
    )
    distiller = ResponseBasedDistiller(
        kind.model(0, 1),
        kind.model(5, 2),
        train_dataset=numbered(kind.data(STEPS * BATCH, 1)),
        data_collator=collator,
        args=args,
        soft_loss_fn=function,
        soft_loss_fn_kwargs=loss_keywords,
    )
    history = trained(distiller)
    return history, dict(distiller.student_model.named_parameters()), collator.seen


@functools.cache
def order(name: str) -> tuple[int, ...]:
    """The order in which one uncut run reads the samples."""
    return tuple(train(name, (8, 1), Padding(), 0.0, None if name == "bert_regression" else 0)[2])


@functools.cache
def expected(name: str, alpha: float, divergence: int | None) -> Any:
    kind = KINDS[name]
    data = kind.data(STEPS * BATCH, 1)
    steps = [[data[i] for i in order(name)[step * BATCH : (step + 1) * BATCH]] for step in range(STEPS)]
    function, keywords = soft_loss(divergence)
    losses, parameters = reference_steps(kind, steps, alpha, SOFT[function], LEARNING_RATE, **keywords)
    start = dict(kind.model(0, 1).named_parameters())
    moved = max((parameters[key] - start[key]).abs().max().item() for key in start)
    assert moved > 1e-3, "the parameters hardly move, so they would show no wrong gradient"
    return losses, parameters


def check(history: list[dict[str, Any]], parameters: dict[str, torch.Tensor], wanted: Any, alpha: float) -> None:
    losses, wanted_parameters = wanted
    rows = [row for row in history if "loss" in row]
    assert len(rows) == STEPS
    for row, (total, soft, hard) in zip(rows, losses, strict=True):
        assert row["loss"] == pytest.approx(total, rel=1e-5)
        assert row["loss/soft"] == pytest.approx(soft, rel=1e-5)
        if alpha > 0:
            assert row["loss/hard"] == pytest.approx(hard, rel=1e-5)
        else:
            assert "loss/hard" not in row
    assert parameters.keys() == wanted_parameters.keys()
    for key, parameter in parameters.items():
        wanted_parameter = wanted_parameters[key].detach()
        torch.testing.assert_close(parameter.detach().double(), wanted_parameter, rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize(("name", "cut", "padding", "alpha", "divergence"), cases())
def test_one_rank(name: str, cut: tuple[int, int], padding: Padding, alpha: float, divergence: int | None) -> None:
    history, parameters, seen = train(name, cut, padding, alpha, divergence)
    assert tuple(seen) == order(name)  # or the steps would not hold the same samples
    check(history, parameters, expected(name, alpha, divergence), alpha)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert_mlm", "t5", "bert_classifier", "perceptron"])
def test_a_step_in_which_nothing_counts(name: str, alpha: float) -> None:
    """Its loss is exactly 0 and it teaches nothing; the steps around it are what they would be without it."""
    kind = KINDS[name]
    data = kind.data(2 * BATCH, 1)
    silent = [{**sample, "labels": torch.full_like(sample["labels"], -100)} for sample in kind.data(BATCH, 2)]
    built = ResponseBasedDistiller(
        kind.model(0, 1),
        kind.model(5, 2),
        train_dataset=[*data[:BATCH], *silent, *data[BATCH:]],
        data_collator=Collator(name),
        args=training_arguments(
            silverspoon_ray,
            alpha=alpha,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            train_sampling_strategy="sequential",
            optim="sgd",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            remove_unused_columns=False,
            logging_nan_inf_filter=False,
        ),
    )
    rows = [row for row in trained(built) if "loss" in row]
    assert rows[1]["loss"] == rows[1]["loss/soft"] == rows[1].get("loss/hard", 0.0) == 0.0
    assert rows[1]["grad_norm"] == 0.0
    losses, parameters = reference_steps(
        kind, [data[:BATCH], data[BATCH:]], alpha, SOFT["kl_divergence"], LEARNING_RATE
    )
    assert [rows[0]["loss"], rows[2]["loss"]] == pytest.approx([total for total, _, _ in losses], rel=1e-5)
    for key, parameter in built.student_model.named_parameters():
        wanted = parameters[key].detach()
        torch.testing.assert_close(parameter.detach().double(), wanted, rtol=0, atol=1e-6, msg=key)


# ---- two ranks ---------------------------------------------------------------------------------------------

RANK_CASES = [(name, (4, 1), 0.4, None if name == "bert_regression" else 1) for name in KINDS]
RANK_CASES += [("llama", (1, 4), 0.4, 2), ("bert_mlm", (2, 2), 0.0, 0), ("t5", (2, 2), 1.0, 0)]


def train_all_on_a_rank() -> list[Any]:
    return [train(name, cut, Padding(), alpha, divergence) for name, cut, alpha, divergence in RANK_CASES]


@pytest.fixture(scope="module")
def on_two_ranks() -> list[Any]:
    """For each of RANK_CASES, what :func:`train` returned on each rank."""
    return list(zip(*on_ranks(train_all_on_a_rank), strict=True))


@pytest.mark.parametrize("case", range(len(RANK_CASES)), ids=[f"{c[0]}-{c[1][0]}x{c[1][1]}" for c in RANK_CASES])
def test_two_ranks(case: int, on_two_ranks: list[Any]) -> None:
    name, _, alpha, divergence = RANK_CASES[case]
    data = KINDS[name].data(STEPS * BATCH, 1)
    seen = [ranks_seen for _, _, ranks_seen in on_two_ranks[case]]
    half = BATCH // 2
    for step in range(STEPS):
        parts = [rank[step * half : (step + 1) * half] for rank in seen]
        assert sorted(parts[0] + parts[1]) == sorted(order(name)[step * BATCH : (step + 1) * BATCH])
    if KINDS[name].rows is not class_rows:
        tokens = [[int((data[i]["labels"] != -100).sum()) for i in rank] for rank in seen]
        uneven = [
            sum(tokens[0][s * half : (s + 1) * half]) != sum(tokens[1][s * half : (s + 1) * half]) for s in range(STEPS)
        ]
        assert any(uneven), "the ranks must have unequal numbers of tokens"
    for history, parameters, _ in on_two_ranks[case]:
        # The logs are those of rank 0 on every rank: averages over ranks.
        check(history, parameters, expected(name, alpha, divergence), alpha)
