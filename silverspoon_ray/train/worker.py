"""What runs on every training worker."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import transformers

from silverspoon_ray.teacher.protocol import Teacher
from silverspoon_ray.train.alignments import make_alignments
from silverspoon_ray.train.data import unpack_dataset
from silverspoon_ray.train.plan import WorkerPlan, unpack_model
from silverspoon_ray.train.report import (
    CHECKPOINT_SUBDIRECTORY,
    ProgressLinesCallback,
    RayProgressCallback,
    RayReportCallback,
)
from silverspoon_ray.training_arguments import TrainingArguments

DRAIN_TIMEOUT_S = 30.0


def train_worker(config: dict[str, Any]) -> dict[str, Any]:
    """Build the student, its data and its distiller, train, and return the history of logs.

    Args:
        config: ``{"plan": WorkerPlan}``.

    Returns:
        ``log_history`` of the Trainer's state, and ``process``: pid, node and device. Ray Train keeps rank 0's.
    """
    plan: WorkerPlan = config["plan"]
    context = ray.train.get_context()
    if context.get_world_size() == 1:
        # accelerate takes these variables of Ray Train's for a distributed run, and wraps a single student in DDP.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    on_gpu = torch.cuda.is_available() and bool(ray.get_runtime_context().get_accelerator_ids().get("GPU"))
    if not on_gpu:
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1.0)
        torch.set_num_threads(max(1, int(cpus)))
    _quiet_logs()

    scratch = Path(tempfile.gettempdir()) / f"silverspoon_ray-{os.getuid()}" / plan.run_key
    args = worker_arguments(plan, scratch, on_gpu)
    # What is made before the Trainer seeds (a student from a callable, a loss's own projection) is the same on every
    # rank and after every restart.
    transformers.set_seed(args.seed)
    student = unpack_model(plan.student, "student")
    teacher = plan.teacher
    if not isinstance(teacher, Teacher):
        teacher = unpack_model(teacher, "teacher", **plan.teacher_kwargs)
    kwargs = dict(plan.distiller_kwargs)
    if plan.alignments is not None:
        structure = teacher if isinstance(teacher, torch.nn.Module) else teacher.structure
        kwargs["alignments"] = make_alignments(plan.alignments, structure, student)
    progress = RayProgressCallback() if plan.progress_bar else ProgressLinesCallback()
    reporting = RayReportCallback()
    callbacks = [*(kwargs.pop("callbacks", None) or []), reporting, progress]
    distiller = plan.distiller(
        student_model=student,
        teacher_model=teacher,
        args=args,
        train_dataset=unpack_dataset(plan, "train", context.get_world_size()),
        eval_dataset=unpack_dataset(plan, "eval", context.get_world_size()),
        callbacks=callbacks,
        **kwargs,
    )
    distiller.remove_callback(transformers.PrinterCallback)
    try:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as directory:
                distiller.train(resume_from_checkpoint=os.path.join(directory, CHECKPOINT_SUBDIRECTORY))
        else:
            distiller.train(resume_from_checkpoint=plan.resume_from_checkpoint)
    except BaseException:
        # A checkpoint that is on its way to the storage is worth a short wait: the next attempt begins with it.
        reporting.reporter.drain(DRAIN_TIMEOUT_S)
        raise
    finally:
        if context.get_local_rank() == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    process = {"pid": os.getpid(), "node_id": ray.get_runtime_context().get_node_id(), "device": str(args.device)}
    return {"log_history": distiller.state.log_history, "process": process}


def worker_arguments(plan: WorkerPlan, scratch: Path, on_gpu: bool) -> TrainingArguments:
    """The arguments as they hold on this machine.

    Checkpoints are written to scratch space and uploaded from there; the run's storage keeps them. Scratch keeps the
    newest (and the best, where it is to be loaded at the end).
    """
    keywords = dict(plan.arguments)
    keywords["output_dir"] = str(scratch)
    keywords["disable_tqdm"] = True
    keywords["save_total_limit"] = 1
    if not on_gpu:
        keywords["use_cpu"] = True
        keywords.setdefault("dataloader_pin_memory", False)  # torch would warn that it cannot
    return TrainingArguments(**keywords)


def _quiet_logs() -> None:
    """What people follow is the progress bar and the result; a line for each report would bury both."""
    ray_train = os.path.dirname(ray.train.__file__)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith((ray_train, "ray.train")):  # some of Ray's loggers are named by their file
            logging.getLogger(name).setLevel(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
