"""The main job on text that ships with Python: a byte-level teacher, and the same student trained twice."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from silverspoon_ray.distillers import SilentProgressCallback
from silverspoon_ray.distillers.checkpoint import write_json
from silverspoon_ray.teacher.placement import TeacherPlacement
from silverspoon_ray.train import DistillationTrainer
from silverspoon_ray.train.report import CHECKPOINT_SUBDIRECTORY
from silverspoon_ray.training_arguments import TrainingArguments

BYTE_OFFSET = 3
"""ByT5's tokenizer: byte b is token b + 3, after padding, end and unknown."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the numbers. The teacher is cached under what it depends on.

    Attributes:
        length: bytes in a sample.
        batch: samples in a batch.
        held_out: samples kept for evaluation.
        teacher_width, teacher_layers, teacher_steps, teacher_lr: the teacher and its training.
        student_width, student_layers, student_steps, student_lr: the student and its two trainings.
        alpha: weight of the task loss in the distillation.
        seed: of data order and initialisation.
    """

    length: int = 128
    batch: int = 16
    held_out: int = 192
    teacher_width: int = 128
    teacher_layers: int = 3
    teacher_steps: int = 450
    teacher_lr: float = 4e-3
    student_width: int = 64
    student_layers: int = 2
    student_steps: int = 250
    student_lr: float = 5e-3
    alpha: float = 0.2
    seed: int = 0


class TextBlocks(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The documentation of Python's own language topics, as blocks of byte tokens.

    Args:
        recipe: sizes.
        held_out: the evaluation part; else the rest.
    """

    def __init__(self, recipe: Recipe, held_out: bool) -> None:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() + BYTE_OFFSET
        count = len(tokens) // recipe.length
        blocks = tokens[: count * recipe.length].view(count, recipe.length)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(recipe.seed))
        self.blocks = blocks[order[: recipe.held_out]] if held_out else blocks[order[recipe.held_out :]]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def llama(width: int, layers: int, seed: int) -> transformers.LlamaForCausalLM:
    """A small Llama over bytes."""
    config = transformers.LlamaConfig(
        vocab_size=384,
        hidden_size=width,
        intermediate_size=width * 5 // 2,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config)


def run_quickstart(output_dir: Path, recipe: Recipe | None = None) -> dict[str, Any]:
    """Train teacher, student alone and student from the teacher; write summary, picture and table.

    Args:
        output_dir: gets ``summary.json``, ``curves.png``, ``teacher/`` (reused by later runs) and ``run/``.
        recipe: sizes; None: those of the README.

    Returns:
        the summary, as written.
    """
    recipe = recipe or Recipe()
    console = Console()
    begin = time.perf_counter()
    output_dir = output_dir.expanduser().absolute()
    output_dir.mkdir(parents=True, exist_ok=True)
    train, held_out = TextBlocks(recipe, False), TextBlocks(recipe, True)
    console.print(
        f"Text: pydoc_data.topics, {len(train)} blocks of {recipe.length} bytes to learn from, {len(held_out)} held out"
    )

    teacher_dir, teacher_seconds = _teacher(output_dir, recipe, train, held_out, console)
    console.print("The student alone (task loss only)")
    alone = _plain_trainer(
        llama(recipe.student_width, recipe.student_layers, recipe.seed + 1),
        student_keywords(recipe, output_dir),
        train,
        held_out,
    )
    alone.train()
    baseline = alone.state.log_history

    console.print("The same student from the teacher, on Ray: teacher and student each in a process of its own")
    trainer = DistillationTrainer(
        "response_based",
        teacher=str(teacher_dir),
        student=partial(llama, recipe.student_width, recipe.student_layers, recipe.seed + 1),
        args=TrainingArguments(
            **student_keywords(recipe, output_dir),
            alpha=recipe.alpha,
            teacher_placement=TeacherPlacement(),
            e2e_eval_loss="forward",
        ),
        train_dataset=partial(TextBlocks, recipe, False),
        eval_dataset=partial(TextBlocks, recipe, True),
    )
    result = trainer.fit()
    checkpoint = Path(result.checkpoint.path) / CHECKPOINT_SUBDIRECTORY

    losses = {
        name: evaluate(transformers.AutoModelForCausalLM.from_pretrained(path), held_out)
        for name, path in (("teacher", teacher_dir), ("distilled", checkpoint))
    }
    losses["baseline"] = evaluate(alone.model, held_out)
    replica = (trainer.teacher_stats or [{}])[0]
    summary = {
        "teacher_eval_loss": losses["teacher"],
        "baseline_eval_loss": losses["baseline"],
        "distilled_eval_loss": losses["distilled"],
        "gain": losses["baseline"] - losses["distilled"],
        "seconds": time.perf_counter() - begin,
        "teacher_seconds": teacher_seconds,
        "checkpoint": str(checkpoint),
        "run": result.path,
        "steps": recipe.student_steps,
        "teacher_process": {key: replica.get(key) for key in ("pid", "node_id", "device", "forwards", "busy_s")},
        "student_process": (result.return_value or {}).get("process"),
        "driver_pid": os.getpid(),
        "recipe": asdict(recipe),
    }
    write_json(output_dir / "summary.json", summary)
    picture = output_dir / "curves.png"
    draw(baseline, result.metrics_dataframe.to_dict("records"), losses["teacher"], picture)
    console.print(_table(summary, recipe))
    console.print(f"Written: {output_dir / 'summary.json'}, {picture}")
    console.print(f"The distilled student: {checkpoint}", soft_wrap=True)
    return summary


def student_keywords(recipe: Recipe, output_dir: Path) -> dict[str, Any]:
    """What both trainings of the student share, to the last keyword."""
    return {
        "output_dir": str(output_dir / "run"),
        "max_steps": recipe.student_steps,
        "per_device_train_batch_size": recipe.batch,
        "per_device_eval_batch_size": 32,
        "learning_rate": recipe.student_lr,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 20,
        "adam_beta2": 0.95,
        "weight_decay": 0.01,
        "logging_steps": 10,
        "eval_strategy": "steps",
        "eval_steps": 50,
        "save_strategy": "steps",
        "save_steps": recipe.student_steps,
        "seed": recipe.seed,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }


def _teacher(
    output_dir: Path, recipe: Recipe, train: TextBlocks, held_out: TextBlocks, console: Console
) -> tuple[Path, float]:
    """The trained teacher's directory, and the seconds it took; 0 where an earlier run has left it."""
    directory = output_dir / "teacher"
    wanted = {name: value for name, value in asdict(recipe).items() if not name.startswith(("student", "alpha"))}
    record = directory / "recipe.json"  # written last: a half-written teacher has none
    if record.is_file() and json.loads(record.read_text()) == wanted:
        console.print(f"The teacher is there already: {directory}")
        return directory, 0.0
    console.print("The teacher (once; later runs reuse it)")
    begin = time.perf_counter()
    keywords = student_keywords(recipe, output_dir) | {
        "max_steps": recipe.teacher_steps,
        "learning_rate": recipe.teacher_lr,
        "eval_strategy": "no",
    }
    model = llama(recipe.teacher_width, recipe.teacher_layers, recipe.seed)
    trainer = _plain_trainer(model, keywords, train, held_out)
    trainer.train()
    trainer.model.save_pretrained(directory)
    transformers.ByT5Tokenizer().save_pretrained(directory)
    write_json(record, wanted)
    return directory, time.perf_counter() - begin


def _plain_trainer(
    model: transformers.PreTrainedModel, keywords: dict[str, Any], train: TextBlocks, held_out: TextBlocks
) -> transformers.Trainer:
    """Hugging Face's own Trainer, with a progress bar and nothing else printed."""
    arguments = transformers.TrainingArguments(
        **{**keywords, "save_strategy": "no", "report_to": "none", "disable_tqdm": False}
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=train, eval_dataset=held_out)
    trainer.remove_callback(transformers.ProgressCallback)
    trainer.add_callback(SilentProgressCallback if sys.stderr.isatty() else _Lines)
    return trainer


class _Lines(transformers.TrainerCallback):
    """Progress where there is no terminal for a bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if "loss" in (logs or {}) and state.global_step % 50 == 0:
            print(f"  step {state.global_step} of {state.max_steps}: loss {(logs or {})['loss']:.4f}", flush=True)


@torch.no_grad()
def evaluate(model: torch.nn.Module, held_out: TextBlocks) -> float:
    """Cross-entropy on the held-out text, in nats per byte; every block has the same number of labels."""
    device = next(model.parameters()).device
    model.eval()
    losses = [
        model(input_ids=blocks.to(device), labels=blocks.to(device)).loss.item() * len(blocks)
        for blocks in held_out.blocks.split(32)
    ]
    return sum(losses) / len(held_out)


def draw(baseline: list[dict[str, Any]], distilled: list[dict[str, Any]], teacher_loss: float, path: Path) -> None:
    """Held-out loss by step for both trainings, and the teacher's as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=140)
    for history, key, label, color in (
        (baseline, "eval_loss", "student alone", "#8d99ae"),
        (distilled, "eval_loss/e2e", "student from the teacher", "#d62839"),
    ):
        points = [(row["step"], row[key]) for row in history if row.get(key) is not None and row[key] == row[key]]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=2, label=label, color=color)
        axes.annotate(f"{points[-1][1]:.3f}", points[-1], textcoords="offset points", xytext=(6, -3), color=color)
    axes.axhline(teacher_loss, linestyle="--", linewidth=1.2, color="#1d3557", label=f"teacher ({teacher_loss:.3f})")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("cross-entropy on held-out text (nats per byte)")
    axes.set_title("The same student, the same steps, with and without a teacher", fontsize=11)
    axes.margins(x=0.1)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _table(summary: dict[str, Any], recipe: Recipe) -> Table:
    table = Table(title=f"nats per byte, {recipe.student_steps} student steps", title_justify="left")
    table.add_column("model")
    table.add_column("loss", justify="right")
    table.add_column("process")
    teacher, student = summary["teacher_process"], summary["student_process"] or {}
    table.add_row("teacher", f"{summary['teacher_eval_loss']:.4f}", f"pid {teacher['pid']} ({teacher['device']})")
    table.add_row("student alone", f"{summary['baseline_eval_loss']:.4f}", f"pid {summary['driver_pid']}")
    table.add_row("student from the teacher", f"{summary['distilled_eval_loss']:.4f}", f"pid {student.get('pid')}")
    table.add_row("gain", f"{summary['gain']:.4f}", f"{summary['seconds']:.0f} s in all")
    return table
