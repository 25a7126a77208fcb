"""The student's own loss on the labels."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification

from silverspoon_ray.distillers.masks import IGNORED

# Losses that divide by num_items_in_batch when it is given. Others take the keyword and ignore it.
_DIVIDE_BY_ITEMS = (ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification)
_TOKEN_LEVEL_LOSSES = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration")


class TaskLossTraits:
    """What can be known of a student's loss from its class.

    Attributes:
        gives_loss: its forward takes ``labels`` and returns a loss.
        divides_by_items: that loss divides by ``num_items_in_batch`` when it is given.
        token_level: its logits have a position for every token; None: not known.
    """

    def __init__(self, model: nn.Module) -> None:
        unwrapped = model.get_base_model() if hasattr(model, "get_base_model") else model
        parameters = inspect.signature(unwrapped.forward).parameters
        self.gives_loss = "labels" in parameters
        self.takes_labels = self.gives_loss
        loss_type = getattr(unwrapped, "loss_type", None)
        encoder_decoder = bool(getattr(getattr(unwrapped, "config", None), "is_encoder_decoder", False))
        self.divides_by_items = (
            isinstance(unwrapped, PreTrainedModel)
            and LOSS_MAPPING.get(loss_type) in _DIVIDE_BY_ITEMS
            # Encoder-decoder classes compute their loss themselves, whatever the mapping says of their name.
            and not encoder_decoder
            and any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        )
        self.token_level: bool | None = None
        if isinstance(unwrapped, PreTrainedModel):
            self.token_level = loss_type in _TOKEN_LEVEL_LOSSES or encoder_decoder


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in float32 for a module that returns logits and no loss; label -100 is ignored.

    Args:
        logits: ``[..., classes]``.
        labels: integers of shape ``[...]``.
    """
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1), ignore_index=IGNORED)


def counted_labels(batch: Mapping[str, Any], shifts: bool) -> torch.Tensor | None:
    """How many labels the task loss averages over, as a 0-d integer tensor; None where labels are no integers.

    Args:
        batch: with ``labels``.
        shifts: causal language models never predict the first label.
    """
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return None
    if shifts and "shift_labels" not in batch:
        labels = labels[..., 1:]
    return (labels != IGNORED).sum()
