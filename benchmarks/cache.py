"""The teacher cache: what its first epoch costs, and what the others no longer do.

Three epochs with a cold cache, in the student's own process and for each form of soft targets. The steps of the second
and third epoch are compared with those of the student alone (a teacher that costs nothing), run in turn with them,
round after round, in one script. Beside them: bytes of a token on disk, by form, and how fast a cache is built against
the bare forward of the teacher on the same batches.

    python benchmarks/cache.py [--rounds 5] [--batches 12] [--forms full hidden top_k sampled] [--vocabulary 8192]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import silverspoon_ray
from benchmarks.machine import machine, write
from benchmarks.step_time import BATCH, LENGTH, Constant, StepTimes, llama
from silverspoon_ray import ResponseBasedDistiller
from silverspoon_ray.teacher.cache.teacher import CachedTeacher
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import FORMS, TeacherRequest

EPOCHS = 3


def epochs(
    teacher: Any, student: torch.nn.Module, data: Sequence[Any], batches: int, **further: Any
) -> tuple[list[float], list[dict[str, float]]]:
    """Seconds per step of each epoch, its first step left out, and the logs at the ends of epochs."""
    arguments = silverspoon_ray.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        logging_steps=batches,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **further,
    )
    times = StepTimes()
    distiller = ResponseBasedDistiller(
        student_model=student, teacher_model=teacher, train_dataset=data, args=arguments, callbacks=[times]
    )
    distiller.remove_callback(transformers.PrinterCallback)
    distiller.train()
    ends = [times.ends[epoch * batches : (epoch + 1) * batches] for epoch in range(EPOCHS)]
    seconds = [(own[-1] - own[0]) / (len(own) - 1) for own in ends]
    return seconds, [row for row in distiller.state.log_history if "loss" in row]


def throughput(teacher: torch.nn.Module, data: Sequence[Any], form: str) -> dict[str, float]:
    """Tokens per second of the bare forward, and of forward, cutting and writing, in turn on the same batches."""
    batches = [
        {"input_ids": torch.stack([row["input_ids"] for row in data[start : start + BATCH]]), "use_cache": False}
        for start in range(0, len(data), BATCH)
    ]
    local, request = LocalTeacher(teacher), TeacherRequest(logits=form)
    local.answer(batches[0], request)  # which runs whole
    seconds = {"forward": 0.0, "build": 0.0}
    with tempfile.TemporaryDirectory() as directory:
        cached = CachedTeacher(local, directory)
        stream = cached.open(request)
        for batch in batches:
            begin = time.perf_counter()
            local.answer(batch, request)
            middle = time.perf_counter()
            stream.submit(batch).result()
            seconds["forward"] += middle - begin
            seconds["build"] += time.perf_counter() - middle
        begin = time.perf_counter()
        cached.flush()
        seconds["build"] += time.perf_counter() - begin
        size = sum(file.stat().st_size for file in Path(directory).glob("*.arrow"))
    tokens = len(data) * LENGTH
    return {
        "forward_tokens_per_s": tokens / seconds["forward"],
        "build_tokens_per_s": tokens / seconds["build"],
        "build_over_forward": seconds["forward"] / seconds["build"],
        "bytes_per_token": size / tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=12, help="of an epoch")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--name", default="cache", help="results/NAME.json")
    options = parser.parse_args()
    here = machine()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, options.vocabulary, (BATCH * options.batches, LENGTH), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    teacher = llama(512, 8, options.vocabulary, 0).eval()
    batch = {"input_ids": tokens[:BATCH], "use_cache": False}

    def student() -> torch.nn.Module:
        return llama(256, 6, options.vocabulary, 1)

    rounds: list[dict[str, float]] = []
    for number in range(options.rounds):
        row: dict[str, float] = {}
        for form in options.forms:
            with tempfile.TemporaryDirectory() as directory:
                seconds, logs = epochs(
                    teacher, student(), data, options.batches, teacher_logits=form, teacher_cache=directory
                )
            assert [log["teacher/forwards"] for log in logs] == [options.batches, 0, 0], "the teacher was asked again"
            alone, _ = epochs(Constant(teacher, batch), student(), data, options.batches, teacher_logits=form)
            limit = statistics.mean(alone[1:])
            row[f"{form}, first epoch"] = seconds[0]
            row[f"{form}, later epochs"] = statistics.mean(seconds[1:])
            row[f"{form}, student alone"] = limit
            row[f"{form}, later over alone"] = statistics.mean(seconds[1:]) / limit
            row |= {f"{form}, {name}": value for name, value in throughput(teacher, data, form).items()}
        rounds.append(row)
        print(f"round {number}: " + ", ".join(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
    median = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
    result = {
        "what": "three epochs with a cold teacher cache, seconds per step; medians over rounds",
        "workload": f"Llama 512 x 8 teaches 256 x 6, vocabulary {options.vocabulary}, {BATCH} x {LENGTH} tokens",
        "batches_per_epoch": options.batches,
        "later_over_alone": {form: median[f"{form}, later over alone"] for form in options.forms},
        "bytes_per_token": {form: median[f"{form}, bytes_per_token"] for form in options.forms},
        "build_over_forward": {form: median[f"{form}, build_over_forward"] for form in options.forms},
        "median": median,
        "rounds": rounds,
        "machine": here,
    }
    print(f"written to {write(options.name, result)}")


if __name__ == "__main__":
    main()
