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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from silverspoon_ray.cli.checks import argument_keywords, arguments_to_read, data_files, validate
from silverspoon_ray.cli.config import RunConfigFile, load_config, local_path
from silverspoon_ray.cli.hub import model_source, name_or_path
from silverspoon_ray.cli.tables import print_plan, print_result
from silverspoon_ray.errors import ConfigError

if TYPE_CHECKING:
    import ray.data
    import ray.train

    from silverspoon_ray.train.trainer import DistillationTrainer

DONE, FAILED, WRONG = 0, 1, 2
FAILURE_LOG = "failure.log"
LONGEST_VALUE = 200  # characters of a value in an error
CONNECT_TIMEOUT_S = 5.0
# Read when ray and tqdm are imported. Ray colours what it forwards from workers, and what it counts instead of
# repeating, whatever it writes to; progress bars would fill a file with copies of themselves.
PLAIN_ENVIRONMENT = {"RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0", "TQDM_DISABLE": "1"}

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
        run = load_config(config, overrides or [])
        validate(run)
    directory = Path(local_path(str(run.args.get("output_dir") or "trainer_output")))
    with _outcome(directory, debug), _ray(address):
        print_result(_train(run, debug))


@app.command()
def check(config: ConfigPath, overrides: Overrides = None, debug: Debug = False) -> None:
    """Validate a file and print what the run would take. Starts nothing and connects to nothing."""
    with _outcome(None, debug):
        run = load_config(config, overrides or [])
        validate(run)
        print_plan(run)


@app.command()
def cache(
    config: ConfigPath,
    overrides: Overrides = None,
    actors: Annotated[
        int | None, typer.Option(min=1, help="How many teachers; default: teacher_placement.replicas, or 1.")
    ] = None,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Fill the cache that args.teacher_cache names with the teacher's answers to all data. It can be stopped at any
    time, and goes on where it was."""
    with _outcome(None, debug):
        run = load_config(config, overrides or [])
        if not run.args.get("teacher_cache"):
            raise ConfigError("args.teacher_cache", None, "a directory or URI, e.g. args.teacher_cache=cache")
        validate(run)
    directory = Path(local_path(str(run.args.get("output_dir") or "trainer_output")))
    with _outcome(directory, debug), _ray(address):
        from silverspoon_ray.train.cache_job import fill_cache

        report = fill_cache(_trainer(run, debug), actors, say=lambda line: print(line, flush=True))
        print(f"done: {report.samples} samples, {report.answered} answered by the teacher, {report.seconds:.1f} s")


# ---------------------------------------------------------------- training


def _train(run: RunConfigFile, debug: bool) -> ray.train.Result:
    # That a run needs no teacher is worth a line.
    noted = logging.getLogger("silverspoon_ray.train.cached")
    noted.setLevel(logging.INFO)
    if not noted.handlers:
        noted.addHandler(logging.StreamHandler())
    return _trainer(run, debug).fit()


def _trainer(run: RunConfigFile, debug: bool) -> DistillationTrainer:
    from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig

    from silverspoon_ray.train.text_data import PadCollator, load_tokenizer, padding_token
    from silverspoon_ray.train.trainer import DistillationTrainer

    if not debug:
        _hush_ray_data()
    keywords = argument_keywords(run)
    tokenizer = load_tokenizer(name_or_path(run.data.tokenizer))
    storage = local_path(run.run.storage_path or keywords["output_dir"])
    return DistillationTrainer(
        run.distiller,
        teacher=model_source(run.teacher),
        student=model_source(run.student),
        teacher_kwargs=run.teacher.load,
        args=keywords,
        train_dataset=_dataset("train", run.data.train, run),
        eval_dataset=_dataset("eval", run.data.eval, run) if run.data.eval is not None else None,
        alignments=run.alignments,
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
    files, data_format = data_files(key, entries, data.format)
    tokenizer = name_or_path(data.tokenizer)
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
        placement = arguments_to_read(run).teacher_placement
        if hasattr(placement, "replicas") and (placement.device_type or cluster_device_type()) == "cuda":
            gpus -= placement.replicas * placement.num_devices
        use_gpu = gpus >= 1 and not run.args.get("use_cpu", False)
    return ScalingConfig(
        num_workers=scaling.num_workers, use_gpu=use_gpu, resources_per_worker=scaling.resources_per_worker
    )


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
