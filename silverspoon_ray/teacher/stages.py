"""How a model is cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from silverspoon_ray.errors import ConfigError

# Their layers hand on more than one hidden state: position biases made by the first.
REFUSED_TYPES = dict.fromkeys(
    ("t5", "mt5", "umt5", "longt5", "udop"), "its layers pass position biases besides the hidden state"
)


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        number: from 0.
        layers: dotted names of its layers, in order.
        bytes: of the parameters it holds.
    """

    number: int
    layers: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class PipelinePlan:
    """A model's stages.

    Attributes:
        stack: dotted name of the container of the layers.
        layers: dotted names of all layers, in the order in which they run.
        before: modules outside the layers that the first stage holds (embeddings).
        after: those that the last stage holds (norm, head).
        both: those among ``before`` that the last stage holds too. Where a module is defined does not say when it runs
            (OPT defines its last norm before its layers); what is no embedding may run behind the layers.
        stages: in order.
    """

    stack: str
    layers: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    both: tuple[str, ...]
    stages: tuple[Stage, ...]

    def stage_of(self, module: str) -> int:
        """The stage in which a module fires; a module that contains layers of several fires in the last."""
        for stage in self.stages:
            if any(_within(module, layer) for layer in stage.layers):
                return stage.number
        if any(_within(module, name) for name in self.before):
            return 0
        return len(self.stages) - 1


def plan_pipeline(model: nn.Module, num_stages: int, key: str = "num_devices") -> PipelinePlan:
    """Cut a model so that the heaviest stage is as light as it can be.

    The layers are those of the heaviest ``ModuleList`` or ``Sequential``. What is defined before them belongs to the
    first stage, what is defined after them to the last; both count.

    Args:
        model: the model or its structure.
        num_stages: how many stages.
        key: names the number in errors.

    Raises:
        ConfigError: the model has no stack of layers, fewer layers than stages, or layers that pass more than a hidden
            state.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if num_stages > 1 and model_type in REFUSED_TYPES:
        raise ConfigError(key, num_stages, f"1 for {type(model).__name__}: {REFUSED_TYPES[model_type]}")
    stack = _heaviest_stack(model, num_stages, key)
    container = model.get_submodule(stack)
    layers = tuple(f"{stack}.{name}" if stack else name for name, _ in container.named_children())
    if len(layers) < num_stages:
        raise ConfigError(key, num_stages, f"at most {len(layers)}, the number of layers in {stack or 'the model'}")
    before, after = _around(model, stack)
    weights = [parameter_bytes(model.get_submodule(layer)) for layer in layers]
    first = sum(parameter_bytes(model.get_submodule(name)) for name in before)
    both = tuple(name for name in before if not _embeds(model.get_submodule(name)))
    last = sum(parameter_bytes(model.get_submodule(name)) for name in (*after, *both))
    stages, start = [], 0
    for number, count in enumerate(balanced(weights, num_stages, first, last)):
        own = sum(weights[start : start + count])
        own += first if number == 0 else 0
        own += last if number == num_stages - 1 else 0
        stages.append(Stage(number, layers[start : start + count], own))
        start += count
    return PipelinePlan(stack, layers, before, after, both, tuple(stages))


def balanced(weights: Sequence[int], parts: int, first: int = 0, last: int = 0) -> list[int]:
    """Cut a row of weights into consecutive parts, none of them empty, so that the heaviest is as light as possible.

    Args:
        weights: in order.
        parts: how many.
        first, last: extra weight of the first and the last part.

    Returns:
        how many weights each part gets.
    """
    sums = [0, *accumulate(weights)]
    count = len(weights)
    # best[k][n]: the lightest heaviest part when the first n weights are cut into k parts.
    best = [[float("inf")] * (count + 1) for _ in range(parts + 1)]
    cut = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0
    for part in range(1, parts + 1):
        extra = (first if part == 1 else 0) + (last if part == parts else 0)
        for end in range(part, count - (parts - part) + 1):
            for start in range(part - 1, end):
                heaviest = max(best[part - 1][start], sums[end] - sums[start] + extra)
                if heaviest < best[part][end]:
                    best[part][end], cut[part][end] = heaviest, start
    counts, end = [], count
    for part in range(parts, 0, -1):
        counts.append(end - cut[part][end])
        end = cut[part][end]
    return counts[::-1]


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, tied ones once."""
    tensors: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _heaviest_stack(model: nn.Module, num_stages: int, key: str) -> str:
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0:
            found[name] = parameter_bytes(module)
    outermost = {name: size for name, size in found.items() if not any(_within(name, o) for o in found if o != name)}
    encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    if encoder_decoder:
        # A decoder's layers all need the encoder's output: they stay together.
        outermost = {name: size for name, size in outermost.items() if "decoder" not in name.split(".")}
    if not outermost:
        raise ConfigError(key, num_stages, f"1; {type(model).__name__} has no ModuleList or Sequential to cut")
    return max(outermost, key=lambda name: outermost[name])


def _around(model: nn.Module, stack: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The largest modules outside the stack, by whether they are defined before or after it."""
    before, after = [], []
    path = stack.split(".") if stack else []
    for depth in range(len(path)):
        parent = ".".join(path[:depth])
        seen = False
        for name, _ in model.get_submodule(parent).named_children():
            full = f"{parent}.{name}" if parent else name
            if name == path[depth]:
                seen = True
            elif seen:
                after.append(full)
            else:
                before.append(full)
    return tuple(before), tuple(after)


def _embeds(module: nn.Module) -> bool:
    """It makes hidden states out of the model's inputs, or holds another stack of layers."""
    kinds = nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ModuleList | nn.Sequential
    return any(isinstance(part, kinds) for part in module.modules())


def _within(module: str, container: str) -> bool:
    return module == container or module.startswith(f"{container}.")


def modules_below(model: nn.Module, names: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """The named modules and everything in them, with full names."""
    for name in names:
        for inner, module in model.get_submodule(name).named_modules():
            yield (f"{name}.{inner}" if inner else name), module
