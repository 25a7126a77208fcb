"""Callbacks that look at a run from outside."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import silverspoon_ray
from silverspoon_ray import ResponseBasedDistiller
from silverspoon_ray.distillers import MemoryDiagnosticsCallback, diagnostics
from silverspoon_ray.errors import ConfigError
from tests.support import gpt2, llama, token_data, trained, training_arguments


def distiller(*callbacks: Any, **arguments: Any) -> ResponseBasedDistiller:
    return ResponseBasedDistiller(
        gpt2(0),
        llama(1),
        train_dataset=token_data(32),
        eval_dataset=token_data(4, seed=2),
        args=training_arguments(silverspoon_ray, **arguments),
        callbacks=list(callbacks),
    )


def test_weightwatcher(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("weightwatcher")
    capsys.readouterr()
    history = trained(distiller(use_weightwatcher=True, eval_strategy="steps", eval_steps=3))
    found = [row for row in history if "weightwatcher/alpha" in row]
    assert [row["step"] for row in found] == [3, 6]
    assert all(row["weightwatcher/log_norm"] == row["weightwatcher/log_norm"] for row in found)
    assert found[0]["weightwatcher/log_norm"] != found[1]["weightwatcher/log_norm"]
    assert "SMALL N" not in capsys.readouterr().out


def test_weightwatcher_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'silverspoon-ray\[weightwatcher\]'"):
        distiller(use_weightwatcher=True)


class Leaks(transformers.TrainerCallback):
    """Keeps two tensors of every step."""

    def __init__(self, leaks: bool) -> None:
        self.leaks, self.kept = leaks, []  # type: ignore[var-annotated]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.leaks:
            self.kept += [torch.zeros(7, 5), torch.zeros(7, 5)]


@pytest.mark.parametrize("leaks", [True, False])
def test_memory(leaks: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A callback that keeps tensors is found, with their shape; a run that keeps none is not accused."""
    watching = MemoryDiagnosticsCallback(every=2, patience=4)
    built = distiller(Leaks(leaks), watching, max_steps=20)
    with caplog.at_level(logging.WARNING, logger=diagnostics.__name__):
        trained(built)
    said = [record.getMessage() for record in caplog.records if record.name == diagnostics.__name__]
    assert len(said) == leaks
    if leaks:
        assert "tensors and" in said[0]
        assert "16 more float32[7, 5]" in said[0]
    samples = json.loads((Path(built.args.output_dir) / "memory.json").read_text())
    assert [sample["step"] for sample in samples] == list(range(2, 21, 2))
    assert all(sample["resident_bytes"] > 10**7 and sample["tensor_bytes"] > 0 for sample in samples)


@pytest.mark.parametrize(("key", "value"), [("every", 0), ("patience", True), ("every", 1.5)])
def test_settings_that_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        MemoryDiagnosticsCallback(**{key: value})
    assert refused.value.key == key
