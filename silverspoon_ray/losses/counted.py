"""The rows of a tensor that count, a chunk at a time and without a copy of all."""

from __future__ import annotations

import torch

from silverspoon_ray.losses.chunks import is_matrix


class CountedRows:
    """Rows [n, D] of a tensor [..., D] by their position among those that count.

    They are views where the tensor is a matrix of which all rows count. Else a chunk is copied when it is asked for:
    masks leave rows out, and ``logits[:, :-1]`` cannot be viewed as one matrix.

    Args:
        tensor: [..., D], detached. One that is strided in its last dimension is copied as a whole.
        index: [n], which of the flattened rows count, None = all.
    """

    def __init__(self, tensor: torch.Tensor, index: torch.Tensor | None) -> None:
        width = tensor.shape[-1]
        pitch = _pitch(tensor)
        if pitch is None:
            tensor, pitch = tensor.contiguous(), width
        self._all = index is None and is_matrix(tensor)
        if self._all:
            self._matrix = tensor.view(-1, width)
            return
        # All rows lie at multiples of the pitch: as a matrix of which some rows are not the tensor's.
        numbers = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            numbers = numbers.unsqueeze(-1) + torch.arange(size, device=tensor.device) * (stride // pitch)
        self._numbers = numbers.reshape(-1) if index is None else numbers.reshape(-1)[index]
        last = sum((n - 1) * (s // pitch) for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True))
        self._matrix = tensor.as_strided((last + 1 if tensor.numel() else 0, width), (pitch, 1))

    def __len__(self) -> int:
        return len(self._matrix if self._all else self._numbers)

    @property
    def device(self) -> torch.device:
        return self._matrix.device

    @property
    def dtype(self) -> torch.dtype:
        return self._matrix.dtype

    def read(self, part: slice, out: torch.Tensor | None = None) -> torch.Tensor:
        """The rows at ``part``, a view or a copy; a copy is in ``out`` [r, D] if that is given."""
        if self._all:
            return self._matrix[part]
        if self._matrix.dtype == torch.uint16:  # index_select knows no uint16
            return self._matrix[self._numbers[part]]
        if out is None:
            return self._matrix.index_select(0, self._numbers[part])
        return torch.index_select(self._matrix, 0, self._numbers[part], out=out)


def _pitch(tensor: torch.Tensor) -> int | None:
    """Distance of which that of any two rows is a multiple, None where there is none or no row is contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return None
    strides = [s for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1]
    pitch = min(strides, default=tensor.shape[-1])
    return pitch if pitch >= tensor.shape[-1] and all(s % pitch == 0 for s in strides) else None
