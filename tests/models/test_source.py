"""Where models come from: directories, callables, fresh initialisations, modules; what is refused without loading."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertForSequenceClassification

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.models.source import RandomInit, architecture_class, build_model, check_source
from tests.distillers.kinds import KINDS
from tests.support import Perceptron

SAVED = [name for name in KINDS if name != "perceptron"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in SAVED:
        KINDS[name].model(3, 2).save_pretrained(root / name)
    return {name: root / name for name in SAVED}


def same_weights(left: nn.Module, right: nn.Module) -> bool:
    first, second = left.state_dict(), right.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("spelling", [str, Path], ids=["str", "path"])
@pytest.mark.parametrize("name", SAVED)
def test_directory(name: str, spelling: Callable[..., Any], directories: dict[str, Path]) -> None:
    built = build_model(spelling(directories[name]))
    original = KINDS[name].model(3, 2)
    assert type(built) is type(original)
    assert same_weights(built, original)


def test_home_directory(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(directories["llama"].parent))
    assert same_weights(build_model("~/llama"), KINDS["llama"].model(3, 2))


def test_loading_keywords(directories: dict[str, Path]) -> None:
    built = build_model(str(directories["llama"]), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in built.parameters()} == {torch.bfloat16}


def test_module_and_callable() -> None:
    module = Perceptron()
    assert build_model(module) is module
    assert same_weights(build_model(lambda: Perceptron(4)), Perceptron(4))
    assert same_weights(build_model(Perceptron), Perceptron())


@pytest.mark.parametrize("name", SAVED)
def test_random_init(name: str, directories: dict[str, Path]) -> None:
    source = RandomInit(str(directories[name]), seed=7)
    state = torch.get_rng_state()
    first = build_model(source)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers must not be used up"
    torch.rand(3)
    second = build_model(pickle.loads(pickle.dumps(source)))
    saved = KINDS[name].model(3, 2)
    assert type(first) is type(saved)
    assert same_weights(first, second)
    assert not same_weights(first, saved)
    assert not same_weights(first, build_model(RandomInit(str(directories[name]), seed=8)))


def test_random_init_with_overrides(directories: dict[str, Path]) -> None:
    built = build_model(RandomInit(str(directories["llama"]), {"num_hidden_layers": 1, "hidden_size": 32}))
    assert len(built.model.layers) == 1
    assert built.model.embed_tokens.weight.shape[1] == 32


# ---- refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["teacher", "student"])
@pytest.mark.parametrize("source", [3, None, [], b"path"], ids=repr)
def test_what_is_no_model(source: Any, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_source(key, source)
    assert refused.value.key == key
    assert refused.value.value == source
    with pytest.raises(ConfigError):
        build_model(source, key)


@pytest.mark.parametrize("spelling", ["missing", "empty"])
def test_what_is_no_directory(spelling: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json") as refused:
        check_source("teacher", str(tmp_path / spelling))
    assert refused.value.value == str(tmp_path / spelling)


@pytest.mark.parametrize("text", ["./missing", "../missing", "~/missing"])
def test_relative_paths_are_no_hub_ids(text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_source("teacher", text)


def test_a_hub_id_is_not_looked_up_before_it_is_loaded() -> None:
    check_source("teacher", "someone/something")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(ConfigError, match="hub id that can be read") as refused:
        build_model("someone/something", "teacher")
    assert refused.value.key == "teacher"
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "llama"}, "architectures"),
        ({"model_type": "llama", "architectures": []}, "architectures"),
        ({"model_type": "llama", "architectures": ["LlamaForTelepathy"]}, "no class LlamaForTelepathy"),
    ],
    ids=["none", "empty", "unknown"],
)
def test_directory_without_a_known_class(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        build_model(str(tmp_path))


def test_broken_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="can be read"):
        build_model(str(tmp_path))


@pytest.mark.parametrize(
    "source", [dict, lambda: {}, lambda *args, width=3: {}], ids=["built_in", "lambda", "defaults"]
)
def test_callable_that_returns_something_else(source: Any) -> None:
    with pytest.raises(ConfigError, match="it returned dict") as refused:
        build_model(source, "student")
    assert refused.value.key == "student"


def test_callable_that_needs_arguments() -> None:
    with pytest.raises(ConfigError, match="needs path, seed"):
        check_source("student", lambda path, *args, seed, width=3, **kwargs: None)


def test_architecture_class(directories: dict[str, Path]) -> None:
    config = BertForSequenceClassification.from_pretrained(directories["bert_classifier"]).config
    assert architecture_class(config, "here") is BertForSequenceClassification
