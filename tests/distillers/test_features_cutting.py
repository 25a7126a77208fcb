"""Cutting and padding change nothing in feature-based distillation; the yardstick is one float64 pass, a sample at a
time, without padding and masks (:func:`tests.distillers.feature_kinds.reference`)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import silverspoon_ray
from silverspoon_ray import BlockwiseDistiller, HolisticDistiller
from tests.distillers.feature_kinds import FEATURES, LEARNING_RATE, alignments_of, reference
from tests.distillers.kinds import NO_PADDING, Collator, Padding, kind_of, numbered
from tests.support import trained, training_arguments

STEPS, BATCH = 3, 8
CUTS = [(1, 8), (2, 4), (4, 2), (8, 1)]
"""(samples in a micro-batch, micro-batches in a step)"""
PADDINGS = [
    ((8, 1), Padding("left")),
    ((2, 4), Padding("left", extra=3, garbage=9)),
    ((4, 2), Padding("right", extra=5, garbage=7)),
]
HOLISTIC = [("mse", 0.4), ("cosine", 0.0), ("own", 0.4), ("logit_lens", 0.0)]
"""(loss, alpha)"""
BLOCKWISE = [("own", True), ("logit_lens", False), ("mse", True), ("cosine", False)]
"""(loss, backward per block)"""
Case = tuple[str, str, tuple[int, int], Padding, str, float, bool]


def cases() -> list[Any]:
    """Every kind with every cut and padding; losses take turns."""
    found = []
    for number, (name, kind) in enumerate(FEATURES.items()):
        variants = [(cut, NO_PADDING) for cut in CUTS] + (PADDINGS if kind_of(kind.base).fill else [])
        for turn, (cut, padding) in enumerate(variants, number):
            loss, alpha = HOLISTIC[turn % len(HOLISTIC)]
            found.append((name, "holistic", cut, padding, loss, alpha, False))
            loss, per_block = BLOCKWISE[turn % len(BLOCKWISE)]
            found.append((name, "blockwise", cut, padding, loss, 0.0, per_block))
    # A convolution's or perceptron's features have no one size for an output head.
    return [case for case in found if case[4] != "logit_lens" or case[0] not in ("conv", "perceptron")]


def ident(case: Case) -> str:
    name, distiller, cut, padding, loss, alpha, per_block = case
    return f"{name}-{distiller}-{cut[0]}x{cut[1]}-{padding}-{loss}-alpha{alpha}" + ("-per_block" if per_block else "")


def train(case: Case) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], list[int]]:
    """Logs, final parameters (projectors as ``<alignment>.output.weight``), and the samples in the order they came."""
    name, distiller, cut, padding, loss, alpha, per_block = case
    kind = FEATURES[name]
    student, teacher = kind.models()
    collator = Collator(kind.base, padding)
    alignments = alignments_of(name, loss, student, teacher)
    if distiller == "blockwise":
        for number, alignment in enumerate(alignments):
            alignment.input_projector = kind.projector(number, "input")
    build: Any = BlockwiseDistiller if distiller == "blockwise" else HolisticDistiller
    built = build(
        teacher_model=teacher,
        student_model=student,
        alignments=alignments,
        train_dataset=numbered(kind_of(kind.base).data(STEPS * BATCH, 1)),
        data_collator=collator,
        args=training_arguments(
            silverspoon_ray,
            alpha=alpha,
            backward_per_block=per_block,
            max_steps=STEPS,
            per_device_train_batch_size=cut[0],
            gradient_accumulation_steps=cut[1],
            optim="sgd",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            remove_unused_columns=False,
        ),
    )
    first = len(collator.seen)  # to see shapes a distiller may read a sample
    history = trained(built)
    final = {key: value for key, value in student.named_parameters() if "distillation_projectors" not in key}
    for number, alignment in enumerate(alignments):
        for which, projector in alignment.projectors.items():
            prefix = f"{number}.{which.removesuffix('_projector')}"
            final |= {f"{prefix}.{key}": value for key, value in projector.named_parameters()}
    return history, {key: value.detach() for key, value in final.items()}, collator.seen[first:]


@functools.cache
def order(name: str) -> tuple[int, ...]:
    """The order in which one uncut run reads the samples."""
    return tuple(train((name, "holistic", (8, 1), NO_PADDING, "mse", 0.0, False))[2])


@functools.cache
def expected(name: str, distiller: str, loss: str, alpha: float) -> Any:
    data = kind_of(FEATURES[name].base).data(STEPS * BATCH, 1)
    steps = [[data[i] for i in order(name)[step * BATCH : (step + 1) * BATCH]] for step in range(STEPS)]
    losses, parameters = reference(name, loss, distiller, alpha, steps)
    start = dict(FEATURES[name].models()[0].named_parameters())
    moved = max((parameters[key] - start[key]).abs().max().item() for key in start)
    assert moved > 1e-4, "the parameters hardly move, so they would show no wrong gradient"
    return losses, parameters


def check(history: list[dict[str, Any]], parameters: dict[str, torch.Tensor], wanted: Any) -> None:
    losses, wanted_parameters = wanted
    rows = [row for row in history if "loss" in row]
    assert len(rows) == STEPS
    for row, values in zip(rows, losses, strict=True):
        assert {key for key in row if key.startswith("loss")} == values.keys()
        for key, value in values.items():
            assert row[key] == pytest.approx(value, rel=1e-5), key
    assert parameters.keys() == wanted_parameters.keys()
    for key, parameter in parameters.items():
        torch.testing.assert_close(parameter.double(), wanted_parameters[key], rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize("case", cases(), ids=ident)
def test_one_rank(case: Case) -> None:
    name, distiller, _, _, loss, alpha, _ = case
    history, parameters, seen = train(case)
    assert tuple(seen) == order(name)  # or the steps would not hold the same samples
    check(history, parameters, expected(name, distiller, loss, alpha))
