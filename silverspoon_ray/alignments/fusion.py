"""Folding trained projectors into the layers beside them, so that the student carries no extra layer.

Linear maps in a row are one linear map. With ``W x + b`` as the layer, ``Q x + d`` as the projector before it and
``P x + c`` as the one after it, what does all three has the weight ``P W Q`` and the bias ``P (W d + b) + c``.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from silverspoon_ray.alignments.projectors import GenericConv2dProjector, GenericLinearProjector
from silverspoon_ray.errors import ConfigError

FORWARDS = {nn.Linear: nn.Linear.forward, nn.Conv2d: nn.Conv2d.forward, Conv1D: Conv1D.forward}


@torch.no_grad()
def fuse_projectors_into_module(
    module: nn.Module,
    input_projector: nn.Module | None = None,
    output_projector: nn.Module | None = None,
    inplace: bool = False,
) -> nn.Module:
    """One layer that computes ``output_projector(module(input_projector(x)))``.

    The arithmetic is float32 or wider whatever the dtypes; the result has the module's dtype, device, training mode and
    ``requires_grad``. A bias that the module did not have and now needs takes the weight's ``requires_grad``.

    Args:
        module: an ``nn.Linear``, an ``nn.Conv2d`` or transformers' ``Conv1D`` (GPT-2's linear layer). A grouped
            convolution becomes one with ``groups=1`` and zeros in its kernel, because a projector mixes the groups.
        input_projector: before the module. For a linear layer an ``nn.Linear``, for a convolution an ``nn.Conv2d``
            with a 1x1 kernel, generic projectors included; None or ``nn.Identity`` for none.
        output_projector: after the module, of the same kinds.
        inplace: change ``module`` itself; whoever shares its weight keeps the old one. False: the module is left as it
            was, and the fused layer shares no memory with it.

    Returns:
        The fused layer; ``module`` itself with ``inplace=True`` and where there is nothing to fuse.

    Raises:
        ConfigError: a kind of module or projector that cannot be folded, widths that do not fit, or an input projector
            with a bias before a convolution that pads with zeros, which no single convolution can repeat.
    """
    kind = _kind("module", module)
    before = _map_of("input_projector", input_projector, kind)
    after = _map_of("output_projector", output_projector, kind)
    if before is None and after is None:
        return module
    weight, bias = _weight_and_bias(module)
    if before is not None:
        projection, offset = before
        if projection.shape[0] != weight.shape[1]:
            raise ConfigError(
                "input_projector", input_projector, f"one that gives the {weight.shape[1]} features the module takes"
            )
        if offset is not None and _pads_with_zeros(module) and bool((offset != 0).any()):
            raise ConfigError(
                "input_projector",
                input_projector,
                "one without bias before a convolution that pads with zeros: where the projector would add its bias, "
                "the fused layer would see plain zeros; use padding=0 or another padding_mode, or bias=False",
            )
        if offset is not None:
            seen = weight.flatten(2).sum(-1) if weight.dim() > 2 else weight  # a constant image sees the kernel's sum
            bias = _sum(bias, seen @ offset.to(weight))
        weight = torch.einsum("oi...,ip->op...", weight, projection.to(weight))
    if after is not None:
        projection, offset = after
        if projection.shape[1] != weight.shape[0]:
            raise ConfigError(
                "output_projector", output_projector, f"one that takes the {weight.shape[0]} features the module gives"
            )
        bias = _sum(None if bias is None else projection.to(weight) @ bias, offset)
        weight = torch.einsum("qo,oi...->qi...", projection.to(weight), weight)
    fused = module if inplace else copy.deepcopy(module, {id(p): p for p in module.parameters()})
    _assign(fused, weight, bias)
    return fused


def _kind(key: str, module: nn.Module) -> type[nn.Module]:
    """Which of the foldable layers it is: its forward has to be that of the base class."""
    for kind, forward in FORWARDS.items():
        if isinstance(module, kind):
            generic = isinstance(module, GenericLinearProjector | GenericConv2dProjector)
            if not generic and type(module).forward is not forward:
                raise ConfigError(key, module, f"a layer that computes what {kind.__name__} does; this one may not")
            # Weight norm, spectral norm and the like compute the weight anew in every forward.
            if "weight" not in module._parameters or not module.weight.is_floating_point():
                raise ConfigError(key, module, "a layer whose weight is a plain floating-point parameter")
            return kind
    raise ConfigError(key, module, f"one of {', '.join(kind.__name__ for kind in FORWARDS)}")


def _map_of(
    key: str, projector: nn.Module | None, module_kind: type[nn.Module]
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """A projector as numbers: weight ``[out, in]`` and bias ``[out]``; None where there is nothing to do."""
    if projector is None or isinstance(projector, nn.Identity):
        return None
    fitting = nn.Conv2d if module_kind is nn.Conv2d else nn.Linear
    if not isinstance(projector, fitting):
        raise ConfigError(key, projector, f"an nn.{fitting.__name__} for fusion into a {module_kind.__name__}")
    _kind(key, projector)
    if isinstance(projector, GenericLinearProjector | GenericConv2dProjector) and projector.mode == "input":
        if key == "output_projector":
            raise ConfigError(key, projector, "a projector with mode='output'")
        if projector.apply_to_arg not in (None, 0, -1) or projector.apply_to_kwarg not in (None, "input"):
            raise ConfigError(key, projector, "a projector of the module's only argument")
    if isinstance(projector, nn.Conv2d) and not (
        projector.kernel_size == (1, 1) and projector.stride == (1, 1) and not _pads(projector)
    ):
        raise ConfigError(key, projector, "a convolution with a 1x1 kernel, stride 1 and no padding")
    weight, bias = _weight_and_bias(projector)
    return weight.flatten(1), bias


def _weight_and_bias(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight ``[out, in, ...]`` without groups and bias ``[out]``, in float32 or wider."""
    weight = _wide(module.weight)
    bias = None if module.bias is None else module.bias.detach().to(weight)
    if isinstance(module, Conv1D):
        return weight.T, bias
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        blocks = weight.chunk(module.groups)
        weight = weight.new_zeros(module.out_channels, module.in_channels, *weight.shape[2:])
        rows, columns = blocks[0].shape[:2]
        for group, block in enumerate(blocks):
            weight[group * rows : (group + 1) * rows, group * columns : (group + 1) * columns] = block
    return weight, bias


def _assign(module: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Give the layer these numbers and the sizes that go with them."""
    out_size, in_size = weight.shape[:2]
    if bias is not None:
        like = module.weight if module.bias is None else module.bias
        module.bias = nn.Parameter(bias.to(like.dtype, copy=True), like.requires_grad)
    stored = weight.T.contiguous() if isinstance(module, Conv1D) else weight
    module.weight = nn.Parameter(stored.to(module.weight.dtype), module.weight.requires_grad)
    if isinstance(module, nn.Conv2d):
        module.in_channels, module.out_channels, module.groups = in_size, out_size, 1
    elif isinstance(module, nn.Linear):
        module.in_features, module.out_features = in_size, out_size
    elif isinstance(module, Conv1D):
        module.nx, module.nf = in_size, out_size


def _pads(module: nn.Conv2d) -> bool:
    if isinstance(module.padding, str):
        return module.padding == "same" and any(size > 1 for size in module.kernel_size)
    return any(module.padding)


def _pads_with_zeros(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.padding_mode == "zeros" and _pads(module)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _sum(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        return left if right is None else right
    return left + right.to(left)
