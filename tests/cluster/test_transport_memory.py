"""Memory that tensors on their way live in."""

from __future__ import annotations

import pytest
import torch

from silverspoon_ray.cluster.transport.memory import SMALL, SPARE, Blocks, holders, private

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


def test_nearly_the_same_size_shares_blocks() -> None:
    blocks = Blocks()
    addresses = {blocks.take(LARGE - 1000 * i).data_ptr() for i in range(5)}
    assert len(addresses) == 1


def test_spare_blocks_are_few() -> None:
    blocks = Blocks()
    held = [blocks.take(SMALL) for _ in range(2 * SPARE)]
    assert blocks.nbytes <= SPARE * SMALL * 1.13
    assert len({block.data_ptr() for block in held}) == 2 * SPARE
    del held
    blocks.take(LARGE)
    assert blocks.nbytes <= LARGE * 1.13, "blocks of a size that is not asked for any more"
    assert holders(torch.ones(3)) == 1
