"""A distiller's teacher behind a cache."""

from __future__ import annotations

from typing import Any

import torch

from silverspoon_ray.errors import CacheError
from silverspoon_ray.teacher.cache.identity import TeacherIdentity
from silverspoon_ray.teacher.cache.manifest import tokenizer_hash
from silverspoon_ray.teacher.cache.place import Place
from silverspoon_ray.teacher.cache.teacher import CachedTeacher
from silverspoon_ray.teacher.local import LocalTeacher
from silverspoon_ray.training_arguments import TrainingArguments


def check_cache(args: TrainingArguments, teacher: Any, student: Any) -> None:
    """Make the place of ``args.teacher_cache``, if there is to be one.

    Raises:
        CacheError: it cannot be written to, or answers of this teacher cannot be kept.
    """
    if args.teacher_cache is None:
        return
    if teacher is student:
        expected = "None where the teacher is the student itself, whose answers change with every step"
        raise CacheError("teacher_cache", args.teacher_cache, expected)
    Place(args.teacher_cache).make()


def cached_teacher(distiller: Any, identity: TeacherIdentity) -> CachedTeacher:
    """The teacher behind ``args.teacher_cache``.

    Args:
        distiller: a :class:`~silverspoon_ray.distillers.base.BaseDistiller` with its teacher.
        identity: the teacher's.

    Raises:
        CacheError: the cache is another teacher's, or of another request.
    """
    args, accelerator = distiller.args, distiller.accelerator

    def any_rank(asks: bool) -> bool:
        asking = torch.tensor([float(asks)], device=args.device)
        return bool(accelerator.reduce(asking, reduction="sum").item() > 0)

    # A teacher that is spread over the student's processes is asked by all of them or by none.
    sharded = args.teacher_placement == "sharded" and isinstance(distiller.teacher, LocalTeacher)
    precision = None if distiller.teacher.dedicated else accelerator.mixed_precision
    return CachedTeacher(
        distiller.teacher,
        args.teacher_cache,
        tokenizer=tokenizer_hash(distiller.processing_class),
        identity=identity,
        whole=args.distill_mask == "none",
        autocast=None if precision == "no" else precision,
        in_step=any_rank if sharded and accelerator.num_processes > 1 else None,
    )
