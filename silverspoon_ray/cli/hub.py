"""Models and tokenizers that a run names: in a directory, in the cache, or on the hub.

Nothing heavy is imported with this module; what needs torch or transformers imports them where it is called.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silverspoon_ray.cli.config import ModelSection, RunConfigFile, first_line, local_path, nearest
from silverspoon_ray.errors import ConfigError

if TYPE_CHECKING:
    from silverspoon_ray.models.source import RandomInit

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")
HUB_TIMEOUT_S = 3.0


def is_local(given: str) -> bool:
    """Whether it can only be a path; a hub id has at most one slash."""
    return given.startswith(("/", ".", "~")) or given.count("/") > 1 or os.path.exists(given)


def name_or_path(given: str) -> str:
    """A hub id as it is, a directory as an absolute path."""
    return local_path(given) if is_local(given) else given


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
        expected = f"a configuration that {model_class.__name__} accepts ({first_line(error)})"
        if section.overrides:
            raise ConfigError(f"{key}.overrides", section.overrides, expected) from error
        raise ConfigError(key, section.path, expected) from error


# ---------------------------------------------------------------- checks


def check_model_directory(key: str, section: ModelSection) -> None:
    if section.load and (key != "teacher" or section.init == "random"):
        raise ConfigError(
            f"{key}.load", section.load, "nothing; only a teacher with saved weights is loaded with keywords"
        )
    if section.init == "pretrained":
        for name in ("overrides", "seed"):
            if getattr(section, name):
                raise ConfigError(f"{key}.{name}", getattr(section, name), f"nothing, or set {key}.init: random")
    if not is_local(section.path):
        return
    directory = Path(local_path(section.path))
    try:
        json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        missing = "there is none in it" if directory.is_dir() else "there is no such directory"
        reason = missing if isinstance(error, FileNotFoundError) else first_line(error)
        raise ConfigError(key, section.path, f"a model directory with a config.json ({reason})") from error
    if section.init == "pretrained" and not any(next(directory.glob(name), None) for name in WEIGHT_FILES):
        raise ConfigError(key, section.path, f"a directory with weights (model.safetensors), or {key}.init: random")


def check_on_hub(key: str, name: str, file: str) -> None:
    """Is there such a repository, in the cache or on the hub? One question with a short limit, no second try."""
    if is_local(name):
        return
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    expected = "an existing directory, or a hub id"
    try:
        if isinstance(try_to_load_from_cache(name, file), str):
            return
    except HFValidationError as error:
        raise ConfigError(key, name, f"{expected} ({first_line(error)})") from error
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
            answer[:] = [first_line(error)]

    # In a thread, because looking up a host's address knows no limit.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT_S + 0.5)
    return answer[0] if answer else None


def check_tokenizer(config: RunConfigFile) -> int | None:
    """How many tokens it has; None if it is on the hub and not here yet."""
    key, given = "data.tokenizer", config.data.tokenizer
    import transformers

    if given == "bytes":
        return len(transformers.ByT5Tokenizer(extra_ids=0))
    path = Path(local_path(given))
    if is_local(given) and not any(next(path.glob(name), None) for name in TOKENIZER_FILES):
        raise ConfigError(key, given, "a directory with a tokenizer (tokenizer.json), a hub id, or bytes")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name_or_path(given), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # tokenizer classes raise what they like
        if not is_local(given):
            return None
        raise ConfigError(key, given, f"a tokenizer that can be loaded ({first_line(error)})") from error
    if config.data.packing and tokenizer.eos_token_id is None and tokenizer.sep_token_id is None:
        raise ConfigError(key, given, "a tokenizer with an EOS or SEP token to end documents with, or packing: false")
    return len(tokenizer)


def check_model(key: str, section: ModelSection) -> Any:
    """The model's configuration; where it has been changed, a model that can be built from it."""
    return meta_model(key, section).config if section.init == "random" else _model_config(key, section)


# ---------------------------------------------------------------- configurations


def _model_config(key: str, section: ModelSection) -> Any:
    try:
        plain = _auto_config(section.path)
    except Exception as error:  # configuration classes raise what they like
        raise ConfigError(key, section.path, f"a model whose config.json can be used ({first_line(error)})") from error
    if not section.overrides:
        return plain
    known = sorted(name for name in {**vars(plain), **plain.to_dict()} if not name.startswith("_"))
    for name, value in section.overrides.items():
        if name not in known and not hasattr(plain, name):
            raise ConfigError(f"{key}.overrides.{name}", value, f"unknown; {nearest(name, known)}")
    try:
        return _auto_config(section.path, **section.overrides)
    except Exception as error:
        raise ConfigError(f"{key}.overrides", section.overrides, f"values it can take ({first_line(error)})") from error


def _auto_config(path: str, **overrides: Any) -> Any:
    """From a directory or the cache without a question to the network; asked only for what is not there."""
    from transformers import AutoConfig

    options = {"trust_remote_code": False, **overrides}
    try:
        return AutoConfig.from_pretrained(name_or_path(path), local_files_only=True, **options)
    except OSError:
        if is_local(path):
            raise
        return AutoConfig.from_pretrained(path, **options)
