"""Time and memory of the divergences, forward and backward, against silverspoon-kd's.

Both are run in turn in one process, medians over repetitions; the extra peak memory of each is taken in a process of
its own. Written to ``results/losses.json``.

    python benchmarks/losses.py
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import silverspoon_kd
import torch

import silverspoon_ray
from benchmarks.machine import machine, write

LIBRARIES = {"silverspoon_kd": silverspoon_kd, "silverspoon_ray": silverspoon_ray}
LOSSES: dict[str, Callable[[Any], Any]] = {
    "kl": lambda library: library.kl_divergence_loss(temperature=1.0),
    "jsd": lambda library: library.jsd_loss(temperature=2.0, beta=0.5),
}


def logits(rows: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(rows, vocabulary, generator=generator) for _ in range(2))
    return student.requires_grad_(), teacher


def step(loss: Any, student: torch.Tensor, teacher: torch.Tensor) -> float:
    """Seconds of one forward and backward."""
    student.grad = None
    begin = time.perf_counter()
    loss(student, teacher).backward()
    return time.perf_counter() - begin


def peak_mib(library: str, name: str, rows: int, vocabulary: int) -> float:
    """Extra peak memory of one forward and backward, in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.losses", "--peak", library, name, str(rows), str(vocabulary)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def print_peak(library: str, name: str, rows: int, vocabulary: int) -> None:
    student, teacher = logits(rows, vocabulary)
    loss = LOSSES[name](LIBRARIES[library])
    step(loss, *logits(8, vocabulary))  # load what is loaded lazily
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, importing torch, is forgotten
    before = resident_peak_kib()
    step(loss, student, teacher)
    print((resident_peak_kib() - before) / 1024)


def resident_peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peak", nargs=4, metavar=("LIBRARY", "LOSS", "ROWS", "VOCABULARY"))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    if options.peak:
        library, name, rows, vocabulary = options.peak
        print_peak(library, name, int(rows), int(vocabulary))
        return
    here, results = machine(), []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for rows, vocabulary in ((1024, 8192), (1024, 32000)):
            student, teacher = logits(rows, vocabulary)
            for name, make in LOSSES.items():
                times: dict[str, list[float]] = {library: [] for library in LIBRARIES}
                for _ in range(options.repetitions + 1):
                    for library, module in LIBRARIES.items():
                        times[library].append(step(make(module), student, teacher))
                medians = {library: statistics.median(values[1:]) for library, values in times.items()}
                row: dict[str, Any] = {"loss": name, "rows": rows, "vocabulary": vocabulary, "threads": threads}
                row["seconds"] = medians
                row["ratio"] = medians["silverspoon_kd"] / medians["silverspoon_ray"]
                if threads == options.threads[0]:
                    row["extra_peak_mib"] = {lib: peak_mib(lib, name, rows, vocabulary) for lib in LIBRARIES}
                results.append(row)
                print(row, flush=True)
    write("losses", {"what": "forward and backward, float32", "results": results, "machine": here})


if __name__ == "__main__":
    main()
