"""TrainingArguments: every field of transformers' own, and what distillation adds."""

from __future__ import annotations

import dataclasses
import numbers
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.teacher.placement import TeacherPlacement
from silverspoon_ray.teacher.protocol import FORMS

TEACHER_TRANSPORTS = ("auto", "object_store", "collective")
DISTILL_MASKS = ("auto", "labels", "attention", "none")
LEAST = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "dataloader_num_workers": 0,
    "seed": 0,
}
"""Smallest values of transformers' own fields that mean anything."""
WIRE_DTYPES = ("float32", "bfloat16", "float16")
SWITCHES = (
    "magnitude_aware_weighting",
    "auto_device_match",
    "auto_dtype_match",
    "count_flops",
    "backward_per_block",
    "clip_projectors",
    "deepcopy_captured_args_and_kwargs",
    "enable_profiling",
    "profiling_with_stack",
    "use_weightwatcher",
)


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` plus the keywords of distillation.

    An instance pickles as its keywords and is built anew where it arrives: transformers caches the device and the
    process state of the machine it was made on, which must not travel to a worker.

    Raises:
        ConfigError: (a ``ValueError``) a keyword is out of its range; the message names key, value and what is right.
    """

    alpha: float = field(
        default=0.0, metadata={"help": "total = (1 - alpha) * distillation loss + alpha * task loss; in [0, 1]."}
    )
    magnitude_aware_weighting: bool = field(
        default=False,
        metadata={"help": "Divide each component by its own detached magnitude before weighting. Per micro-batch."},
    )
    teacher_placement: Any = field(
        default=None,
        metadata={
            "help": "None or 'replicated': a copy in every student process. 'sharded': FSDP over the student ranks. "
            "A TeacherPlacement or a dict of its keywords: dedicated devices."
        },
    )
    overlap_teacher_forward: bool | None = field(
        default=None,
        metadata={
            "help": "Whether the teacher may work on a batch while the student does. None: whenever it can help. "
            "True: insist, an error where the teacher has no device of its own. False: never."
        },
    )
    backward_per_block: bool = field(default=False, metadata={"help": "Blockwise: backward after each block."})
    clip_projectors: bool = field(default=True, metadata={"help": "Projector gradients count in gradient clipping."})
    deepcopy_captured_args_and_kwargs: bool = field(
        default=False, metadata={"help": "Copy captured inputs, for models that write in place."}
    )
    auto_device_match: bool = field(
        default=False, metadata={"help": "Move the teacher's logits to the student's device."}
    )
    auto_dtype_match: bool = field(
        default=False, metadata={"help": "Cast the teacher's logits to the student's dtype."}
    )
    e2e_eval_loss: str | None = field(
        default=None, metadata={"help": "'forward': also report the student's own task loss as eval_loss/e2e."}
    )
    count_flops: bool = field(
        default=False, metadata={"help": "Measure the first step; log flops/step and the running flops/total."}
    )
    enable_profiling: bool = field(default=False, metadata={"help": "Write torch.profiler traces."})
    profiling_output_dir: str | None = field(
        default=None, metadata={"help": "Where traces go; None: {output_dir}/profiling."}
    )
    profiling_wait: int = field(default=20, metadata={"help": "Steps before the profiler warms up."})
    profiling_warmup: int = field(default=3, metadata={"help": "Steps of warm-up, not recorded."})
    profiling_active: int = field(default=3, metadata={"help": "Steps recorded."})
    profiling_repeat: int = field(default=1, metadata={"help": "How many such cycles; 0: until the end."})
    profiling_with_stack: bool = field(default=False, metadata={"help": "Record Python stacks too."})
    use_weightwatcher: bool = field(default=False, metadata={"help": "WeightWatcher analysis at evaluation."})
    teacher_prefetch: int = field(
        default=2, metadata={"help": "Batches in flight ahead of the student; 0: ask for each when it is needed."}
    )
    teacher_logits: str = field(
        default="full", metadata={"help": "What travels instead of logits: full, top_k, sampled, hidden."}
    )
    teacher_top_k: int = field(default=64, metadata={"help": "k of top_k, draws of sampled."})
    teacher_wire_dtype: str | None = field(
        default=None, metadata={"help": "dtype on the wire; None: the teacher's own, bit-exact."}
    )
    teacher_transport: str = field(
        default="auto",
        metadata={
            "help": "How a dedicated teacher's answers come. object_store: Ray's shared memory. collective: rank to "
            "rank, by NCCL or Gloo. auto: on GPUs collective where a trial shows that it works, else object_store."
        },
    )
    teacher_cache: str | None = field(
        default=None, metadata={"help": "Directory or URI of a cache of teacher outputs, read first, written through."}
    )
    distill_mask: str = field(
        default="auto",
        metadata={
            "help": "Which positions count: labels (label not -100, shifted for causal models), attention (every "
            "real token), none (every position); auto: labels if present, else attention."
        },
    )

    def __post_init__(self) -> None:
        # What the user gave, before transformers turns strings into enums and fills in derived values.
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        if given["report_to"] is None:
            self.report_to: Any = "none"
        self._check_own_keywords()
        self._check_inherited_keywords()
        super().__post_init__()
        self._given = given
        self._derived = {name: getattr(self, name) for name in given}

    def keywords(self) -> dict[str, Any]:
        """The keywords that build this instance again, defaults left out, later assignments included."""
        defaults = {f.name: _default(f) for f in dataclasses.fields(self) if f.init}
        keywords = {name: value for name, value in self._given.items() if not _same(value, defaults[name])}
        for name, derived in self._derived.items():
            now = getattr(self, name)
            if not _same(now, derived):
                keywords[name] = now
        return keywords

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.keywords())

    def _check_inherited_keywords(self) -> None:
        """transformers takes any value for its fields and fails much later, on a worker."""
        hints = typing.get_type_hints(transformers.TrainingArguments)
        for f in dataclasses.fields(transformers.TrainingArguments):
            value, hint = getattr(self, f.name), hints[f.name]
            kinds = set(
                typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
            )
            if not f.init or _same(value, _default(f)) or not kinds <= {int, float, bool, str, type(None)}:
                continue
            fits = (
                (value is None and type(None) in kinds)
                or (isinstance(value, bool) and bool in kinds)
                or (isinstance(value, str) and str in kinds)
                or (isinstance(value, numbers.Integral) and not isinstance(value, bool) and kinds & {int, float})
                or (isinstance(value, numbers.Real) and not isinstance(value, bool) and float in kinds)
            )
            if not fits:
                names = " or ".join(sorted("None" if kind is type(None) else kind.__name__ for kind in kinds))
                raise ConfigError(f.name, value, f"of type {names}")
        for name, low in LEAST.items():
            value = getattr(self, name)
            if isinstance(value, int) and value < low:
                raise ConfigError(name, value, f"{low} or more")

    def _check_own_keywords(self) -> None:
        for name in SWITCHES:
            self._check_choice(name, (True, False))
        self._check_range("alpha", 0, 1, "a number between 0 (distillation only) and 1 (task loss only)")
        self._check_choice("teacher_logits", FORMS)
        self._check_choice("teacher_transport", TEACHER_TRANSPORTS)
        self._check_choice("distill_mask", DISTILL_MASKS)
        if self.e2e_eval_loss is not None:
            self._check_choice("e2e_eval_loss", ("forward",))
        if self.teacher_wire_dtype is not None:
            name = str(self.teacher_wire_dtype).removeprefix("torch.")
            if name not in WIRE_DTYPES:
                raise ConfigError(
                    "teacher_wire_dtype", self.teacher_wire_dtype, "None or one of " + ", ".join(WIRE_DTYPES)
                )
            self.teacher_wire_dtype = name
        if self.overlap_teacher_forward not in (None, True, False):
            raise ConfigError("overlap_teacher_forward", self.overlap_teacher_forward, "None, True or False")
        self._check_count("teacher_prefetch", 0)
        self._check_count("teacher_top_k", 1)
        for name in ("profiling_wait", "profiling_warmup", "profiling_repeat"):
            self._check_count(name, 0)
        self._check_count("profiling_active", 1)
        self._check_placement()
        if self.teacher_cache is not None:
            given: Any = self.teacher_cache
            if not isinstance(given, str | os.PathLike) or not os.fspath(given):
                raise ConfigError("teacher_cache", given, "None, a directory, or a URI such as s3://bucket/path")
            self.teacher_cache = os.fspath(given)

    def _check_placement(self) -> None:
        placement = self.teacher_placement
        if placement is None or placement in ("replicated", "sharded"):
            return
        if isinstance(placement, str):
            raise ConfigError(
                "teacher_placement", placement, "None, 'replicated', 'sharded', a TeacherPlacement or a dict"
            )
        self.teacher_placement = TeacherPlacement.from_value(placement)

    def _check_range(self, name: str, low: float, high: float, expected: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ConfigError(name, value, expected)

    def _check_count(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(name, value, f"a whole number of {low} or more")

    def _check_choice(self, name: str, allowed: tuple[Any, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ConfigError(name, getattr(self, name), "one of " + ", ".join(map(str, allowed)))


def training_arguments_from(args: TrainingArguments | Mapping[str, Any] | None) -> TrainingArguments:
    """The instance itself, or one made from a mapping of keywords.

    Raises:
        ConfigError: an unknown keyword (the nearest known ones are named), or a value that is refused.
    """
    if isinstance(args, TrainingArguments):
        return args
    if isinstance(args, transformers.TrainingArguments):
        raise ConfigError(
            "args", type(args).__name__, "silverspoon_ray.TrainingArguments (or a dict of its keywords), not the parent"
        )
    keywords = dict(args or {})
    check_keywords(keywords)
    try:
        return TrainingArguments(**keywords)
    except ConfigError:
        raise
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError("args", keywords, f"transformers refuses it: {error}") from error


def check_keywords(keywords: Mapping[str, Any], prefix: str = "") -> None:
    """Raise a ConfigError that names the nearest keywords if one is unknown."""
    import difflib

    known = [f.name for f in dataclasses.fields(TrainingArguments) if f.init]
    for key in keywords:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3)
            hint = "did you mean " + " or ".join(near) + "?" if near else "see TrainingArguments for the known ones"
            raise ConfigError(f"{prefix}{key}", keywords[key], f"unknown keyword; {hint}")


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


def _same(left: Any, right: Any) -> bool:
    return left is right or (type(left) is type(right) and bool(left == right))


def _rebuild(cls: type[TrainingArguments], keywords: dict[str, Any]) -> TrainingArguments:
    return cls(**keywords)
