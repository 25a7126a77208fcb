"""A model's structure without its weights."""

from __future__ import annotations

import copy

import torch
from torch import nn


def structure_of(model: nn.Module) -> nn.Module:
    """The same tree of modules with every parameter and buffer on the meta device.

    No weight is copied: each tensor is replaced before the deep copy reaches it, so a model of any size costs a few
    kilobytes. Names, shapes, dtypes, tied weights, ``config`` and ``forward`` signatures are kept.
    """
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
