"""What the features of a module are counted over: the tokens of a batch, those of its decoder, or its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from silverspoon_ray.distillers.masks import IGNORED, PositionRule
from silverspoon_ray.errors import ConfigError

TOKENS, DECODER_TOKENS, SAMPLES = "tokens", "decoder_tokens", "samples"


@dataclass(frozen=True)
class Grid:
    """The positions of a batch that features may belong to.

    Attributes:
        kind: ``"tokens"``, ``"decoder_tokens"`` or ``"samples"``.
        shape: ``(batch, positions)``, or ``(batch,)``.
        mask: boolean, of that shape; None: every position counts.
    """

    kind: str
    shape: tuple[int, ...]
    mask: torch.Tensor | None = None

    @property
    def count(self) -> torch.Tensor | int:
        """How many positions count."""
        return self.mask.sum() if self.mask is not None else int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class GridRule:
    """How to read the grids off a batch, and which of them a module's features belong to.

    Padding never enters a loss. Features of ``[batch, positions, ...]`` are counted at the tokens that are real;
    whatever has no positions (a pooled vector, a convolution's map) is counted by samples, all of them.

    Args:
        mode: ``distill_mask``: ``"auto"`` and ``"attention"``: every real token; ``"labels"``: where the logits
            count; ``"none"``: every position.
        positions: the rule for the logits.
        encoder_decoder: modules with ``decoder`` in their name belong to the decoder's tokens.
    """

    mode: str
    positions: PositionRule
    encoder_decoder: bool = False

    def grids(self, batch: Mapping[str, Any]) -> dict[str, Grid]:
        """All grids of a batch, by kind."""
        rows = next((v.shape[0] for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 0), 1)
        found = {SAMPLES: Grid(SAMPLES, (rows,))}
        tokens = self._tokens(batch)
        if tokens is not None:
            found[TOKENS] = tokens
        decoder = self._decoder_tokens(batch) if self.encoder_decoder else None
        if decoder is not None:
            found[DECODER_TOKENS] = decoder
        return found

    def grid_of(self, features: torch.Tensor, module: str, grids: Mapping[str, Grid]) -> Grid:
        """The grid of a module's features; its mask has the leading dimensions of ``features``.

        Args:
            features: ``[batch, positions, ...]``, ``[batch * positions, features]``, or ``[batch, ...]``.
            module: the module's dotted name.
            grids: the batch's.
        """
        in_decoder = self.encoder_decoder and "decoder" in module.split(".")
        grid = grids.get(DECODER_TOKENS if in_decoder else TOKENS)
        if grid is not None and features.dim() >= 3 and tuple(features.shape[:2]) == grid.shape:
            return grid
        flat = grid is not None and features.dim() == 2 and grid.shape[1] > 1
        if grid is not None and flat and features.shape[0] == grid.shape[0] * grid.shape[1]:
            mask = None if grid.mask is None else grid.mask.reshape(-1)
            return Grid(grid.kind, (features.shape[0],), mask)
        return grids[SAMPLES]

    def _tokens(self, batch: Mapping[str, Any]) -> Grid | None:
        attention = batch.get("attention_mask")
        if isinstance(attention, torch.Tensor) and attention.dim() == 2:
            shape = tuple(attention.shape)
            return Grid(TOKENS, shape, self._counted(batch, TOKENS, attention != 0))
        for key in ("input_ids", "inputs_embeds"):
            value = batch.get(key)
            if isinstance(value, torch.Tensor) and value.dim() >= 2:
                return Grid(TOKENS, tuple(value.shape[:2]), self._counted(batch, TOKENS, None))
        return None

    def _decoder_tokens(self, batch: Mapping[str, Any]) -> Grid | None:
        given = batch.get("decoder_attention_mask")
        if isinstance(given, torch.Tensor) and given.dim() == 2:
            return Grid(DECODER_TOKENS, tuple(given.shape), self._counted(batch, DECODER_TOKENS, given != 0))
        labels = batch.get("labels")
        if isinstance(labels, torch.Tensor) and labels.dim() == 2:
            # The decoder's inputs are the labels, shifted: where no label is, there is padding.
            return Grid(DECODER_TOKENS, tuple(labels.shape), self._counted(batch, DECODER_TOKENS, labels != IGNORED))
        ids = batch.get("decoder_input_ids")
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            return Grid(DECODER_TOKENS, tuple(ids.shape), self._counted(batch, DECODER_TOKENS, None))
        return None

    def _counted(self, batch: Mapping[str, Any], kind: str, real: torch.Tensor | None) -> torch.Tensor | None:
        if self.mode == "none":
            return None
        if self.mode != "labels" or (kind == TOKENS and self.encoder_decoder):
            return real  # an encoder's tokens have no labels
        mask = self.positions.mask(batch)
        if mask is None or mask.dim() != 2:
            raise ConfigError(
                "distill_mask", self.mode, "'attention' or 'auto' where the labels do not say which tokens count"
            )
        return mask
