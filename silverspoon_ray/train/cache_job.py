"""Filling a teacher cache without training, as a Ray Data job over a pool of teachers."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import ray.data
import torch
from ray.exceptions import RayError
from torch.utils.data import ConcatDataset

from silverspoon_ray.cluster.resources import cluster_device_type, refuse_impossible
from silverspoon_ray.distillers.soft_targets import bytes_per_token
from silverspoon_ray.errors import ConfigError, SilverspoonError
from silverspoon_ray.models.source import known_structure
from silverspoon_ray.teacher.cache.place import Place
from silverspoon_ray.teacher.placement import TeacherPlacement
from silverspoon_ray.teacher.protocol import Teacher, TeacherRequest
from silverspoon_ray.train.alignments import make_alignments
from silverspoon_ray.train.data import is_ray_dataset
from silverspoon_ray.train.plan import WorkerPlan, unpack_model
from silverspoon_ray.train.trainer import DistillationTrainer
from silverspoon_ray.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

SAMPLES_PER_TASK = 512
FLUSH_S = 10.0
"""Answers become a file after so many samples or seconds at the latest: this much is lost where an actor dies."""
LOOKED_AT = 256
PROGRESS_S = 5.0
# What only training needs, and would ask for data that is not here.
ONLY_TRAINING: dict[str, Any] = {
    "eval_strategy": "no",
    "eval_on_start": False,
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "enable_profiling": False,
    "use_weightwatcher": False,
    "teacher_placement": None,
    "torch_compile": False,
    "report_to": "none",
    "disable_tqdm": True,
}


@dataclass
class CacheReport:
    """What a job did.

    Attributes:
        samples: that were looked at.
        answered: of these, by a teacher; the others were there.
        seconds: from the first to the last.
    """

    samples: int = 0
    answered: int = 0
    seconds: float = 0.0


def fill_cache(
    trainer: DistillationTrainer, actors: int | None = None, say: Callable[[str], None] = logger.info
) -> CacheReport:
    """Ask for the teacher's answer to every sample of a run that is not in its cache yet.

    The answers are those that the run itself would ask for. A job that is stopped at any time goes on where it was.

    Args:
        trainer: describes the run: models, data, arguments with ``teacher_cache``.
        actors: how many teachers; None: as many as ``teacher_placement.replicas``, or one for each student worker.
        say: gets lines about the size to expect and the progress.

    Raises:
        ConfigError: there is no ``teacher_cache``, the data cannot be divided, or the teacher needs several devices.
        CacheError: the cache belongs to something else, or cannot be written to.
        PlacementError: there are not so many devices.
    """
    run = trainer._cached_run()
    if run.args.teacher_cache is None:
        raise ConfigError("args.teacher_cache", None, "the directory or URI of the cache that is to be filled")
    if isinstance(trainer.teacher, Teacher):
        raise ConfigError("teacher", type(trainer.teacher).__name__, "where a model comes from: each actor holds one")
    placement = run.args.teacher_placement
    placed = placement if isinstance(placement, TeacherPlacement) else None
    if placed is not None and placed.num_devices > 1:
        expected = "1: each actor that fills a cache holds a whole teacher on one device"
        raise ConfigError("args.teacher_placement.num_devices", placed.num_devices, expected)
    if actors is not None and actors < 1:
        raise ConfigError("actors", actors, "1 or more")
    workers = trainer.scaling_config.num_workers
    wanted = placed.replicas if placed is not None else (workers if isinstance(workers, int) else min(workers))
    count = actors or wanted
    Place(run.args.teacher_cache).make()
    if not ray.is_initialized():
        ray.init()
    on_gpu = ((placed.device_type if placed else None) or cluster_device_type()) == "cuda" and not run.args.use_cpu
    bundle = {"CPU": 1.0, **({"GPU": 1.0} if on_gpu else {})}
    refuse_impossible([bundle] * count + [{"CPU": 1.0}], f"{count} teacher(s) and a CPU for Ray Data to read with")
    parts = _divisible(run.datasets)
    total = sum(dataset.count() for dataset, _ in parts)
    say(_estimate(trainer, total))
    plan = _plan(trainer, placed is not None)
    report, begin, said = CacheReport(), time.perf_counter(), float("-inf")
    for dataset, rows in parts:
        dataset.context.raise_original_map_exception = True  # and not one that only holds its text
        done = dataset.map_batches(
            CacheFiller,
            fn_constructor_args=(plan, None if rows is None else ray.put(rows), on_gpu),
            batch_size=min(SAMPLES_PER_TASK, max(1, -(-dataset.count() // count))),
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(size=count),
            num_cpus=1,
            num_gpus=1 if on_gpu else 0,
        )
        try:
            for row in done.iter_rows():
                report.samples += int(row["samples"])
                report.answered += int(row["answered"])
                report.seconds = time.perf_counter() - begin
                if time.perf_counter() - said >= PROGRESS_S or report.samples == total:
                    said = time.perf_counter()
                    speed = report.samples / report.seconds
                    there = report.samples - report.answered
                    say(f"{report.samples} of {total} samples, {there} were there; {speed:.1f} samples/s")
        except RayError as error:
            raise _own_cause(error) or error from error
    return report


def _divisible(datasets: Mapping[str, Any]) -> list[tuple[ray.data.Dataset, Any]]:
    """What the pool goes through: rows of ``ray.data`` datasets (and None), or numbers and the dataset they are of.

    As few as can be, because every one starts its own pool of teachers.
    """
    streams, others = [], []
    for name, given in datasets.items():
        if is_ray_dataset(given):
            streams.append(given)
        elif hasattr(given, "__getitem__") and hasattr(given, "__len__"):
            others.append(given)
        else:
            expected = "a ray.data.Dataset, or one with a length and rows"
            raise ConfigError(f"{name}_dataset", type(given).__name__, expected)
    parts: list[tuple[ray.data.Dataset, Any]] = []
    if streams:
        parts.append((streams[0].union(*streams[1:]) if len(streams) > 1 else streams[0], None))
    if others:
        rows: ConcatDataset[Any] = ConcatDataset(others)
        parts.append((ray.data.range(len(rows)), rows))
    return parts


def _estimate(trainer: DistillationTrainer, samples: int) -> str:
    """Samples x real tokens of a sample x bytes of a token."""
    run = trainer._cached_run()
    rows = _first_rows(trainer, LOOKED_AT)
    lengths = [_length(row) for row in rows if isinstance(row, Mapping)]
    structure = known_structure(run.teacher)
    head = f"{samples} samples"
    if not any(lengths) or structure is None or not run.distiller.compares_logits:
        return f"{head}; how large the cache will be is not known before the first answers"
    wire = run.args.teacher_wire_dtype
    request = TeacherRequest(
        logits=run.args.teacher_logits,
        top_k=run.args.teacher_top_k,
        wire_dtype=getattr(torch, wire) if wire else None,
    )
    size, mean = bytes_per_token(request, structure), float(np.mean(lengths))
    return f"{head} x {mean:.1f} tokens x {size} bytes: about {samples * mean * size / 2**20:.1f} MiB"


def _first_rows(trainer: DistillationTrainer, count: int) -> list[Any]:
    given = trainer._given_datasets["train"]
    return given.take(count) if is_ray_dataset(given) else [given[i] for i in range(min(count, len(given)))]


def _length(row: Mapping[str, Any]) -> int:
    mask, ids = row.get("attention_mask"), row.get("input_ids")
    if mask is not None:
        return int(np.asarray(mask).astype(bool).sum())
    return 0 if ids is None else len(ids)


def _plan(trainer: DistillationTrainer, dedicated: bool) -> WorkerPlan:
    """That of the run, without what only training needs."""
    plan = trainer._plan(trainer.shipped_teacher())
    arguments = {**plan.arguments, **ONLY_TRAINING}
    if dedicated:  # which has no part in the student's autocast
        arguments |= {"bf16": False, "fp16": False}
    rows = _first_rows(trainer, 1)
    example = rows[0] if rows and isinstance(rows[0], Mapping) else None
    kwargs = {name: value for name, value in plan.distiller_kwargs.items() if name not in ("callbacks",)}
    return dataclasses.replace(plan, arguments=arguments, example=example, distiller_kwargs=kwargs, datasets={})


class CacheFiller:
    """An actor of the pool: a teacher, and the distiller of the run to ask it as the run would.

    Args:
        plan: the run's.
        dataset: reference of a dataset whose rows come as numbers; None: they come themselves.
        on_gpu: it has a GPU of its own.
    """

    def __init__(self, plan: WorkerPlan, dataset: Any, on_gpu: bool) -> None:
        # Nothing here can fail: of an actor that dies at its start Ray keeps only the text of the error.
        self.given = (plan, dataset, on_gpu)
        self.distiller: Any = None

    def _build(self, plan: WorkerPlan, dataset: Any, on_gpu: bool) -> None:
        torch.set_num_threads(max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0))))
        arguments = {**plan.arguments, "output_dir": tempfile.mkdtemp(prefix="silverspoon_ray-cache-")}
        args = TrainingArguments(**{**arguments, **({} if on_gpu else {"use_cpu": True})})
        student = unpack_model(plan.student, "student")
        assert not isinstance(plan.teacher, Teacher)
        teacher = unpack_model(plan.teacher, "teacher", **plan.teacher_kwargs)
        kwargs = dict(plan.distiller_kwargs)
        if plan.alignments is not None:
            kwargs["alignments"] = make_alignments(plan.alignments, teacher, student)
        examples = None if plan.example is None else [plan.example]
        self.distiller = plan.distiller(
            student_model=student, teacher_model=teacher, args=args, train_dataset=examples, **kwargs
        )
        self.dataset = None if dataset is None else ray.get(dataset)
        collate = self.distiller.data_collator
        self.collate = self.distiller._get_collator_with_removed_columns(collate, description="Training")
        self.samples = args.per_device_train_batch_size

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, list[int]]:
        """Answer what is not there; all of it is in a file when this returns."""
        if self.distiller is None:
            self._build(*self.given)
        samples = self._rows(rows)
        distiller = self.distiller
        assert distiller.cache is not None
        answered, flushed = 0, time.monotonic()
        for start in range(0, len(samples), self.samples):
            batch = distiller._prepare_inputs(dict(self.collate(samples[start : start + self.samples])))
            with distiller.compute_loss_context_manager():
                pending = distiller.stream.submit(distiller._teacher_batch(batch))
            if getattr(pending, "asked", True):
                pending.result()
            answered += len(getattr(pending, "missing", ()))
            pending.release()
            if time.monotonic() - flushed > FLUSH_S:  # sooner than in training, which has checkpoints
                distiller.cache.flush()
                flushed = time.monotonic()
        distiller.cache.flush()
        return {"samples": [len(samples)], "answered": [answered]}

    def _rows(self, rows: Mapping[str, Any]) -> list[Any]:
        if self.dataset is not None:
            return [self.dataset[int(index)] for index in rows["id"]]
        count = len(next(iter(rows.values())))
        return [{name: column[number] for name, column in rows.items()} for number in range(count)]


def _own_cause(error: BaseException | None) -> SilverspoonError | None:
    """The error of ours that an actor raised, out of Ray's wrappers."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, SilverspoonError):
            return error
        error = getattr(error, "cause", None) or error.__cause__
    return None
