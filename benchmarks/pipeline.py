"""Batches per second of a teacher in two pipeline stages, against one device; and what each stage of four holds.

    PYTHONPATH=. python benchmarks/pipeline.py

A device is one CPU core. Both groups run in turn, several batches in flight, medians over rounds. The second part
starts a teacher of more than 200 MB in four stages and reads the physical memory of each stage's process. Written to
``results/pipeline.json``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.machine import machine, write
from silverspoon_ray import TeacherGroup, TeacherPlacement
from silverspoon_ray.teacher.protocol import TeacherRequest

BATCH, LENGTH, IN_FLIGHT, BATCHES = 8, 128, 6, 24


def model(width: int, layers: int) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=LENGTH,
        )
    )


def batches_per_second(group: TeacherGroup) -> float:
    """With ``IN_FLIGHT`` answers asked for ahead."""
    stream = group.handle.open(TeacherRequest())
    generator = torch.Generator().manual_seed(1)
    batch = {"input_ids": torch.randint(0, 1024, (BATCH, LENGTH), generator=generator)}
    waiting = [stream.submit(batch) for _ in range(IN_FLIGHT)]
    begin = time.perf_counter()
    for _ in range(BATCHES):
        answer = waiting.pop(0)
        answer.result()
        answer.release()
        waiting.append(stream.submit(batch))
    seconds = time.perf_counter() - begin
    for answer in waiting:
        answer.result()
        answer.release()
    return BATCHES / seconds


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise KeyError("VmRSS")


def throughput(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        model(512, 8).save_pretrained(directory)
        found: dict[int, list[float]] = {1: [], 2: []}
        with (
            TeacherGroup.create(directory, TeacherPlacement(num_devices=1)) as one,
            TeacherGroup.create(directory, TeacherPlacement(num_devices=2)) as two,
        ):
            for _ in range(rounds):
                for number, group in ((1, one), (2, two)):
                    found[number].append(batches_per_second(group))
    medians = {number: statistics.median(rates) for number, rates in found.items()}
    ratio = medians[2] / medians[1]
    return {"one_device": round(medians[1], 2), "two_stages": round(medians[2], 2), "ratio": round(ratio, 2)}


def memory() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        big = model(768, 10)
        big.save_pretrained(directory)
        whole = sum(p.numel() * 4 for p in big.parameters()) / 2**20
        tiny = Path(directory) / "tiny"
        model(64, 4).save_pretrained(tiny)
        del big
        measured = {}
        for name, source in (("rest", str(tiny)), ("stages", directory)):
            with TeacherGroup.create(source, TeacherPlacement(num_devices=4)) as group:
                batches_per_second(group)  # weights are mapped from the file, and take memory once they are used
                stats = group.stats()
                measured[name] = [resident_mb(stage["pid"]) for stage in stats]
                weights = [stage["weight_bytes"] / 2**20 for stage in stats]
    # What a process takes that holds next to nothing is Python, torch and transformers.
    rest = statistics.median(measured["rest"])
    return {
        "model_mb": round(whole, 1),
        "weights_of_each_stage_mb": [round(size, 1) for size in weights],
        "resident_of_each_stage_above_an_empty_one_mb": [round(size - rest, 1) for size in measured["stages"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=6, log_to_driver=False, logging_level="error")
    result = {"machine": machine(), "setting": {"batch": BATCH, "length": LENGTH, "in_flight": IN_FLIGHT}}
    result["batches_per_second"] = throughput(arguments.rounds)
    print(result["batches_per_second"], flush=True)
    result["memory"] = memory()
    print(result["memory"], flush=True)
    write("pipeline", result)
    ray.shutdown()


if __name__ == "__main__":
    main()
