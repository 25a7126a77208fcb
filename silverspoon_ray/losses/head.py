"""The output head of a model: the map from its last hidden state to its logits, as data instead of a module."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from silverspoon_ray.errors import ConfigError
from silverspoon_ray.losses.rows import check_positive, is_real


@dataclass(frozen=True)
class OutputHead:
    """logits = softcap * tanh(z / softcap) with z = scale * (hidden @ weight.T + bias); without ``softcap``, z.

    Attributes:
        weight: [V, H], any floating dtype.
        bias: [V] or None; -inf bans a class.
        scale: what the products are multiplied by, finite and not 0 (Cohere's ``logit_scale``, 1 / Granite's
            ``logits_scaling``).
        softcap: bound of the logits, finite and > 0 (Gemma 2, arXiv:2408.00118, section 2), or None.

    Raises:
        ConfigError: shapes, dtypes or devices that do not belong together, a number out of its range.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        weight, bias = self.weight, self.bias
        if weight.ndim != 2 or not weight.numel():
            raise ConfigError("weight", tuple(weight.shape), "an output head needs a matrix [classes, width]")
        if not weight.is_floating_point():
            raise ConfigError("weight", weight.dtype, "must be of a floating dtype")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ConfigError("bias", tuple(bias.shape), f"must be one number per class: {tuple(weight.shape[:1])}")
        if bias is not None and bias.device != weight.device:
            raise ConfigError("bias", bias.device, f"must be on the weight's device {weight.device}")
        if not is_real(self.scale) or not 0.0 < abs(self.scale) < float("inf"):
            raise ConfigError("scale", self.scale, "must be a finite number other than 0")
        if self.softcap is not None:
            check_positive("softcap", self.softcap)

    @property
    def classes(self) -> int:
        return self.weight.shape[0]

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., H], differentiable in ``hidden``, ``weight`` and ``bias``.

        Computed in the dtype of ``hidden``, to which weight and bias are cast; under autocast in the dtype of that.
        """
        weight, bias = self.weight.to(hidden.dtype), None if self.bias is None else self.bias.to(hidden.dtype)
        logits = F.linear(hidden, weight, bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def products(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """hidden @ weight.T + bias of [r, H] in ``out`` [r, V]; one dtype for all, no autograd. See `finish_`."""
        if self.bias is None:
            return torch.mm(hidden, self.weight.T, out=out)
        return torch.addmm(self.bias, hidden, self.weight.T, out=out)

    def finish_(self, products: torch.Tensor) -> torch.Tensor:
        """Make logits of `products` in place, with the operations and roundings of `logits`."""
        if self.scale != 1.0:
            products.mul_(self.scale)
        return products if self.softcap is None else products.div_(self.softcap).tanh_().mul_(self.softcap)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None = None) -> OutputHead:
        """The head on ``device`` and in ``dtype`` (None = as they are); itself if it is so already."""
        weight = self.weight.to(device=device, dtype=dtype)
        bias = None if self.bias is None else self.bias.to(device=device, dtype=dtype)
        return self if weight is self.weight and bias is self.bias else replace(self, weight=weight, bias=bias)

    def first(self, classes: int) -> OutputHead:
        """The head of the first ``classes`` classes; its tensors are views.

        Raises:
            ConfigError: there are not as many classes.
        """
        if not 0 < classes <= self.classes:
            raise ConfigError("classes", classes, f"must be in 1..{self.classes}, the classes of the output head")
        if classes == self.classes:
            return self
        return replace(self, weight=self.weight[:classes], bias=None if self.bias is None else self.bias[:classes])
