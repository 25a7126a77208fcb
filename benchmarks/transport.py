"""How fast answers come: the object store against the collective transport, by payload.

    PYTHONPATH=. python benchmarks/transport.py [--device cuda]

One teacher and one student process on one machine. The teacher's forward does nothing but write its answer, and the
student reads it once, so a step is what travelling costs. *Alone*: one answer at a time, asked for and waited for; its
bytes by that time are the bandwidth. *Made and read*: what of that is not travelling, measured in one process.
*Ahead*: two answers in flight, as in training. *Beside work*: two in flight, and the student multiplies matrices in
between; what a step takes more than those. *CPU*: processor time of both processes for one answer, which other load on
the machine hardly changes. All in turn, medians over rounds. Written to ``results/transport.json``
(``transport_cuda.json``) with a picture beside it. With ``--device cuda`` the teacher has a GPU of its own and answers
go through NCCL, so two GPUs are needed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import psutil
import ray
import torch

from benchmarks.machine import RESULTS, machine, write
from silverspoon_ray import TeacherGroup, TeacherPlacement
from silverspoon_ray.teacher.protocol import TeacherRequest

TRANSPORTS = ("object_store", "collective")
PAYLOADS = {"64 KB": 2**16, "1 MB": 2**20, "8 MB": 2**23, "32 MB": 2**25, "128 MB": 2**27}
AHEAD = 2


class Writes(torch.nn.Module):
    """A teacher whose answer is as large as asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.full((int(numbers[0]),), 1.0, device=self.place.device)


def read(tensor: torch.Tensor) -> None:
    """As a loss does, once; it may copy to the GPU first."""
    assert float(tensor.to(DEVICE).sum()) > 0


def work(size: int = 384, times: int = 6) -> None:
    a = torch.ones(size, size, device=DEVICE)
    for _ in range(times):
        a = a @ a * 1e-3
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def alone(stream: Any, batch: dict[str, Any], steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        pending = stream.submit(batch)
        read(pending.result().logits)
        pending.release()
    return (time.perf_counter() - begin) / steps


def ahead(stream: Any, batch: dict[str, Any], steps: int, between: Any = None) -> float:
    waiting = deque(stream.submit(batch) for _ in range(AHEAD))
    begin = time.perf_counter()
    for _ in range(steps):
        if between is not None:
            between()
        pending = waiting.popleft()
        read(pending.result().logits)
        pending.release()
        waiting.append(stream.submit(batch))
    seconds = (time.perf_counter() - begin) / steps
    for pending in waiting:
        pending.result()
        pending.release()
    return seconds


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measured(handle: Any, rounds: int) -> dict[str, Any]:
    streams = {transport: handle.open(TeacherRequest(transport=transport)) for transport in TRANSPORTS}
    processes = [psutil.Process(), *(psutil.Process(worker["pid"]) for worker in handle.stats())]
    found = {}
    for name, payload in PAYLOADS.items():
        batch = {"numbers": torch.tensor([payload // 4])}
        steps = max(4, min(60, 2**27 // payload))
        times: dict[str, dict[str, list[float]]] = {
            t: {"alone": [], "ahead": [], "beside": [], "cpu": []} for t in TRANSPORTS
        }
        begin = time.perf_counter()
        for _ in range(3 * steps):
            read(Writes().to(DEVICE)(batch["numbers"]))
        found[name] = {"made_and_read_ms": round((time.perf_counter() - begin) / (3 * steps) * 1e3, 3)}
        for stream in streams.values():
            alone(stream, batch, 3)  # connections, memory of the store that was never touched
        for _ in range(rounds):
            for transport, stream in streams.items():
                before = cpu_seconds(processes)
                times[transport]["alone"].append(alone(stream, batch, steps))
                times[transport]["cpu"].append((cpu_seconds(processes) - before) / steps)
                times[transport]["ahead"].append(ahead(stream, batch, steps))
                begin = time.perf_counter()
                for _ in range(steps):
                    work()
                pure = (time.perf_counter() - begin) / steps
                times[transport]["beside"].append(ahead(stream, batch, steps, work) - pure)
        for transport in TRANSPORTS:
            medians = {way: statistics.median(seconds) for way, seconds in times[transport].items()}
            found[name][transport] = {
                "alone_ms": round(medians["alone"] * 1e3, 3),
                "alone_gb_per_s": round(payload / medians["alone"] / 1e9, 3),
                "alone_cpu_ms": round(medians["cpu"] * 1e3, 3),
                "ahead_ms": round(medians["ahead"] * 1e3, 3),
                "beside_work_ms": round(medians["beside"] * 1e3, 3),
            }
        store, own = (found[name][transport] for transport in TRANSPORTS)
        found[name]["ratio_alone"] = round(store["alone_ms"] / own["alone_ms"], 2)
        found[name]["ratio_ahead"] = round(store["ahead_ms"] / own["ahead_ms"], 2)
        print(name, found[name], flush=True)
    return found


def picture(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
    places = range(len(found))
    for transport, mark in zip(TRANSPORTS, ("o--", "s-"), strict=True):
        label = transport.replace("_", " ")
        left.plot(places, [row[transport]["alone_gb_per_s"] for row in found.values()], mark, label=label)
        right.plot(places, [row[transport]["ahead_ms"] for row in found.values()], mark, label=label)
    left.set_ylabel("GB/s, one answer at a time")
    right.set_ylabel(f"ms per step, {AHEAD} answers ahead")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xticks(list(places), list(found))
        axes.set_xlabel("bytes of an answer")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    # Ray gives the teacher the first GPU; the student takes the last.
    DEVICE = torch.device("cuda", torch.cuda.device_count() - 1) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(DEVICE)
        torch.cuda.init()
    torch.set_num_threads(1)
    resources = {} if on_gpu else {"num_gpus": 0}
    ray.init(
        address="local", num_cpus=4, object_store_memory=2**31, log_to_driver=False, logging_level="error", **resources
    )
    result: dict[str, Any] = {"machine": machine(), "setting": {"rounds": arguments.rounds, "ahead": AHEAD}}
    with TeacherGroup.create(Writes, TeacherPlacement(device_type=arguments.device)) as group:
        result["by_payload"] = measured(group.handle, arguments.rounds)
    name = "transport_cuda" if on_gpu else "transport"
    path = write(name, result)
    picture(result["by_payload"], RESULTS / f"{name}.png")
    print("written to", path)
    ray.shutdown()


DEVICE = torch.device("cpu")

if __name__ == "__main__":
    main()
