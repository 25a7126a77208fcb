"""Finding the modules that belong together, by patterns over their dotted names."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from silverspoon_ray.alignments.alignment import Alignment, ProjectorInit
from silverspoon_ray.alignments.describe import AlignmentList
from silverspoon_ray.alignments.selector import OutputSelector
from silverspoon_ray.errors import AlignmentError, ConfigError
from silverspoon_ray.losses import LossFunction

Patterns = str | Sequence[str] | Mapping[str, str]


def create_alignments(
    teacher_model: Any,
    student_model: nn.Module,
    modules: Patterns,
    loss_function: str | LossFunction | None = None,
    loss_function_kwargs: Mapping[str, Any] | None = None,
    output_selector_index: int | str | None = None,
    auto_projector: bool = True,
    projector_init: ProjectorInit = None,
    max_grad_norm: float | int | None = None,
    loss_weight: float = 1.0,
) -> AlignmentList:
    """Pair modules of teacher and student whose names match.

    Args:
        teacher_model: the model; or the handle of a ``TeacherGroup``, whose structure is looked at.
        student_model: the model.
        modules: regular expressions over whole dotted names (``re.fullmatch``).

            - a string, or a list of them: modules of the teacher that match, each paired with the student's module of
              the same name.
            - a mapping from teacher to student: ``{r"model\\.layers\\.(\\d+)5": r"model\\.layers\\.\\1"}``. The
              student's side may refer back to groups of the teacher's (``\\1``, ``\\g<name>``) and is a pattern again.
              Where both sides match several, they are paired in the order of the models.
        loss_function, loss_function_kwargs, auto_projector, projector_init, max_grad_norm, loss_weight: see
            :class:`Alignment`.
        output_selector_index: which entry of a module's output is compared where it is a tuple, list or mapping;
            None: the first.

    Returns:
        a list, in the order of the teacher's modules; its ``describe()`` prints the pairs.

    Raises:
        AlignmentError: a pattern that matches nothing or that cannot be read, or modules without a partner; the
            message lists the nearest names.
        ConfigError: no such loss.
    """
    teacher_model = getattr(teacher_model, "structure", teacher_model)
    for key, model in (("teacher_model", teacher_model), ("student_model", student_model)):
        if not isinstance(model, nn.Module):
            raise ConfigError(key, type(model).__name__, "an nn.Module, or the handle of a TeacherGroup")
    teacher_names = dict(teacher_model.named_modules())
    student_names = dict(student_model.named_modules())
    selector = OutputSelector(output_selector_index if output_selector_index is not None else 0)
    alignments = AlignmentList()
    for teacher_name, student_name in matched_names(list(teacher_names), list(student_names), modules):
        alignment = Alignment(
            teacher_block=teacher_names[teacher_name],
            student_block=student_names[student_name],
            teacher_model_name=model_name(teacher_model),
            student_model_name=model_name(student_model),
            teacher_module_name=teacher_name,
            student_module_name=student_name,
            teacher_output_selector=selector,
            student_output_selector=selector,
            auto_projector=auto_projector,
            projector_init=projector_init,
            loss_function=loss_function,
            loss_function_kwargs=loss_function_kwargs,
            max_grad_norm=max_grad_norm,
            loss_weight=loss_weight,
        )
        alignment.student_model = student_model
        alignments.append(alignment)
    return alignments


def model_name(model: nn.Module) -> str:
    """The name or hub id that a model was loaded from, without the directory of a local one; ``""`` if it has none."""
    name = getattr(model, "name_or_path", "")
    if not isinstance(name, str):
        return ""
    return os.path.basename(os.path.normpath(name)) if os.path.isabs(name) or os.path.isdir(name) else name


def matched_names(teacher: Sequence[str], student: Sequence[str], modules: Patterns) -> list[tuple[str, str]]:
    """Pairs of names; see :func:`create_alignments`. In the order of the teacher's names."""
    if isinstance(modules, str):
        modules = [modules]
    if not modules:
        raise AlignmentError("modules", modules, "at least one pattern")
    pairs: list[tuple[str, str]] = []
    if isinstance(modules, Mapping):
        for pattern, target in modules.items():
            pairs += _pairs_of(pattern, target, teacher, student)
    else:
        for pattern in modules:
            for match in _matches(pattern, teacher, "teacher"):
                name = match.group(0)
                if name not in student:
                    expected = (
                        f"patterns whose matches are in the student too; {name!r} is not. {_near(name, student)}. A "
                        "mapping {teacher pattern: student pattern} pairs modules of different names"
                    )
                    raise AlignmentError("modules", pattern, expected)
                pairs.append((name, name))
    position = {name: number for number, name in enumerate(teacher)}
    return sorted(dict.fromkeys(pairs), key=lambda pair: position[pair[0]])


def _pairs_of(pattern: str, target: str, teacher: Sequence[str], student: Sequence[str]) -> list[tuple[str, str]]:
    by_target: dict[str, list[str]] = {}
    for match in _matches(pattern, teacher, "teacher"):
        by_target.setdefault(_expanded(match, target), []).append(match.group(0))
    pairs: list[tuple[str, str]] = []
    for expanded, names in by_target.items():
        found = [match.group(0) for match in _matches(expanded, student, "student")]
        if len(found) == 1:
            found *= len(names)
        if len(found) != len(names):
            raise AlignmentError(
                "modules",
                {pattern: target},
                f"as many modules of the student as of the teacher; {expanded!r} matches {len(found)} "
                f"({_listed(found)}), the teacher has {len(names)} ({_listed(names)}). A group in the teacher's "
                r"pattern, and \1 in the student's, pairs them by name",
            )
        pairs += zip(names, found, strict=True)
    return pairs


def _expanded(match: re.Match[str], target: str) -> str:
    r"""The student's pattern with ``\1`` and ``\g<name>`` replaced by what the teacher's groups matched."""

    def group(reference: re.Match[str]) -> str:
        key = reference.group(1) or reference.group(2)
        try:
            found: str | None = match.group(int(key) if key.isdigit() else key)
        except IndexError:
            raise AlignmentError(
                "modules", target, f"references to groups of {match.re.pattern!r}; it has no group {key}"
            ) from None
        return re.escape(found or "")

    return re.sub(r"\\(?:(\d+)|g<(\w+)>)", group, target)


def _matches(pattern: Any, names: Sequence[str], whose: str) -> list[re.Match[str]]:
    if not isinstance(pattern, str):
        raise AlignmentError("modules", pattern, "patterns as strings")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise AlignmentError("modules", pattern, f"a regular expression; {error}") from None
    match_whole: Callable[[str], re.Match[str] | None] = compiled.fullmatch
    found = [match for name in names if name and (match := match_whole(name)) is not None]
    if not found:
        expected = f"a pattern that matches the whole name of a module of the {whose}. {_near(pattern, names)}"
        raise AlignmentError("modules", pattern, expected)
    return found


def _near(wanted: str, names: Sequence[str]) -> str:
    plain = wanted.replace("\\", "")
    near = difflib.get_close_matches(plain, [name for name in names if name], n=4, cutoff=0.3)
    return f"Near are {', '.join(near)}" if near else f"Its modules are {_listed([name for name in names if name])}"


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown + (f", ... {len(names) - most} more" if len(names) > most else "")
