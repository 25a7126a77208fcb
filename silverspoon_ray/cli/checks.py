"""Every check of a run that needs no Ray.

Nothing heavy is imported with this module, and :func:`validate` makes the cheap checks first, so that most mistakes are
answered in about a second.
"""

from __future__ import annotations

import codecs
import contextlib
import enum
import glob
import inspect
import json
import os
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from silverspoon_ray.cli import hub
from silverspoon_ray.cli.config import DataSection, RunConfigFile, first_line, local_path, nearest
from silverspoon_ray.errors import ConfigError, NotYetError, VocabularyError

if typing.TYPE_CHECKING:
    from silverspoon_ray.training_arguments import TrainingArguments

DataFormat = Literal["parquet", "json", "text"]

FORMAT_OF_ENDING: Mapping[str, DataFormat] = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".txt": "text",
}
PEEK_BYTES = 1 << 16


def validate(config: RunConfigFile) -> None:
    """Make every check that needs no Ray and no more than one short question to the network.

    Raises:
        ConfigError: the first thing found wrong, with its dotted key.
    """
    hub.check_model_directory("teacher", config.teacher)
    hub.check_model_directory("student", config.student)
    _check_data("train", config.data.train, config.data)
    if config.data.eval is not None:
        _check_data("eval", config.data.eval, config.data)
    _check_placement(config.args.get("teacher_placement"))
    if config.data.tokenizer != "bytes":
        hub.check_on_hub("data.tokenizer", config.data.tokenizer, "tokenizer_config.json")
    for key in ("teacher", "student"):
        hub.check_on_hub(key, getattr(config, key).path, "config.json")
    # From here on every line needs more of torch and transformers than the one before: seconds of imports.
    _check_loss(config.distiller_kwargs)
    with _quiet():
        _check_arguments(config)
        tokens = hub.check_tokenizer(config)
        models = {key: hub.check_model(key, getattr(config, key)) for key in ("teacher", "student")}
        _check_distiller(config)
        _check_alignments(config)
        _check_layout(config)
        _check_vocabulary(config, models, tokens)


# ---------------------------------------------------------------- what the sections stand for


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
    cache = keywords.get("teacher_cache")
    if cache is not None and "://" not in cache:
        keywords["teacher_cache"] = local_path(cache)
    return keywords


def arguments_to_read(config: RunConfigFile) -> TrainingArguments:
    """For reading values from; built as if for the CPU, because only the workers have what the run asks for."""
    from silverspoon_ray.training_arguments import training_arguments_from

    return training_arguments_from({**argument_keywords(config), "use_cpu": True})


# ---------------------------------------------------------------- checks without torch


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
        raise ConfigError(key, str(file), f"a Parquet file that can be read ({first_line(error)})") from error
    if column not in schema.names:
        raise ConfigError("data.text_column", column, f"a column of {file}: {nearest(column, schema.names)}")
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ConfigError("data.text_column", column, f"a column of text; in {file} it is {kind}")


def _check_json_lines(key: str, file: Path, column: str) -> None:
    expected = "JSON Lines, one object per line"
    try:
        with file.open(encoding="utf-8") as stream:
            row = json.loads(next((line for line in stream if line.strip()), ""))
    except (OSError, ValueError) as error:
        raise ConfigError(key, str(file), f"{expected} ({first_line(error)})") from error
    if not isinstance(row, dict):
        raise ConfigError(key, str(file), f"{expected}; the first line is a {type(row).__name__}")
    if column not in row:
        raise ConfigError("data.text_column", column, f"a key in {file}: {nearest(column, row)}")
    if not isinstance(row[column], str | NoneType):
        raise ConfigError("data.text_column", column, f"a key with text; in {file} it is {row[column]!r}")


def _check_text(key: str, file: Path) -> None:
    try:
        with file.open("rb") as stream:
            start = stream.read(PEEK_BYTES)
        # The last bytes may be the first half of a character.
        codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) < PEEK_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, str(file), f"text in UTF-8 ({first_line(error)})") from error


def _check_placement(given: Any) -> None:
    if isinstance(given, Mapping):
        from silverspoon_ray.teacher.placement import TeacherPlacement

        with _below("args"):
            TeacherPlacement.from_value(given)


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
    if args.teacher_cache is not None:
        from silverspoon_ray.teacher.cache.place import Place

        with _below("args"):
            Place(args.teacher_cache).look()
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
    from silverspoon_ray.distillers.soft_targets import check_soft_targets
    from silverspoon_ray.losses import get_loss_function
    from silverspoon_ray.models.output_head import output_head_name

    distiller = distiller_class(config.distiller)
    # The keywords that come from other sections, and those that no YAML value can give.
    elsewhere = {"self", "student_model", "teacher_model", "train_dataset", "eval_dataset", "data_collator", "args"}
    elsewhere |= {"kwargs", "prepare_teacher_inputs", "prepare_student_inputs", "alignments", "student_models"}
    known = [name for name in inspect.signature(distiller.__init__).parameters if name not in elsewhere]
    given = config.distiller_kwargs
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"distiller_kwargs.{name}", value, f"unknown keyword; {nearest(name, known)}")
    if given.get("output_head_layer") is not None:
        with _below("distiller_kwargs"):
            output_head_name(hub.meta_model("student", config.student), given["output_head_layer"])
    if distiller.compares_logits:
        loss = get_loss_function(given.get("soft_loss_fn") or "kl_divergence", **given.get("soft_loss_fn_kwargs", {}))
        form = arguments_to_read(config).teacher_logits
        with _below("args"):
            check_soft_targets(form, loss, hub.meta_model("teacher", config.teacher) if form == "hidden" else None)


def _check_layout(config: RunConfigFile) -> None:
    from silverspoon_ray.teacher.layout import check_layout

    placement = arguments_to_read(config).teacher_placement
    if hasattr(placement, "num_devices") and placement.num_devices > 1:
        with _below("args"):
            check_layout(hub.meta_model("teacher", config.teacher), placement)


def _check_alignments(config: RunConfigFile) -> None:
    from silverspoon_ray.distillers import FeatureDistiller, distiller_class
    from silverspoon_ray.train.alignments import check_alignments

    distiller = distiller_class(config.distiller)
    models = [None, None]
    if issubclass(distiller, FeatureDistiller) and config.alignments is not None:
        models = [hub.meta_model(key, getattr(config, key)) for key in ("teacher", "student")]
    try:
        check_alignments(distiller, config.alignments, *models)
    except ConfigError as error:
        if error.key.startswith("alignments"):
            raise
        raise _renamed(error, f"alignments.{error.key}") from error


def _check_vocabulary(config: RunConfigFile, models: Mapping[str, Any], tokens: int | None) -> None:
    from silverspoon_ray.distillers.vocabulary import common_vocabulary, vocabulary_size

    sizes = {key: vocabulary_size(model) for key, model in models.items()}
    for key, size in sizes.items():
        if size is not None and tokens is not None and tokens > size:
            expected = f"a tokenizer of at most {size} tokens, the vocabulary of the {key}; this one has {tokens}"
            raise ConfigError("data.tokenizer", config.data.tokenizer, expected)
    teacher, student = sizes["teacher"], sizes["student"]
    if config.alignments is not None:
        return  # no logits are compared
    if teacher is None or student is None:
        return
    try:
        common_vocabulary(teacher, student, tokens)
    except VocabularyError as error:
        expected = f"{error.expected} (the vocabularies have {teacher} and {student} entries)"
        raise VocabularyError("student", config.student.path, expected) from error


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
