"""Runs the benchmarks in turn and writes what they found as one page, ``results/README.md``.

python -m benchmarks [--device cuda] [--only losses step_time_8192]
python -m benchmarks --page        # the page alone, from the results that are there
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS

SCRIPTS = Path(__file__).parent
RUNS: dict[str, list[str]] = {
    "losses": ["losses.py"],
    "step_time_8192": ["step_time.py", "--transports", "object_store", "collective"],
    "step_time_32000": ["step_time.py", "--vocabulary", "32000", "--rounds", "3", "--forms", "full", "hidden", "top_k"],
    "transport": ["transport.py"],
    "overlap": ["overlap.py"],
    "pipeline": ["pipeline.py"],
    "blockwise_memory": ["blockwise_memory.py"],
    "feature_bytes": ["feature_bytes.py"],
}
ON_A_GPU: dict[str, list[str]] = {
    "gpu": ["gpu.py"],
    "step_time_8192_cuda": ["step_time.py", "--rounds", "2", "--device", "cuda"],
    "transport_cuda": ["transport.py", "--device", "cuda"],
    "overlap_cuda": ["overlap.py", "--rounds", "1", "--device", "cuda"],
}
"""Short, so that all take less than ten minutes."""


def page() -> str:
    """The results that are there, as Markdown."""
    lines = ["# Results", "", "Written by `python -m benchmarks`; each is a script of its own in `benchmarks/`.", ""]
    for file in sorted(RESULTS.glob("*.json")):
        result = json.loads(file.read_text())
        lines += [f"## {file.stem}", ""]
        lines += [f"{key}: {value}" for key, value in result.items() if isinstance(value, str) and key != "what"]
        lines += ["", str(result.get("what", "")), ""]
        for key, value in result.items():
            if key not in ("machine", "rounds"):
                lines += table(key, value)
        if file.with_suffix(".png").is_file():
            lines += [f"![{file.stem}]({file.stem}.png)", ""]
        where = result.get("machine")
        if isinstance(where, Mapping):
            versions = ", ".join(f"{name} {number}" for name, number in where.get("versions", {}).items())
            lines += [f"*{where.get('processor')}, {where.get('cores')} cores; {versions}*", ""]
    return "\n".join(lines)


def table(title: str, value: Any) -> list[str]:
    """A mapping of numbers, or of rows, as a table; nothing for what is neither."""
    if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
        value = {str(number): row for number, row in enumerate(value)}
    if not isinstance(value, Mapping) or not value:
        return []
    rows = {name: flat(row) if isinstance(row, Mapping) else {title: row} for name, row in value.items()}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [f"| {title} | " + " | ".join(columns) + " |", "|" + " --- |" * (len(columns) + 1)]
    lines += [
        f"| {name} | " + " | ".join(shown(row.get(column)) for column in columns) + " |" for name, row in rows.items()
    ]
    return [*lines, ""]


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings with joined names."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found.update({f"{name}, {inner}": entry for inner, entry in flat(value).items()})
        else:
            found[name] = value
    return found


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="+", choices=[*RUNS, *ON_A_GPU], help="some of them")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    options = parser.parse_args()
    runs = ON_A_GPU if options.device == "cuda" else RUNS
    chosen = {} if options.page else {name: {**RUNS, **ON_A_GPU}[name] for name in options.only or runs}
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent)}
    failed = []
    for number, (name, command) in enumerate(chosen.items(), 1):
        print(f"[{number}/{len(chosen)}] {name}: python benchmarks/{' '.join(command)}", flush=True)
        begin = time.monotonic()
        script = str(SCRIPTS / command[0])
        done = subprocess.run([sys.executable, script, *command[1:]], env=environment, check=False)
        failed += [name] if done.returncode else []
        print(f"    {time.monotonic() - begin:.0f} s, exit status {done.returncode}", flush=True)
    path = RESULTS / "README.md"
    path.write_text(page())
    print(f"written to {path}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
