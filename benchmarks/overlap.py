"""How much of the cheaper side is hidden behind the other, for teachers and students of different costs.

With a teacher on a device of its own a step should take max(T, F+B): T the teacher's forward, F+B the student's step.
Both are measured alone, on one thread each, with the other core idle; and once more in the run itself (the teacher's
busy seconds, and the student's time without waiting), because two processes on one chip slow each other down through
its caches and memory whatever a framework does. What is above the second limit is ours.

    python benchmarks/overlap.py [--rounds 3] [--steps 24] [--prefetch 2] [--device cuda]
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ray
import torch

import silverspoon_ray
from benchmarks.machine import machine, write
from benchmarks.step_time import BATCH, LENGTH, Constant, distil, llama, teacher_alone
from silverspoon_ray import TeacherGroup, TeacherPlacement

VOCABULARY, WIDTH = 1024, 256
# Layers of teacher and student. A student's step is three forwards, so at 3:1 both cost the same.
PAIRS = {"1:4": (3, 4), "1:2": (6, 4), "1:1": (12, 4), "2:1": (12, 2), "4:1": (12, 1)}


def student_run(teacher: Any, layers: int, data: Any, steps: int, **arguments: Any) -> tuple[float, dict[str, Any]]:
    """Seconds per step, and the last log."""
    return distil(silverspoon_ray, teacher, llama(WIDTH, layers, VOCABULARY, 1), data, steps, **arguments)


def busy(group: TeacherGroup) -> tuple[float, int]:
    stats = group.stats()
    return sum(row["busy_s"] for row in stats), sum(row["forwards"] for row in stats)


def measured(
    pair: tuple[int, int],
    data: Any,
    batch: Mapping[str, Any],
    rounds: int,
    steps: int,
    placement: TeacherPlacement,
    **arguments: Any,
) -> dict[str, float]:
    """Medians over rounds, in which the parts and the whole are run in turn."""
    make = partial(llama, WIDTH, pair[0], VOCABULARY, 0)
    rows = []
    with TeacherGroup.create(make, placement) as group:
        local = make().eval().to(placement.device_type)
        constant = Constant(local, batch)
        student_run(group.handle, pair[1], data, 1, **arguments)  # what is loaded lazily
        for _ in range(rounds):
            alone = teacher_alone(local, batch, "full", steps // 2)
            student, _ = student_run(constant, pair[1], data, steps // 2, **arguments)
            before = busy(group)
            step, log = student_run(group.handle, pair[1], data, steps, **arguments)
            after = busy(group)
            in_run = (after[0] - before[0]) / (after[1] - before[1])
            working = step * (1 - log["teacher/wait_fraction"])
            rows.append(
                {
                    "step": step,
                    "T": alone,
                    "F+B": student,
                    "T in the run": in_run,
                    "F+B in the run": working,
                    "over limit alone": step / max(alone, student),
                    "over limit in the run": step / max(in_run, working),
                    "of the sum": step / (alone + student),
                }
            )
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def picture(results: Mapping[str, Mapping[str, float]], path: str) -> None:
    """Parts as bars, the step beside them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4), dpi=130)
    places = range(len(results))
    for offset, key, color in ((-0.25, "T", "#e07a1f"), (0.0, "F+B", "#5c677d"), (0.25, "step", "#d62839")):
        heights = [row[key] * 1000 for row in results.values()]
        axes.bar([place + offset for place in places], heights, width=0.23, color=color, label=key)
    for place, row in zip(places, results.values(), strict=True):
        axes.hlines(
            (row["T"] + row["F+B"]) * 1000, place - 0.4, place + 0.4, color="black", linewidth=1, linestyle="--"
        )
        axes.annotate(f"{row['over limit alone']:.2f}", (place + 0.25, row["step"] * 1000), ha="center", va="bottom")
    axes.set_xticks(list(places), [f"T : F+B about {name}" for name in results], fontsize=8)
    axes.set_ylabel("ms")
    axes.set_title("A step against its parts alone (dashed: their sum; number: step / larger part)", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cuda: one card for both, half each")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    here = machine()
    torch.set_num_threads(1)
    tokens = torch.randint(0, VOCABULARY, (BATCH * 64, LENGTH), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    batch = {"input_ids": tokens[:BATCH].to(options.device), "use_cache": False}
    placement = TeacherPlacement(device_type=options.device, resources_per_device={"GPU": 0.5} if cuda else None)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    results = {}
    for name, pair in PAIRS.items():
        results[name] = measured(
            pair,
            data,
            batch,
            options.rounds,
            options.steps,
            placement,
            teacher_prefetch=options.prefetch,
            use_cpu=not cuda,
        )
        print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in results[name].items()), flush=True)
    result = {
        "what": "seconds of a step and of its parts; medians over rounds",
        "workload": f"Llama of width {WIDTH}, vocabulary {VOCABULARY}, {BATCH} x {LENGTH} tokens",
        "layers of teacher and student": PAIRS,
        "prefetch": options.prefetch,
        "device": options.device,
        "results": results,
        "machine": here,
    }
    path = write("overlap" + ("_cuda" if cuda else ""), result)
    picture(results, str(path.with_suffix(".png")))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
