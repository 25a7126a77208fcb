"""Memory that tensors on their way live in."""

from __future__ import annotations

import pytest
import torch

from silverspoon_ray.cluster.transport.memory import IDLE_ROUNDS, SMALL, Blocks, holders, private

LARGE = 3 * SMALL


def test_what_nobody_else_holds_is_not_copied() -> None:
    whole = torch.arange(64, dtype=torch.float32)
    buffers = [whole.view(torch.uint8)[:64].detach(), whole.view(torch.uint8)[128:].detach()]
    del whole
    kept = private(buffers)
    assert [k.data_ptr() for k in kept] == [b.data_ptr() for b in buffers]


def test_what_somebody_else_holds_is_copied() -> None:
    workspace, own = torch.ones(8), torch.ones(8)
    buffers = [workspace.reshape(-1).view(torch.uint8), own.view(torch.uint8)]
    address = own.data_ptr()
    del own
    copied, same = private(buffers)
    workspace.zero_()
    assert torch.equal(copied.view(torch.float32), torch.ones(8))
    assert same.data_ptr() == address


@pytest.mark.parametrize("size", [0, 1, SMALL - 1, SMALL, SMALL + 1, LARGE, 2 * LARGE + 7])
def test_blocks_have_the_size_asked_for(size: int) -> None:
    block = Blocks().take(size)
    assert (block.shape, block.dtype) == ((size,), torch.uint8)
    assert block.untyped_storage().nbytes() <= max(size, 16) * 1.13


def test_a_block_is_used_again_when_nobody_refers_to_it() -> None:
    blocks = Blocks()
    first = blocks.take(LARGE)
    address, view = first.data_ptr(), first.view(torch.float32).view(3, -1)[1]
    del first
    second = blocks.take(LARGE)
    assert second.data_ptr() != address, "a view of the first is still read"
    del view, second
    assert {blocks.take(LARGE).data_ptr() for _ in range(9)} <= {address, blocks.take(LARGE).data_ptr()}
    assert blocks.nbytes <= 2 * LARGE * 1.13


def test_graphs_count_as_readers() -> None:
    blocks = Blocks()
    weight = torch.ones(LARGE // 4, requires_grad=True)
    given = blocks.take(LARGE).view(torch.float32).fill_(2.0)
    loss = (weight * given).sum()
    del given
    blocks.take(LARGE).fill_(0)
    loss.backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))


@pytest.mark.parametrize(
    ("sizes", "together"),
    [
        ((LARGE, LARGE - 1000), LARGE),
        ((2 * LARGE, LARGE, 3 * LARGE // 2), 2 * LARGE),
        ((LARGE, SMALL), LARGE + SMALL),  # too different
    ],
)
def test_batches_of_different_lengths_share_blocks(sizes: tuple[int, ...], together: int) -> None:
    blocks = Blocks()
    for _ in range(20):
        for size in sizes:
            held = [blocks.take(size) for _ in range(3)]
            assert len({block.data_ptr() for block in held}) == 3
            del held
    assert blocks.nbytes <= 3 * 1.13 * together


def test_what_lies_idle_is_given_back() -> None:
    blocks = Blocks()
    held = [blocks.take(4 * LARGE) for _ in range(8)]
    assert blocks.nbytes >= 8 * 4 * LARGE
    del held
    for _ in range(IDLE_ROUNDS * 9 + 9):
        blocks.take(LARGE)
    assert blocks.nbytes <= LARGE * 1.13, "blocks of a size that is not asked for any more"


def test_what_is_read_for_long_is_not_written_to() -> None:
    blocks = Blocks()
    kept = blocks.take(LARGE).fill_(7)
    for _ in range(IDLE_ROUNDS * 4):
        blocks.take(LARGE).fill_(0)
    assert bool((kept == 7).all())
    assert blocks.nbytes <= LARGE * 1.13, "it is its reader's alone"
    assert holders(torch.ones(3)) == 1
