"""A student cut out of the teacher: the same class, with the weakest heads, units and widths removed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.models.prune_graph import prune_by_graph
from silverspoon_ray.models.prune_layers import FAMILIES, kept_head_dim, prune_layers
from silverspoon_ray.models.reconfig import new_model


def prune_model(
    model: Any,
    name_or_path: str,
    diff: Mapping[str, Any] | None = None,
    example_inputs: Any = None,
    output_transform: Callable[..., Any] | None = None,
    ignored_layers: Sequence[nn.Module] | None = None,
    num_heads: Mapping[nn.Module, int] | None = None,
    out_channel_groups: Mapping[nn.Module, int] | None = None,
    forward_fn: Callable[..., Any] | None = None,
    round_to: int | None = None,
    freeze_copied_weights: bool = False,
) -> Any:
    """A smaller model of the same class that keeps the strongest parts of the one given.

    What is removed is decided by magnitude: of the units that can only go together (a head's rows in query, key and
    value and its columns in the output projection; an intermediate unit's rows and column; a hidden unit's entry
    everywhere), those whose weights have the smallest L2 norm. Layers are not judged: the first ones stay, as in
    silverspoon-kd; for others call `reconfig_model` with ``copy_layers`` first.

    Known architectures (Llama, Mistral, Qwen2, Qwen3, GPT-2, BERT, RoBERTa, ViT, DeiT) need nothing but ``diff``:

    - Fewer heads, also with grouped keys and values: whole groups go, or heads within each group. Where a
      configuration has no ``head_dim`` of its own and derives it (BERT, GPT-2), fewer heads at the same width are wider
      heads; the width gained starts without effect and can be trained. Llama's and ViT's keep their width.
    - Smaller intermediate size, fewer layers. (GPT-2's follows its width, four times, where ``n_inner`` is not set.)
    - Smaller width. Norms then see the kept units only; their gains are scaled by what the weights say of the share of
      the signal that is left. Removing units that are always zero is exact for RMSNorm up to its epsilon, for LayerNorm
      only as far as a token's values have mean zero. Heads narrower than before (BERT, GPT-2 and ViT where the width
      shrinks and the number of heads does not) lose their weakest dimensions; with rotary embeddings, where a
      dimension's place is its frequency, that is refused.
    - Removing heads, intermediate units or dimensions of heads whose weights are zero leaves the logits as they are.

    Any other transformers model is traced by torch-pruning (``pip install 'silverspoon-ray[prune]'``) with
    ``example_inputs``, and pruned to the shapes that the new configuration has, where its graph allows that.

    Args:
        model: a transformers model; it stays as it is and shares no memory with the result.
        name_or_path: the new configuration's ``name_or_path``; nothing is read or written.
        diff: configuration keys and their new values, as in `reconfig_model`.
        example_inputs: traced models: keyword arguments (a mapping), positional ones (a sequence) or one tensor.
        output_transform: traced models: picks tensors out of the output; None: all that depend on a parameter.
        ignored_layers: modules of ``model`` that must keep their size; an error where ``diff`` says otherwise.
        num_heads, out_channel_groups: traced models: modules whose output channels form so many equal blocks, from
            each of which equally many are removed. Known architectures say themselves how many heads they have.
        forward_fn: traced models: ``forward_fn(model, example_inputs)``; None: call the model with them.
        round_to: every size that changes must be a multiple of this.
        freeze_copied_weights: let the parameters that were taken over whole and unchanged not be trained.

    Returns:
        The new model, in evaluation mode, on the same device in the same dtypes; its configuration says the new sizes.

    Raises:
        ConfigError: sizes that cannot be reached by removing something, a model that is not known and comes without
            ``example_inputs``, or torch-pruning is needed and not installed.
    """
    family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
    fixed = {} if family is None else kept_head_dim(model, family, diff or {})
    new = new_model(model, name_or_path, diff, fixed=fixed)
    _check_sizes(model, new, diff or {}, ignored_layers or (), round_to)
    if family is not None:
        whole = prune_layers(model, new, family, diff or {})
    else:
        whole = prune_by_graph(
            model,
            new,
            diff=diff or {},
            example_inputs=example_inputs,
            output_transform=output_transform,
            blocks={**(num_heads or {}), **(out_channel_groups or {})},
            forward_fn=forward_fn,
        )
    if freeze_copied_weights:
        _freeze(new, whole)
    return new.eval()


def _freeze(new: nn.Module, whole: Collection[str]) -> None:
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(name not in whole)


def _check_sizes(
    model: nn.Module, new: nn.Module, diff: Mapping[str, Any], ignored: Sequence[nn.Module], round_to: int | None
) -> None:
    """Refuse what would grow, what must not change, and what is no multiple of ``round_to``."""
    names = {id(module): name for name, module in model.named_modules()}
    kept = []
    for module in ignored:
        if id(module) not in names:
            raise ConfigError("ignored_layers", type(module).__name__, "modules of the model that is pruned")
        kept.append(names[id(module)])
    old_shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, tensor in new.state_dict().items():
        shape = tuple(tensor.shape)
        old = old_shapes.get(name)
        if old is None:
            raise ConfigError("diff", dict(diff), f"nothing that the model does not have; {name} would be new")
        if old == shape:
            continue
        if len(old) != len(shape):
            raise ConfigError("diff", dict(diff), f"sizes only; {name} would be {shape} instead of {old}")
        for module in kept:
            if name.startswith(f"{module}.") or not module:
                raise ConfigError("ignored_layers", module, f"a layer that keeps its size; {name} is to be {shape}")
        changed = [size for size, before in zip(shape, old, strict=True) if size != before]
        if round_to is not None and any(size % round_to for size in changed):
            raise ConfigError("round_to", round_to, f"a divisor of the new sizes; {name} is to be {shape}")
