"""A model's output head: the linear layer that turns the last hidden state into logits, and what comes after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from silverspoon_ray.capture import named_module
from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.head import OutputHead

# How far logits may be from what the head gives, over the largest of them. Half precision rounds at 2^-8; a scale or
# soft cap that was missed shows far above both.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF_TOLERANCE = 3e-2


def output_head_name(model: nn.Module, given: str | None = None) -> str | None:
    """Dotted name of the model's output head, a plain linear layer; None where it has none.

    Args:
        model: the model or its structure.
        given: a name that decides; else it is what transformers calls the model's output embeddings.

    Raises:
        ConfigError: the given name is no linear layer of the model.
    """
    if given is not None:
        if not is_linear(named_module(model, given, "output_head_layer")):
            found = type(model.get_submodule(given)).__name__
            raise ConfigError("output_head_layer", given, f"the name of an nn.Linear; this is a {found}")
        return given
    get: Any = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if head is None or not is_linear(head):
        return None
    return next((name for name, module in model.named_modules() if module is head), None)


def is_linear(module: nn.Module) -> bool:
    """It multiplies with a weight and adds a bias, and does nothing else (as LoRA or a quantised layer would)."""
    return type(module) is nn.Linear and not getattr(module, "_hf_hook", None)


def output_head(model: nn.Module, name: str) -> OutputHead:
    """The head with the model's own weights, and the scale and soft cap that its configuration names.

    Args:
        model: the model, with the weights of its head.
        name: see :func:`output_head_name`.
    """
    layer: Any = model.get_submodule(name)
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = 1.0
    if getattr(text, "logits_scaling", None):  # Granite
        scale = 1.0 / float(text.logits_scaling)
    elif isinstance(getattr(text, "logit_scale", None), int | float):  # Cohere
        scale = float(text.logit_scale)
    cap = getattr(text, "final_logit_softcapping", None) or getattr(text, "logits_soft_cap", None)  # Gemma
    weight, bias = (
        tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in (layer.weight, layer.bias)
    )
    return OutputHead(
        weight=weight,
        bias=bias,
        scale=scale,
        softcap=float(cap) if cap else None,
    )


def explains(head: OutputHead, hidden: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether the model's logits are what the head makes of its hidden states, judged at the position of the largest.

    Args:
        head: the head.
        hidden: what the head's layer was called with, ``[..., H]``.
        logits: the model's, ``[..., V]``.
    """
    if logits.shape != (*hidden.shape[:-1], head.classes):  # fewer classes would be more behind the head, too
        return False
    if hidden.numel() == 0:
        return True
    rows = logits.reshape(-1, head.classes)
    # A soft cap shows least where logits are small; positions of padding may hold anything.
    low, high = (edge.nan_to_num(0.0, 0.0, 0.0) for edge in rows.aminmax(dim=-1))
    place = torch.maximum(high, -low).argmax()
    row = hidden.reshape(-1, hidden.shape[-1])[place, None]
    expected = head.to(row.device, row.dtype).logits(row).double()
    found = rows[place, None].double()
    narrower = max(TOLERANCE.get(dtype, HALF_TOLERANCE) for dtype in (row.dtype, logits.dtype))
    same = expected == found  # classes that a bias of -inf bans have no difference
    scale = torch.cat([expected, found]).nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1e-6)
    return bool(((expected - found).masked_fill(same, 0.0).abs().max() <= narrower * scale).item())
