"""Freezing by name: whole names only, and never silently nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.models.freeze import freeze_parameters
from tests.support import gpt2, llama, t5


def frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def test_layer_1_is_not_layer_11() -> None:
    """silverspoon-kd searches for the pattern anywhere, so that this freezes layers 10 and 11 too."""
    model = llama(layers=12)
    freeze_parameters(model, [r"model\.layers\.1"])
    assert frozen(model) == {name for name, _ in model.named_parameters() if name.startswith("model.layers.1.")}
    assert frozen(model)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([r"lm_head\.weight"], {"lm_head.weight"}),
        (["lm_head"], {"lm_head.weight"}),
        (["lm_head", r"model\.norm\.weight"], {"lm_head.weight", "model.norm.weight"}),
        (r"lm_head\.weight", {"lm_head.weight"}),
        ([r".*\.0\..*_layernorm.*"], {f"model.layers.0.{n}_layernorm.weight" for n in ("input", "post_attention")}),
        ([r".*norm"], None),
        ([], set()),
    ],
)
def test_what_is_frozen(patterns: Any, expected: set[str] | None) -> None:
    model = llama(layers=2)
    if expected is None:
        expected = {name for name, _ in model.named_parameters() if "norm" in name}
    assert freeze_parameters(model, patterns) is None
    assert frozen(model) == expected


@pytest.mark.parametrize("pattern", [r"model\.layers\.0\.mlp\.up_proj\.weight", ".*", r"lm_head\.weight"])
@pytest.mark.parametrize("thaw", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_same_as_silverspoon_kd_for_whole_names(pattern: str, thaw: bool, before: bool) -> None:
    kd = pytest.importorskip("silverspoon_kd")
    results = []
    for freeze in (freeze_parameters, kd.freeze_parameters):
        model = llama(layers=2).requires_grad_(before)
        assert freeze(model, [pattern], thaw_not_matched=thaw) is None
        results.append(frozen(model))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["transformer.wte.weight", "lm_head.weight", "lm_head", "transformer.wte"])
def test_a_tied_weight_is_found_under_each_of_its_names(name: str) -> None:
    model = gpt2()
    freeze_parameters(model, [name.replace(".", r"\.")], thaw_not_matched=True)
    assert frozen(model) == {"transformer.wte.weight"}
    model = t5()
    freeze_parameters(model, [r"encoder\.embed_tokens\.weight"])
    assert frozen(model) == {"shared.weight"}


def test_thawing_leaves_whole_numbers_alone() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    model.register_parameter("count", nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False))
    freeze_parameters(model, ["bias"], thaw_not_matched=True)
    assert frozen(model) == {"bias", "count"}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("up_proj", r"only a part of model\.layers\.0\.mlp\.up_proj\.weight, .*write '\.\*up_proj\.\*'"),
        (r"model\.layers\.1\d", "near are"),
        ("lm_heed.weight", r"near are lm_head\.weight"),
        ("(", "a regular expression"),
        (3, "a list of regular expressions"),
    ],
)
def test_what_matches_nothing(pattern: Any, message: str) -> None:
    model = llama(layers=2)
    with pytest.raises(ConfigError, match=message) as refused:
        freeze_parameters(model, [r"lm_head\.weight", pattern], thaw_not_matched=True)
    assert refused.value.key == "freeze_regex_patterns"
    assert refused.value.value == pattern
    assert not frozen(model), "nothing is changed"
