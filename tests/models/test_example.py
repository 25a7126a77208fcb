"""A batch without data: whoever gets one can run on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from silverspoon_ray.models.example import example_inputs
from silverspoon_ray.models.structure import structure_of
from tests.support import Perceptron, bert_classifier, bert_mlm, gpt2, llama, t5, vit

MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert_mlm, "classifier": bert_classifier, "t5": t5, "vit": vit}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_models_run_on_their_example(name: str, dtype: torch.dtype) -> None:
    """Made from the structure alone, it is on the CPU."""
    model = MODELS[name]().to(dtype).eval()
    example = example_inputs(structure_of(model))
    assert example is not None
    with torch.no_grad():
        assert model(**example).logits.shape[0] == 1


def test_an_image_size_of_two_numbers() -> None:
    structure = structure_of(vit())
    structure.config.image_size = (8, 12)
    assert example_inputs(structure)["pixel_values"].shape == (1, 1, 8, 12)


@pytest.mark.parametrize("vocabulary", [1, 3])
def test_ids_are_valid(vocabulary: int) -> None:
    structure = structure_of(llama())
    structure.config.vocab_size = vocabulary
    ids = example_inputs(structure)["input_ids"]
    assert ids.shape == (1, 4)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < vocabulary


def unknown(name: str, **values: Any) -> Any:
    structure = structure_of(llama())
    structure.main_input_name = name
    for key, value in values.items():
        setattr(structure.config, key, value)
    return structure


@pytest.mark.parametrize(
    "structure",
    [
        Perceptron(),
        unknown("input_values"),
        unknown("pixel_values"),
        unknown("pixel_values", image_size=[8, 8, 8], num_channels=3),
        unknown("input_ids", vocab_size=0),
    ],
    ids=["plain module", "speech", "no sizes", "three sizes", "no vocabulary"],
)
def test_no_example(structure: Any) -> None:
    assert example_inputs(structure) is None
