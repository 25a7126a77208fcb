"""Pruning of transformers whose layers we know: which rows and columns belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.models.reconfig import layer_stacks


@dataclass(frozen=True)
class Family:
    """Where the parts of a layer are, by their names within it.

    Attributes:
        stack: the last part of the name of the list of layers.
        attention: the module that knows ``head_dim`` (or ``attention_head_size``) and ``scaling``.
        inputs: the projections to queries, keys and values, or the one that is all three.
        output: the projection of the heads' results.
        up: the projections to the intermediate units.
        down: the projection back.
        rotary: whether a dimension's place in a head is its frequency.
        own_head_dim: whether ``config.head_dim`` is honoured.
    """

    stack: str
    attention: str
    inputs: tuple[str, ...]
    output: str
    up: tuple[str, ...]
    down: str
    rotary: bool = False
    own_head_dim: bool = False


_LLAMA = Family(
    stack="layers",
    attention="self_attn",
    inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    rotary=True,
    own_head_dim=True,
)
_BERT = Family(
    stack="layer",
    attention="attention.self",
    inputs=("attention.self.query", "attention.self.key", "attention.self.value"),
    output="attention.output.dense",
    up=("intermediate.dense",),
    down="output.dense",
)
_VIT = Family(
    stack="layers",
    attention="attention",
    inputs=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    output="attention.o_proj",
    up=("mlp.fc1",),
    down="mlp.fc2",
    own_head_dim=True,
)
_GPT2 = Family("h", "attn", ("attn.c_attn",), "attn.c_proj", ("mlp.c_fc",), "mlp.c_proj")
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    **dict.fromkeys(("bert", "roberta"), _BERT),
    **dict.fromkeys(("vit", "deit"), _VIT),
    "gpt2": _GPT2,
}


@dataclass(frozen=True)
class _Map:
    """Views of a linear layer: weight ``[out, in]``, bias ``[out]`` or None. Writing to them writes to the layer."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def out_energy(self) -> torch.Tensor:
        """Squared L2 norm per output, bias included."""
        energy = self.weight.double().square().sum(1)
        return energy if self.bias is None else energy + self.bias.double().square()

    def in_energy(self) -> torch.Tensor:
        return self.weight.double().square().sum(0)


@dataclass(frozen=True)
class _Layer:
    """A layer's linear maps, and how its heads are made."""

    query: _Map
    key: _Map
    value: _Map
    output: _Map
    up: tuple[_Map, ...]
    down: _Map
    head_dim: int
    scaling: float


@dataclass(frozen=True)
class _Heads:
    """What stays of an attention: indices into the old rows and columns, -1 where there is no old one."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor


def kept_head_dim(model: Any, family: Family, diff: Mapping[str, Any]) -> dict[str, int]:
    """``head_dim`` for the new configuration, where deriving it anew would make heads of another width."""
    if not family.own_head_dim or "head_dim" in diff or getattr(model.config, "head_dim", None) is not None:
        return {}
    if not family.rotary and ("hidden_size" in diff or "num_attention_heads" not in diff):
        return {}
    return {"head_dim": model.config.hidden_size // model.config.num_attention_heads}


@torch.no_grad()
def prune_layers(model: Any, new: Any, family: Family, diff: Mapping[str, Any]) -> set[str]:
    """Fill ``new`` with the strongest parts of ``model``.

    Args:
        model: of that family.
        new: freshly initialised, with the new sizes; its first layers' weights come from the model's first layers.
        family: where the parts are.
        diff: for error messages.

    Returns:
        The names of the parameters that were taken over whole and unchanged.

    Raises:
        ConfigError: a size that cannot be reached by removing something.
    """
    name, stack = _stack(model, family)
    new_stack = new.get_submodule(name)
    sources = model.state_dict(keep_vars=True)
    for key, tensor in new.state_dict(keep_vars=True).items():
        tensor.data = tensor.data.to(sources[key].dtype)
    old_layers = [_layer(layer, family) for layer in list(stack)[: len(new_stack)]]
    new_layers = [_layer(layer, family) for layer in new_stack]
    parts = (*family.inputs, family.output, *family.up, family.down)
    known = {id(p) for layer in new_stack for part in parts for p in layer.get_submodule(part).parameters()}
    others: dict[str, torch.Tensor] = {}  # a tied weight under its first name only
    for key, tensor in new.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            known.add(id(tensor))
            others[key] = tensor
    widths = (model.config.hidden_size, new.config.hidden_size)
    if widths[1] > widths[0]:
        raise _refused(diff, f"a hidden size of {widths[0]} or less")
    axes = {key: _hidden_axes(key, sources[key], tensor, widths, f"{name}.", diff) for key, tensor in others.items()}
    hidden = None
    gain = 1.0
    if widths[0] != widths[1]:
        changed = [(sources[key], axes[key]) for key in others]
        hidden, gain = _hidden_units(old_layers, changed, *widths)
    plans = [_heads(old, target, family, diff) for old, target in zip(old_layers, new_layers, strict=True)]
    for old, target, heads in zip(old_layers, new_layers, plans, strict=True):
        units = _strongest(
            sum((up.out_energy() for up in old.up), old.down.in_energy()), target.down.weight.shape[1], diff
        )
        scale = old.scaling / target.scaling
        _write(target.query, old.query, heads.query, hidden, scale=scale)
        _write(target.key, old.key, heads.key, hidden, empty=0.0)
        _write(target.value, old.value, heads.value, hidden)
        _write(target.output, old.output, hidden, heads.output, empty=0.0)
        for up, old_up in zip(target.up, old.up, strict=True):
            _write(up, old_up, units, hidden)
        _write(target.down, old.down, hidden, units)
    norms = {f"{key}.weight" for key, module in new.named_modules() if _is_norm(module)}
    for key, tensor in others.items():
        value = sources[key]
        for axis in axes[key]:
            value = _picked(value, axis, hidden)
        tensor.copy_(value * gain if axes[key] and key in norms else value)
    return {
        key
        for key, parameter in new.named_parameters()
        if sources[key].shape == parameter.shape and torch.equal(sources[key], parameter)
    }


def _stack(model: nn.Module, family: Family) -> tuple[str, nn.ModuleList]:
    for name, stack in layer_stacks(model).items():
        if name.rpartition(".")[2] == family.stack:
            return name, stack
    raise ConfigError("model", type(model).__name__, f"a model with a list of layers called {family.stack}")


def _layer(layer: nn.Module, family: Family) -> _Layer:
    inputs = [_view(layer.get_submodule(name)) for name in family.inputs]
    if len(inputs) == 1:  # one projection whose rows are queries, keys, values, in this order
        (joined,) = inputs
        biases = (None,) * 3 if joined.bias is None else joined.bias.chunk(3)
        inputs = [_Map(weight, bias) for weight, bias in zip(joined.weight.chunk(3), biases, strict=True)]
    query, key, value = inputs
    attention: Any = layer.get_submodule(family.attention)
    return _Layer(
        query=query,
        key=key,
        value=value,
        output=_view(layer.get_submodule(family.output)),
        up=tuple(_view(layer.get_submodule(name)) for name in family.up),
        down=_view(layer.get_submodule(family.down)),
        head_dim=getattr(attention, "head_dim", None) or attention.attention_head_size,
        scaling=float(attention.scaling),
    )


def _view(module: Any) -> _Map:
    weight = module.weight.detach()
    return _Map(
        weight.T if isinstance(module, Conv1D) else weight, None if module.bias is None else module.bias.detach()
    )


def _heads(old: _Layer, new: _Layer, family: Family, diff: Mapping[str, Any]) -> _Heads:
    """Choose heads and, where they get narrower, dimensions within them."""
    width, new_width = old.head_dim, new.head_dim
    groups, new_groups = old.key.weight.shape[0] // width, new.key.weight.shape[0] // new_width
    heads, new_heads = old.query.weight.shape[0] // width, new.query.weight.shape[0] // new_width
    if width != new_width and family.rotary:
        raise _refused(diff, f"heads {width} wide, as with rotary embeddings a dimension's place is its frequency")
    each, new_each = heads // groups, new_heads // new_groups
    if new_groups > groups or new_each > each:
        raise _refused(
            diff,
            f"no more than {groups} key-value heads with {each} query heads each; "
            f"{new_heads} heads over {new_groups} would be {new_each} each",
        )
    queries = old.query.out_energy().view(groups, each, width)
    outputs = old.output.in_energy().view(groups, each, width)
    keys, values = old.key.out_energy().view(groups, width), old.value.out_energy().view(groups, width)
    per_head, chosen = (queries + outputs).sum(-1).topk(new_each, dim=1)  # [groups, new_each]
    kept = (per_head.sum(1) + keys.sum(1) + values.sum(1)).topk(new_groups).indices.sort().values
    picked: dict[str, list[torch.Tensor]] = {"query": [], "key": [], "value": [], "output": []}
    for group in kept.tolist():
        members = chosen[group].sort().values
        scored = _dimensions(queries[group, members].sum(0) + keys[group], new_width)
        mixed = _dimensions(outputs[group, members].sum(0) + values[group], new_width)
        for member in members.tolist():
            picked["query"].append(_placed(scored, (group * each + member) * width))
            picked["output"].append(_placed(mixed, (group * each + member) * width))
        picked["key"].append(_placed(scored, group * width))
        picked["value"].append(_placed(mixed, group * width))
    return _Heads(**{role: torch.cat(indices) for role, indices in picked.items()})


def _dimensions(energy: torch.Tensor, width: int) -> torch.Tensor:
    """The strongest ``width`` dimensions of a head in their order, or all of them and -1 for those it gains."""
    if width <= len(energy):
        return energy.topk(width).indices.sort().values
    return torch.cat([torch.arange(len(energy)), torch.full((width - len(energy),), -1)]).to(energy.device)


def _placed(dimensions: torch.Tensor, start: int) -> torch.Tensor:
    return torch.where(dimensions < 0, dimensions, dimensions + start)


def _hidden_axes(
    key: str, old: torch.Tensor, new: torch.Tensor, widths: tuple[int, int], layers: str, diff: Mapping[str, Any]
) -> list[int]:
    """Which dimensions of a tensor are the hidden units that change in number."""
    axes = [axis for axis, (a, b) in enumerate(zip(old.shape, new.shape, strict=True)) if a != b]
    if axes and not (
        all((old.shape[axis], new.shape[axis]) == widths for axis in axes) and (old.dim() == 1 or layers not in key)
    ):
        raise _refused(
            diff, f"heads, layers, intermediate or hidden size; {key} would go from {tuple(old.shape)} to "
            f"{tuple(new.shape)}, for which reconfig_model starts anew"
        )  # fmt: skip
    return axes


def _hidden_units(
    layers: Sequence[_Layer], others: Sequence[tuple[torch.Tensor, list[int]]], width: int, new_width: int
) -> tuple[torch.Tensor, float]:
    """The strongest hidden units, and what norms' gains are multiplied with so that signals keep their scale.

    A norm divides by the root of the mean square over the units. If the kept ones hold the share r of the sum of
    squares, that root changes by ``sqrt(r * width / new_width)``. We estimate r from the weights that write to the
    units: embeddings, and the output and down projections.
    """
    writing = [m.weight.double().square().sum(1) for layer in layers for m in (layer.output, layer.down)]
    reading = [m.in_energy() for layer in layers for m in (layer.query, layer.key, layer.value, *layer.up)]
    for tensor, axes in others:
        for axis in axes if tensor.dim() > 1 else ():
            energy = tensor.double().square().sum([d for d in range(tensor.dim()) if d != axis])
            # Tables and kernels write (embeddings, patches, positions); square matrices belong to a head at the end.
            (writing if axes == [tensor.dim() - 1] or tensor.dim() > 2 else reading).append(energy)
    total = sum([*writing, *reading], torch.zeros(width, dtype=torch.float64, device=writing[0].device))
    hidden = total.topk(new_width).indices.sort().values
    shares = [float(energy[hidden].sum() / energy.sum()) for energy in writing if energy.sum() > 0]
    share = sum(shares) / len(shares) if shares else new_width / width
    return hidden, float((share * width / new_width) ** 0.5)


def _strongest(energy: torch.Tensor, count: int, diff: Mapping[str, Any]) -> torch.Tensor:
    if count > len(energy):
        raise _refused(diff, f"{len(energy)} intermediate units or fewer, not {count}")
    return energy.topk(count).indices.sort().values


def _write(
    new: _Map,
    old: _Map,
    rows: torch.Tensor | None,
    columns: torch.Tensor | None,
    scale: float = 1.0,
    empty: float | None = None,
) -> None:
    """Copy rows and columns; None for all, -1 for one that is ``empty``, or left as it was initialised."""
    weight = _picked(old.weight, 0, rows)
    weight = _picked(weight, 1, columns) * scale
    fresh = torch.zeros_like(new.weight, dtype=torch.bool)
    if rows is not None:
        fresh |= (rows < 0)[:, None]
    if columns is not None:
        fresh |= (columns < 0)[None, :]
    new.weight.copy_(torch.where(fresh, new.weight if empty is None else torch.full_like(new.weight, empty), weight))
    if old.bias is not None and new.bias is not None:
        bias = _picked(old.bias, 0, rows) * scale
        new.bias.copy_(bias if rows is None else torch.where(rows < 0, torch.zeros_like(bias), bias))


def _picked(tensor: torch.Tensor, axis: int, indices: torch.Tensor | None) -> torch.Tensor:
    return tensor if indices is None else tensor.index_select(axis, indices.clamp(min=0))


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm")


def _refused(diff: Mapping[str, Any], expected: str) -> ConfigError:
    return ConfigError("diff", dict(diff), expected)
