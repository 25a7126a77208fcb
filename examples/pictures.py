"""The pictures of the examples."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import MultipleLocator, PercentFormatter


def draw_embeddings(
    teacher: torch.Tensor, students: dict[str, torch.Tensor], results: dict[str, Any], path: Path
) -> None:
    """Left: how close each sentence is to the teacher's. Right: similarities of pairs, by student and teacher."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.5), dpi=140)
    rows, columns = torch.triu_indices(len(teacher), len(teacher), offset=1)
    some = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:3000]
    rows, columns = rows[some], columns[some]
    similar = (teacher[rows] * teacher[columns]).sum(-1)
    for (name, found), color in zip(students.items(), ("#8d99ae", "#d62839"), strict=True):
        row = results[name]
        label = f"student {name} training (mean {row['cosine_mean']:.2f})"
        left.hist((found * teacher).sum(-1).numpy(), bins=40, range=(0, 1), color=color, alpha=0.7, label=label)
        label = f"student {name} training (rank correlation {row['rank_correlation_of_pairs']:.2f})"
        right.scatter(similar, (found[rows] * found[columns]).sum(-1), s=4, alpha=0.35, color=color, label=label)
    left.set_xlabel("cosine of student's and teacher's embedding")
    left.set_ylabel("held-out sentences")
    left.set_title(f"Embeddings of {len(teacher)} held-out sentences", fontsize=11)
    left.legend(frameon=False, loc="upper left")
    right.plot([-0.2, 1], [-0.2, 1], linestyle="--", linewidth=1.2, color="#1d3557", label="the same as the teacher")
    right.set_xlabel("similarity by the teacher (6 layers)")
    right.set_ylabel("similarity by the student (3 layers)")
    right.set_title(f"Similarity of {len(some)} pairs of them", fontsize=11)
    legend = right.legend(frameon=False, loc="upper left", markerscale=3)
    for handle in legend.legend_handles:
        handle.set_alpha(1)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def draw_digits(found: dict[str, list[float]], teacher: float, title: str, path: Path) -> None:
    """Accuracy by way: each seed as a point, the mean as a line with its number, the teacher as a line through all."""
    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=140)
    for place, (values, color) in enumerate(zip(found.values(), ("#5c677d", "#d62839", "#e07a1f"), strict=True)):
        mean = statistics.mean(values)
        axes.hlines(mean, place - 0.22, place + 0.22, color=color, linewidth=3, label=None if place else "mean")
        spread = [place + 0.1 * (number - (len(values) - 1) / 2) for number in range(len(values))]
        axes.scatter(spread, values, color=color, s=30, alpha=0.6, zorder=3, label=None if place else "each seed")
        axes.annotate(
            f"{mean:.1%}", (place + 0.25, mean), xytext=(2, 0), textcoords="offset points", va="center", color=color
        )
    axes.axhline(teacher, linestyle="--", linewidth=1.2, color="#1d3557", label=f"teacher, all labels ({teacher:.1%})")
    names = ["student alone", "response-based:\nteacher's logits", "feature-based:\nteacher's maps"]
    axes.set_xticks(range(len(found)), names)
    axes.set_xlim(-0.5, len(found) - 0.3)
    axes.yaxis.set_major_locator(MultipleLocator(0.05))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(top=1.005)
    axes.set_ylabel("accuracy on test images")
    axes.set_title(title, fontsize=11)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
