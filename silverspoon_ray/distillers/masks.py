"""Which positions of a batch count in a distillation loss.

Padding and ignored positions never enter a loss. What counts is read off the batch itself, before any forward, so that
the denominator over all micro-batches and ranks is known when the first of them is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from silverspoon_ray.errors import ConfigError

IGNORED = -100
"""The label of positions that no loss sees, as everywhere in transformers."""


@dataclass(frozen=True)
class PositionRule:
    """How to read the counted positions off a batch.

    Args:
        mode: ``distill_mask``: ``"auto"``, ``"labels"``, ``"attention"`` or ``"none"``.
        shifts: the student is a causal language model: its logits at position t predict label t+1, so they count
            where that label does, and the last position never counts.
        token_level: the logits have a position for every token; False: one row for each sample (classification);
            None: not known from the model, the labels decide.
        encoder_decoder: the logits belong to the decoder's positions, ``attention_mask`` to the encoder's.
    """

    mode: str = "auto"
    shifts: bool = False
    token_level: bool | None = None
    encoder_decoder: bool = False

    def without_padding(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The batch with labels ignored that lie on padding or, for a causal model, are predicted from padding.

        The logits of padding before a sample's first token would otherwise be scored on that token, while without
        the padding nothing predicts it. With ``"none"`` the batch is left as it is.
        """
        attention = self._attention(batch)
        if self.mode == "none" or attention is None or not self._is_token_level(batch):
            return batch
        real = attention != 0
        predicted_from_real = torch.cat([real[:, :1], real[:, 1:] & real[:, :-1]], dim=1) if self.shifts else real
        cleaned = {}
        for key, counted in (("labels", predicted_from_real), ("shift_labels", real)):
            labels = batch.get(key)
            if isinstance(labels, torch.Tensor) and labels.shape == counted.shape:
                cleaned[key] = labels.masked_fill(~counted, IGNORED)
        return {**batch, **cleaned} if cleaned else batch

    def mask(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """Boolean, ``[batch, positions]`` or ``[batch]``; None: everything counts.

        Raises:
            ConfigError: ``distill_mask="labels"`` and the batch has none that could say it.
        """
        if self.mode == "none":
            return None
        if self.mode in ("auto", "labels"):
            found = self._from_labels(batch)
            if found is not None or self._labels(batch) is not None:
                return found
            if self.mode == "labels":
                raise ConfigError("distill_mask", "labels", "batches with `labels`; these have " + ", ".join(batch))
        return self._from_attention(batch)

    def decoder_positions(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """Which of a decoder's positions may count where its inputs are made from the labels: those up to the last
        label. Boolean, ``[batch, positions]``; None: not known, or there is no such decoder."""
        labels = batch.get("labels")
        made = self.encoder_decoder and "decoder_input_ids" not in batch and "shift_labels" not in batch
        if not made or self.mode not in ("auto", "labels") or not isinstance(labels, torch.Tensor) or labels.dim() != 2:
            return None
        counted = labels != IGNORED
        return counted.flip(1).cumsum(1).flip(1) > 0

    def positions(self, batch: Mapping[str, Any]) -> int:
        """How many rows of logits the batch has, counted or not; samples where that cannot be seen."""
        for key in ("decoder_input_ids", "labels", "input_ids", "attention_mask"):
            value = batch.get(key)
            if isinstance(value, torch.Tensor) and value.dim() >= 2 and self._is_token_level(batch):
                return value.shape[0] * value.shape[1]
        return next((v.shape[0] for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 0), 1)

    def _labels(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        labels = batch.get("shift_labels", batch.get("labels"))
        return labels if isinstance(labels, torch.Tensor) else None

    def _is_token_level(self, batch: Mapping[str, Any]) -> bool:
        if self.token_level is not None:
            return self.token_level
        labels = self._labels(batch)
        return labels is None or (labels.dim() >= 2 and not labels.is_floating_point())

    def _from_labels(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        labels = self._labels(batch)
        if labels is None or labels.is_floating_point():
            return None  # regression and multi-label targets have no ignored value: every sample counts
        if not self._is_token_level(batch):
            return labels != IGNORED if labels.dim() == 1 else None
        counted = labels != IGNORED
        if not self.shifts or "shift_labels" in batch:
            return counted
        return torch.cat([counted[..., 1:], torch.zeros_like(counted[..., :1])], dim=-1)

    def _from_attention(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        attention = self._attention(batch)
        return attention != 0 if attention is not None and self._is_token_level(batch) else None

    def _attention(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        attention = batch.get("decoder_attention_mask" if self.encoder_decoder else "attention_mask")
        return attention if isinstance(attention, torch.Tensor) and attention.dim() == 2 else None


def check_mask(mask: torch.Tensor | None, logits: torch.Tensor, mode: str) -> None:
    """Raise a ConfigError where the mask does not have one entry for each row of logits."""
    if mask is not None and mask.shape != logits.shape[:-1]:
        raise ConfigError(
            "distill_mask",
            mode,
            f"a mask with one entry for each row of logits; the batch gives {tuple(mask.shape)}, the logits are "
            f"{tuple(logits.shape)}. If positions cannot be told from the batch, use 'none'",
        )
