"""A batch that a model can run on, without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TOKENS = 4


def example_inputs(structure: nn.Module) -> dict[str, Any] | None:
    """The smallest batch that shows how a model's forward goes.

    Args:
        structure: a model, or its structure.

    Returns:
        keyword arguments of its forward on the CPU: ``input_ids`` ``[1, 4]`` (for an encoder-decoder model
        ``decoder_input_ids`` too), or ``pixel_values`` ``[1, channels, height, width]`` in the model's dtype; None for
        a model that takes something else, or does not say what it takes.
    """
    config = getattr(structure, "config", None)
    main_input = getattr(structure, "main_input_name", None)
    if config is None:
        return None
    if main_input == "input_ids":
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        vocabulary: Any = getattr(text, "vocab_size", None)
        if not _is_count(vocabulary):
            return None
        # From the end of the vocabulary: special tokens, of which a model may expect some or none, are at its start.
        ids = torch.arange(vocabulary - 1, vocabulary - 1 - TOKENS, -1).clamp(min=0).unsqueeze(0)
        batch = {"input_ids": ids}
        return {**batch, "decoder_input_ids": ids.clone()} if getattr(config, "is_encoder_decoder", False) else batch
    if main_input == "pixel_values":
        size: Any = getattr(config, "image_size", None)
        channels: Any = getattr(config, "num_channels", None)
        sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
        if len(sides) != 2 or not all(map(_is_count, (*sides, channels))):
            return None
        dtype = next((p.dtype for p in structure.parameters() if p.is_floating_point()), torch.float32)
        return {"pixel_values": torch.zeros(1, channels, *sides, dtype=dtype)}
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
