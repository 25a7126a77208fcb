"""Peak memory of a blockwise step, with one backward pass for all blocks and with one for each.

    PYTHONPATH=. python benchmarks/blockwise_memory.py

Every case runs in a process of its own. What is measured is the process's physical memory as the kernel counts it
(peak, ``VmHWM``) above what it was when training began; the allocator gives freed memory back at once (``MALLOC_*``),
so that the peak is that of live memory. Both cases must end with the same parameters, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import silverspoon_kd
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback

import silverspoon_ray
from benchmarks.machine import machine, write

LIBRARIES: dict[str, Any] = {"silverspoon_ray": silverspoon_ray, "silverspoon_kd": silverspoon_kd}
BLOCKS = (4, 8, 16)
WIDTH, LENGTH, BATCH, STEPS = 256, 256, 8, 3
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}


def status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


class Peak(TrainerCallback):
    """Physical memory at the beginning of the last step, and the peak during it."""

    def __init__(self) -> None:
        self.before = self.peak = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS - 1:  # the optimizer and the allocator have what they keep
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            self.before = status("VmRSS")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS - 1:
            self.peak = status("VmHWM")


def model(seed: int, blocks: int) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=blocks,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
            use_cache=False,  # the reference cannot do with one
        )
    )


def measure(blocks: int, per_block: bool, name: str) -> dict[str, Any]:
    """One case, in this process."""
    torch.set_num_threads(1)
    library = LIBRARIES[name]
    teacher, student = model(1, blocks), model(0, blocks)
    generator = torch.Generator().manual_seed(2)
    data = [{"input_ids": torch.randint(0, 256, (LENGTH,), generator=generator)} for _ in range(BATCH * STEPS)]
    peak = Peak()
    with tempfile.TemporaryDirectory() as directory:
        distiller = library.BlockwiseDistiller(
            teacher_model=teacher,
            alignments=library.create_alignments(teacher, student, r"model\.layers\.\d+$", output_selector_index=0),
            train_dataset=data,
            args=library.TrainingArguments(
                output_dir=directory,
                max_steps=STEPS,
                per_device_train_batch_size=BATCH,
                backward_per_block=per_block,
                optim="sgd",
                use_cpu=True,
                save_strategy="no",
                disable_tqdm=True,
                seed=0,
            ),
            callbacks=[peak],
        )
        distiller.remove_callback(PrinterCallback)
        distiller.train()
    digest = hashlib.sha256()
    for parameter in student.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return {
        "blocks": blocks,
        "backward_per_block": per_block,
        "peak_mb": (peak.peak - peak.before) / 1e6,
        "parameters": digest.hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs=3, metavar=("BLOCKS", "PER_BLOCK", "LIBRARY"), help="one case; prints JSON")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(int(arguments.case[0]), arguments.case[1] == "1", arguments.case[2])))
        return
    rows = []
    cases = [(name, per_block) for name in LIBRARIES for per_block in (False, True)]
    for blocks in BLOCKS:
        found: dict[tuple[str, bool], list[dict[str, Any]]] = {case: [] for case in cases}
        for _ in range(arguments.repeats):
            for name, per_block in cases:
                command = [sys.executable, __file__, "--case", str(blocks), str(int(per_block)), name]
                environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[1])}
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                found[name, per_block].append(json.loads(done.stdout.splitlines()[-1]))
        peaks = {case: sorted(one["peak_mb"] for one in runs)[len(runs) // 2] for case, runs in found.items()}
        ours = [one["parameters"] for (name, _), runs in found.items() if name == "silverspoon_ray" for one in runs]
        rows.append(
            {
                "blocks": blocks,
                "one_backward_mb": round(peaks["silverspoon_ray", False], 1),
                "backward_per_block_mb": round(peaks["silverspoon_ray", True], 1),
                "ratio": round(peaks["silverspoon_ray", False] / peaks["silverspoon_ray", True], 2),
                "reference_one_backward_mb": round(peaks["silverspoon_kd", False], 1),
                "reference_backward_per_block_mb": round(peaks["silverspoon_kd", True], 1),
                "same_parameters": len(set(ours)) == 1,
            }
        )
        print(rows[-1], flush=True)
    setting = {"width": WIDTH, "length": LENGTH, "batch": BATCH, "model": "Llama-shaped, teacher of the same size"}
    write("blockwise_memory", {"machine": machine(), "setting": setting, "peak_above_rest": rows})


if __name__ == "__main__":
    main()
