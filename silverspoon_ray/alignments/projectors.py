"""Trained maps between the widths of student and teacher, and when one is needed.

A projector is an ``nn.Linear`` or a 1x1 ``nn.Conv2d`` that knows which tensor it is for: the output of a block, or one
argument of the call of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from silverspoon_ray.errors import ConfigError

ProjectorInit = str | Callable[[nn.Module], object] | None

MODES = ("output", "input")
NORMAL_STD = 0.02


class GenericLinearProjector(nn.Linear):
    """A linear map of the last dimension: ``[..., in_features]`` to ``[..., out_features]``.

    Args:
        in_features: width of the tensor that comes in.
        out_features: width of the tensor that goes out.
        bias: whether a learned offset is added.
        mode: ``"output"``: called with one tensor, returns one tensor (further arguments are ignored, as a forward
            hook may pass them). ``"input"``: called with the arguments of a block, returns ``(args, kwargs)``, a tuple
            and a dict, in which one tensor is projected and everything else is what came in.
        apply_to_arg: mode ``"input"``: which positional argument, counted from 0; negative numbers count from the end.
            None with ``apply_to_kwarg=None``: the first.
        apply_to_kwarg: mode ``"input"``: which keyword argument.

    Raises:
        ConfigError: settings that do not go together; when called: no such argument, or not a tensor of that width.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        mode: str = "output",
        apply_to_arg: int | None = None,
        apply_to_kwarg: str | None = None,
    ) -> None:
        _check_sizes(in_features=in_features, out_features=out_features)
        _check_settings(mode, apply_to_arg, apply_to_kwarg)
        super().__init__(in_features, out_features, bias=bias)
        self.mode = mode
        self.apply_to_arg = apply_to_arg
        self.apply_to_kwarg = apply_to_kwarg

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _applied(self, self._project, args, kwargs)

    def _project(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[-1] != self.in_features:
            raise ConfigError("projector", self, f"a last dimension of {self.in_features}, not {tuple(tensor.shape)}")
        return super().forward(tensor)

    def extra_repr(self) -> str:
        return super().extra_repr() + _settings_text(self)


class GenericConv2dProjector(nn.Conv2d):
    """A linear map of the channels, the same at every pixel: ``[B, in_channels, H, W]`` to ``[B, out_channels, H, W]``.

    It is a convolution with a 1x1 kernel; ``[C, H, W]`` is taken as well.

    Args:
        in_channels: channels of the tensor that comes in.
        out_channels: channels of the tensor that goes out.
        bias: whether a learned offset is added.
        mode, apply_to_arg, apply_to_kwarg: as in :class:`GenericLinearProjector`.

    Raises:
        ConfigError: as in :class:`GenericLinearProjector`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        bias: bool = False,
        mode: str = "output",
        apply_to_arg: int | None = None,
        apply_to_kwarg: str | None = None,
    ) -> None:
        _check_sizes(in_channels=in_channels, out_channels=out_channels)
        _check_settings(mode, apply_to_arg, apply_to_kwarg)
        super().__init__(in_channels, out_channels, kernel_size=1, bias=bias)
        self.mode = mode
        self.apply_to_arg = apply_to_arg
        self.apply_to_kwarg = apply_to_kwarg

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _applied(self, self._project, args, kwargs)

    def _project(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() not in (3, 4) or tensor.shape[-3] != self.in_channels:
            raise ConfigError(
                "projector", self, f"a shape [B, {self.in_channels}, H, W] or [{self.in_channels}, H, W], "
                f"not {tuple(tensor.shape)}"
            )  # fmt: skip
        return super().forward(tensor)

    def extra_repr(self) -> str:
        return super().extra_repr() + _settings_text(self)


def projector_between(teacher_shape: Sequence[int], student_shape: Sequence[int]) -> nn.Module | None:
    """The projector that turns the student's output into the teacher's feature size.

    Args:
        teacher_shape: shape of the teacher's output, e.g. ``(B, T, D)`` or ``(B, C, H, W)``.
        student_shape: shape of the student's, for the same batch.

    Returns:
        None where the shapes are equal; a `GenericConv2dProjector` where only the channels of ``[B, C, H, W]`` differ;
        a `GenericLinearProjector` where only the last dimension differs (so also for ``[B, H, W, C]``). It lies on the
        CPU in torch's default dtype.

    Raises:
        ConfigError: the shapes differ in anything else, e.g. in sequence length, spatial size or rank.
    """
    teacher, student = tuple(teacher_shape), tuple(student_shape)
    if len(teacher) != len(student):
        raise ConfigError(
            "student_shape",
            student,
            f"the rank of the teacher's {teacher}: {len(student)} dimensions cannot be projected onto {len(teacher)}; "
            "choose another output with an output selector",
        )
    differing = [d for d, (theirs, ours) in enumerate(zip(teacher, student, strict=True)) if theirs != ours]
    if not differing:
        return None
    if differing == [len(teacher) - 1]:
        return GenericLinearProjector(student[-1], teacher[-1])
    if len(teacher) == 4 and differing == [1]:
        return GenericConv2dProjector(student[1], teacher[1])
    features = 1 if len(teacher) == 4 and 1 in differing else len(teacher) - 1
    said = ", ".join(
        f"{_dimension_name(d, len(teacher))} is {student[d]}, the teacher's {teacher[d]}"
        for d in differing
        if d != features
    )
    raise ConfigError(
        "student_shape",
        student,
        f"the teacher's {teacher} but for the feature size, the only one that a projector bridges: {said}; "
        "give an output_projector of your own or choose another output",
    )


def init_projector(projector: nn.Module, how: ProjectorInit) -> nn.Module:
    """Initialise a projector in place.

    Args:
        projector: any module; the names act on every ``nn.Linear`` and ``nn.Conv2d`` in it.
        how: None: leave what torch's constructors gave. ``"normal"``: weights from N(0, 0.02²), biases 0.
            ``"xavier"``: weights uniform after Glorot and Bengio (2010), biases 0. A callable gets the projector and
            changes it in place; what it returns is ignored.

    Returns:
        The projector given.

    Raises:
        ConfigError: no such initialisation.
    """
    if how is None:
        return projector
    if callable(how):
        how(projector)
        return projector
    fill = _INITS.get(how) if isinstance(how, str) else None
    if fill is None:
        near = get_close_matches(str(how), _INITS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError("projector_init", how, f"None, {', '.join(map(repr, _INITS))} or a callable{hint}")
    for module in projector.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            fill(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return projector


def _normal(weight: torch.Tensor) -> object:
    return nn.init.normal_(weight, std=NORMAL_STD)


_INITS: Mapping[str, Callable[[torch.Tensor], object]] = {"normal": _normal, "xavier": nn.init.xavier_uniform_}


def _check_sizes(**sizes: object) -> None:
    for key, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(key, value, "a whole number, at least 1")


def _check_settings(mode: object, apply_to_arg: object, apply_to_kwarg: object) -> None:
    if mode not in MODES:
        raise ConfigError("mode", mode, f"one of {', '.join(map(repr, MODES))}")
    if apply_to_arg is not None and apply_to_kwarg is not None:
        raise ConfigError("apply_to_arg", apply_to_arg, f"not together with apply_to_kwarg={apply_to_kwarg!r}")
    if apply_to_arg is not None and (isinstance(apply_to_arg, bool) or not isinstance(apply_to_arg, int)):
        raise ConfigError("apply_to_arg", apply_to_arg, "the position of an argument, a whole number")
    if apply_to_kwarg is not None and not isinstance(apply_to_kwarg, str):
        raise ConfigError("apply_to_kwarg", apply_to_kwarg, "the name of a keyword argument")
    if mode == "output":
        for key, value in (("apply_to_arg", apply_to_arg), ("apply_to_kwarg", apply_to_kwarg)):
            if value is not None:
                raise ConfigError(key, value, "only with mode='input'; an output is one tensor")


def _settings_text(projector: GenericLinearProjector | GenericConv2dProjector) -> str:
    if projector.mode == "output":
        return ""
    if projector.apply_to_kwarg is not None:
        return f", mode='input', apply_to_kwarg={projector.apply_to_kwarg!r}"
    return f", mode='input', apply_to_arg={projector.apply_to_arg or 0}"


def _applied(
    projector: GenericLinearProjector | GenericConv2dProjector,
    project: Callable[[torch.Tensor], torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What the projector returns when it is called with these arguments, by its mode."""
    # `input` is what torch calls the one argument of a layer: by name it is as good as by position.
    if not args and "input" in kwargs and projector.apply_to_kwarg is None:
        args, kwargs = (kwargs["input"],), {key: value for key, value in kwargs.items() if key != "input"}
    if projector.mode == "output":
        if not args:
            raise ConfigError("input", None, "one tensor, the output to project; the projector was called without")
        return project(_tensor("input", args[0]))
    if projector.apply_to_kwarg is not None:
        name = projector.apply_to_kwarg
        if name not in kwargs:
            near = get_close_matches(name, kwargs, n=1)
            raise ConfigError(
                "apply_to_kwarg", name,
                f"a keyword that the block is called with: {', '.join(kwargs) or 'none'}"
                + (f"; did you mean {near[0]!r}?" if near else ""),
            )  # fmt: skip
        return args, {**kwargs, name: project(_tensor(name, kwargs[name]))}
    position = projector.apply_to_arg or 0
    if not -len(args) <= position < len(args):
        raise ConfigError(
            "apply_to_arg",
            position,
            f"a positional argument that the block is called with; it gets {len(args)}, "
            f"and the keywords {', '.join(kwargs) or 'none'} (apply_to_kwarg)",
        )
    changed = list(args)
    changed[position] = project(_tensor(f"argument {position}", args[position]))
    return tuple(changed), kwargs


def _tensor(key: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        shown = value if isinstance(value, str | int | float | None) else type(value).__name__
        raise ConfigError(key, shown, "a tensor; an output selector picks one out of what a block returns")
    return value


def _dimension_name(dimension: int, rank: int) -> str:
    """A word for what a dimension usually is, beside its number."""
    names = {2: ("batch",), 3: ("batch", "sequence length"), 4: ("batch", "channels", "height", "width")}.get(rank, ())
    return f"dimension {dimension}" + (f" ({names[dimension]})" if dimension < len(names) else "")
