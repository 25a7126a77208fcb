"""DistillationTrainer: a Ray Train TorchTrainer whose workers run a distiller."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import ray
import torch
from ray.data.dataset import MaterializedDataset
from ray.train import Checkpoint, CheckpointConfig, DataConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from silverspoon_ray.cluster.group import TeacherGroup, device_bundle
from silverspoon_ray.cluster.resources import check_room, cluster_device_type, refuse_impossible
from silverspoon_ray.distillers import BaseDistiller, ResponseBasedDistiller, distiller_class
from silverspoon_ray.distillers.response_based import soft_loss_from
from silverspoon_ray.distillers.soft_targets import check_soft_targets
from silverspoon_ray.distillers.vocabulary import check_vocabularies, speaks_tokens
from silverspoon_ray.errors import ConfigError, SilverspoonError
from silverspoon_ray.models.source import ModelSource, check_source, known_config, known_structure, located
from silverspoon_ray.teacher.cache.place import Place
from silverspoon_ray.teacher.compiled import compile_settings
from silverspoon_ray.teacher.placement import TeacherPlacement
from silverspoon_ray.teacher.protocol import Teacher
from silverspoon_ray.train.alignments import check_alignments
from silverspoon_ray.train.cached import CachedRun, absent_teacher
from silverspoon_ray.train.data import check_dataset, is_ray_dataset, ship_dataset
from silverspoon_ray.train.plan import WorkerPlan, ship_model
from silverspoon_ray.train.report import CHECKPOINT_SUBDIRECTORY
from silverspoon_ray.train.worker import train_worker
from silverspoon_ray.training_arguments import TrainingArguments, check_keywords, training_arguments_from

logger = logging.getLogger(__name__)

HISTORY_FILE = "log_history.json"
HEALTH_CHECK_INTERVAL_S_ENV_VAR = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
REPORT_POLL_S = 0.1
READING = "a CPU for Ray Data to read with (a materialized dataset needs none)"


class DistillationTrainer(TorchTrainer):
    """Train a student on Ray from a frozen teacher.

    A ``ray.train.torch.TorchTrainer`` in use and in type. With ``args.teacher_placement`` the teacher runs as an actor
    group on devices of its own, which ``fit()`` starts and ends; without it every worker holds a copy.

    Args:
        distiller: ``"response_based"``, ``"holistic"``, ``"blockwise"`` (``"reskd"``, ``"hkd"``, ``"bkd"``), or a
            ``BaseDistiller`` subclass.
        teacher: a model directory or hub id, a callable without arguments, a module, or the handle of a
            ``TeacherGroup`` that is running already.
        student: a model directory or hub id, a callable without arguments, or a module.
        args: ``TrainingArguments`` or a dict of its keywords. ``output_dir`` is where runs are stored unless
            ``run_config`` says otherwise.
        train_dataset, eval_dataset: a torch or Hugging Face dataset, a ``ray.data.Dataset``, or a callable without
            arguments that makes one in the worker. Of a ``ray.data`` training set every worker gets a part; an
            evaluation set is read by all workers and divided between them by the Trainer.
        alignments: for ``"holistic"`` and ``"blockwise"``: a dict of ``create_alignments`` keywords (``modules``,
            ``loss_function``, ...), a list of them, or a callable ``make(teacher_structure, student)`` that returns
            alignments. They are made in the workers; of a dedicated teacher only the structure is known there.
        distiller_kwargs: the distiller's further keywords (``soft_loss_fn``, ``soft_loss_fn_kwargs``, ...).
        data_collator, processing_class, compute_metrics, callbacks: as for ``transformers.Trainer``; they travel to
            the workers.
        scaling_config: the student's workers; None: one, on a GPU where the cluster has one.
        run_config: name, storage, failure handling. A later ``fit()`` with the same name and storage goes on from the
            last checkpoint there.
        torch_config: as for ``TorchTrainer``.
        resume_from_checkpoint: a Hugging Face checkpoint directory, or a ``ray.train.Checkpoint`` of an earlier run.
        teacher_kwargs: keywords of ``from_pretrained`` for a teacher that is a directory or hub id (``dtype``,
            ``attn_implementation``, ``quantization_config``, ...).

    Raises:
        ConfigError: something cannot work; before any device is taken.
    """

    train_run_context: Any
    """TorchTrainer's record of the run; it holds the scaling configuration once more."""

    def __init__(
        self,
        distiller: str | type[BaseDistiller],
        *,
        teacher: ModelSource | Teacher,
        student: ModelSource,
        args: TrainingArguments | Mapping[str, Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        alignments: Any = None,
        distiller_kwargs: Mapping[str, Any] | None = None,
        data_collator: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        torch_config: TorchConfig | None = None,
        resume_from_checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
        teacher_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.distiller = distiller_class(distiller)
        self.arguments, checked = arguments_on_driver(args)
        self.distiller.check_arguments(checked)
        if checked.teacher_cache is not None:
            Place(checked.teacher_cache).look()
        self._checked = checked
        self.torch_compile = compile_settings(checked)
        self.placement: TeacherPlacement | None = (
            checked.teacher_placement if isinstance(checked.teacher_placement, TeacherPlacement) else None
        )
        if not isinstance(teacher, Teacher):
            check_source("teacher", teacher)
        elif checked.teacher_placement is not None:
            expected = "None for the handle of a TeacherGroup, which says itself where it runs"
            raise ConfigError("args.teacher_placement", checked.teacher_placement, expected)
        check_source("student", student)
        if train_dataset is None:
            raise ConfigError("train_dataset", None, "a dataset, a ray.data.Dataset, or a callable that makes one")
        check_dataset("train", train_dataset)
        check_dataset("eval", eval_dataset)
        if eval_dataset is None and str(checked.eval_strategy.value) != "no":
            raise ConfigError("args.eval_strategy", checked.eval_strategy.value, "'no', or pass an eval_dataset")
        structures: tuple[Any, Any] = (None, None)
        if isinstance(alignments, Mapping | list):
            given = teacher.structure if isinstance(teacher, Teacher) else known_structure(teacher)
            structures = (given, known_structure(student))
        check_alignments(self.distiller, alignments, *structures)
        self.alignments = alignments
        self.teacher_kwargs = dict(teacher_kwargs or {})
        if self.teacher_kwargs and not isinstance(teacher, str | os.PathLike):
            expected = "None: only a teacher that is a directory or hub id is loaded with keywords"
            raise ConfigError("teacher_kwargs", self.teacher_kwargs, expected)
        self.teacher = located(teacher)
        self.student = located(student)
        self.distiller_kwargs = dict(distiller_kwargs or {})
        if issubclass(self.distiller, ResponseBasedDistiller):
            given_loss = (self.distiller_kwargs.get(key) for key in ("soft_loss_fn", "soft_loss_fn_kwargs"))
            structure = teacher.structure if isinstance(teacher, Teacher) else known_structure(teacher)
            check_soft_targets(checked.teacher_logits, soft_loss_from(*given_loss), structure)
            teacher_config = known_config(teacher.structure if isinstance(teacher, Teacher) else teacher)
            student_config = known_config(student)
            if speaks_tokens(student_config):
                tokens = len(processing_class) if hasattr(processing_class, "__len__") else None
                check_vocabularies(teacher_config, student_config, tokens)
        further = {
            "data_collator": data_collator,
            "processing_class": processing_class,
            "compute_metrics": compute_metrics,
            "callbacks": callbacks,
        }
        self.distiller_kwargs.update({name: value for name, value in further.items() if value is not None})
        self._given_datasets = {"train": train_dataset}
        if eval_dataset is not None:
            self._given_datasets["eval"] = eval_dataset
        self.resume_from_checkpoint = _checkpoint_directory(resume_from_checkpoint)
        ray_datasets = {name: given for name, given in self._given_datasets.items() if is_ray_dataset(given)}
        execution = ray.data.ExecutionOptions(preserve_order=True) if ray_datasets else None
        super().__init__(
            train_worker,
            train_loop_config={},
            torch_config=torch_config,
            scaling_config=scaling_config,
            run_config=default_run_config(run_config, checked),
            datasets=ray_datasets,
            # Order is kept so that a resumed run skips exactly the samples it has seen. Evaluation sets stay whole:
            # Ray splits into equal parts and would drop the rest.
            dataset_config=DataConfig(datasets_to_split=["train"], execution_options=execution),
        )
        self._scaling_given = scaling_config is not None

    def fit(self) -> Result:
        """Train. Starts the teacher before and ends it afterwards.

        Returns:
            the result: ``metrics`` has the last value of every logged key and its ``step``, ``metrics_dataframe`` a row
            for each log event, ``checkpoint`` a ``checkpoint/`` directory that ``from_pretrained`` loads.

        Raises:
            CacheError: the teacher's cache is damaged or another teacher's, or cannot be written to.
            PlacementError: devices for teacher or students are not to be had.
            TeacherError: the teacher failed, with its own traceback.
            ray.train.TrainingFailedError: a worker failed more often than ``run_config.failure_config`` allows.
        """
        if not ray.is_initialized():
            ray.init()
        if not self._scaling_given:
            self.scaling_config = ScalingConfig(num_workers=1, use_gpu=self._students_on_gpu())
            self.train_run_context = dataclasses.replace(self.train_run_context, scaling_config=self.scaling_config)
        group: TeacherGroup | None = None
        teacher: Any = self.teacher
        if self._checked.teacher_cache is not None and not isinstance(teacher, Teacher):
            Place(self._checked.teacher_cache).make()
            teacher = absent_teacher(self._cached_run()) or teacher
        students, reading = self._student_bundles()
        purpose = f"{len(students)} student worker(s)" + (f" and {READING}" if reading else "")
        refuse_impossible([*students, *reading, *self._teacher_bundles(teacher)], f"the teacher and {purpose}")
        refuse_impossible(students, purpose, self.scaling_config.placement_strategy)
        try:
            if isinstance(teacher, Teacher):
                pass
            elif self.placement is not None:
                group = TeacherGroup.create(
                    teacher, self.placement, torch_compile=self.torch_compile, **self.teacher_kwargs
                )
                teacher = group.handle
                for replica in group.stats():
                    logger.info("teacher replica %s: pid %s", replica["rank"], replica["pid"])
            else:
                teacher = self.shipped_teacher()
            timeout_s = self.placement.startup_timeout_s if self.placement is not None else 600.0
            check_room(students, self.scaling_config.placement_strategy, timeout_s, purpose, beside=reading)
            self.train_loop_config = {"plan": self._plan(teacher)}
            with _controller_polls_often():
                result = super().fit()
        except ray.train.TrainingFailedError as failed:
            cause = _own_error(failed)
            if cause is None:
                raise
            raise cause from failed
        finally:
            if group is not None:
                self.teacher_stats = _stats_or_none(group)
                group.shutdown()
        return _with_history(result)

    teacher_stats: list[dict[str, Any]] | None = None
    """Of the last ``fit()`` with a dedicated teacher: per replica pid, node, forwards, bytes, seconds busy."""

    def shipped_teacher(self) -> Any:
        """The teacher's source, as a worker unpacks it."""
        return ship_model(self.teacher)

    def _cached_run(self) -> CachedRun:
        evaluates = str(self._checked.eval_strategy.value) != "no" or self._checked.eval_on_start
        asked = {name: given for name, given in self._given_datasets.items() if name == "train" or evaluates}
        return CachedRun(
            args=self._checked,
            distiller=self.distiller,
            distiller_kwargs=self.distiller_kwargs,
            teacher=self.teacher,
            student=self.student,
            teacher_kwargs=self.teacher_kwargs,
            datasets=asked,
            dedicated=self.placement is not None,
        )

    def _plan(self, teacher: Any) -> WorkerPlan:
        rows = {}
        for name, dataset in self.datasets.items():
            if name == "train" and self.arguments.get("max_steps", -1) <= 0:  # epochs have to be counted
                rows[name] = dataset.count()
        return WorkerPlan(
            distiller=self.distiller,
            arguments=self._arguments_of_workers(),
            student=ship_model(self.student),
            teacher=teacher,
            teacher_kwargs=self.teacher_kwargs,
            datasets={name: ship_dataset(given) for name, given in self._given_datasets.items()},
            ray_data_rows=rows,
            distiller_kwargs=self.distiller_kwargs,
            alignments=self.alignments,
            example=self._example(),
            resume_from_checkpoint=self.resume_from_checkpoint,
            progress_bar=sys.stderr.isatty(),
            run_key=f"{self.run_config.name}-{uuid.uuid4().hex[:8]}",
        )

    def _example(self) -> dict[str, Any] | None:
        """A training row, if the workers will have to see shapes and cannot look into a stream without using it up."""
        if self.alignments is None or "train" not in self.datasets:
            return None
        rows: list[dict[str, Any]] = self.datasets["train"].take(1)
        return rows[0] if rows else None

    def _arguments_of_workers(self) -> dict[str, Any]:
        """Workers write checkpoints to scratch space; traces and the cache are where the user expects them."""
        arguments = dict(self.arguments)
        if arguments.get("enable_profiling") and arguments.get("profiling_output_dir") is None:
            output_dir = Path(arguments.get("output_dir") or "trainer_output").expanduser().absolute()
            arguments["profiling_output_dir"] = str(output_dir / "profiling")
        cache = self._checked.teacher_cache
        if cache is not None and "://" not in cache:
            arguments["teacher_cache"] = str(Path(cache).expanduser().absolute())
        return arguments

    def _students_on_gpu(self) -> bool:
        gpus = ray.cluster_resources().get("GPU", 0)
        if self.placement is not None and (self.placement.device_type or cluster_device_type()) == "cuda":
            gpus -= self.placement.replicas * self.placement.num_devices
        return gpus >= 1 and not self.arguments.get("use_cpu", False)

    def _teacher_bundles(self, teacher: Any) -> list[dict[str, float]]:
        if self.placement is None or isinstance(teacher, Teacher):
            return []
        bundle = device_bundle(self.placement, self.placement.device_type or cluster_device_type())
        return [bundle] * (self.placement.replicas * self.placement.num_devices)

    def _student_bundles(self) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        """What the workers take, and what reading their data takes besides."""
        scaling = self.scaling_config
        workers = scaling.num_workers if isinstance(scaling.num_workers, int) else min(scaling.num_workers)
        bundles = [dict(scaling._resources_per_worker_not_none)] * workers
        # Ray Data reads in tasks of its own. Without a slot for them it would wait for ever.
        reads = any(not isinstance(dataset, MaterializedDataset) for dataset in self.datasets.values())
        return bundles, [{"CPU": 1.0}] if reads else []


def arguments_on_driver(args: TrainingArguments | Mapping[str, Any] | None) -> tuple[dict[str, Any], TrainingArguments]:
    """The keywords that travel to the workers, and arguments that show that they are valid.

    A dict may ask for what this machine cannot do, such as bf16 on GPUs that only the workers have; it is checked as
    if for the CPU.
    """
    if args is None or isinstance(args, Mapping):
        keywords = dict(args or {})
        check_keywords(keywords, "args.")
        on_cpu = {} if torch.cuda.is_available() else {"use_cpu": True}
        return keywords, training_arguments_from({**keywords, **on_cpu})
    checked = training_arguments_from(args)
    return checked.keywords(), checked


def default_run_config(run_config: RunConfig | None, args: TrainingArguments) -> RunConfig:
    """Fill in storage (``output_dir``) and checkpoints to keep (``save_total_limit``) where nothing is said."""
    config = run_config or RunConfig()
    if config.storage_path == RunConfig().storage_path:  # Ray fills in its default where nothing is said
        config = dataclasses.replace(config, storage_path=str(Path(args.output_dir).expanduser().absolute()))
    if args.save_total_limit is not None and config.checkpoint_config.num_to_keep is None:
        kept = CheckpointConfig(num_to_keep=max(1, args.save_total_limit))
        config = dataclasses.replace(config, checkpoint_config=kept)
    return config


@contextmanager
def _controller_polls_often() -> Iterator[None]:
    """Ray Train's controller takes one report of each worker per poll; its default of two seconds is made for runs that
    report every few minutes, and would hold up one that logs every few steps. A value the user has set stays."""
    if HEALTH_CHECK_INTERVAL_S_ENV_VAR in os.environ:
        yield
        return
    os.environ[HEALTH_CHECK_INTERVAL_S_ENV_VAR] = str(REPORT_POLL_S)
    try:
        yield
    finally:
        del os.environ[HEALTH_CHECK_INTERVAL_S_ENV_VAR]


def _checkpoint_directory(given: str | os.PathLike[str] | Checkpoint | None) -> str | None:
    if given is None:
        return None
    directory = Path(given.path if isinstance(given, Checkpoint) else given).expanduser().absolute()
    if (directory / CHECKPOINT_SUBDIRECTORY / "trainer_state.json").is_file():
        directory = directory / CHECKPOINT_SUBDIRECTORY
    if not (directory / "trainer_state.json").is_file():
        expected = "a checkpoint directory with a trainer_state.json, as a run with save_strategy writes it"
        raise ConfigError("resume_from_checkpoint", str(directory), expected)
    return str(directory)


def _own_error(failed: ray.train.TrainingFailedError) -> SilverspoonError | None:
    """The error of ours that a worker died of, if it was one of ours."""
    for error in getattr(failed, "worker_failures", {}).values():
        seen: BaseException | None = error
        while seen is not None:
            if isinstance(seen, SilverspoonError):
                return seen
            seen = getattr(seen, "cause", None) or getattr(seen, "_base_exc", None) or seen.__cause__
    return None


def _stats_or_none(group: TeacherGroup) -> list[dict[str, Any]] | None:
    try:
        return group.stats()
    except SilverspoonError as error:
        logger.warning("no statistics of the teacher: %s", error)
        return None


def _with_history(result: Result) -> Result:
    """Fill in what Ray Train keeps only beside checkpoints: all logs, and store them with the run."""
    history = (result.return_value or {}).get("log_history", [])
    if not history:
        return result
    metrics: dict[str, Any] = {}
    for row in history:
        metrics.update(row)
    result.metrics = metrics
    result.metrics_dataframe = pd.DataFrame(history)
    with result.filesystem.open_output_stream(f"{result.path}/{HISTORY_FILE}") as stream:
        stream.write(json.dumps(history, indent=1).encode())
    return result
