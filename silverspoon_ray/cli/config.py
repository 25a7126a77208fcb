"""The YAML file of a run: its schema, command line overrides, and every check that needs no Ray.

Nothing heavy is imported with this module, and :func:`validate` makes the cheap checks first, so that most mistakes are
answered in about a second. Relative paths in the file are relative to the current working directory.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import enum
import functools
import glob
import inspect
import json
import os
import threading
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from silverspoon_ray.errors import ConfigError, NotYetError, VocabularyError

if typing.TYPE_CHECKING:
    from silverspoon_ray.models.source import RandomInit

DataFormat = Literal["parquet", "json", "text"]

FORMAT_OF_ENDING: Mapping[str, DataFormat] = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".txt": "text",
}
SECTIONS_TO_COME = ("alignments", "sweep", "cache")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")
HUB_TIMEOUT_S = 3.0
PEEK_BYTES = 1 << 16

FILES = "a file, directory or glob pattern (.parquet, .jsonl, .json, .txt), or a list of them"
MODEL = "a model directory or hub id, or {path: ..., init: random, overrides: {...}, seed: 0}"


class _Section(BaseModel):
    """Unknown keys and values of another type are refused. Each field's description says what would be right."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSection(_Section):
    """A model: saved weights, or the architecture of a saved model with fresh ones."""

    path: str = Field(min_length=1, description="a model directory or hub id")
    init: Literal["pretrained", "random"] = Field(default="pretrained", description="pretrained or random")
    overrides: dict[str, Any] = Field(default={}, description="configuration values to replace, with init: random")
    seed: int = Field(default=0, ge=0, description="a whole number, with init: random")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        return {"path": given} if isinstance(given, str) else given


class DataSection(_Section):
    """The text to learn from."""

    train: list[str] = Field(min_length=1, description=FILES)
    eval: list[str] | None = Field(default=None, min_length=1, description=FILES)
    format: Literal["auto", "parquet", "json", "text"] = Field(
        default="auto", description="auto (by file ending), parquet, json (one object per line) or text"
    )
    text_column: str = Field(default="text", min_length=1, description="the name of the column with the text")
    tokenizer: str = Field(min_length=1, description='a tokenizer directory or hub id, or "bytes"')
    max_length: int = Field(default=512, ge=2, description="tokens per sample, a whole number of 2 or more")
    packing: bool = Field(default=True, description="true (documents joined, cut into blocks) or false (one each)")

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _one_or_many(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given


class ScalingSection(_Section):
    """The student's workers."""

    num_workers: int = Field(default=1, ge=1, description="a whole number of 1 or more")
    use_gpu: bool | None = Field(default=None, description="true, false, or null: where the cluster has GPUs")
    resources_per_worker: dict[str, float] | None = Field(
        default=None, description="amounts by resource name, e.g. {CPU: 2}"
    )


class RunSection(_Section):
    """Where the run is stored, and what happens when it fails."""

    name: str | None = Field(default=None, min_length=1, description="a name; the same name goes on from a checkpoint")
    storage_path: str | None = Field(default=None, min_length=1, description="a directory; null: args.output_dir")
    max_failures: int = Field(default=0, ge=-1, description="restarts after failures, a whole number; -1: no limit")
    num_to_keep: int | None = Field(default=None, ge=1, description="checkpoints to keep, 1 or more; null: all")


class RunConfigFile(_Section):
    """One run, as its YAML file describes it."""

    distiller: str = Field(default="response_based", description="the name of a distiller")
    teacher: ModelSection = Field(description=MODEL)
    student: ModelSection = Field(description=MODEL)
    args: dict[str, Any] = Field(default={}, description="keywords of TrainingArguments")
    distiller_kwargs: dict[str, Any] = Field(default={}, description="keywords of the distiller")
    data: DataSection = Field(description="a section with train and tokenizer")
    scaling: ScalingSection = Field(default=ScalingSection(), description="a section, e.g. {num_workers: 2}")
    run: RunSection = Field(default=RunSection(), description="a section, e.g. {name: first}")


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfigFile:
    """Read a run's YAML file and put the command line's values in.

    Args:
        path: the file.
        overrides: each ``"key.path=value"``, the value in YAML.

    Raises:
        ConfigError: the file is missing or no YAML, a key is unknown or missing, a value has the wrong type. Whether
            the values make sense is for :func:`validate`.
    """
    tree = _read_yaml(path)
    for override in overrides:
        _override(tree, override)
    for name in SECTIONS_TO_COME:
        if name in tree:
            raise NotYetError(name, tree[name], "this section is not built yet, leave it out")
    # `args:` with nothing below it is how YAML writes an empty section.
    given = {key: value for key, value in tree.items() if value is not None}
    try:
        return RunConfigFile.model_validate(given)
    except ValidationError as error:
        raise _schema_error(error, given) from error


def validate(config: RunConfigFile) -> None:
    """Make every check that needs no Ray and no more than one short question to the network.

    Raises:
        ConfigError: the first thing found wrong, with its dotted key.
    """
    _check_model_directory("teacher", config.teacher)
    _check_model_directory("student", config.student)
    _check_data("train", config.data.train, config.data)
    if config.data.eval is not None:
        _check_data("eval", config.data.eval, config.data)
    _check_placement(config.args.get("teacher_placement"))
    if config.data.tokenizer != "bytes":
        _check_on_hub("data.tokenizer", config.data.tokenizer, "tokenizer_config.json")
    for key in ("teacher", "student"):
        _check_on_hub(key, getattr(config, key).path, "config.json")
    # From here on every line needs more of torch and transformers than the one before: seconds of imports.
    _check_loss(config.distiller_kwargs)
    with _quiet():
        _check_arguments(config)
        tokens = _check_tokenizer(config)
        models = {key: _check_model(key, getattr(config, key)) for key in ("teacher", "student")}
        _check_distiller(config)
        _check_vocabulary(config, models, tokens)


# ---------------------------------------------------------------- what the sections stand for


def local_path(path: str) -> str:
    """The absolute path, as workers in other directories need it. Addresses like ``s3://...`` stay as they are."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def name_or_path(given: str) -> str:
    """A hub id as it is, a directory as an absolute path."""
    return local_path(given) if _is_local(given) else given


def model_source(section: ModelSection) -> str | RandomInit:
    """What ``DistillationTrainer`` takes as teacher or student."""
    path = name_or_path(section.path)
    if section.init == "pretrained":
        return path
    from silverspoon_ray.models.source import RandomInit

    return RandomInit(path, overrides=section.overrides, seed=section.seed)


def meta_model(key: str, section: ModelSection) -> Any:
    """The model on the meta device: every shape, no weights.

    Raises:
        ConfigError: the configuration cannot be read, names no known class, or contradicts itself.
    """
    import torch

    from silverspoon_ray.models.source import architecture_class

    config = _model_config(key, section)
    try:
        model_class = architecture_class(config, section.path)
    except ConfigError as error:
        raise ConfigError(key, error.value, error.expected) from error
    try:
        with torch.device("meta"):
            return model_class._from_config(config)
    except Exception as error:  # whatever this architecture's own checks raise
        expected = f"a configuration that {model_class.__name__} accepts ({_say(error)})"
        if section.overrides:
            raise ConfigError(f"{key}.overrides", section.overrides, expected) from error
        raise ConfigError(key, section.path, expected) from error


def data_files(key: str, entries: Sequence[str], data_format: str) -> tuple[list[Path], DataFormat]:
    """The files that ``data.train`` or ``data.eval`` stands for, and their common format.

    Directories are searched to any depth, names that begin with a dot or underscore left out; files found by pattern
    or in a directory come in the order of their names.

    Raises:
        ConfigError: nothing found, an ending that is not known, or more than one format.
    """
    found: list[Path] = []
    for entry in entries:
        if "://" in entry:
            raise NotYetError(key, entry, "not built yet, give a path on a file system that every node can read")
        found += _files_of(key, entry, data_format)
    formats = {data_format} if data_format != "auto" else {FORMAT_OF_ENDING.get(file.suffix.lower()) for file in found}
    if None in formats:
        odd = next(file for file in found if file.suffix.lower() not in FORMAT_OF_ENDING)
        known = ", ".join(FORMAT_OF_ENDING)
        raise ConfigError(key, str(odd), f"files that end in {known}; or say data.format: parquet, json or text")
    if len(formats) > 1:
        mixed = " and ".join(sorted(str(name) for name in formats))
        raise ConfigError(key, list(entries), f"files of one format; these are {mixed}")
    return found, typing.cast(DataFormat, formats.pop())


def argument_keywords(config: RunConfigFile) -> dict[str, Any]:
    """The keywords of ``TrainingArguments``: known names, values of the right type, ``output_dir`` absolute.

    Raises:
        ConfigError: an unknown keyword, or a value of the wrong type.
    """
    from silverspoon_ray.training_arguments import TrainingArguments, check_keywords

    check_keywords(config.args, prefix="args.")
    hints = typing.get_type_hints(TrainingArguments)
    keywords = {name: _typed(f"args.{name}", value, hints[name]) for name, value in config.args.items()}
    keywords["output_dir"] = local_path(keywords.get("output_dir") or "trainer_output")
    return keywords


# ---------------------------------------------------------------- the file


def _read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    name = os.fspath(path)
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("CONFIG", name, f"a YAML file that can be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError("CONFIG", name, f"a YAML file in UTF-8 ({error.reason} at byte {error.start})") from error
    try:
        tree = yaml.safe_load(text)
        twice = _repeated_key(yaml.compose(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError("CONFIG", name, f"valid YAML; {_yaml_problem(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError("CONFIG", name, f"a file with keys such as teacher:, student:, data:; got {tree!r}")
    if twice is not None:
        key, line = twice
        raise ConfigError("CONFIG", name, f"every key once; {key!r} stands a second time in line {line}")
    return tree


def _repeated_key(root: yaml.Node | None) -> tuple[str, int] | None:
    """A key that stands twice in one mapping (YAML itself lets the last one win), and its line."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            names = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in names and key.value != "<<":
                    return key.value, key.start_mark.line + 1
                names.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
                waiting.append(value)
    return None


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return where + (getattr(error, "problem", None) or _say(error))


def _override(tree: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    names = key.split(".")
    if not sign or not all(names):
        raise ConfigError("override", override, "key.path=value, e.g. args.max_steps=100")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(key, text, f"a value in YAML; {_yaml_problem(error)}") from error
    node = tree
    for depth, name in enumerate(names[:-1]):
        below = node.get(name)
        if depth == 0 and name in ("teacher", "student") and isinstance(below, str):
            below = {"path": below}  # the short form, written out
        if below is None:
            below = {}
        if not isinstance(below, dict):
            parent = ".".join(names[: depth + 1])
            raise ConfigError(key, value, f"a key below a section, but {parent} is {below!r} in the file")
        node[name] = below
        node = below
    node[names[-1]] = value


def _schema_error(error: ValidationError, given: Mapping[str, Any]) -> ConfigError:
    # A misspelt key is both unknown and missing under its right name; the first says more.
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    path = [part for part in problem["loc"] if part != "[key]"]
    key = ".".join(str(part) for part in path)
    section: type[BaseModel] = RunConfigFile
    field, inside = None, False
    for part in path:
        found = section.model_fields.get(str(part)) if not inside else None
        if found is None:
            break  # unknown, or an entry of a list or mapping
        field = found
        inside = not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
        if not inside:
            section = typing.cast(type[BaseModel], field.annotation)
    if problem["type"] == "extra_forbidden":
        return ConfigError(key, problem["input"], f"unknown key; {_nearest(str(path[-1]), section.model_fields)}")
    described = field.description if field is not None and field.description else problem["msg"]
    if problem["type"] == "missing":
        return ConfigError(key, None, f"required: {described}")
    if len(path) > 2 or isinstance(path[-1], int):
        described = f"{described} ({problem['msg'].lower()})"
    return ConfigError(key, problem["input"], described)


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"known here: {', '.join(known)}"


# ---------------------------------------------------------------- checks without torch


def _is_local(given: str) -> bool:
    """Whether it can only be a path; a hub id has at most one slash."""
    return given.startswith(("/", ".", "~")) or given.count("/") > 1 or os.path.exists(given)


def _check_model_directory(key: str, section: ModelSection) -> None:
    if section.init == "pretrained":
        for name in ("overrides", "seed"):
            if getattr(section, name):
                raise ConfigError(f"{key}.{name}", getattr(section, name), f"nothing, or set {key}.init: random")
    if not _is_local(section.path):
        return
    directory = Path(local_path(section.path))
    try:
        json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        missing = "there is none in it" if directory.is_dir() else "there is no such directory"
        reason = missing if isinstance(error, FileNotFoundError) else _say(error)
        raise ConfigError(key, section.path, f"a model directory with a config.json ({reason})") from error
    if section.init == "pretrained" and not any(next(directory.glob(name), None) for name in WEIGHT_FILES):
        raise ConfigError(key, section.path, f"a directory with weights (model.safetensors), or {key}.init: random")


def _files_of(key: str, entry: str, data_format: str) -> list[Path]:
    path = Path(local_path(entry))
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path)))
        if data_format == "auto":
            inside = [file for file in inside if file.suffix.lower() in FORMAT_OF_ENDING]
        if not inside:
            raise ConfigError(key, entry, f"a directory with files that end in {', '.join(FORMAT_OF_ENDING)}")
        return inside
    if glob.has_magic(entry):
        matched = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        matched = [file for file in matched if file.is_file()]
        if not matched:
            raise ConfigError(key, entry, f"a pattern that matches files (read from {os.getcwd()})")
        return matched
    raise ConfigError(key, entry, f"an existing file, directory or pattern; there is no {path}")


def _hidden(relative: Path) -> bool:
    return any(part.startswith((".", "_")) for part in relative.parts)


def _check_data(split: str, entries: Sequence[str], data: DataSection) -> None:
    key = f"data.{split}"
    files, data_format = data_files(key, entries, data.format)
    full = [file for file in files if file.stat().st_size > 0]
    if not full:
        raise ConfigError(key, list(entries), "files with something in them; these are empty")
    if data_format == "parquet":
        _check_parquet(key, full[0], data.text_column)
    elif data_format == "json":
        _check_json_lines(key, full[0], data.text_column)
    else:
        _check_text(key, full[0])


def _check_parquet(key: str, file: Path, column: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(file)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(key, str(file), f"a Parquet file that can be read ({_say(error)})") from error
    if column not in schema.names:
        raise ConfigError("data.text_column", column, f"a column of {file}: {_nearest(column, schema.names)}")
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ConfigError("data.text_column", column, f"a column of text; in {file} it is {kind}")


def _check_json_lines(key: str, file: Path, column: str) -> None:
    expected = "JSON Lines, one object per line"
    try:
        with file.open(encoding="utf-8") as stream:
            row = json.loads(next((line for line in stream if line.strip()), ""))
    except (OSError, ValueError) as error:
        raise ConfigError(key, str(file), f"{expected} ({_say(error)})") from error
    if not isinstance(row, dict):
        raise ConfigError(key, str(file), f"{expected}; the first line is a {type(row).__name__}")
    if column not in row:
        raise ConfigError("data.text_column", column, f"a key in {file}: {_nearest(column, row)}")
    if not isinstance(row[column], str | NoneType):
        raise ConfigError("data.text_column", column, f"a key with text; in {file} it is {row[column]!r}")


def _check_text(key: str, file: Path) -> None:
    try:
        with file.open("rb") as stream:
            start = stream.read(PEEK_BYTES)
        # The last bytes may be the first half of a character.
        codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) < PEEK_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, str(file), f"text in UTF-8 ({_say(error)})") from error


def _check_placement(given: Any) -> None:
    if isinstance(given, Mapping):
        from silverspoon_ray.teacher.placement import TeacherPlacement

        with _below("args"):
            TeacherPlacement.from_value(given)


def _check_on_hub(key: str, name: str, file: str) -> None:
    """Is there such a repository, in the cache or on the hub? One question with a short limit, no second try."""
    if _is_local(name):
        return
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    expected = "an existing directory, or a hub id"
    try:
        if isinstance(try_to_load_from_cache(name, file), str):
            return
    except HFValidationError as error:
        raise ConfigError(key, name, f"{expected} ({_say(error)})") from error
    if constants.is_offline_mode():
        raise ConfigError(key, name, f"{expected} that is in the cache, because HF_HUB_OFFLINE is set")
    problem = _ask_hub(name, file)
    if problem is not None:
        raise ConfigError(key, name, f"{expected} that is in the cache or can be reached ({problem})")


@functools.lru_cache
def _ask_hub(name: str, file: str) -> str | None:
    """Why the repository is not to be had, or None if it is."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    answer = [f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co')} did not answer within {HUB_TIMEOUT_S:g} s"]

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(name, file), timeout=HUB_TIMEOUT_S)
            answer[:] = []
        except EntryNotFoundError:
            answer[:] = [] if file != "config.json" else ["the repository has no config.json"]
        except GatedRepoError:
            answer[:] = ["the repository is gated, log in with an account that may read it"]
        except RepositoryNotFoundError:
            answer[:] = ["the hub has no such repository, or it is private"]
        except Exception as error:
            answer[:] = [_say(error)]

    # In a thread, because looking up a host's address knows no limit.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT_S + 0.5)
    return answer[0] if answer else None


# ---------------------------------------------------------------- checks with torch and transformers


def _typed(key: str, value: Any, hint: Any) -> Any:
    """The value as the keyword's annotation wants it; refused if it is of another kind.

    Two habits of YAML 1.1 are put right: it reads ``5e-5`` as text and ``no`` as false.
    """
    kinds = set(typing.get_args(hint)) or {hint}
    choices = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, enum.Enum)]
    if value is False and any(choice.value == "no" for kind in choices for choice in kind):
        return "no"
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
    if any(kind not in plain and kind not in choices for kind in kinds):
        return value  # dicts, lists and the like: transformers looks into them
    accepted = kinds | ({int} if float in kinds else set())
    if type(value) in accepted:
        return value
    if isinstance(value, str) and float in kinds:
        with contextlib.suppress(ValueError):
            return float(value)
    words = [word for kind, word in plain.items() if kind in kinds]
    raise ConfigError(key, value, " or ".join(words))


def _check_loss(given: Mapping[str, Any]) -> None:
    from silverspoon_ray.losses import get_loss_function

    loss, keywords = given.get("soft_loss_fn"), given.get("soft_loss_fn_kwargs")
    if not isinstance(loss, str | NoneType):
        raise ConfigError("distiller_kwargs.soft_loss_fn", loss, "the name of a loss, e.g. kl_divergence")
    if not isinstance(keywords, Mapping | NoneType):
        raise ConfigError("distiller_kwargs.soft_loss_fn_kwargs", keywords, "keywords, e.g. {temperature: 2.0}")
    try:
        get_loss_function(loss or "kl_divergence", **(keywords or {}))
    except ConfigError as error:
        name = error.key.rpartition(".")[2]
        below = f"_kwargs.{name}" if name in (keywords or {}) else ""
        raise _renamed(error, f"distiller_kwargs.soft_loss_fn{below}") from error


def _check_arguments(config: RunConfigFile) -> None:
    import torch

    from silverspoon_ray.training_arguments import training_arguments_from

    keywords = argument_keywords(config)
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if keywords.get(name, 1) < 1:
            raise ConfigError(f"args.{name}", keywords[name], "a whole number of 1 or more")
    if not keywords.get("learning_rate", 0) >= 0:
        raise ConfigError("args.learning_rate", keywords["learning_rate"], "a number of 0 or more")
    # Only the workers need what the run asks for, bf16 on GPUs for example; here it is checked as if for the CPU.
    here = {} if torch.cuda.is_available() else {"use_cpu": True}
    try:
        args = training_arguments_from({**keywords, **here})
    except ConfigError as error:
        if error.key != "args":
            raise _renamed(error, f"args.{error.key}") from error
        for name, value in keywords.items():  # which of them does transformers mean?
            try:
                training_arguments_from({name: value, **here})
            except ConfigError as alone:
                raise ConfigError(f"args.{name}", value, alone.expected) from error
        raise _renamed(error, "args", config.args) from error
    if args.max_steps == 0 or args.max_steps < -1:
        raise ConfigError("args.max_steps", args.max_steps, "1 or more, or -1: as many as num_train_epochs takes")
    if args.max_steps == -1 and not args.num_train_epochs > 0:
        raise ConfigError("args.num_train_epochs", args.num_train_epochs, "more than 0, or set args.max_steps")
    strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
    if config.data.eval is None and strategy != "no":
        raise ConfigError("args.eval_strategy", strategy, "'no', or data.eval with the files to evaluate on")
    if config.data.eval is None and args.eval_on_start:
        raise ConfigError("args.eval_on_start", True, "false, or data.eval with the files to evaluate on")


def _check_distiller(config: RunConfigFile) -> None:
    from silverspoon_ray.distillers.factory import distiller_class

    distiller = distiller_class(config.distiller)
    # The keywords that come from other sections, and those that no YAML value can give.
    elsewhere = {"self", "student_model", "teacher_model", "train_dataset", "eval_dataset", "data_collator", "args"}
    elsewhere |= {"kwargs", "prepare_teacher_inputs", "prepare_student_inputs"}
    known = [name for name in inspect.signature(distiller.__init__).parameters if name not in elsewhere]
    given = config.distiller_kwargs
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"distiller_kwargs.{name}", value, f"unknown keyword; {_nearest(name, known)}")
    for name in ("use_liger_kernel", "output_head_layer"):
        if given.get(name):
            raise NotYetError(f"distiller_kwargs.{name}", given[name], "not built yet, leave it out")


def _check_tokenizer(config: RunConfigFile) -> int | None:
    """How many tokens it has; None if it is on the hub and not here yet."""
    key, given = "data.tokenizer", config.data.tokenizer
    import transformers

    if given == "bytes":
        return len(transformers.ByT5Tokenizer(extra_ids=0))
    path = Path(local_path(given))
    if _is_local(given) and not any(next(path.glob(name), None) for name in TOKENIZER_FILES):
        raise ConfigError(key, given, "a directory with a tokenizer (tokenizer.json), a hub id, or bytes")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name_or_path(given), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # tokenizer classes raise what they like
        if not _is_local(given):
            return None
        raise ConfigError(key, given, f"a tokenizer that can be loaded ({_say(error)})") from error
    if config.data.packing and tokenizer.eos_token_id is None and tokenizer.sep_token_id is None:
        raise ConfigError(key, given, "a tokenizer with an EOS or SEP token to end documents with, or packing: false")
    return len(tokenizer)


def _check_model(key: str, section: ModelSection) -> Any:
    """The model's configuration; where it has been changed, a model that can be built from it."""
    return meta_model(key, section).config if section.init == "random" else _model_config(key, section)


def _check_vocabulary(config: RunConfigFile, models: Mapping[str, Any], tokens: int | None) -> None:
    from silverspoon_ray.distillers.vocabulary import common_vocabulary, vocabulary_size

    sizes = {key: vocabulary_size(model) for key, model in models.items()}
    for key, size in sizes.items():
        if size is not None and tokens is not None and tokens > size:
            expected = f"a tokenizer of at most {size} tokens, the vocabulary of the {key}; this one has {tokens}"
            raise ConfigError("data.tokenizer", config.data.tokenizer, expected)
    teacher, student = sizes["teacher"], sizes["student"]
    if teacher is None or student is None:
        return
    try:
        common_vocabulary(teacher, student, tokens)
    except VocabularyError as error:
        expected = f"{error.expected} (the vocabularies have {teacher} and {student} entries)"
        raise VocabularyError("student", config.student.path, expected) from error


def _model_config(key: str, section: ModelSection) -> Any:
    try:
        plain = _auto_config(section.path)
    except Exception as error:  # configuration classes raise what they like
        raise ConfigError(key, section.path, f"a model whose config.json can be used ({_say(error)})") from error
    if not section.overrides:
        return plain
    known = sorted(name for name in {**vars(plain), **plain.to_dict()} if not name.startswith("_"))
    for name, value in section.overrides.items():
        if name not in known and not hasattr(plain, name):
            raise ConfigError(f"{key}.overrides.{name}", value, f"unknown; {_nearest(name, known)}")
    try:
        return _auto_config(section.path, **section.overrides)
    except Exception as error:
        raise ConfigError(f"{key}.overrides", section.overrides, f"values it can take ({_say(error)})") from error


def _auto_config(path: str, **overrides: Any) -> Any:
    """From a directory or the cache without a question to the network; asked only for what is not there."""
    from transformers import AutoConfig

    options = {"trust_remote_code": False, **overrides}
    try:
        return AutoConfig.from_pretrained(name_or_path(path), local_files_only=True, **options)
    except OSError:
        if _is_local(path):
            raise
        return AutoConfig.from_pretrained(path, **options)


# ---------------------------------------------------------------- small helpers


def _renamed(error: ConfigError, key: str, value: object = ...) -> ConfigError:
    """The same error under the key that it has in the file."""
    return type(error)(key, error.value if value is ... else value, error.expected)


@contextlib.contextmanager
def _below(section: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise _renamed(error, f"{section}.{error.key}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings while values are only tried out; the run itself shows them."""
    import transformers

    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.utils.logging.set_verbosity(level)


def _say(error: BaseException) -> str:
    """An error's first line; its name where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
