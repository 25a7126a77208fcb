"""``silverspoon-ray cache``, and what the other commands say of a cache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from silverspoon_ray.cli.app import main
from tests.cli.conftest import run_tree, write_run
from tests.support import llama

ROOT = Path(__file__).parents[2]


def test_a_cache_needs_a_place(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "run.yaml"]) == 2
    assert "args.teacher_cache=None: a directory or URI" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "train", "cache"])
def test_places_that_cannot_be(workplace: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Found out by every command before Ray is started."""
    for place in ("text/one.txt/below", "nowhere://bucket/x"):
        assert main([command, "run.yaml", f"args.teacher_cache={place}"]) == 2
        assert "args.teacher_cache=" in capsys.readouterr().err
    assert main([command, "run.yaml", "args.teacher_cache=3"]) == 2
    assert "args.teacher_cache=3: text or null" in capsys.readouterr().err


def test_check_shows_it_and_makes_nothing(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.yaml", "args.teacher_cache=cache"]) == 0
    assert str(workplace / "cache") in capsys.readouterr().out.replace("\n", "")
    assert not (workplace / "cache").exists()


@pytest.mark.slow
@pytest.mark.cluster
def test_killed_and_gone_on_with(workplace: Path) -> None:
    """A job that is killed with what it has written; the next goes on; the run then needs no teacher, and says so."""
    llama(0, 32, 2, vocabulary=259).save_pretrained(workplace / "teacher")
    (workplace / "text" / "more.txt").write_text("".join(f"line {n} of many, all different\n" for n in range(4000)))
    tree: dict[str, Any] = run_tree()
    tree["args"] |= {"teacher_cache": "cache", "teacher_logits": "top_k", "teacher_top_k": 8, "alpha": 0.0}
    tree["args"] |= {"teacher_placement": {"num_devices": 1}, "logging_steps": 1, "per_device_train_batch_size": 1}
    write_run(workplace, tree)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(command: str, *overrides: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "silverspoon_ray", command, "run.yaml", *overrides],
            cwd=workplace,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    job = start("cache")
    limit = time.monotonic() + 150
    while not list((workplace / "cache").glob("*.arrow")) and time.monotonic() < limit and job.poll() is None:
        time.sleep(0.02)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    written = len(list((workplace / "cache").glob("*.arrow")))
    assert written > 0
    out = start("cache", "args.per_device_train_batch_size=16").communicate(timeout=250)[0]
    assert "done: " in out, out
    done = out[out.index("done: ") :].split()
    assert 0 < int(done[3]) < int(done[1]) - 100
    out = start("train", "args.per_device_train_batch_size=4").communicate(timeout=250)[0]
    assert f"every one of {done[1]} samples is in the cache: no teacher is started" in out, out
