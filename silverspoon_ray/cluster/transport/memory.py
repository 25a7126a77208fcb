"""Memory that tensors on their way live in: who else holds it, and using it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

SMALL = 2**20
"""Smaller blocks come cheap: the C library keeps them for itself."""
SPARE = 16


def holders(tensor: torch.Tensor) -> int:
    """How many tensors refer to its memory, this one included, wherever they are."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # the storage object that is asked


def private(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same bytes in memory that the model does not write to again.

    An answer waits while the model is at the next one. Where it is the only holder of its memory, that is safe. What
    somebody else holds too is copied: a workspace that the model fills anew in each forward, the static outputs of a
    CUDA graph, a tensor of its state.

    Args:
        buffers: in an order that is kept; the caller holds no other tensors of their memory.
    """
    ours = Counter(buffer.untyped_storage()._cdata for buffer in buffers)
    return [
        buffer if holders(buffer) <= ours[buffer.untyped_storage()._cdata] else buffer.clone() for buffer in buffers
    ]


class Blocks:
    """Memory to receive into, used again as soon as nobody refers to it any more.

    The operating system hands out large blocks page by page as they are first touched, which takes longer than to
    receive what is put there. Blocks that have not been needed for a while are given back, so as many are kept as
    answers are held at the same time, and at most :data:`SPARE` besides.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []  # the one that was used last comes last

    def take(self, size: int) -> torch.Tensor:
        """``uint8[size]``, on the CPU, with anything in it."""
        if size < SMALL:
            return torch.empty(size, dtype=torch.uint8)
        capacity = _rounded(size)
        for place, block in enumerate(self._blocks):
            if block.numel() == capacity and holders(block) == 1:
                del self._blocks[place]
                break
        else:
            # Another size is in fashion, or more answers are held than ever: what lies idle would lie idle for good.
            self._blocks = [block for block in self._blocks if holders(block) > 1 or block.numel() == capacity]
            block = torch.empty(capacity, dtype=torch.uint8)
        self._blocks.append(block)
        del self._blocks[:-SPARE]
        return block[:size]

    @property
    def nbytes(self) -> int:
        return sum(block.numel() for block in self._blocks)


def _rounded(size: int) -> int:
    """Up to the next eighth of a power of two, so that batches of nearly the same length can share blocks."""
    step = max(1 << (size.bit_length() - 4), 1)
    return -(-size // step) * step
