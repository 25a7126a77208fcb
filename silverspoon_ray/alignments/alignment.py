"""One pair of modules: what of the teacher teaches what of the student, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from silverspoon_ray.alignments.projectors import init_projector, projector_between
from silverspoon_ray.alignments.selector import OutputSelector, identity
from silverspoon_ray.errors import AlignmentError, ConfigError
from silverspoon_ray.losses import LossFunction, get_loss_function, loss_keywords

Selector = Callable[[Any], Any]
ProjectorInit = str | Callable[[nn.Module], Any] | None


class Alignment:
    """A module of the teacher that teaches a module of the student.

    Args:
        teacher_block: the teacher's module; of a teacher that runs elsewhere, a module of its ``structure``.
        student_block: the student's module.
        teacher_model_name, student_model_name: names of the models, for logs and checkpoints.
        teacher_module_name, student_module_name: the modules' dotted names in their models. Distillers look them up
            where they are empty.
        teacher_output_selector, student_output_selector: pick the tensor that is compared from what a module returns.
        input_projector: learned; turns the teacher's input of the block into what the student's block takes. Blockwise
            only.
        output_projector: learned; turns the student's output into the teacher's size.
        auto_projector: make the projectors that shapes ask for, before training begins. Without it a loss of the
            user's gets features of any size.
        projector_init: how new projectors begin: a name or ``init(module)``; None: as torch does.
        loss_function: a loss by name or a callable ``loss(student, teacher)``; None: ``"mse"``. A callable that takes
            ``mask=`` gets the features as they are; any other gets the positions that count as rows,
            ``[rows, features]``, and must return their mean. One with an attribute ``counts_samples = True`` takes
            ``mask=`` and means over the samples of which anything counts, whatever positions they have.
        loss_function_kwargs: keywords of a loss given by name.
        optimizer, scheduler: for this student block and its projectors alone; None: the distiller's.
        max_grad_norm: the gradients of the block and its projectors are clipped to this norm; None: blockwise clips
            each block to the training arguments' ``max_grad_norm``.
        loss_weight: what the loss is multiplied by in the total.
        auto_device_match, auto_dtype_match: move, cast the teacher's features to the student's device, dtype.

    Raises:
        ConfigError: a value that cannot be used.
    """

    def __init__(
        self,
        teacher_block: nn.Module,
        student_block: nn.Module,
        teacher_model_name: str = "",
        student_model_name: str = "",
        teacher_module_name: str = "",
        student_module_name: str = "",
        teacher_output_selector: Selector = identity,
        student_output_selector: Selector = OutputSelector(0),  # noqa: B008  (frozen)
        input_projector: nn.Module | None = None,
        output_projector: nn.Module | None = None,
        auto_projector: bool = False,
        projector_init: ProjectorInit = None,
        loss_function: str | LossFunction | None = None,
        loss_function_kwargs: Mapping[str, Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        max_grad_norm: float | int | None = None,
        loss_weight: float = 1.0,
        auto_device_match: bool = False,
        auto_dtype_match: bool = False,
    ) -> None:
        for key, module in (("teacher_block", teacher_block), ("student_block", student_block)):
            if not isinstance(module, nn.Module):
                raise ConfigError(key, type(module).__name__, "an nn.Module; create_alignments finds modules by name")
        if scheduler is not None and optimizer is None:
            raise ConfigError("scheduler", type(scheduler).__name__, "None where no optimizer is given")
        _check_number("loss_weight", loss_weight, "a finite number of 0 or more")
        if max_grad_norm is not None:
            _check_number("max_grad_norm", max_grad_norm, "a finite number of 0 or more, or None")
        self.teacher_block = teacher_block
        self.student_block = student_block
        self.teacher_model_name = teacher_model_name
        self.student_model_name = student_model_name
        self.teacher_module_name = teacher_module_name
        self.student_module_name = student_module_name
        self.teacher_output_selector = teacher_output_selector
        self.student_output_selector = student_output_selector
        self.input_projector = input_projector
        self.output_projector = output_projector
        self.auto_projector = auto_projector
        self.projector_init = projector_init
        self.loss_function = loss_from(loss_function, loss_function_kwargs)
        self.loss_name = loss_function or "mse"
        self._inspected: LossFunction | None = None
        self._takes_mask = False
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.max_grad_norm = max_grad_norm
        self.loss_weight = loss_weight
        self.auto_device_match = auto_device_match
        self.auto_dtype_match = auto_dtype_match
        self.student_model: nn.Module | None = None
        """The model that the student's block is a part of, where it is known."""
        self.shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        """Shapes of the teacher's and the student's features for one sample, once they have been seen."""

    def __repr__(self) -> str:
        return f"Alignment({self.teacher_module_name!r} -> {self.student_module_name!r}, {self.loss_name!r})"

    def get_name(self) -> str:
        """``<student model>.<student module>``: the key of this alignment in logs and checkpoints."""
        return f"{self.student_model_name}.{self.student_module_name}"

    @property
    def projectors(self) -> dict[str, nn.Module]:
        """Those that there are, as ``input_projector`` and ``output_projector``."""
        both = {"input_projector": self.input_projector, "output_projector": self.output_projector}
        return {name: projector for name, projector in both.items() if projector is not None}

    @property
    def trained_modules(self) -> dict[str, nn.Module]:
        """Projectors, and a loss that has weights of its own, as ``loss_function``: trained beside the student."""
        loss: Any = self.loss_function
        learns = isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None
        return {**self.projectors, **({"loss_function": loss} if learns else {})}

    # ---- features ------------------------------------------------------------------------

    def teacher_features(self, output: Any) -> torch.Tensor:
        """The tensor that is compared, from what the teacher's module returned."""
        return self._selected("teacher", self.teacher_module_name, self.teacher_output_selector, output)

    def student_features(self, output: Any) -> torch.Tensor:
        """The tensor that is compared, from what the student's module returned; not projected yet."""
        return self._selected("student", self.student_module_name, self.student_output_selector, output)

    def _selected(self, whose: str, name: str, select: Selector, output: Any) -> torch.Tensor:
        try:
            features = select(output)
        except (AttributeError, LookupError, TypeError) as error:
            features = None
            reason = f"{type(error).__name__}: {error}"
        else:
            reason = f"the selector gives {type(features).__name__}"
        if isinstance(features, torch.Tensor):
            return features
        raise AlignmentError(
            f"{whose}_output_selector",
            select,
            f"a function that picks a tensor from what {whose} module {name!r} returns ({_described(output)}); {reason}"
            ". create_alignments(..., output_selector_index=0) picks the first of several",
        )

    def make_output_projector(self, student: torch.Tensor, teacher: torch.Tensor) -> None:
        """Make the output projector if it is missing and needed.

        Args:
            student, teacher: features of one batch, as selected.

        Raises:
            AlignmentError: they differ in more than a projector can bridge, or none may be made.
        """
        self.shapes = (tuple(teacher.shape[1:]), tuple(student.shape[1:]))
        brought = isinstance(getattr(self.loss_function, "projector", None), nn.Module)
        wanted = self.auto_projector or not self.loss_takes_any_size
        if self.output_projector is None and wanted and not brought:
            self.output_projector = self._projector("output", student, teacher)

    def make_input_projector(self, student: torch.Tensor, teacher: torch.Tensor) -> None:
        """The same for the input projector; the tensors are what the blocks are called with."""
        if self.input_projector is None:
            self.input_projector = self._projector("input", teacher, student)

    def _projector(self, which: str, given: torch.Tensor, wanted: torch.Tensor) -> nn.Module | None:
        if given.shape == wanted.shape:
            return None
        sizes = f"student module {self.student_module_name!r}, teacher module {self.teacher_module_name!r}"
        if not self.auto_projector:
            raise AlignmentError(
                f"{which}_projector",
                None,
                f"a projector from {tuple(given.shape)} to {tuple(wanted.shape)} for {sizes}, or auto_projector=True",
            )
        try:
            projector = projector_between(tuple(wanted.shape), tuple(given.shape))
        except ConfigError as error:
            raise AlignmentError(f"{which}_projector", None, f"{error.expected} ({sizes})") from None
        if projector is not None:
            init_projector(projector, self.projector_init)
            projector.to(given.device)
        return projector

    # ---- loss ----------------------------------------------------------------------------

    def loss(
        self, student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None, teacher_is_shared: bool = False
    ) -> torch.Tensor:
        """The loss over the positions that count, unweighted; 0 where none does.

        Args:
            student: features as selected; projected here.
            teacher: features as selected.
            mask: boolean, ``[batch, positions]`` or ``[batch]``; None: everything counts.
            teacher_is_shared: ``teacher`` must not be written to; it is copied for a loss of the user's.

        Raises:
            AlignmentError: the features cannot be compared.
        """
        if self.output_projector is not None:
            student = in_dtype_of(self.output_projector, student)
            student = self.output_projector(student)
        if student.shape != teacher.shape and not self.loss_takes_any_size:
            raise AlignmentError(
                "alignment",
                self.get_name(),
                f"features of one shape; teacher module {self.teacher_module_name!r} gives {tuple(teacher.shape)}, "
                f"student module {self.student_module_name!r} gives {tuple(student.shape)} (an output_projector, or "
                "auto_projector=True, turns one size into another)",
            )
        teacher = teacher.to(student.device)
        if self.auto_dtype_match:
            teacher = teacher.to(student.dtype)
        if teacher_is_shared and not self._loss_is_ours:
            teacher = teacher.clone()
        try:
            value = self._called(student, teacher, mask)
        except (RuntimeError, ConfigError) as error:
            shapes = f"features {tuple(student.shape)} of the student and {tuple(teacher.shape)} of the teacher"
            reason = error.expected if isinstance(error, ConfigError) else str(error)
            raise AlignmentError("alignment", self.get_name(), f"a loss that can take {shapes}; {reason}") from error
        if not isinstance(value, torch.Tensor) or value.dim() > 0:
            what = (
                f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            )
            raise AlignmentError("loss_function", self.loss_name, f"a loss that gives one number; it gives {what}")
        return value

    @property
    def _loss_is_ours(self) -> bool:
        return type(self.loss_function).__module__.startswith("silverspoon_ray.losses")

    @property
    def loss_takes_any_size(self) -> bool:
        """The loss may compare features of different sizes: a user's own, or one with a projector of its own."""
        return not self._loss_is_ours or isinstance(getattr(self.loss_function, "projector", None), nn.Module)

    @property
    def counts_samples(self) -> bool:
        """The loss's mean is over samples, whatever positions they have."""
        return bool(getattr(self.loss_function, "counts_samples", False))

    def _called(self, student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if self.counts_samples:
            mean = self.loss_function(student, teacher, mask=mask)  # over the samples of which anything counts
            return mean if mask is None else mean * mask.reshape(len(mask), -1).any(1).to(mean.dtype).mean()
        if self._inspected is not self.loss_function:  # once, and again where a user has put another in its place
            self._inspected = self.loss_function
            self._takes_mask = "mask" in loss_keywords(self.loss_function)
        if self._takes_mask:
            return self.loss_function(student, teacher, mask=mask)
        if mask is None:
            return self.loss_function(student, teacher)
        rows = student[mask]
        if rows.shape[0] == 0:
            return rows.sum()  # connected, exactly 0
        return self.loss_function(rows, teacher[mask])


def in_dtype_of(projector: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype of a projector's weights, where autocast does not see to that."""
    weight = next(projector.parameters(), None)
    if weight is None or torch.is_autocast_enabled(tensor.device.type) or not tensor.is_floating_point():
        return tensor
    return tensor.to(weight.dtype)


def loss_from(loss_function: str | LossFunction | None, kwargs: Mapping[str, Any] | None = None) -> LossFunction:
    """The loss that a name or callable stands for; None is ``"mse"``.

    Raises:
        ConfigError: an unknown name or keyword, or something that is no loss.
    """
    for key, value in (kwargs or {}).items():
        if _has_no_memory(value):
            raise ConfigError(
                f"loss_function_kwargs.{key}",
                type(value).__name__,
                "weights that are in this process; of a dedicated teacher only the structure is here. Load that weight "
                "from the teacher's directory, or keep the teacher in the student's process",
            )
    if loss_function is None or isinstance(loss_function, str):
        return get_loss_function(loss_function or "mse", **dict(kwargs or {}))
    if not callable(loss_function):
        raise ConfigError("loss_function", loss_function, "the name of a loss, or a callable loss(student, teacher)")
    if kwargs:
        import functools

        return functools.partial(loss_function, **kwargs)
    return loss_function


def _has_no_memory(value: Any) -> bool:
    tensors = list(value.parameters()) if isinstance(value, nn.Module) else [value]
    return any(isinstance(tensor, torch.Tensor) and tensor.device.type == "meta" for tensor in tensors)


def _check_number(key: str, value: Any, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(key, value, expected)


def _described(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of {len(output)}"
    if isinstance(output, Mapping):
        return f"a mapping with {', '.join(map(str, output))}"
    return type(output).__name__
