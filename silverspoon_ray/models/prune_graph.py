"""Pruning of models that we do not know, along the graph that torch-pruning traces.

torch-pruning (Fang et al., 2023, "DepGraph: Towards Any Structural Pruning") finds which channels of which layers can
only be removed together. How many are removed comes from the shapes of the new model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from silverspoon_ray.errors import ConfigError

INSTALL = "pip install 'silverspoon-ray[prune]'"


def prune_by_graph(
    model: Any,
    new: Any,
    *,
    diff: Mapping[str, Any],
    example_inputs: Any,
    output_transform: Callable[..., Any] | None,
    blocks: Mapping[nn.Module, int],
    forward_fn: Callable[..., Any] | None,
) -> set[str]:
    """Fill ``new`` with the strongest channels of ``model``; where only layers are left out, nothing is traced.

    Args:
        model: stays as it is.
        new: the same class, with the new sizes.
        diff: for error messages.
        example_inputs, output_transform, forward_fn: as in `prune_model`.
        blocks: modules of ``model`` whose output channels form so many equal blocks.

    Returns:
        The names of the parameters that were taken over whole.

    Raises:
        ConfigError: torch-pruning or example inputs are missing, or the graph has no way to these shapes.
    """
    old_shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, tensor in new.state_dict().items():
        if any(size > old for size, old in zip(tensor.shape, old_shapes[name], strict=True)):
            raise ConfigError(
                "diff",
                dict(diff),
                f"smaller sizes; {name} would go from {tuple(old_shapes[name])} to {tuple(tensor.shape)}",
            )
    whole = {name for name, parameter in new.named_parameters() if parameter.shape == old_shapes[name]}
    pruned = model
    if any(tensor.shape != old_shapes[name] for name, tensor in new.state_dict().items()):
        pruned = _pruned(model, new, diff, example_inputs, output_transform, blocks, forward_fn)
    sources = pruned.state_dict()
    wrong = [name for name, tensor in new.state_dict().items() if sources[name].shape != tensor.shape]
    if wrong:
        said = ", ".join(f"{n} {tuple(sources[n].shape)} not {tuple(new.state_dict()[n].shape)}" for n in wrong[:3])
        raise ConfigError(
            "diff",
            dict(diff),
            f"sizes that go together in this model; after pruning {len(wrong)} tensors do not fit: {said}",
        )
    with torch.no_grad():
        for name, tensor in new.state_dict(keep_vars=True).items():
            tensor.data = tensor.data.to(sources[name].dtype)
            tensor.copy_(sources[name])
    return whole


def _pruned(
    model: Any,
    new: Any,
    diff: Mapping[str, Any],
    example_inputs: Any,
    output_transform: Callable[..., Any] | None,
    blocks: Mapping[nn.Module, int],
    forward_fn: Callable[..., Any] | None,
) -> Any:
    """A copy of the model without the channels that are too many."""
    if example_inputs is None:
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise ConfigError(
            "example_inputs", None, f"inputs of the model's forward: {kind} has to be traced to be pruned"
        )
    try:
        import torch_pruning
    except ImportError as error:
        raise ConfigError("model", type(model).__name__, f"torch-pruning for this architecture: {INSTALL}") from error
    names = {id(module): name for name, module in model.named_modules()}
    unknown = [type(module).__name__ for module in blocks if id(module) not in names]
    if unknown:
        raise ConfigError("num_heads", unknown, "modules of the model that is pruned")
    counts = {names[id(module)]: count for module, count in blocks.items()}
    pruned = copy.deepcopy(model).eval().requires_grad_(True)
    if hasattr(pruned.config, "use_cache"):
        pruned.config.use_cache = False  # a cache in the output is no tensor, and nothing depends on it
    _shorten(pruned, new)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that parameters outside layers are pruned in their last dimension
        graph = torch_pruning.DependencyGraph().build_dependency(
            pruned,
            example_inputs=example_inputs,
            forward_fn=forward_fn or _call,
            output_transform=output_transform or _tensors,
            verbose=False,
        )
    importance = torch_pruning.importance.GroupMagnitudeImportance(p=2)
    for name, module in list(pruned.named_modules()):
        if isinstance(module, nn.Conv2d) and module.groups == module.out_channels > 1:
            continue  # depthwise: its channels are those of the layer before
        if isinstance(module, nn.Linear | nn.Conv2d):
            removed = module.weight.shape[0] - new.get_submodule(name).weight.shape[0]
            if removed > 0:
                _remove(graph, torch_pruning, importance, module, removed, counts.get(name, 1), diff, name)
    return pruned


def _remove(
    graph: Any, library: Any, importance: Any, module: Any, count: int, blocks: int, diff: Mapping[str, Any], name: str
) -> None:
    """Remove the weakest ``count`` output channels, equally many of each block, with all that depends on them."""
    conv = isinstance(module, nn.Conv2d)
    prune = library.prune_conv_out_channels if conv else library.prune_linear_out_channels
    channels = module.weight.shape[0]
    blocks = max(blocks, module.groups if conv else 1)
    if channels % blocks or count % blocks:
        raise ConfigError("diff", dict(diff), f"equally many channels from each of the {blocks} blocks of {name}")
    scores = importance(graph.get_pruning_group(module, prune, idxs=list(range(channels))))
    weakest = scores.view(blocks, -1).argsort(dim=1)[:, : count // blocks]
    offsets = torch.arange(blocks, device=weakest.device)[:, None] * (channels // blocks)
    group = graph.get_pruning_group(module, prune, idxs=sorted((weakest + offsets).flatten().tolist()))
    if not graph.check_pruning_group(group):
        raise ConfigError("diff", dict(diff), f"a size that leaves channels in everything that depends on {name}")
    group.prune()


def _shorten(pruned: nn.Module, new: nn.Module) -> None:
    """Leave out the layers that the new model does not have, the last ones of each list."""
    theirs = dict(new.named_modules())
    for name, module in list(pruned.named_modules()):
        other = theirs.get(name)
        if isinstance(module, nn.ModuleList | nn.Sequential) and other is not None:
            for _ in range(len(module) - len(other)):
                del module[-1]


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, Sequence) else model(inputs)


def _tensors(output: Any) -> list[torch.Tensor]:
    """Every tensor in an output that depends on a parameter."""
    if isinstance(output, torch.Tensor):
        return [output] if output.grad_fn is not None else []
    if isinstance(output, Mapping):
        output = list(output.values())
    return [tensor for part in output for tensor in _tensors(part)] if isinstance(output, list | tuple) else []
