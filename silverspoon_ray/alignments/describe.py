"""Alignments as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from silverspoon_ray.alignments.alignment import Alignment

HEADINGS = ("teacher", "student", "features", "loss", "weight", "projectors")


class AlignmentList(list[Alignment]):
    """A list of alignments that can describe itself."""

    def __add__(self, other: list[Alignment]) -> AlignmentList:  # type: ignore[override]
        return AlignmentList([*self, *other])

    def describe(self) -> str:
        """Print pairs, shapes, losses and projectors as a table; the text is returned too."""
        text = described(self)
        print(text)
        return text


def described(alignments: Iterable[Alignment]) -> str:
    """A table with a row for each alignment; shapes are those of one sample, where they are known."""
    rows = [HEADINGS, *map(row, alignments)]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(HEADINGS))]
    lines = ["  ".join(c.ljust(width) for c, width in zip(cells, widths, strict=True)).rstrip() for cells in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def row(alignment: Alignment) -> tuple[str, ...]:
    """The cells of one alignment, under :data:`HEADINGS`."""
    projectors = [f"{name.removesuffix('_projector')} {_size(p)}" for name, p in alignment.projectors.items()]
    if not projectors and alignment.shapes is None:
        projectors = ["made if shapes differ" if alignment.auto_projector else "none"]
    return (
        f"{alignment.teacher_module_name} ({type(alignment.teacher_block).__name__})",
        f"{alignment.student_module_name} ({type(alignment.student_block).__name__})",
        _features(alignment),
        loss_label(alignment),
        f"{alignment.loss_weight:g}",
        ", ".join(projectors) or "none",
    )


def loss_label(alignment: Alignment) -> str:
    """The loss's name, or the name of the user's function."""
    loss: Any = alignment.loss_name
    return loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)


def _features(alignment: Alignment) -> str:
    if alignment.shapes is not None:
        teacher, student = alignment.shapes
        return f"{_shape(teacher)} -> {_shape(student)}"
    widths = [feature_size(block) for block in (alignment.teacher_block, alignment.student_block)]
    return " -> ".join(f"[..., {width or '?'}]" for width in widths)


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def feature_size(module: nn.Module) -> int | None:
    """How many features a module gives, as far as its parameters and configuration show it without a forward."""
    for name in ("out_features", "out_channels", "embedding_dim", "num_features", "nf"):
        size = getattr(module, name, None)
        if isinstance(size, int):
            return size
    for part in (module, *module.children()):
        size = getattr(getattr(part, "config", None), "hidden_size", None) or getattr(part, "hidden_size", None)
        if isinstance(size, int):
            return size
    own = [parameter for name, parameter in module.named_parameters(recurse=False) if name == "weight"]
    return own[0].shape[-1] if own and own[0].dim() == 1 else None  # a norm


def _size(projector: nn.Module) -> str:
    sizes = [getattr(projector, name, None) for name in ("in_features", "out_features", "in_channels", "out_channels")]
    known = [str(size) for size in sizes if isinstance(size, int)]
    return "->".join(known[:2]) if len(known) >= 2 else type(projector).__name__
