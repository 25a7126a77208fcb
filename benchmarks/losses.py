"""Time and memory of the losses, forward and backward, against silverspoon-kd's and, where it is installed, trl's.

Divergences of logits first; then the loss from hidden states, in which the student's logits are never held, against
products and loss one after the other. All are run in turn in one process, medians over repetitions; the extra peak
memory of each is taken in a process of its own. Written to ``results/losses.json``.

    python benchmarks/losses.py [--threads 1 2]
"""

from __future__ import annotations

import argparse
import importlib.util
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
from silverspoon_ray.losses.fused import LinearStudent, combined_loss
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.losses.targets import LogitTargets, top_k_targets

LIBRARIES: dict[str, Any] = {"silverspoon_kd": silverspoon_kd, "silverspoon_ray": silverspoon_ray}
if importlib.util.find_spec("trl") is not None:
    LIBRARIES["trl"] = None
LOSSES: dict[str, tuple[float, float]] = {"kl": (1.0, 0.0), "jsd": (2.0, 0.5)}
"""Temperature, and the teacher's weight in the mixture; without a mixture the forward KL."""
WIDTH = 256


def loss_of(library: str, name: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A library's loss of student's and teacher's logits."""
    temperature, beta = LOSSES[name]
    if library == "trl":
        from trl.experimental.gkd.gkd_trainer import GKDTrainer

        function = GKDTrainer.generalized_jsd_loss
        return lambda student, teacher: function(student[None], teacher[None], beta=beta, temperature=temperature)
    if name == "kl":
        made: Any = LIBRARIES[library].kl_divergence_loss(temperature=temperature)
    else:
        made = LIBRARIES[library].jsd_loss(temperature=temperature, beta=beta)
    return made  # type: ignore[no-any-return]


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
    return printed(command)


def printed(command: list[str]) -> float:
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def print_peak(library: str, name: str, rows: int, vocabulary: int) -> None:
    student, teacher = logits(rows, vocabulary)
    loss = loss_of(library, name)
    step(loss, *logits(8, vocabulary))  # load what is loaded lazily
    print_extra(lambda: step(loss, student, teacher))


def print_extra(run: Callable[[], Any]) -> None:
    """How far the resident memory rises, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, importing torch, is forgotten
    before = resident_peak_kib()
    run()
    print((resident_peak_kib() - before) / 1024)


# ---- from hidden states ------------------------------------------------------------------------------------


def fused_inputs(rows: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, Any, torch.Tensor]:
    """Student's hidden states and head, the teacher's 64 most probable classes, labels."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, WIDTH, generator=generator) * WIDTH**-0.5).requires_grad_()
    targets = top_k_targets(torch.randn(64, vocabulary, generator=generator), 64, 1.0)
    several = [tensor.repeat(rows // 64, 1) for tensor in (targets.indices, targets.log_probs)]
    return hidden, weight, type(targets)(*several), torch.randint(0, vocabulary, (rows,), generator=generator)


def fused_step(hidden: torch.Tensor, weight: torch.Tensor, targets: Any, labels: torch.Tensor | None) -> float:
    """Seconds of one forward and backward without logits."""
    hidden.grad = weight.grad = None
    begin = time.perf_counter()
    student = LinearStudent(hidden, OutputHead(weight), torch.float32)
    weights = {"soft_weight": 0.5, "task_weight": 0.5} if labels is not None else {}
    combined_loss(student, targets, silverspoon_ray.kl_divergence_loss(), labels=labels, **weights).total.backward()
    return time.perf_counter() - begin


def eager_step(
    library: str, hidden: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor | None
) -> float:
    """Seconds of one forward and backward with logits."""
    hidden.grad = weight.grad = None
    begin = time.perf_counter()
    student = hidden @ weight.T
    loss = loss_of(library, "kl")(student, teacher)
    if labels is not None:
        loss = 0.5 * loss + 0.5 * torch.nn.functional.cross_entropy(student, labels)
    loss.backward()
    return time.perf_counter() - begin


def fused_times(vocabulary: int, repetitions: int) -> list[dict[str, Any]]:
    """Against logits and loss one after the other, for the same targets: the teacher's logits."""
    hidden, weight, _, labels = fused_inputs(1024, vocabulary)
    _, teacher = logits(1024, vocabulary)
    rows = []
    for with_task in (False, True):
        given = labels if with_task else None
        times: dict[str, list[float]] = {"fused": [], **{f"logits, {library}": [] for library in LIBRARIES}}
        for _ in range(repetitions + 1):
            times["fused"].append(fused_step(hidden, weight, LogitTargets(teacher), given))
            for library in LIBRARIES:
                times[f"logits, {library}"].append(eager_step(library, hidden, weight, teacher, given))
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}
        rows.append(
            {
                "rows": 1024,
                "vocabulary": vocabulary,
                "task loss": with_task,
                "seconds": medians,
                "ratio": {name: seconds / medians["fused"] for name, seconds in medians.items() if name != "fused"},
            }
        )
        print(rows[-1], flush=True)
    return rows


def print_fused_peak(rows: int, vocabulary: int) -> None:
    """Beyond the inputs; the gradients of hidden states and head are in it."""
    inputs = fused_inputs(rows, vocabulary)
    fused_step(*fused_inputs(64, 128))  # small, or memory that it has given back would be taken again unseen
    print_extra(lambda: fused_step(*inputs))


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
        if library == "fused":
            print_fused_peak(int(rows), int(vocabulary))
        else:
            print_peak(library, name, int(rows), int(vocabulary))
        return
    here, results, fused = machine(), [], []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for rows, vocabulary in ((1024, 8192), (1024, 32000)):
            student, teacher = logits(rows, vocabulary)
            for name in LOSSES:
                times: dict[str, list[float]] = {library: [] for library in LIBRARIES}
                for _ in range(options.repetitions + 1):
                    for library in LIBRARIES:
                        times[library].append(step(loss_of(library, name), student, teacher))
                medians = {library: statistics.median(values[1:]) for library, values in times.items()}
                row: dict[str, Any] = {"loss": name, "rows": rows, "vocabulary": vocabulary, "threads": threads}
                row["seconds"] = medians
                others = [library for library in LIBRARIES if library != "silverspoon_ray"]
                row["ratio"] = {library: medians[library] / medians["silverspoon_ray"] for library in others}
                if threads == options.threads[0]:
                    row["extra_peak_mib"] = {lib: peak_mib(lib, name, rows, vocabulary) for lib in LIBRARIES}
                results.append(row)
                print(row, flush=True)
            fused += [{"threads": threads, **entry} for entry in fused_times(vocabulary, options.repetitions)]
    script = [sys.executable, "-m", "benchmarks.losses", "--peak", "fused", "kl"]
    peaks = {rows: printed([*script, str(rows), "32000"]) for rows in (1024, 4096, 16384)}
    gradients = {rows: (rows + 32000) * WIDTH * 4 / 2**20 for rows in peaks}
    memory = {
        f"{rows} tokens": {
            "extra_peak_mib": peak,
            "of which gradients of hidden states and head": gradients[rows],
            "logits alone would be": rows * 32000 * 4 / 2**20,
        }
        for rows, peak in peaks.items()
    }
    print(memory)
    write(
        "losses",
        {
            "what": "forward and backward, float32",
            "results": results,
            "fused, from hidden states of 256": fused,
            "memory of fused, vocabulary 32000, top 64": memory,
            "machine": here,
        },
    )


if __name__ == "__main__":
    main()
