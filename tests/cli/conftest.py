"""A run that is in order, for tests that spoil one thing about it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def write_model(directory: Path, weights: bool = True, **values: Any) -> Path:
    """A model directory as far as checks look into it: no real weights."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**LLAMA, **values}))
    if weights:
        (directory / "model.safetensors").write_bytes(b"")
    return directory


def run_tree() -> dict[str, Any]:
    """Everything a run needs, with paths relative to the working directory."""
    return {
        "teacher": "teacher",
        "student": {"path": "teacher", "init": "random", "overrides": {"num_hidden_layers": 1}},
        "args": {"output_dir": "out", "max_steps": 2, "learning_rate": 1e-3, "alpha": 0.5, "use_cpu": True},
        "distiller_kwargs": {"soft_loss_fn": "kl_divergence", "soft_loss_fn_kwargs": {"temperature": 2.0}},
        "data": {"train": "text/*.txt", "tokenizer": "bytes", "max_length": 16},
    }


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, text, and ``run.yaml``."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "teacher")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "one.txt").write_text("a first line\n\nand the second\n" * 20)
    (tmp_path / "text" / "two.txt").write_text("another file, without a last line feed")
    write_run(tmp_path, run_tree())
    return tmp_path


def write_run(directory: Path, tree: dict[str, Any]) -> Path:
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(autouse=True)
def _handlers_as_they_were() -> Iterator[None]:
    """The command line quiets Ray Data's console by raising its handlers' levels; in this process pytest's own, which
    are shared by all tests, are among them."""
    handlers = {*logging.root.handlers, *logging.getLogger("ray.data").handlers}
    levels = {handler: handler.level for handler in handlers}
    yield
    for handler, level in levels.items():
        handler.setLevel(level)
