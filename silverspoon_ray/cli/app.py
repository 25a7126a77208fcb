"""``silverspoon-ray``: the commands, and how their outcome becomes an exit code.

0: done. 1: the run failed; one line says why and where the log is. 2: the request was wrong; one line says which key,
its value, and what would be right.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silverspoon_ray.cli import config as run_config
from silverspoon_ray.cli.config import ModelSection, RunConfigFile
from silverspoon_ray.errors import ConfigError

if TYPE_CHECKING:
    import ray.data
    import ray.train
    from rich.table import Table

    from silverspoon_ray.training_arguments import TrainingArguments

DONE, FAILED, WRONG = 0, 1, 2
FAILURE_LOG = "failure.log"
PLAIN_WIDTH = 200  # columns, where the output is no terminal
LONGEST_VALUE = 200  # characters of a value in an error
CONNECT_TIMEOUT_S = 5.0
MOST_FILES = 20  # data files that `check` lists one by one
# Read when ray and tqdm are imported. Ray colours what it forwards from workers, and what it counts instead of
# repeating, whatever it writes to; progress bars would fill a file with copies of themselves.
PLAIN_ENVIRONMENT = {"RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0", "TQDM_DISABLE": "1"}
ANY_DEVICE = "GPU (CPU where there is none)"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Knowledge distillation on Ray.",
)

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG.yaml", help="The run, see the schema in the README.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key.path=value ...]", help="Values that replace those of the file.")
]
Address = Annotated[
    str | None, typer.Option(help="The Ray cluster; default: RAY_ADDRESS, and without it a local Ray is started.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of a failure, and Ray's own logs.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: None: those of the process.

    Returns:
        the exit code.
    """
    if not sys.stderr.isatty():
        for name, value in PLAIN_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="silverspoon-ray", standalone_mode=False)
    except typer.TyperException as error:  # a command line that typer cannot read
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        if message:  # none where the help was shown instead
            _complain(message)
        return WRONG
    if not isinstance(code, int):
        return DONE
    return code if code in (DONE, WRONG) else FAILED  # typer has a code of its own for an interrupt


@app.command()
def quickstart(
    output_dir: Annotated[Path, typer.Option(help="Where the run and its summary.json go.")] = Path("quickstart"),
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Distil a small language model from text that ships with Python. Needs no files and no network."""
    directory = output_dir.expanduser().absolute()
    with _outcome(directory, debug), _ray(address):
        from silverspoon_ray.cli.quickstart import run_quickstart

        run_quickstart(directory)


@app.command()
def train(config: ConfigPath, overrides: Overrides = None, address: Address = None, debug: Debug = False) -> None:
    """Train one student, as the file describes it."""
    with _outcome(None, debug):
        run = run_config.load_config(config, overrides or [])
        run_config.validate(run)
    directory = Path(run_config.local_path(str(run.args.get("output_dir") or "trainer_output")))
    with _outcome(directory, debug), _ray(address):
        _print_result(_train(run, debug))


@app.command()
def check(config: ConfigPath, overrides: Overrides = None, debug: Debug = False) -> None:
    """Validate a file and print what the run would take. Starts nothing and connects to nothing."""
    with _outcome(None, debug):
        run = run_config.load_config(config, overrides or [])
        run_config.validate(run)
        _print_plan(run)


# ---------------------------------------------------------------- training


def _train(run: RunConfigFile, debug: bool) -> ray.train.Result:
    from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig

    from silverspoon_ray.train.text_data import PadCollator, load_tokenizer, padding_token
    from silverspoon_ray.train.trainer import DistillationTrainer

    if not debug:
        _hush_ray_data()
    keywords = run_config.argument_keywords(run)
    tokenizer = load_tokenizer(run_config.name_or_path(run.data.tokenizer))
    storage = run_config.local_path(run.run.storage_path or keywords["output_dir"])
    trainer = DistillationTrainer(
        run.distiller,
        teacher=run_config.model_source(run.teacher),
        student=run_config.model_source(run.student),
        args=keywords,
        train_dataset=_dataset("train", run.data.train, run),
        eval_dataset=_dataset("eval", run.data.eval, run) if run.data.eval is not None else None,
        distiller_kwargs=run.distiller_kwargs,
        data_collator=PadCollator(padding_token(tokenizer)),
        processing_class=tokenizer,
        scaling_config=_scaling(run),
        run_config=RunConfig(
            name=run.run.name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=run.run.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=run.run.num_to_keep),
            # A failure is reported here, in one line; Ray Train would print it twice, with its tracebacks.
            logging_config=LoggingConfig(log_level="INFO" if debug else "CRITICAL"),
        ),
    )
    return trainer.fit()


def _hush_ray_data() -> None:
    """On the console only. A failure is reported in one line; its tracebacks go to the log, and to Ray's own."""
    import ray.data

    for handler in logging.getLogger(ray.data.__name__).handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL)


def _dataset(split: str, entries: Sequence[str], run: RunConfigFile) -> ray.data.Dataset:
    """Read and tokenised before teacher and students take the devices that reading needs too, and only once."""
    from silverspoon_ray.train.text_data import text_dataset

    key, data = f"data.{split}", run.data
    files, data_format = run_config.data_files(key, entries, data.format)
    tokenizer = run_config.name_or_path(data.tokenizer)
    dataset = text_dataset(files, data_format, data.text_column, tokenizer, data.max_length, data.packing).materialize()
    if dataset.count() == 0:
        expected = f"text of at least data.max_length={data.max_length} tokens" if data.packing else "files with text"
        raise ConfigError(key, list(entries), expected)
    dataset.context.enable_progress_bars = False  # of reading it again and again, beside that of training
    return dataset


def _scaling(run: RunConfigFile) -> ray.train.ScalingConfig | None:
    scaling = run.scaling
    if scaling == type(scaling)():
        return None  # the trainer's own choice
    import ray
    from ray.train import ScalingConfig

    from silverspoon_ray.cluster.resources import cluster_device_type

    use_gpu = scaling.use_gpu
    if use_gpu is None:
        gpus = ray.cluster_resources().get("GPU", 0)
        placement = _arguments(run).teacher_placement
        if hasattr(placement, "replicas") and (placement.device_type or cluster_device_type()) == "cuda":
            gpus -= placement.replicas * placement.num_devices
        use_gpu = gpus >= 1 and not run.args.get("use_cpu", False)
    return ScalingConfig(
        num_workers=scaling.num_workers, use_gpu=use_gpu, resources_per_worker=scaling.resources_per_worker
    )


def _arguments(run: RunConfigFile) -> TrainingArguments:
    """For reading values from; built as if for the CPU, because only the workers have what the run asks for."""
    from silverspoon_ray.training_arguments import training_arguments_from

    return training_arguments_from({**run_config.argument_keywords(run), "use_cpu": True})


@contextlib.contextmanager
def _ray(address: str | None) -> Iterator[None]:
    """A connection to the cluster, or a local Ray for as long as this lasts. One that exists already is used."""
    if address:
        os.environ["RAY_ADDRESS"] = address
    import ray

    if ray.is_initialized():
        yield
        return
    cluster = os.environ.get("RAY_ADDRESS")
    key = "--address" if address else "RAY_ADDRESS"
    if cluster:
        _check_reachable(key, cluster)
    try:
        # "local": without it Ray would join any cluster that happens to run on this machine.
        ray.init(address=cluster or "local", logging_level=logging.WARNING, log_to_driver=True)
    except (ConnectionError, ValueError) as error:
        if not cluster:
            raise
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(key, cluster, f"the address of a Ray cluster that is running ({reason})") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(key: str, address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        expected = f"the address of a Ray cluster that is running, host:port ({error})"
        raise ConfigError(key, address, expected) from error


# ---------------------------------------------------------------- outcomes


@contextlib.contextmanager
def _outcome(directory: Path | None, debug: bool) -> Iterator[None]:
    """Turn what is raised inside into one line and an exit code.

    Args:
        directory: where the log of a failure goes; None: before there is a run.
        debug: print the traceback as well.
    """
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt as error:
        _complain("interrupted")
        raise typer.Exit(FAILED) from error
    except Exception as error:
        cause = _cause(error)
        if isinstance(cause, ConfigError):
            value = _shortened(repr(cause.value), LONGEST_VALUE)
            _complain(f"{cause.key}={value}: {cause.expected}")
            raise typer.Exit(WRONG) from error
        if debug:
            traceback.print_exception(error)
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        log = _write_log(directory, error)
        _complain(f"{type(cause).__name__}: {lines[0] if lines else 'no message'}" + (f" (log: {log})" if log else ""))
        raise typer.Exit(FAILED) from error


def _cause(error: BaseException) -> BaseException:
    """What went wrong in the first place, out of the wrappers that Ray puts around it."""
    while True:
        failures = getattr(error, "worker_failures", None) or {}
        inside = [*failures.values(), getattr(error, "controller_failure", None), getattr(error, "cause", None)]
        inner = next((given for given in inside if isinstance(given, BaseException) and given is not error), None)
        if inner is None:
            return error
        error = inner


def _write_log(directory: Path | None, error: Exception) -> Path | None:
    if directory is None:
        return None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / FAILURE_LOG
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return None  # the failure itself is still reported
    return log


def _complain(message: str) -> None:
    """One line on stderr, whatever is in the message."""
    print("error:", " ".join(message.split()), file=sys.stderr, flush=True)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


# ---------------------------------------------------------------- tables


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


def _print_result(result: ray.train.Result) -> None:
    table = _table("last metrics", "metric", "value")
    for name, value in sorted((result.metrics or {}).items()):
        if isinstance(value, int | float) and not isinstance(value, bool):
            table.add_row(name, f"{value:.6g}")
    _print_tables(table)
    # Not in the table: a path must stay in one piece.
    print(f"checkpoint: {os.path.join(result.checkpoint.path, 'checkpoint') if result.checkpoint else 'none'}")
    print(f"run: {result.path}", flush=True)


def _print_plan(run: RunConfigFile) -> None:
    args = _arguments(run)
    _print_tables(
        _run_table(run, args),
        _model_table(run),
        _alignment_table(run, args),
        _resource_table(run, args),
        _data_table(run),
    )


def _run_table(run: RunConfigFile, args: TrainingArguments) -> Table:
    table = _table("run", "key", "value")
    table.add_row("distiller", run.distiller)
    table.add_row("name", run.run.name or "given by Ray Train")
    table.add_row("stored in", run_config.local_path(run.run.storage_path or args.output_dir))
    table.add_row("length", f"{args.max_steps} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs")
    samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * run.scaling.num_workers
    table.add_row("samples per step", f"{samples} ({run.data.max_length} tokens each, at most)")
    table.add_row("learning rate", f"{args.learning_rate:g}")
    table.add_row("evaluation", str(args.eval_strategy.value))
    return table


def _model_table(run: RunConfigFile) -> Table:
    from silverspoon_ray.distillers.vocabulary import vocabulary_size

    table = _table("models", "role", "source", "class", "parameters", "vocabulary", "weights")
    for role in ("teacher", "student"):
        section: ModelSection = getattr(run, role)
        model = run_config.meta_model(role, section)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        weights = "saved" if section.init == "pretrained" else f"random, seed {section.seed}"
        source, name = run_config.name_or_path(section.path), type(model).__name__
        table.add_row(role, source, name, f"{parameters:,}", str(vocabulary_size(model.config) or "-"), weights)
    return table


def _alignment_table(run: RunConfigFile, args: TrainingArguments) -> Table:
    """Of the distillers built so far all compare logits."""
    loss = run.distiller_kwargs.get("soft_loss_fn") or "kl_divergence"
    keywords = run.distiller_kwargs.get("soft_loss_fn_kwargs") or {}
    described = ", ".join(f"{name}={value}" for name, value in keywords.items())
    table = _table("what is learned", "student", "from", "loss", "weight")
    table.add_row("logits", "teacher's logits", f"{loss}({described})", f"{1 - args.alpha:g}")
    if args.alpha > 0:
        table.add_row("task loss", "labels", "the student's own", f"{args.alpha:g}")
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
        files, data_format = run_config.data_files(f"data.{split}", entries, run.data.format)
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
