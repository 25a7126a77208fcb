"""Alignments of a run: they travel as a description and are made in the worker, where the student is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from silverspoon_ray.alignments import Alignment, create_alignments
from silverspoon_ray.alignments.alignment import loss_from
from silverspoon_ray.alignments.describe import feature_size
from silverspoon_ray.distillers import BaseDistiller, FeatureDistiller
from silverspoon_ray.errors import AlignmentError, ConfigError

AlignmentSource = Mapping[str, Any] | Sequence[Mapping[str, Any]] | Callable[[nn.Module, nn.Module], list[Alignment]]
"""Keywords of ``create_alignments``, several of them, or ``make(teacher_structure, student)``, which returns them."""

MODELS = ("teacher_model", "student_model")


def check_alignments(
    distiller: type[BaseDistiller], given: Any, teacher: nn.Module | None, student: nn.Module | None
) -> None:
    """Refuse alignments that cannot be made, before any device is taken.

    Args:
        distiller: the distiller's class.
        given: what the user passed.
        teacher, student: the models' structures, where they are known already.

    Raises:
        ConfigError: a distiller that needs none or has none, an unknown keyword, loss or value.
        AlignmentError: patterns that match nothing.
    """
    if not issubclass(distiller, FeatureDistiller):
        if given is not None:
            raise ConfigError("alignments", type(given).__name__, f"None; {distiller.__name__} compares no modules")
        return
    if given is None:
        raise ConfigError(
            "alignments", None, "keywords of create_alignments, e.g. {'modules': ...}, or make(teacher, student)"
        )
    if callable(given) and not isinstance(given, Mapping):
        return
    several = given if isinstance(given, list) else [given]
    for keywords in several:
        _check_keywords(keywords)
    if teacher is not None and student is not None:
        for alignment in make_alignments(given, teacher, student):
            _check_widths(alignment)


def _check_widths(alignment: Alignment) -> None:
    """Refuse features of other sizes where no projector may be made; sizes that show only in a forward pass."""
    sizes = [feature_size(block) for block in (alignment.teacher_block, alignment.student_block)]
    if alignment.auto_projector or alignment.loss_takes_any_size or None in sizes or sizes[0] == sizes[1]:
        return
    raise AlignmentError(
        "alignments.auto_projector",
        False,
        f"true: {alignment.teacher_module_name} gives {sizes[0]} features, {alignment.student_module_name} {sizes[1]}",
    )


def _check_keywords(given: Any) -> None:
    if not isinstance(given, Mapping):
        expected = "a dict of create_alignments keywords, a list of them, or a callable"
        raise ConfigError("alignments", type(given).__name__, expected)
    known = [name for name in inspect.signature(create_alignments).parameters if name not in MODELS]
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"alignments.{name}", value, f"no keyword of create_alignments; {', '.join(known)}")
    if "modules" not in given:
        raise ConfigError("alignments.modules", None, "required: patterns of module names")
    keywords = given.get("loss_function_kwargs")
    if keywords is not None and not isinstance(keywords, Mapping):
        raise ConfigError("alignments.loss_function_kwargs", keywords, "keywords of the loss, e.g. {temperature: 2.0}")
    try:
        loss_from(given.get("loss_function"), keywords)
    except ConfigError as error:
        key = f"loss_function_kwargs.{error.key}" if error.key in (keywords or {}) else "loss_function"
        raise ConfigError(f"alignments.{key}", error.value, error.expected) from error


def make_alignments(given: AlignmentSource, teacher: nn.Module, student: nn.Module) -> list[Alignment]:
    """The alignments between a teacher (or its structure) and the student of this worker."""
    if not callable(given):
        several = [given] if isinstance(given, Mapping) else given
        return [a for keywords in several for a in create_alignments(teacher, student, **keywords)]
    made = given(teacher, student)
    if not isinstance(made, list) or not all(isinstance(alignment, Alignment) for alignment in made):
        raise ConfigError("alignments", given, "a callable that returns a list of Alignment objects")
    return made
