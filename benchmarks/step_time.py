"""Steps per second of a distillation: silverspoon-kd in one process against ours with a dedicated teacher.

Both get the same two cores. silverspoon-kd runs teacher and student one after the other in one process on two threads;
ours gives the teacher's actor one thread and the student's process the other. The two are run in turn, round after
round, in one script; what is reported are medians over rounds, and ratios.

    python benchmarks/step_time.py [--rounds 5] [--steps 20] [--vocabulary 8192]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ray
import silverspoon_kd
import torch
import transformers

import silverspoon_ray
from benchmarks.machine import machine, write
from silverspoon_ray import TeacherGroup
from silverspoon_ray.models.structure import structure_of
from silverspoon_ray.teacher.protocol import TeacherOutput, TeacherRequest

BATCH, LENGTH = 8, 128
WARM_UP = 4


def llama(width: int, layers: int, vocabulary: int, seed: int) -> transformers.LlamaForCausalLM:
    """A Llama-shaped model with heads of 64."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=512,
    )
    return transformers.LlamaForCausalLM(config)


class StepTimes(transformers.TrainerCallback):
    """The time at the end of every step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    def seconds_per_step(self) -> float:
        """Mean after the warm-up; a mean, so that work which overlaps steps cannot hide."""
        return (self.ends[-1] - self.ends[WARM_UP - 1]) / (len(self.ends) - WARM_UP)


class Constant:
    """A teacher that costs nothing: what remains is the student's own step."""

    dedicated = False

    def __init__(self, model: torch.nn.Module, logits: torch.Tensor) -> None:
        self.structure = structure_of(model)
        self.output = TeacherOutput(logits=logits)
        self.nbytes = 0

    def open(self, request: TeacherRequest) -> Constant:
        return self

    def submit(self, batch: Mapping[str, Any]) -> Constant:
        return self

    def result(self) -> TeacherOutput:
        return self.output

    def release(self) -> None:
        """The same answer serves every batch."""


def distil(
    library: Any, teacher: Any, student: torch.nn.Module, data: Any, steps: int, **ours: Any
) -> tuple[float, dict[str, Any]]:
    """Train; seconds per step and the last training log. ``ours`` are keywords that only our library knows."""
    if library is silverspoon_ray:
        ours["distill_mask"] = "none"  # as the reference, which counts every position
    arguments = library.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps + WARM_UP,
        per_device_train_batch_size=BATCH,
        logging_steps=steps + WARM_UP,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **ours,
    )
    times = StepTimes()
    distiller = library.ResponseBasedDistiller(
        student_model=student, teacher_model=teacher, train_dataset=data, args=arguments, callbacks=[times]
    )
    distiller.remove_callback(transformers.PrinterCallback)
    distiller.train()
    return times.seconds_per_step(), next(row for row in distiller.state.log_history if "loss" in row)


def teacher_alone(teacher: torch.nn.Module, data: Any, forwards: int) -> float:
    """Median seconds of the teacher's forward."""
    batch = torch.stack([data[i]["input_ids"] for i in range(BATCH)])
    seconds = []
    with torch.no_grad():
        for _ in range(forwards):
            begin = time.perf_counter()
            teacher(input_ids=batch, use_cache=False)
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--prefetch", type=int, default=2)
    options = parser.parse_args()
    here = machine()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, options.vocabulary, (BATCH * 64, LENGTH), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    make_teacher = partial(llama, 512, 8, options.vocabulary, 0)
    make_student = partial(llama, 256, 6, options.vocabulary, 1)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    rounds: list[dict[str, float]] = []
    with TeacherGroup.create(make_teacher) as group:
        local_teacher = make_teacher().eval()
        for number in range(options.rounds):
            torch.set_num_threads(2)
            reference, reference_log = distil(silverspoon_kd, local_teacher, make_student(), data, options.steps)
            torch.set_num_threads(1)
            ours, our_log = distil(
                silverspoon_ray, group.handle, make_student(), data, options.steps, teacher_prefetch=options.prefetch
            )
            forward = teacher_alone(local_teacher, data, options.steps)
            constant = Constant(local_teacher, torch.randn(BATCH, LENGTH, options.vocabulary))
            student, _ = distil(silverspoon_ray, constant, make_student(), data, options.steps)
            assert abs(reference_log["loss"] - our_log["loss"]) < 1e-3 * abs(reference_log["loss"]), "not the same job"
            rounds.append(
                {
                    "reference_s": reference,
                    "ours_s": ours,
                    "teacher_alone_s": forward,
                    "student_alone_s": student,
                    "ratio": reference / ours,
                    "over_limit": ours / max(forward, student),
                    "wait_fraction": our_log["teacher/wait_fraction"],
                }
            )
            print(f"round {number}: " + ", ".join(f"{k} {v:.4f}" for k, v in rounds[-1].items()), flush=True)
        bytes_per_step = our_log["teacher/bytes_per_step"]
    medians = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    result = {
        "what": "steps per second of ours over silverspoon-kd, same two cores",
        "workload": f"Llama 512 x 8 teaches 256 x 6, vocabulary {options.vocabulary}, {BATCH} x {LENGTH} tokens",
        "prefetch": options.prefetch,
        "steps_per_round": options.steps,
        "median": medians,
        "limit_ratio": medians["reference_s"] / max(medians["teacher_alone_s"], medians["student_alone_s"]),
        "bytes_per_step": bytes_per_step,
        "rounds": rounds,
        "machine": here,
    }
    path = write(f"step_time_{options.vocabulary}", result)
    print(f"ratio {medians['ratio']:.2f}, over the limit {medians['over_limit']:.3f}; written to {path}")


if __name__ == "__main__":
    main()
