"""What a sample is, whatever batch it came in: a key of its content, without padding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
"""Which mask says what of a tensor with a place for every token is real; the first also rules all other tensors."""


def sample_keys(batch: Mapping[str, Any], rows: int) -> list[bytes]:
    """A key for each sample of a batch, the same in every batch and beside any padding.

    Args:
        batch: a model's keyword arguments; tensors whose first dimension is ``rows`` belong to samples.
        rows: how many samples there are.

    Returns:
        16 bytes for each sample (BLAKE2b of names, dtypes, shapes and real entries). Padding in front or between real
        entries moves them, which models that count positions themselves answer to; so where no position ids are given,
        the places of the real entries belong to the content unless they come first.
    """
    tensors = {
        name: value.detach().cpu().contiguous()
        for name, value in sorted(batch.items())
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows
    }
    masks = {name: tensors[name] != 0 for name in MASKS.values() if name in tensors and tensors[name].dim() == 2}
    moved = {
        name: ~(mask == (torch.arange(mask.shape[1]) < mask.sum(dim=1, keepdim=True))).all(dim=1)
        for name, mask in masks.items()
        if name.replace("attention_mask", "position_ids") not in tensors
    }
    keys = []
    for row in range(rows):
        digest = hashlib.blake2b(digest_size=16)
        for name, anywhere in moved.items():
            if anywhere[row]:
                digest.update(f"{name} at {masks[name][row].nonzero().flatten().tolist()};".encode())
        for name, tensor in tensors.items():
            if name in masks:
                continue
            value = tensor[row]
            mask = masks.get(MASKS.get(name, "attention_mask"))
            if mask is not None and value.dim() > 0 and value.shape[0] == mask.shape[1]:
                value = value[mask[row]]
            if name == "position_ids" and torch.equal(value, torch.arange(len(value), dtype=value.dtype)):
                continue  # what models assume without any; beside left padding they have to be given
            digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        keys.append(digest.digest())
    return keys


def sample_uniforms(batch: Mapping[str, Any], shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random numbers for every row of logits that depend on the sample, its position and the seed alone.

    Neither other samples of the batch, nor how it is cut or laid out over devices, nor padding changes them.

    Args:
        batch: the model's keyword arguments.
        shape: ``[samples]`` or ``[samples, positions]``, of the logits without classes.
        seed: gives other numbers for the same content.

    Returns:
        float64 of that shape in [0, 1); 0 on padding.
    """
    uniforms = torch.zeros(shape, dtype=torch.float64)
    for name in ("decoder_attention_mask", "attention_mask"):
        mask = batch.get(name)
        if isinstance(mask, torch.Tensor) and tuple(mask.shape) == shape:
            real = mask.cpu() != 0
            break
    else:
        real = torch.ones(shape, dtype=torch.bool)
    for row, key in enumerate(sample_keys(batch, shape[0])):
        content = hashlib.blake2b(key + seed.to_bytes(8, "little", signed=True), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(content, "little") >> 1)
        own = real[row]
        uniforms[row] = torch.zeros_like(own, dtype=torch.float64).masked_scatter(
            own, torch.rand(int(own.sum()), dtype=torch.float64, generator=generator)
        )
    return uniforms
