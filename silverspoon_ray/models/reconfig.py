"""A student of the teacher's class: the same architecture with other numbers in its configuration."""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from silverspoon_ray.errors import ConfigError

# What configurations and constructors of models raise about their values.
BUILD_ERRORS = (ValueError, TypeError, KeyError, RuntimeError, ZeroDivisionError, StrictDataclassError)


def reconfig_model(
    model: Any,
    name_or_path: str,
    diff: Mapping[str, Any] | None = None,
    copy_matching_weights: bool = False,
    freeze_copied_weights: bool = False,
    copy_layers: Sequence[int] | None = None,
) -> Any:
    """A new model of the same class, freshly initialised, whose configuration differs in ``diff``.

    The model given and its configuration are left as they are, and no memory is shared with it. The new one lies on the
    same device in the same dtypes, has a copy of the generation configuration, and is in training mode.

    Args:
        model: a transformers model.
        name_or_path: what the new configuration calls itself (``config.name_or_path``); nothing is read or written.
        diff: configuration keys and their new values. Keys of a nested configuration are dotted
            (``"text_config.hidden_size"``), or given as a mapping (``{"text_config": {"hidden_size": 64}}``). What the
            configuration does not derive anew stays: Llama's ``head_dim``, T5's ``num_decoder_layers``.
        copy_matching_weights: copy each parameter and saved buffer that has the same name and shape in both models.
        freeze_copied_weights: let those not be trained; needs ``copy_matching_weights``.
        copy_layers: where a stack of layers becomes shorter, or for another order: which of the given model's layers
            the new ones take their weights from, as many as the new model has, e.g. ``[0, 2, 5]``. None: those of the
            same number, so the first ones. Layers that store something only once (T5's position biases, in its first
            layer) keep it where it is. Lists with an entry per layer in the configuration follow.

    Raises:
        ConfigError: not a transformers model, an unknown key, values that make no model, or ``copy_layers`` that do not
            fit.
    """
    if freeze_copied_weights and not copy_matching_weights:
        raise ConfigError("freeze_copied_weights", True, "only together with copy_matching_weights=True")
    if copy_layers is not None and not copy_matching_weights:
        raise ConfigError("copy_layers", copy_layers, "only together with copy_matching_weights=True")
    if copy_layers is not None and not all(type(layer) is int for layer in copy_layers):
        raise ConfigError("copy_layers", copy_layers, "a list of layer numbers, counted from 0")
    new = new_model(model, name_or_path, diff, copy_layers)
    renamed = _layer_names(model, new, copy_layers)
    sources = model.state_dict(keep_vars=True)
    seen: set[int] = set()  # a tied weight comes under several names
    copied: set[int] = set()
    with torch.no_grad():
        for name, tensor in new.state_dict(keep_vars=True).items():
            source = sources.get(renamed(name), sources.get(name))
            if source is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            tensor.data = tensor.data.to(source.dtype)
            if copy_matching_weights and tensor.shape == source.shape:
                tensor.copy_(source)
                copied.add(id(tensor))
    for parameter in new.parameters():
        if freeze_copied_weights and id(parameter) in copied:
            parameter.requires_grad_(False)
    return new


def new_model(
    model: Any,
    name_or_path: str,
    diff: Mapping[str, Any] | None,
    layers: Sequence[int] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> Any:
    """A freshly initialised model of the same class, device and main dtype.

    Args:
        model, name_or_path, diff, layers: as in `reconfig_model`.
        fixed: further values for the configuration, of keys that it need not have yet.
    """
    if not isinstance(model, transformers.PreTrainedModel):
        raise ConfigError("model", type(model).__name__, "a transformers model (PreTrainedModel)")
    if not isinstance(name_or_path, str | os.PathLike):
        raise ConfigError("name_or_path", name_or_path, "a name or path for the new configuration")
    config = copy.deepcopy(model.config)
    _change(config, diff or {}, "", layers)
    config.name_or_path = os.fspath(name_or_path)
    for key, value in (fixed or {}).items():
        setattr(config, key, value)
    _check_heads(config)
    try:
        if hasattr(config, "validate"):
            config.validate()
        new = type(model)._from_config(config, dtype=model.dtype, attn_implementation=model.config._attn_implementation)
    except BUILD_ERRORS as error:
        reason = " ".join(str(error).split())
        raise ConfigError("diff", dict(diff or {}), f"values that make a {type(model).__name__} ({reason})") from error
    new.to(model.device)
    if getattr(model, "generation_config", None) is not None:
        new.generation_config = copy.deepcopy(model.generation_config)
    return new


def _check_heads(config: Any) -> None:
    """Key-value heads are shared by equal groups of heads; a model with other numbers is built, but cannot run."""
    heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        raise ConfigError("diff.num_key_value_heads", shared, f"a number that divides num_attention_heads={heads}")


def _change(config: Any, diff: Mapping[str, Any], path: str, layers: Sequence[int] | None) -> None:
    """Set the values of ``diff`` in a configuration of our own."""
    if not isinstance(diff, Mapping):
        raise ConfigError("diff", diff, "a mapping from configuration keys to values")
    before = _layer_count(config)
    for key, value in diff.items():
        name, _, rest = str(key).partition(".")
        inner = getattr(config, name, None) if isinstance(key, str) else None
        if isinstance(inner, transformers.PretrainedConfig) and (rest or isinstance(value, Mapping)):
            _change(inner, {rest: value} if rest else value, f"{path}{name}.", layers)
            continue
        known = _known_keys(config)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3)
            hint = f"; near are {', '.join(near)}" if near else ""
            raise ConfigError(f"diff.{path}{key}", value, f"{type(config).__name__} has no such key{hint}")
        try:
            setattr(config, key, copy.deepcopy(value))
        except BUILD_ERRORS as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"diff.{path}{key}", value, f"a value for it ({reason})") from error
    after = _layer_count(config)
    if before is not None and after is not None:
        _change_per_layer_lists(config, before, after, [key for key in diff if isinstance(key, str)], layers)


def _known_keys(config: Any) -> set[str]:
    settable = {
        name
        for base in type(config).__mro__
        for name, member in vars(base).items()
        if isinstance(member, property) and member.fset is not None and not name.startswith("_")
    }
    return (set(config.to_dict()) | set(config.attribute_map) | settable) - {"model_type", "transformers_version"}


def _layer_count(config: Any) -> int | None:
    count = getattr(config, "num_hidden_layers", None)
    return count if isinstance(count, int) else None


def _change_per_layer_lists(
    config: Any, before: int, after: int, given: Sequence[str], layers: Sequence[int] | None
) -> None:
    """Keep lists such as ``layer_types`` as long as the stack of layers, unless the user gave them."""
    for key, value in list(vars(config).items()):
        if not key.endswith("layer_types") or not isinstance(value, list | tuple) or len(value) != before:
            continue
        if key in given:
            continue
        if layers is not None and len(layers) == after and all(0 <= layer < before for layer in layers):
            setattr(config, key, [value[layer] for layer in layers])
        elif after <= before:
            setattr(config, key, list(value[:after]))
        else:  # what the configuration's own pattern says of the layers that are new
            fresh = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != key})
            setattr(config, key, [*value, *getattr(fresh, key)[before:]])


def _layer_names(model: nn.Module, new: nn.Module, copy_layers: Sequence[int] | None) -> Any:
    """A function from a name in the new model to the name its weight has in the model given."""
    if copy_layers is None:
        return lambda name: name
    chosen = list(copy_layers)
    old_stacks, new_stacks = layer_stacks(model), layer_stacks(new)
    lengths = {name: (len(stack), len(new_stacks[name])) for name, stack in old_stacks.items() if name in new_stacks}
    fitting = [name for name, (_, length) in lengths.items() if length == len(chosen)]
    shrinking = [name for name in fitting if lengths[name][0] != lengths[name][1]]
    fitting = shrinking or fitting  # in an encoder-decoder in which one side changes, the other stays as it is
    if not fitting:
        said = ", ".join(f"{name} has {length}" for name, (_, length) in lengths.items()) or "there are none"
        raise ConfigError("copy_layers", chosen, f"as many numbers as the new model has layers: {said}")
    depth = min(lengths[name][0] for name in fitting)
    if not all(0 <= layer < depth for layer in chosen):
        raise ConfigError("copy_layers", chosen, f"numbers from 0 to {depth - 1}, the layers of the model given")
    pattern = re.compile(rf"({'|'.join(map(re.escape, fitting))})\.(\d+)\.(.*)")

    def renamed(name: str) -> str:
        match = pattern.fullmatch(name)
        return f"{match[1]}.{chosen[int(match[2])]}.{match[3]}" if match else name

    return renamed


def layer_stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The outermost module lists by name: what a transformer keeps its layers in."""
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in stacks):
            stacks[name] = module
    return stacks
