"""Students out of checkpoints, alone or in the teacher's place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from silverspoon_ray.alignments.alignment import in_dtype_of
from silverspoon_ray.alignments.projector_files import load_alignments, load_projectors
from silverspoon_ray.capture import named_module
from silverspoon_ray.distillers.trunk import BlockCall, Trunk
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.models.saved import load_saved
from silverspoon_ray.teacher.inputs import TeacherInputs


def load_student_weights_from_checkpoint(
    student_model: nn.Module, checkpoint_dir: str | os.PathLike[str], student_model_name: str = "", strict: bool = True
) -> dict[str, list[str]]:
    """Load a trained student's weights into a model of its architecture.

    Args:
        student_model: where they go; its device and dtype stay.
        checkpoint_dir: a checkpoint of any distiller, or a Ray Train checkpoint that has one in ``checkpoint/``.
        student_model_name: of a run with several students, which of them; else it need not match.
        strict: raise where the weights are not exactly the model's.

    Returns:
        ``{"missing_keys": [...], "unexpected_keys": [...]}``.

    Raises:
        ConfigError: no weights there, or with ``strict`` weights that do not fit.
    """
    directory = _checkpoint(checkpoint_dir)
    own = directory / f"student_model_{student_model_name.replace(os.sep, '_')}"
    directory = own if own.is_dir() else directory
    return load_saved(student_model, directory, strict)


def load_student_with_projectors_from_checkpoint(
    teacher_model: nn.Module,
    checkpoint_dir: str | os.PathLike[str],
    student_model_name: str,
    student_model: nn.Module,
    device: torch.device | str | None = None,
) -> nn.Module:
    """The teacher with blocks of a blockwise student in the places of its own.

    Each block that was trained stands between its projectors where the teacher's block stood, and so does what it was
    trained to do; with it the student can be judged, or trained on, in the teacher's company.

    Args:
        teacher_model: changed in place.
        checkpoint_dir: a checkpoint of a blockwise run.
        student_model_name: as the alignments name it: what its model was loaded from (``name_or_path``), ``""`` for one
            that was built in code. Of a run with one student it need not match.
        student_model: of the student's architecture; its weights are loaded.
        device: where everything goes; None: where the teacher is.

    Returns:
        ``teacher_model``, which cannot be saved like this. Its forward also runs the student's embeddings and masks,
        from which blocks take their other arguments. It does not use a cache of keys and values.

    Raises:
        ConfigError: it is no such checkpoint, or does not fit the models.
    """
    directory = _checkpoint(checkpoint_dir)
    description = load_alignments(directory)
    if description.get("distiller") != "blockwise":
        raise ConfigError(
            "checkpoint_dir",
            str(directory),
            "a checkpoint of a BlockwiseDistiller; students that were trained whole are loaded with "
            "load_student_weights_from_checkpoint",
        )
    entries = [entry for entry in description["alignments"] if entry["student_model"] == student_model_name]
    if not entries and len({entry["student_model"] for entry in description["alignments"]}) == 1:
        entries = description["alignments"]
    if not entries:
        known = sorted({entry["student_model"] for entry in description["alignments"]})
        raise ConfigError("student_model_name", student_model_name, f"one of {', '.join(map(repr, known))}")
    load_student_weights_from_checkpoint(student_model, directory, student_model_name)
    projectors = load_projectors(directory)
    target = device if device is not None else next(teacher_model.parameters()).device
    student_model.to(target)
    placed = []
    for entry, own in zip(description["alignments"], projectors, strict=True):
        if entry not in entries:
            continue
        named_module(teacher_model, entry["teacher_module"], "teacher_model")
        block = named_module(student_model, entry["student_module"], "student_model")
        placed_block = ProjectedBlock(block, own.get("input_projector"), own.get("output_projector"))
        parent, _, name = entry["teacher_module"].rpartition(".")
        setattr(teacher_model.get_submodule(parent), name, placed_block.to(target))
        placed.append(placed_block)
    teacher_model.to(target)
    teacher_model.register_forward_pre_hook(StudentArguments(student_model, placed), with_kwargs=True, prepend=True)
    for settings in (getattr(teacher_model, "config", None), getattr(teacher_model, "generation_config", None)):
        if settings is not None and hasattr(settings, "use_cache"):
            settings.use_cache = False
    teacher_model.save_pretrained = _refuse_to_save  # type: ignore[assignment]
    return teacher_model.train(student_model.training)


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        "save_pretrained",
        "teacher with blocks of a student",
        "the student and its checkpoint; no from_pretrained could load this mixture",
    )


class ProjectedBlock(nn.Module):
    """A student's block between its projectors, with the interface of the teacher's block that it replaces.

    Args:
        block: the student's.
        input_projector, output_projector: from and to the teacher's size; None where sizes agree.
    """

    def __init__(self, block: nn.Module, input_projector: nn.Module | None, output_projector: nn.Module | None) -> None:
        super().__init__()
        self.input_projector = input_projector
        self.block = block
        self.output_projector = output_projector
        self.call: BlockCall | None = None
        """How the student would call the block for the present batch."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.call is not None, "the model that holds this block has to be called, not the block"
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        output = run_block(self.block, self.call, hidden, self.input_projector)
        if self.output_projector is None:
            return output
        if isinstance(output, torch.Tensor):
            return self.output_projector(output)
        return (self.output_projector(output[0]), *output[1:])


class StudentArguments:
    """A hook before the model's forward: asks the student how it would call its blocks for this batch.

    Args:
        student: the model that the blocks come from.
        placed: the blocks, where they stand now.
    """

    def __init__(self, student: nn.Module, placed: list[ProjectedBlock]) -> None:
        self.student = student
        self.placed = placed
        self.trunk = Trunk(student, [projected.block for projected in placed])
        self.select = TeacherInputs(student)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(value, Cache) and value.get_seq_length() > 0 for value in kwargs.values()):
            raise ConfigError("cache", "filled", "None, and use_cache=False: the student's blocks keep no cache")
        calls = self.trunk.calls(self.student.forward, *args, **self.select(kwargs))
        for projected in self.placed:
            projected.call = calls[projected.block]
        return (args, {**kwargs, "use_cache": False}) if self.select.constants else None


def run_block(block: Callable[..., Any], call: BlockCall, given: Any, projector: nn.Module | None) -> Any:
    """Call a student's block on the teacher's hidden states; one that takes none is called as the student would.

    Args:
        block: the student's.
        call: how the student calls it.
        given: what the teacher's block was called with.
        projector: turns that into the student's size; None where it has it.
    """
    hidden = call.hidden
    if hidden is None or not isinstance(given, torch.Tensor) or not given.is_floating_point():
        return block(*call.args, **call.kwargs)
    given = given.to(hidden.device, hidden.dtype)
    if projector is not None:
        given = in_dtype_of(projector, given)
    if projector is not None and getattr(projector, "mode", "output") == "input":
        wide = call.with_hidden(given)
        args, kwargs = projector(*wide.args, **wide.kwargs)
        return block(*args, **kwargs)
    call = call.with_hidden(given if projector is None else projector(given).to(hidden.dtype))
    return block(*call.args, **call.kwargs)


def _checkpoint(given: str | os.PathLike[str]) -> Path:
    directory = Path(given).expanduser()
    return directory / "checkpoint" if (directory / "checkpoint").is_dir() else directory
