"""A user's mistakes, as the user sees them: one line, exit code 2, no Ray, within ten seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT_S = 10  # the contract, interpreter start and imports included

MISTAKES = [
    # what the command line says; the key and the value that the answer names
    (["missing.yaml"], "CONFIG", "missing.yaml"),
    (["broken.yaml"], "line 2", "broken.yaml"),
    (["run.yaml", "args.alpha"], "key.path=value", "args.alpha"),
    (["run.yaml", "teecher=small"], "teecher", "small"),
    (["run.yaml", "data.max_length=long"], "data.max_length", "long"),
    (["run.yaml", "scaling.num_workers=0"], "scaling.num_workers", "0"),
    (["run.yaml", "data.train=nothing.txt"], "data.train", "nothing.txt"),
    (["run.yaml", "data.train=text/*.parquet"], "data.train", "text/*.parquet"),
    (["run.yaml", "data.train=text/rows.jsonl", "data.text_column=bodi"], "data.text_column", "bodi"),
    (["run.yaml", "teacher=./text"], "teacher", "./text"),
    (["run.yaml", "data.tokenizer=no-such-organisation-9/tokenizer"], "data.tokenizer", "no-such-organisation-9"),
    (["run.yaml", "args.teacher_placement.replicas=-1"], "args.teacher_placement.replicas", "-1"),
    (["run.yaml", "args.alpha=1.5"], "args.alpha", "1.5"),
    (["run.yaml", "args.learning_rte=0.1"], "learning_rate", "0.1"),
    (["run.yaml", "args.save_strategy=sometimes"], "args.save_strategy", "sometimes"),
    (["run.yaml", "args.teacher_logits=topk"], "args.teacher_logits", "top_k"),
    (
        ["run.yaml", "args.teacher_logits=sampled", "distiller_kwargs.soft_loss_fn=jsd"],
        "args.teacher_logits",
        "forward KL",
    ),
    (["run.yaml", "distiller_kwargs.output_head_layer=lm_hed"], "distiller_kwargs.output_head_layer", "lm_head"),
    (["run.yaml", "distiller_kwargs.soft_loss_fn=kl_divergense"], "distiller_kwargs.soft_loss_fn", "kl_divergense"),
    (["run.yaml", "student.overrides.num_layers=1"], "student.overrides.num_layers", "num_hidden_layers"),
    (["run.yaml", "distiller=holistic", "distiller_kwargs={}"], "alignments", "modules"),
    (["run.yaml", "distiller=holistic", "distiller_kwargs={}", "alignments.modul=x"], "alignments.modul", "modules"),
    (
        ["run.yaml", "distiller=holistic", "distiller_kwargs={}", "alignments.modules=model.layer.0"],
        "modules",
        "model.layers.0",
    ),
    (
        ["run.yaml", "distiller=hkd", "distiller_kwargs={}", "alignments={modules: model.norm, loss_function: msee}"],
        "alignments.loss_function",
        "msee",
    ),
    (["run.yaml", "alignments.modules=model.norm"], "alignments", "ResponseBasedDistiller"),
    (["--adress=x", "run.yaml"], "--adress", "--address"),
]


@pytest.mark.parametrize(("arguments", "key", "value"), MISTAKES, ids=[" ".join(case[0]) for case in MISTAKES])
def test_a_mistake(workplace: Path, arguments: list[str], key: str, value: str) -> None:
    (workplace / "broken.yaml").write_text("teacher: a\n\tstudent: b\n")
    (workplace / "text" / "rows.jsonl").write_text('{"body": "some text"}\n')
    (workplace / "ray").mkdir()
    # The network may be asked; where there is none, the answer must not take longer for it.
    environment = {**os.environ, "RAY_TMPDIR": str(workplace / "ray"), "HF_HUB_OFFLINE": "0"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])

    started = time.monotonic()
    command = [sys.executable, "-m", "silverspoon_ray", "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    seconds = time.monotonic() - started

    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert key in lines[0]
    assert value in lines[0]
    assert done.stdout == ""
    assert list((workplace / "ray").iterdir()) == [], "a Ray was started"
    # On a machine that others load as well, a process gets its share only.
    others = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert seconds < LIMIT_S * others
