"""The same seed and data give the loss curves of silverspoon-kd, which is run here, on what it computes exactly:
unpadded samples, no accumulation, an evaluation set that divides by the batch."""

from __future__ import annotations

from typing import Any

import pytest
import silverspoon_kd
import torch

import silverspoon_ray
from tests.distillers.kinds import bert_classifier, gpt2, llama, t5, vit
from tests.support import PrinterCallback, seeded, token_data, trained, training_arguments

COMPARED = (
    "loss",
    "loss/soft",
    "loss/hard",
    "eval_loss",
    "eval_loss/soft",
    "eval_loss/hard",
    "eval_loss/e2e",
    "grad_norm",
)


def cosine(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """A loss of a user's own."""
    return (1 - torch.cosine_similarity(student, teacher, dim=-1)).mean()


def run(package: Any, student: Any, teacher: Any, data: Any, **settings: Any) -> list[dict[str, Any]]:
    arguments = {"eval_strategy": "steps", "eval_steps": 3, **settings.pop("args", {})}
    if package is silverspoon_ray:
        arguments["distill_mask"] = "none"
    distiller = package.ResponseBasedDistiller(
        student(0, 1),
        teacher(5, 2),
        train_dataset=data(32, seed=1),
        eval_dataset=data(8, seed=2),
        args=training_arguments(package, **arguments),
        **settings,
    )
    distiller.remove_callback(PrinterCallback)
    return trained(distiller)


def curves(history: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """For each key, its values with their step."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in history:
        for key in COMPARED:
            if key in row:
                found.setdefault(key, []).append((row["step"], row[key]))
    return found


def assert_same_curves(here: list[dict[str, Any]], there: list[dict[str, Any]], keys: set[str]) -> None:
    ours, theirs = curves(here), curves(there)
    assert set(ours) == set(theirs) == keys | {"grad_norm"}
    for key, values in ours.items():
        assert [step for step, _ in values] == [step for step, _ in theirs[key]], key
        # Torch and the reference sum in another order; grad_norm of losses near 0 shows it most.
        tolerance = 1e-3 if key == "grad_norm" else 1e-4
        assert [v for _, v in values] == pytest.approx([v for _, v in theirs[key]], rel=tolerance), key


def labelled(inputs: dict[str, Any], classes: int) -> Any:
    def data(samples: int, seed: int) -> list[dict[str, Any]]:
        with seeded(seed):
            return [
                {**{k: make() for k, make in inputs.items()}, "labels": torch.randint(0, classes, ())}
                for _ in range(samples)
            ]

    return data


def dropping(seed: int, layers: int) -> Any:
    return gpt2(seed, layers, dropout=0.2)


def translations(samples: int, seed: int) -> list[dict[str, Any]]:
    """With ``decoder_input_ids``, which the reference does not make from the labels."""
    data = token_data(samples, seed=seed)
    return [{**s, "decoder_input_ids": torch.cat([torch.zeros(1, dtype=torch.long), s["labels"][:-1]])} for s in data]


SOFT, HARD = {"loss", "loss/soft", "eval_loss", "eval_loss/soft"}, {"loss/hard", "eval_loss/hard"}
TEXT = labelled({"input_ids": lambda: torch.randint(1, 64, (9,))}, 3)
IMAGES = labelled({"pixel_values": lambda: torch.randn(1, 8, 8)}, 5)
CASES = {
    "kl": (gpt2, token_data, {}, SOFT),
    "kl-temperature-alpha": (
        gpt2,
        token_data,
        {"soft_loss_fn": "kl_divergence", "soft_loss_fn_kwargs": {"temperature": 2.0}, "args": {"alpha": 0.3}},
        SOFT | HARD,
    ),
    "jsd": (gpt2, token_data, {"soft_loss_fn": "jsd", "soft_loss_fn_kwargs": {"beta": 0.3}}, SOFT),
    "jsd-temperature-alpha": (
        llama,
        token_data,
        {"soft_loss_fn": "jsd", "soft_loss_fn_kwargs": {"beta": 0.3, "temperature": 3.0}, "args": {"alpha": 0.5}},
        SOFT | HARD,
    ),
    "magnitude-aware": (
        llama,
        token_data,
        {"args": {"alpha": 0.5, "magnitude_aware_weighting": True}},
        SOFT | HARD,
    ),
    "dropout": (dropping, token_data, {"args": {"alpha": 0.3}}, SOFT | HARD),
    "end-to-end": (gpt2, token_data, {"args": {"e2e_eval_loss": "forward"}}, SOFT | {"eval_loss/e2e"}),
    "end-to-end-alpha": (
        gpt2,
        token_data,
        {"args": {"e2e_eval_loss": "forward", "alpha": 0.3}},
        SOFT | HARD | {"eval_loss/e2e"},
    ),
    "callable": (llama, token_data, {"soft_loss_fn": cosine}, SOFT),
    "callable-alpha-1": (llama, token_data, {"soft_loss_fn": cosine, "args": {"alpha": 1.0}}, SOFT | HARD),
    "classifier": (bert_classifier, TEXT, {"args": {"alpha": 0.4}}, SOFT | HARD),
    "images": (vit, IMAGES, {"args": {"alpha": 0.4}}, SOFT | HARD),
    "encoder-decoder": (t5, translations, {"args": {"alpha": 0.4}}, SOFT | HARD),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_curves(case: str) -> None:
    model, data, settings, keys = CASES[case]
    here = run(silverspoon_ray, model, model, data, **settings)
    there = run(silverspoon_kd, model, model, data, **settings)
    assert_same_curves(here, there, keys)
