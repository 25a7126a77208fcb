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

_TOKEN_LEVEL_LOSSES = (ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification)


class TaskLossTraits:
    """What can be known of a student's loss from its class.

    Attributes:
        gives_loss: its forward takes ``labels`` and returns a loss.
        shifts_labels: it is a causal language model: the logits at position t are scored with label t+1.
        token_level: its logits have a position for every token; None: not known.
        cross_entropy: that loss is the mean cross-entropy of its logits over labels that are not -100, whatever
            else the model may add to it.
        encoder_decoder: its logits belong to the decoder's positions.
    """

    def __init__(self, model: nn.Module) -> None:
        get_base: Any = getattr(model, "get_base_model", None)  # of a PEFT wrapper
        unwrapped = get_base() if get_base is not None else model
        self.gives_loss = "labels" in inspect.signature(unwrapped.forward).parameters
        self.shifts_labels = False
        self.token_level: bool | None = None
        self.cross_entropy = False
        self.encoder_decoder = bool(getattr(getattr(unwrapped, "config", None), "is_encoder_decoder", False))
        if not isinstance(unwrapped, PreTrainedModel):
            return
        loss = LOSS_MAPPING.get(_loss_type(unwrapped))
        self.cross_entropy = loss in (ForCausalLMLoss, ForMaskedLMLoss) and not self.encoder_decoder
        self.shifts_labels = loss is ForCausalLMLoss and not self.encoder_decoder
        if loss is not None or self.encoder_decoder:
            self.token_level = loss is None or loss in _TOKEN_LEVEL_LOSSES


def _loss_type(model: PreTrainedModel) -> str | None:
    """The name of the model's loss in transformers' table, None where it has one of its own making.

    transformers reads it off the class name, which fails for GPT2LMHeadModel and its like: their ``loss_type`` is None,
    and ``loss_function`` then gives the causal loss to whoever asks for it, as the forward of these classes does.
    """
    loss_type: str | None = getattr(model, "loss_type", None)
    if loss_type is None:
        code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
        return "ForCausalLM" if code is not None and "loss_function" in code.co_names else None
    return loss_type


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in float32 for a module that returns logits and no loss; label -100 is ignored.

    Args:
        logits: ``[..., classes]``.
        labels: integers of shape ``[...]``.
    """
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1), ignore_index=IGNORED)


def labels_by_row(batch: Mapping[str, Any], shifts: bool) -> torch.Tensor:
    """The label of each row of logits, ``[batch, positions]``: for causal language models that of the next position."""
    labels: torch.Tensor = batch["shift_labels" if "shift_labels" in batch else "labels"]
    if not shifts or "shift_labels" in batch:
        return labels
    return torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], IGNORED)], dim=-1)


def counted_labels(batch: Mapping[str, Any], shifts: bool) -> torch.Tensor | None:
    """How many labels the task loss averages over, as a 0-d integer tensor; None where there are no labels.

    Labels of a floating dtype (regression, multi-label classification) have no ignored value: every sample counts.

    Args:
        batch: with ``labels``.
        shifts: causal language models never predict the first label.
    """
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, torch.Tensor):
        return None
    if labels.is_floating_point():
        return torch.tensor(len(labels), device=labels.device)
    if shifts and "shift_labels" not in batch:
        labels = labels[..., 1:]
    return (labels != IGNORED).sum()
