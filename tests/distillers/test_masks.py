"""Which positions count, read off hand-written batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from silverspoon_ray.distillers.masks import PositionRule, check_mask
from silverspoon_ray.distillers.metrics import EvaluationMeter, TrainingMeter
from silverspoon_ray.distillers.task_loss import TaskLossTraits, counted_labels
from silverspoon_ray.distillers.terms import LossTerm, combine, first_rows, widen_rows
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.nested import map_tensors
from silverspoon_ray.teacher.protocol import TeacherOutput
from tests.distillers.kinds import KINDS
from tests.distillers.test_students import TokenModel

N = -100
IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])
LABELS = torch.tensor([[N, 2, 3, N], [5, N, 7, N]])
RIGHT = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
LEFT = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])


def batch(**entries: Any) -> dict[str, Any]:
    return {"input_ids": IDS, **entries}


CASES: dict[str, tuple[PositionRule, dict[str, Any], list[Any] | None]] = {
    "causal labels": (
        PositionRule("auto", True, True),
        batch(labels=LABELS, attention_mask=RIGHT),
        [[1, 1, 0, 0], [0, 1, 0, 0]],
    ),
    "causal labels, asked for": (
        PositionRule("labels", True, True),
        batch(labels=LABELS),
        [[1, 1, 0, 0], [0, 1, 0, 0]],
    ),
    "masked labels": (
        PositionRule("auto", False, True),
        batch(labels=LABELS, attention_mask=RIGHT),
        [[0, 1, 1, 0], [1, 0, 1, 0]],
    ),
    "shifted labels given": (
        PositionRule("auto", True, True),
        batch(shift_labels=LABELS, labels=LABELS),
        [[0, 1, 1, 0], [1, 0, 1, 0]],
    ),
    "attention without labels": (
        PositionRule("auto", True, True),
        batch(attention_mask=RIGHT),
        [[1, 1, 1, 1], [1, 1, 1, 0]],
    ),
    "attention beside labels": (
        PositionRule("attention", True, True),
        batch(labels=LABELS, attention_mask=LEFT),
        [[1, 1, 1, 1], [0, 1, 1, 1]],
    ),
    "nothing that tells": (PositionRule("auto", True, True), batch(), None),
    "none": (PositionRule("none", True, True), batch(labels=LABELS, attention_mask=RIGHT), None),
    "four-dimensional attention": (
        PositionRule("attention", True, True),
        batch(attention_mask=torch.ones(2, 1, 4, 4)),
        None,
    ),
    "encoder-decoder labels": (
        PositionRule("auto", False, True, True),
        batch(labels=LABELS[:, :3], attention_mask=RIGHT),
        [[0, 1, 1], [1, 0, 1]],
    ),
    "encoder's attention is not the decoder's": (
        PositionRule("attention", False, True, True),
        batch(labels=LABELS[:, :3], attention_mask=RIGHT),
        None,
    ),
    "decoder's attention": (
        PositionRule("attention", False, True, True),
        batch(attention_mask=RIGHT, decoder_attention_mask=RIGHT[:, 1:]),
        [[1, 1, 1], [1, 1, 0]],
    ),
    "classes": (
        PositionRule("auto", False, False),
        batch(labels=torch.tensor([1, N]), attention_mask=RIGHT),
        [1, 0],
    ),
    "classes without labels": (PositionRule("auto", False, False), batch(attention_mask=RIGHT), None),
    "several classes at once": (PositionRule("auto", False, False), batch(labels=torch.ones(2, 3)), None),
    "numbers": (PositionRule("auto", False, False), batch(labels=torch.tensor([0.5, -100.0])), None),
    "unknown model, token labels": (PositionRule(), batch(labels=LABELS), [[0, 1, 1, 0], [1, 0, 1, 0]]),
    "unknown model, classes": (PositionRule(), {"x": torch.ones(2, 6), "labels": torch.tensor([N, 3])}, [0, 1]),
}


@pytest.mark.parametrize("case", CASES)
def test_mask(case: str) -> None:
    rule, entries, wanted = CASES[case]
    mask = rule.mask(entries)
    if wanted is None:
        assert mask is None
    else:
        assert mask is not None
        assert mask.dtype == torch.bool
        assert torch.equal(mask, torch.tensor(wanted, dtype=torch.bool))


def test_labels_asked_for_and_not_there() -> None:
    with pytest.raises(ConfigError, match="input_ids") as refused:
        PositionRule("labels", True, True).mask(batch())
    assert refused.value.key == "distill_mask"
    assert refused.value.value == "labels"


@pytest.mark.parametrize(
    ("rule", "entries", "wanted"),
    [
        (PositionRule("none", True, True), batch(labels=LABELS), 8),
        (PositionRule("none", False, True, True), batch(labels=LABELS[:, :3]), 6),
        (PositionRule("none", False, True, True), batch(decoder_input_ids=IDS[:, :1]), 2),
        (PositionRule("auto", False, False), batch(), 2),
        (PositionRule(), {"x": torch.ones(5, 6)}, 5),
        (PositionRule("none", False, False), {"pixel_values": torch.ones(3, 1, 8, 8)}, 3),
    ],
)
def test_positions(rule: PositionRule, entries: dict[str, Any], wanted: int) -> None:
    assert rule.positions(entries) == wanted


@pytest.mark.parametrize(
    ("attention", "shifts", "wanted"),
    [
        (RIGHT, True, [[1, 2, 3, 4], [5, 6, 7, N]]),
        (RIGHT, False, [[1, 2, 3, 4], [5, 6, 7, N]]),
        (LEFT, True, [[1, 2, 3, 4], [N, N, 7, 0]]),
        (LEFT, False, [[1, 2, 3, 4], [N, 6, 7, 0]]),
        (torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0]]), True, [[1, N, N, 4], [N, N, N, N]]),
    ],
    ids=["right-causal", "right", "left-causal", "left", "holes"],
)
def test_without_padding(attention: torch.Tensor, shifts: bool, wanted: list[Any]) -> None:
    given = batch(labels=IDS.clone(), attention_mask=attention)
    cleaned = PositionRule("auto", shifts, True).without_padding(given)
    assert cleaned["labels"].tolist() == wanted
    assert torch.equal(given["labels"], IDS), "the batch itself is left alone"
    assert cleaned["attention_mask"] is attention
    assert PositionRule("none", shifts, True).without_padding(given) is given
    assert PositionRule("auto", False, False).without_padding(given) is given
    assert PositionRule("auto", False, True, True).without_padding(given) is given
    assert PositionRule("auto", shifts, True).without_padding(batch()) == batch()


def test_check_mask() -> None:
    check_mask(None, torch.ones(2, 4, 9), "auto")
    check_mask(torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 4, 9), "auto")
    with pytest.raises(ConfigError, match=r"\(2, 4\).*\(2, 5, 9\)") as refused:
        check_mask(torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 5, 9), "attention")
    assert refused.value.key == "distill_mask"
    assert refused.value.value == "attention"


@pytest.mark.parametrize(
    ("name", "gives_loss", "shifts", "token_level", "encoder_decoder"),
    [
        ("llama", True, True, True, False),
        ("gpt2", True, True, True, False),
        ("bert_mlm", True, False, True, False),
        ("t5", True, False, True, True),
        ("bert_classifier", True, False, False, False),
        ("bert_regression", True, False, False, False),
        ("vit", True, False, False, False),
        ("perceptron", False, False, None, False),
    ],
)
def test_traits(name: str, gives_loss: bool, shifts: bool, token_level: bool | None, encoder_decoder: bool) -> None:
    traits = TaskLossTraits(KINDS[name].model(0, 1))
    assert (traits.gives_loss, traits.shifts_labels) == (gives_loss, shifts)
    assert (traits.token_level, traits.encoder_decoder) == (token_level, encoder_decoder)
    assert TaskLossTraits(TokenModel(0)).token_level is None


@pytest.mark.parametrize(
    ("entries", "shifts", "wanted"),
    [
        ({"labels": LABELS}, True, 3),
        ({"labels": LABELS}, False, 4),
        ({"labels": IDS}, True, 6),
        ({"shift_labels": LABELS, "labels": IDS}, True, 4),
        ({"labels": torch.tensor([1, N, 2])}, False, 2),
        ({"labels": torch.randn(3)}, False, 3),
        ({"labels": torch.randn(3, 5)}, False, 3),
        ({}, True, None),
        ({"labels": None}, True, None),
    ],
)
def test_counted_labels(entries: dict[str, Any], shifts: bool, wanted: int | None) -> None:
    assert counted_labels(entries, shifts) == wanted


# ---- terms and meters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("aware", [False, True])
def test_combine(alpha: float, aware: bool) -> None:
    soft, hard = torch.tensor(4.0, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    terms = {"soft": LossTerm(soft, 3), "hard": LossTerm(hard, 5, kind="task")}
    shares = {"soft": 0.5, "hard": torch.tensor(0.25)}
    total = combine(terms, shares, alpha, aware)
    total.backward()
    scale = {"soft": 4.0 if aware else 1.0, "hard": 0.5 if aware else 1.0}
    weights = {"soft": (1 - alpha) * 0.5 / scale["soft"], "hard": alpha * 0.25 / scale["hard"]}
    assert total.item() == pytest.approx(weights["soft"] * 4 + weights["hard"] * 0.5)
    assert soft.grad.item() == pytest.approx(weights["soft"])  # type: ignore[union-attr]
    assert hard.grad.item() == pytest.approx(weights["hard"])  # type: ignore[union-attr]


def test_magnitude_of_nothing() -> None:
    zero = torch.tensor(0.0, requires_grad=True)
    total = combine({"soft": LossTerm(zero * 3, 0)}, {"soft": 1.0}, 0.0, True)
    total.backward()
    assert total.item() == 0
    assert torch.isfinite(zero.grad)  # type: ignore[arg-type]


def test_rows() -> None:
    rows = {"a": torch.arange(4), "b": torch.ones(4, 2), "c": torch.tensor(3), "d": torch.ones(7), "e": "text"}
    head = map_tensors(first_rows(2, 4), rows)
    assert {key: getattr(value, "shape", value) for key, value in head.items()} == {
        "a": (2,),
        "b": (2, 2),
        "c": (),
        "d": (7,),
        "e": "text",
    }
    answer = TeacherOutput(logits=torch.ones(4, 3, 9), outputs={"x": (torch.ones(4, 2),)}).map(first_rows(3, 4))
    assert answer.logits is not None
    assert answer.logits.shape == (3, 3, 9)
    assert answer.outputs["x"][0].shape == (3, 2)
    wide = widen_rows((torch.tensor([[1, 2], [3, 4]]), torch.tensor(5)), 4)
    assert wide[0].tolist() == [[1, 2], [3, 4], [3, 4], [3, 4]]
    assert wide[1] == 5


def test_training_meter() -> None:
    meter = TrainingMeter()
    assert meter.take(lambda t: t) == {}
    for value in (1.0, 2.0, 3.0):
        meter.add("soft", torch.tensor(value, dtype=torch.bfloat16))
        meter.add("hard", torch.tensor(value * 10))
    meter.steps = 2
    ranks: list[torch.Tensor] = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:  # the other rank has twice as much
        ranks.append(tensor)
        return torch.cat([tensor, 2 * tensor])

    assert meter.take(gather) == {"soft": 4.5, "hard": 45.0}
    assert len(ranks) == 1
    assert meter.take(gather) == {}


def test_evaluation_meter() -> None:
    meter = EvaluationMeter()
    assert meter.means(lambda t: t) == {}
    meter.add("soft", torch.tensor(1.0), 3)
    meter.add("soft", torch.tensor(float("nan")), 0)
    meter.add("soft", torch.tensor(5.0), torch.tensor(1))
    meter.add("hard", torch.tensor(float("nan")), 0)
    means = meter.means(lambda totals: 2 * totals)  # as many on another rank
    assert means["soft"] == 2.0
    assert means["hard"] != means["hard"]
