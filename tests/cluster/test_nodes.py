"""Stages on several nodes, and a node that goes in the middle."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]


def on_nodes(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_health_check_period_ms": "1000"}
    environment["RAY_health_check_failure_threshold"] = "3"
    command = [sys.executable, "-m", "tests.cluster.nodes", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_stage_moves_to_another_node() -> None:
    out = on_nodes("spare", "pp")
    assert "NODES 2" in out
    assert "RECOVERED" in out, out


def test_without_another_node_the_error_names_the_stage() -> None:
    out = on_nodes("none", "pp")
    assert "THREE refused" in out
    assert "NODES 2" in out
    found = re.search(r"FAILED (\d+) (.*)", out)
    assert found is not None, out
    assert int(found.group(1)) < 60
    assert "stage 1 of 2" in found.group(2)
