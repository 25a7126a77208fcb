"""Steps per second of a distillation: silverspoon-kd in one process against ours with a dedicated teacher.

Both get the same two cores. silverspoon-kd runs teacher and student one after the other in one process on two threads;
ours gives the teacher's actor one thread and the student's process the other. Every form of soft targets is run, by
every transport that is asked for, all in turn, round after round, in one script; what is reported are medians over
rounds, and ratios. Beside them stands the limit: what the teacher's forward (T) and the student's step (F+B) take when
each is alone on one thread.

    python benchmarks/step_time.py [--rounds 5] [--steps 16] [--vocabulary 8192] [--transports object_store collective]
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
from silverspoon_ray import TeacherGroup, TeacherPlacement
from silverspoon_ray.losses.head import OutputHead
from silverspoon_ray.models.structure import structure_of
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.teacher.protocol import FORMS, TeacherOutput, TeacherRequest

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
    nbytes = 0

    def __init__(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> None:
        self.local = LocalTeacher(model)
        self.structure = structure_of(model)
        self.batch = batch
        self.output = TeacherOutput()

    def output_head(self) -> OutputHead:
        return self.local.output_head()

    def open(self, request: TeacherRequest) -> Constant:
        self.output = self.local.answer(self.batch, request)
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
        **ours,
    )
    times = StepTimes()
    distiller = library.ResponseBasedDistiller(
        student_model=student, teacher_model=teacher, train_dataset=data, args=arguments, callbacks=[times]
    )
    distiller.remove_callback(transformers.PrinterCallback)
    distiller.train()
    return times.seconds_per_step(), next(row for row in distiller.state.log_history if "loss" in row)


def teacher_alone(teacher: torch.nn.Module, batch: Mapping[str, Any], form: str, forwards: int) -> float:
    """Median seconds of the teacher's answer."""
    local, request = LocalTeacher(teacher), TeacherRequest(logits=form)
    seconds = []
    for _ in range(forwards + 2):
        begin = time.perf_counter()
        local.answer(batch, request)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[2:])


def picture(result: dict[str, Any], path: str) -> None:
    """Steps of ours in the time of one of silverspoon-kd, and the limits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(result["ratio"])
    limits = [result["limit_ratio"][name.split(", ")[0]] for name in names]
    figure, axes = pyplot.subplots(figsize=(7, 0.5 * len(names) + 1.5))
    axes.barh(names, limits, color="#d9d9d9", label="limit: max(T, F+B) alone")
    axes.barh(names, [result["ratio"][name] for name in names], color="#3b6fb6", height=0.5, label="measured")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("steps in the time of one step of silverspoon-kd, on the same two cores")
    axes.set_title(result["workload"], fontsize=9)
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.13))
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--transports", nargs="+", default=["object_store"], choices=["object_store", "collective"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cuda: one card for both, half each")
    options = parser.parse_args()
    here = machine()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, options.vocabulary, (BATCH * 64, LENGTH), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    batch = {"input_ids": tokens[:BATCH].to(options.device), "use_cache": False}
    make_teacher = partial(llama, 512, 8, options.vocabulary, 0)
    make_student = partial(llama, 256, 6, options.vocabulary, 1)
    cuda = options.device == "cuda"
    common = {"use_cpu": not cuda}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    placement = TeacherPlacement(device_type=options.device, resources_per_device={"GPU": 0.5} if cuda else None)
    rounds: list[dict[str, float]] = []
    nbytes: dict[str, float] = {}
    with TeacherGroup.create(make_teacher, placement) as group:
        local_teacher = make_teacher().eval().to(options.device)
        for number in range(options.rounds):
            torch.set_num_threads(2)
            reference, reference_log = distil(
                silverspoon_kd, local_teacher, make_student(), data, options.steps, **common
            )
            torch.set_num_threads(1)
            row = {"reference": reference}
            for form in options.forms:
                for transport in options.transports:
                    seconds, log = distil(
                        silverspoon_ray,
                        group.handle,
                        make_student(),
                        data,
                        options.steps,
                        teacher_prefetch=options.prefetch,
                        teacher_logits=form,
                        teacher_transport=transport,
                        **common,
                    )
                    row[f"{form}, {transport}"] = seconds
                    row[f"waiting, {form}, {transport}"] = log["teacher/wait_fraction"]
                    nbytes[form] = log["teacher/bytes_per_step"]
                    if form in ("full", "hidden"):
                        same = abs(reference_log["loss"] - log["loss"]) < 1e-3 * abs(reference_log["loss"])
                        assert same, "not the same job"
                row[f"T, {form}"] = teacher_alone(local_teacher, batch, form, options.steps // 2)
                constant = Constant(local_teacher, batch)
                alone = {"teacher_logits": form, **common}
                row[f"F+B, {form}"], _ = distil(
                    silverspoon_ray, constant, make_student(), data, options.steps // 2, **alone
                )
            rounds.append(row)
            print(f"round {number}: " + ", ".join(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
    median = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
    runs = [f"{form}, {transport}" for form in options.forms for transport in options.transports]
    limit = {form: max(median[f"T, {form}"], median[f"F+B, {form}"]) for form in options.forms}
    tokens_per_step = BATCH * LENGTH
    result = {
        "what": "steps of ours in the time of one of silverspoon-kd, same two cores; medians over rounds",
        "workload": f"Llama 512 x 8 teaches 256 x 6, vocabulary {options.vocabulary}, {BATCH} x {LENGTH} tokens",
        "device": options.device,
        "prefetch": options.prefetch,
        "steps_per_round": options.steps,
        "ratio": {run: statistics.median(row["reference"] / row[run] for row in rounds) for run in runs},
        "limit_ratio": {form: median["reference"] / seconds for form, seconds in limit.items()},
        "over_limit": {run: median[run] / limit[run.split(", ")[0]] for run in runs},
        "bytes_per_token": {form: size / tokens_per_step for form, size in nbytes.items()},
        "median_seconds": median,
        "rounds": rounds,
        "machine": here,
    }
    name = f"step_time_{options.vocabulary}" + ("_cuda" if cuda else "")
    path = write(name, result)
    picture(result, str(path.with_suffix(".png")))
    for run in runs:
        limits = result["limit_ratio"][run.split(", ")[0]]  # type: ignore[index]
        print(f"{run}: {result['ratio'][run]:.2f}x of silverspoon-kd, limit {limits:.2f}x")  # type: ignore[index]
    print(f"written to {path}")


if __name__ == "__main__":
    main()
