"""Memory that tensors on their way live in: who else holds it, and using it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

SMALL = 2**20
"""Smaller blocks come cheap: the C library keeps them for itself."""
IDLE_ROUNDS = 4
"""A block is given up when all others could have been used so often since it was."""


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
    receive what is put there. As many are kept as answers are held at the same time; what then lies idle, because
    batches have become smaller or fewer are in flight, is given back after a while.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[int, torch.Tensor]] = []  # when each was used last, the latest last
        self._clock = 0

    def take(self, size: int) -> torch.Tensor:
        """``uint8[size]``, on the CPU, with anything in it."""
        if size < SMALL:
            return torch.empty(size, dtype=torch.uint8)
        self._clock += 1
        # Batches differ in length: a block may be up to twice as large as what comes into it.
        fitting = [place for place, (_, block) in enumerate(self._blocks) if size <= block.numel() <= 2 * size]
        for place in reversed(fitting):
            if holders(self._blocks[place][1]) == 1:
                block = self._blocks.pop(place)[1]
                break
        else:
            block = torch.empty(_rounded(size), dtype=torch.uint8)
        self._blocks.append((self._clock, block))
        oldest = self._clock - IDLE_ROUNDS * len(self._blocks)
        while self._blocks[0][0] < oldest:
            del self._blocks[0]  # whoever may still read it has it for himself
        return block[:size]

    @property
    def nbytes(self) -> int:
        return sum(block.numel() for _, block in self._blocks)


def _rounded(size: int) -> int:
    """Up to the next eighth of a power of two, so that batches of nearly the same length can share blocks."""
    step = max(1 << (size.bit_length() - 4), 1)
    return -(-size // step) * step
