"""What the commands print: the plan of a run, and its result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from silverspoon_ray.cli import hub
from silverspoon_ray.cli.checks import arguments_to_read, data_files
from silverspoon_ray.cli.config import ModelSection, RunConfigFile, local_path

if TYPE_CHECKING:
    import ray.train
    from rich.table import Table

    from silverspoon_ray.training_arguments import TrainingArguments

PLAIN_WIDTH = 200  # columns, where the output is no terminal
MOST_FILES = 20  # data files that `check` lists one by one
ANY_DEVICE = "GPU (CPU where there is none)"


def print_plan(run: RunConfigFile) -> None:
    args = arguments_to_read(run)
    _print_tables(
        _run_table(run, args),
        _model_table(run),
        _alignment_table(run, args),
        _resource_table(run, args),
        *_layout_tables(run, args),
        _data_table(run),
    )


def print_result(result: ray.train.Result) -> None:
    table = _table("last metrics", "metric", "value")
    for name, value in sorted((result.metrics or {}).items()):
        if isinstance(value, int | float) and not isinstance(value, bool):
            table.add_row(name, f"{value:.6g}")
    _print_tables(table)
    # Not in the table: a path must stay in one piece.
    print(f"checkpoint: {os.path.join(result.checkpoint.path, 'checkpoint') if result.checkpoint else 'none'}")
    print(f"run: {result.path}", flush=True)


def _run_table(run: RunConfigFile, args: TrainingArguments) -> Table:
    table = _table("run", "key", "value")
    table.add_row("distiller", run.distiller)
    table.add_row("name", run.run.name or "given by Ray Train")
    table.add_row("stored in", local_path(run.run.storage_path or args.output_dir))
    table.add_row("length", f"{args.max_steps} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs")
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * run.scaling.num_workers
    table.add_row("samples per step", f"{samples} ({run.data.max_length} tokens each, at most)")
    table.add_row("learning rate", f"{args.learning_rate:g}")
    table.add_row("evaluation", str(args.eval_strategy.value))
    if args.teacher_cache is not None:
        table.add_row("teacher cache", args.teacher_cache)
    return table


def _model_table(run: RunConfigFile) -> Table:
    from silverspoon_ray.distillers.vocabulary import vocabulary_size

    table = _table("models", "role", "source", "class", "parameters", "vocabulary", "weights")
    for role in ("teacher", "student"):
        section: ModelSection = getattr(run, role)
        model = hub.meta_model(role, section)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        weights = "saved" if section.init == "pretrained" else f"random, seed {section.seed}"
        source, name = hub.name_or_path(section.path), type(model).__name__
        table.add_row(role, source, name, f"{parameters:,}", str(vocabulary_size(model.config) or "-"), weights)
    return table


def _alignment_table(run: RunConfigFile, args: TrainingArguments) -> Table:
    if run.alignments is not None:
        return _feature_table(run, args)
    loss = run.distiller_kwargs.get("soft_loss_fn") or "kl_divergence"
    keywords = run.distiller_kwargs.get("soft_loss_fn_kwargs") or {}
    described = ", ".join(f"{name}={value}" for name, value in keywords.items())
    table = _table("what is learned", "student", "from", "loss", "weight")
    table.add_row("logits", "teacher's logits", f"{loss}({described})", f"{1 - args.alpha:g}")
    if args.alpha > 0:
        table.add_row("task loss", "labels", "the student's own", f"{args.alpha:g}")
    return table


def _feature_table(run: RunConfigFile, args: TrainingArguments) -> Table:
    from silverspoon_ray.alignments.describe import HEADINGS, row
    from silverspoon_ray.train.alignments import make_alignments

    models = [hub.meta_model(role, getattr(run, role)) for role in ("teacher", "student")]
    table = _table("what is learned", *HEADINGS)
    for alignment in make_alignments(run.alignments or [], *models):
        table.add_row(*row(alignment))
    if args.alpha > 0 and run.distiller in ("holistic", "hkd"):
        table.add_row("labels", "task loss", "", "the student's own", f"{args.alpha:g}", "")
    return table


def _resource_table(run: RunConfigFile, args: TrainingArguments) -> Table:
    table = _table("resources", "who", "processes", "each needs", "together")
    total: dict[str, float] = {}

    def add(who: str, processes: int, each: Mapping[str, float]) -> None:
        together = {name: amount * processes for name, amount in each.items()}
        for name, amount in together.items():
            total[name] = total.get(name, 0) + amount
        table.add_row(who, str(processes), _amounts(each), _amounts(together))

    placement = args.teacher_placement
    if hasattr(placement, "replicas"):
        device = {"cuda": "GPU", "cpu": "CPU", None: ANY_DEVICE}[placement.device_type]
        each = {device: 1.0, **(placement.resources_per_device or {})}
        layout = f"teacher ({placement.strategy}, {placement.replicas} x {placement.num_devices} device(s))"
        add(layout, placement.replicas * placement.num_devices, each)
    else:
        table.add_row("teacher (a copy in every student worker)", "0", "nothing of its own", "nothing")
    scaling = run.scaling
    add("student worker", scaling.num_workers, _worker_needs(scaling.use_gpu, scaling.resources_per_worker))
    table.add_row("sum", "", "", _amounts(total))
    return table


def _layout_tables(run: RunConfigFile, args: TrainingArguments) -> list[Table]:
    """Which device of the teacher holds what, and what its answers take on the wire."""
    placement = args.teacher_placement
    if not hasattr(placement, "replicas"):
        return []
    from silverspoon_ray.teacher.stages import parameter_bytes, plan_pipeline

    teacher = hub.meta_model("teacher", run.teacher)
    total = parameter_bytes(teacher)
    table = _table("a replica of the teacher", "device", "holds", "weights")
    if placement.num_devices == 1:
        table.add_row("0", "the whole model", _size(total))
    elif placement.strategy == "pp":
        plan = plan_pipeline(teacher, placement.num_devices)
        for stage in plan.stages:
            edges = [*plan.before] if stage.number == 0 else []
            edges += [*plan.after] if stage.number == len(plan.stages) - 1 else []
            layers = stage.layers[0] + (f" to {stage.layers[-1]}" if len(stage.layers) > 1 else "")
            table.add_row(f"stage {stage.number}", ", ".join([layers, *edges]), _size(stage.bytes))
    else:
        share = f"1/{placement.num_devices} of each layer"
        for device in range(placement.num_devices):
            table.add_row(f"rank {device}", share, _size(total // placement.num_devices))
    tokens = args.per_device_train_batch_size * args.gradient_accumulation_steps * run.data.max_length
    per_worker = tokens * _bytes_per_token(run, args, teacher)
    counts = f", {args.teacher_top_k}" if args.teacher_logits in ("top_k", "sampled") else ""
    what = "features" if run.alignments is not None else f"{args.teacher_logits}{counts}"
    wire = _table(f"answers on the wire ({what})", "per", "size")
    wire.add_row("token", _size(_bytes_per_token(run, args, teacher)))
    wire.add_row("step and student worker, at most", _size(per_worker))
    return [table, wire]


def _bytes_per_token(run: RunConfigFile, args: TrainingArguments, teacher: Any) -> int:
    import torch

    from silverspoon_ray.alignments.describe import feature_size
    from silverspoon_ray.distillers.soft_targets import bytes_per_token
    from silverspoon_ray.teacher.protocol import TeacherRequest
    from silverspoon_ray.train.alignments import make_alignments

    dtype = getattr(torch, args.teacher_wire_dtype) if args.teacher_wire_dtype else teacher.dtype
    if run.alignments is None:
        request = TeacherRequest(logits=args.teacher_logits, wire_dtype=dtype, top_k=args.teacher_top_k)
        return bytes_per_token(request, teacher)
    alignments = make_alignments(run.alignments, teacher, hub.meta_model("student", run.student))
    blocks = {alignment.teacher_module_name: alignment.teacher_block for alignment in alignments}
    states = sum(feature_size(block) or 0 for block in blocks.values())
    if run.distiller in ("blockwise", "bkd"):
        # A block's input is the output of the one before where that is aligned too; the first has one of its own.
        states += feature_size(next(iter(blocks.values()))) or 0
    return states * dtype.itemsize


def _worker_needs(use_gpu: bool | None, resources: Mapping[str, float] | None) -> dict[str, float]:
    """As ``ScalingConfig`` fills it in; with ``use_gpu`` open, in words."""
    if not resources:
        return {{True: "GPU", False: "CPU", None: ANY_DEVICE}[use_gpu]: 1.0}
    needs = {name: amount for name, amount in resources.items() if amount != 0}
    if use_gpu is not False and "GPU" not in needs:
        needs["GPU" if use_gpu else "GPU (where there is one)"] = 1.0
    return needs


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _data_table(run: RunConfigFile) -> Table:
    table = _table("data", "split", "file", "size")
    for split, entries in (("train", run.data.train), ("eval", run.data.eval)):
        if entries is None:
            continue
        files, data_format = data_files(f"data.{split}", entries, run.data.format)
        sizes = [file.stat().st_size for file in files]
        for file, size in list(zip(files, sizes, strict=True))[:MOST_FILES]:
            table.add_row(split, str(file), _size(size))
        if len(files) > MOST_FILES:
            table.add_row(split, f"and {len(files) - MOST_FILES} more", _size(sum(sizes[MOST_FILES:])))
        table.add_row(split, f"together: {len(files)} file(s), {data_format}", _size(sum(sizes)))
    return table


def _size(size: int) -> str:
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.4g} {unit}"


# ---------------------------------------------------------------- any table


def _print_tables(*tables: Table) -> None:
    """With lines and colours on a terminal, as plain columns elsewhere."""
    from rich import box
    from rich.console import Console

    # Neither markup nor highlighting: names of files may look like either.
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=PLAIN_WIDTH, no_color=True)
    for table in tables:
        table.box = box.SIMPLE_HEAD if console.is_terminal else None
        table.title_justify = "left"
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table
