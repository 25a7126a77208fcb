"""A structure is the model without its weights: same names, shapes, dtypes and ties, and next to no memory."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from silverspoon_ray.models.structure import structure_of
from silverspoon_ray.teacher.inputs import TeacherInputs
from tests.distillers.kinds import KINDS
from tests.support import llama


def tensors(model: nn.Module) -> dict[str, Any]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


@pytest.mark.parametrize("name", KINDS)
def test_names_shapes_and_modes(name: str) -> None:
    model = KINDS[name].model(0, 2).train()
    next(model.parameters()).requires_grad_(False)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    structure = structure_of(model)
    assert type(structure) is type(model)
    assert [key for key, _ in structure.named_modules()] == [key for key, _ in model.named_modules()]
    ours, theirs = tensors(structure), tensors(model)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.device.type == "meta", key
        assert value.shape == theirs[key].shape, key
        assert value.dtype == theirs[key].dtype, key
        assert value.requires_grad == theirs[key].requires_grad, key
        assert type(value) is type(theirs[key]), key
    assert structure.training
    if hasattr(model, "config"):
        assert structure.config.to_dict() == model.config.to_dict()
    for key, value in model.state_dict().items():  # the model itself is left alone
        assert value.device.type == "cpu"
        assert torch.equal(value, weights[key])


@pytest.mark.parametrize("name", KINDS)
def test_ties(name: str) -> None:
    """Names that are one tensor in the model are one tensor in the structure."""

    def groups(model: nn.Module) -> set[frozenset[str]]:
        found: dict[int, set[str]] = {}
        for key, value in tensors(model).items():
            found.setdefault(id(value), set()).add(key)
        return {frozenset(names) for names in found.values()}

    model = KINDS[name].model(0, 2)
    assert groups(structure_of(model)) == groups(model)
    if name in ("gpt2", "t5", "bert_mlm"):
        assert any(len(names) > 1 for names in groups(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_weight_is_copied(dtype: torch.dtype) -> None:
    """10 million parameters in a few kilobytes: neither in memory nor in a pickle."""
    model = llama(width=512, layers=2, vocabulary=8000).to(dtype)
    assert sum(parameter.numel() for parameter in model.parameters()) > 8_000_000
    structure = structure_of(model)
    seen: set[int] = set()

    def storage(value: Any, depth: int = 0) -> int:
        """Bytes of CPU tensors reachable from the structure, also those that are plain attributes."""
        if id(value) in seen or depth > 8:
            return 0
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            return value.untyped_storage().nbytes() if value.device.type != "meta" else 0
        if isinstance(value, dict):
            return sum(storage(item, depth + 1) for item in value.values())
        if isinstance(value, list | tuple):
            return sum(storage(item, depth + 1) for item in value)
        return storage(vars(value), depth + 1) if isinstance(value, nn.Module) else 0

    assert storage(structure) < 10_000
    assert len(pickle.dumps(structure)) < 100_000
    again = pickle.loads(pickle.dumps(structure))
    assert {parameter.device.type for parameter in again.parameters()} == {"meta"}
    assert [key for key, _ in again.named_parameters()] == [key for key, _ in model.named_parameters()]


def test_weights_of_a_structure_can_be_filled() -> None:
    model = KINDS["llama"].model(0, 2)
    empty = structure_of(model).to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    assert empty.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("name", KINDS)
def test_what_a_teacher_is_sent(name: str) -> None:
    """The same arguments are picked by the structure as by the model; never targets."""
    model = KINDS[name].model(0, 2)
    batch: dict[str, Any] = {**KINDS[name].data(1, 1)[0], "position_ids": 1, "unknown": 2, "token_type_ids": None}
    batch |= {"shift_labels": 3, "num_items_in_batch": 4, "mine": 5}
    chosen = TeacherInputs(structure_of(model), ["mine"])(batch)
    assert chosen.keys() == TeacherInputs(model, ["mine"])(batch).keys()
    assert not chosen.keys() & {"labels", "shift_labels", "num_items_in_batch", "mine", "token_type_ids"}
    assert chosen.keys() >= batch.keys() & {"input_ids", "attention_mask", "pixel_values", "x"}
    assert chosen.get("use_cache", False) is False
    if name in ("llama", "gpt2", "t5"):
        assert "use_cache" in chosen
    if name == "perceptron":
        assert chosen.keys() == {"x"}
