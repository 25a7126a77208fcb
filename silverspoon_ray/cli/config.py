"""The YAML file of a run: its schema, and command line overrides.

Nothing heavy is imported with this module. Relative paths in the file are relative to the current working directory.
"""

from __future__ import annotations

import difflib
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from silverspoon_ray.errors import ConfigError, NotYetError

SECTIONS_TO_COME = ("sweep",)

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
    load: dict[str, Any] = Field(
        default={}, description="of the teacher: keywords of from_pretrained, e.g. {dtype: bfloat16}"
    )

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
    alignments: dict[str, Any] | list[dict[str, Any]] | None = Field(
        default=None, description="keywords of create_alignments, e.g. {modules: ..., loss_function: mse}, or a list"
    )
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
            the values make sense is for :func:`silverspoon_ray.cli.checks.validate`.
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


def local_path(path: str) -> str:
    """The absolute path, as workers in other directories need it. Addresses like ``s3://...`` stay as they are."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


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
    return where + (getattr(error, "problem", None) or first_line(error))


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
        return ConfigError(key, problem["input"], f"unknown key; {nearest(str(path[-1]), section.model_fields)}")
    described = field.description if field is not None and field.description else problem["msg"]
    if problem["type"] == "missing":
        return ConfigError(key, None, f"required: {described}")
    if len(path) > 2 or isinstance(path[-1], int):
        described = f"{described} ({problem['msg'].lower()})"
    return ConfigError(key, problem["input"], described)


# ---------------------------------------------------------------- what an error says


def nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"known here: {', '.join(known)}"


def first_line(error: BaseException) -> str:
    """An error's first line; its name where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
