"""Bytes that a step's teacher answers take on the wire, against all inputs and outputs of the aligned modules.

    PYTHONPATH=. python benchmarks/feature_bytes.py

The teacher runs as a Ray actor. "naive" is what the same answer would take if every module's input and output were sent
for itself, with all entries of tuples, as the reference captures them. Written to ``results/feature_bytes.json``.
"""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback

from benchmarks.machine import machine, write
from silverspoon_ray import (
    BlockwiseDistiller,
    HolisticDistiller,
    TeacherGroup,
    TeacherPlacement,
    TrainingArguments,
    create_alignments,
)

LAYERS, WIDTH, LENGTH, BATCH, STEPS = 8, 256, 128, 8, 4
STATE = BATCH * LENGTH * WIDTH * 4
"""One hidden state in float32."""


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
        )
    )


def bytes_per_step(kind: str, handle: Any, wire_dtype: str | None) -> float:
    """As the run itself logs them."""
    student = model(0)
    generator = torch.Generator().manual_seed(2)
    data = [{"input_ids": torch.randint(0, 4096, (LENGTH,), generator=generator)} for _ in range(BATCH * STEPS)]
    distiller_class: Any = {"holistic": HolisticDistiller, "blockwise": BlockwiseDistiller}[kind]
    with tempfile.TemporaryDirectory() as directory:
        distiller = distiller_class(
            teacher_model=handle,
            alignments=create_alignments(handle, student, r"model\.layers\.\d+"),
            train_dataset=data,
            args=TrainingArguments(
                output_dir=directory,
                max_steps=STEPS,
                per_device_train_batch_size=BATCH,
                teacher_wire_dtype=wire_dtype,
                logging_steps=STEPS,
                use_cpu=True,
                save_strategy="no",
                disable_tqdm=True,
            ),
            **({"student_model": student} if kind == "holistic" else {}),
        )
        distiller.remove_callback(PrinterCallback)
        distiller.train()
    found: float = distiller.state.log_history[0]["teacher/bytes_per_step"]
    return found


def main() -> None:
    ray.init(address="local", num_cpus=2, log_to_driver=False, logging_level="warning")
    rows = []
    with TeacherGroup.create(partial(model, 1), TeacherPlacement()) as group:
        for kind in ("holistic", "blockwise"):
            for wire_dtype in (None, "bfloat16"):
                got = bytes_per_step(kind, group.handle, wire_dtype)
                rows.append(
                    {
                        "distiller": kind,
                        "wire_dtype": wire_dtype or "as the teacher's, float32",
                        "bytes_per_step": int(got),
                        "hidden_states": got / STATE,
                        "naive_inputs_and_outputs": 2 * LAYERS * STATE,
                        "share": round(got / (2 * LAYERS * STATE), 4),
                    }
                )
                print(rows[-1], flush=True)
    ray.shutdown()
    setting = {"layers": LAYERS, "width": WIDTH, "length": LENGTH, "batch": BATCH, "hidden_state_bytes": STATE}
    write("feature_bytes", {"machine": machine(), "setting": setting, "per_step": rows})


if __name__ == "__main__":
    main()
