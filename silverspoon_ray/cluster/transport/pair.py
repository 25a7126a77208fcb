"""Two processes that send tensors to each other: a process group of their own."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from silverspoon_ray.cluster.transport.memory import Blocks

CONNECT_TIMEOUT_S = 10.0
"""For each step of the connection's making. Gloo tries five times to reach a process that has died meanwhile."""
TRANSFER_TIMEOUT_S = 60.0
"""For one buffer, once both ends are at it: more than a slow network needs for a gigabyte."""

STUDENT, ACTOR = 0, 1
SEND, DROP = 1, 2
_ORDERS, _DATA = 0, 1  # tags; those of buffers follow

_device_lock = threading.Lock()
_devices: dict[str, ProcessGroupGloo.Device] = {}


class PairBrokenError(RuntimeError):
    """The other process is gone, or was silent for too long. Nothing can be sent any more."""


class Pair:
    """The connection of a student's stream with an actor that sends to it.

    The student orders and the actor sends what is ordered: so whatever is on its way is also being received, nobody
    holds up anybody, and what is not wanted any more never travels. It is independent of every other process group of
    both processes, and not thread-safe: each end has one thread.

    Args:
        store: where both meet.
        name: of this pair; no other must ever have had it in that store.
        rank: :data:`STUDENT` or :data:`ACTOR`.
        device: where buffers are. On CUDA at both ends they go through NCCL, otherwise through Gloo.
        blocks: memory to receive into on the CPU.

    Raises:
        PairBrokenError: the other end did not come in time.
    """

    def __init__(self, store: Store, name: str, rank: int, device: torch.device, blocks: Blocks | None = None) -> None:
        self.peer = 1 - rank
        self.device = device
        self._blocks = blocks if blocks is not None else Blocks()
        try:
            self._gloo: Any = gloo_group(PrefixStore(f"{name}/gloo", store), rank)  # torch's stubs lack send and recv
            self._nccl: Any = nccl_group(PrefixStore(f"{name}/nccl", store), rank) if device.type == "cuda" else None
        except (RuntimeError, torch.distributed.DistError) as error:
            raise PairBrokenError(f"no connection was made: {error}") from None

    # ---- the student's end ---------------------------------------------------------------

    def receive(self, number: int, sizes: Sequence[int], limit_s: float) -> list[torch.Tensor]:
        """Order the buffers of an answer and wait for them.

        Args:
            number: the answer's.
            sizes: bytes of each buffer.
            limit_s: for all of them.

        Returns:
            ``uint8``, in memory of this process that nobody else refers to.

        Raises:
            PairBrokenError: they did not come.
        """
        deadline = time.monotonic() + limit_s
        if self._nccl is not None:
            buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
        else:
            buffers = [self._blocks.take(size) for size in sizes]
        filled = [buffer for buffer in buffers if buffer.numel()]
        try:
            if self._nccl is not None:
                # The order first: NCCL's receiving end may wait for the sending one already when it is called.
                self._order(SEND, number)
                works = [self._nccl.recv([buffer], self.peer, 0) for buffer in filled]
            else:
                works = [self._gloo.recv([buffer], self.peer, _DATA + i) for i, buffer in enumerate(filled)]
                self._order(SEND, number)
            for work in works:
                work.wait(_time(min(max(deadline - time.monotonic(), 0.001), TRANSFER_TIMEOUT_S)))
        except RuntimeError as error:
            raise PairBrokenError(_said(error)) from None
        return buffers

    def drop(self, number: int) -> None:
        """The answer is not wanted.

        Raises:
            PairBrokenError: the actor could not be told.
        """
        try:
            self._order(DROP, number)
        except RuntimeError as error:
            raise PairBrokenError(_said(error)) from None

    def _order(self, what: int, number: int) -> None:
        order = torch.tensor([what, number], dtype=torch.int64)
        self._gloo.send([order], self.peer, _ORDERS).wait(_time(TRANSFER_TIMEOUT_S))

    # ---- the actor's end -----------------------------------------------------------------

    def next_order(self, limit_s: float) -> tuple[int, int]:
        """Wait for the student: what it wants (:data:`SEND`, :data:`DROP`), and of which answer.

        Raises:
            PairBrokenError: the student is gone, or wanted nothing for ``limit_s``.
        """
        order = torch.empty(2, dtype=torch.int64)
        try:
            self._gloo.recv([order], self.peer, _ORDERS).wait(_time(limit_s))
        except RuntimeError as error:
            raise PairBrokenError(_said(error)) from None
        what, number = order.tolist()
        return what, number

    def send(self, buffers: Sequence[torch.Tensor]) -> None:
        """Send what was ordered; returns when the student has it.

        Raises:
            PairBrokenError: the student is gone, or did not take it in time.
        """
        filled = [buffer for buffer in buffers if buffer.numel()]
        try:
            if self._nccl is not None:
                works = [self._nccl.send([buffer], self.peer, 0) for buffer in filled]
            else:
                works = [self._gloo.send([buffer], self.peer, _DATA + i) for i, buffer in enumerate(filled)]
            for work in works:
                work.wait(_time(TRANSFER_TIMEOUT_S))
        except RuntimeError as error:
            raise PairBrokenError(_said(error)) from None

    def abort(self) -> None:
        """End what NCCL may still be doing; after :class:`PairBrokenError`. Gloo has ended with the error."""
        if self._nccl is not None:
            self._nccl.abort()


def gloo_group(store: Store, rank: int) -> ProcessGroupGloo:
    """A group of two on the address by which other nodes know this one."""
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_device(ray.util.get_node_ip_address())]
    options._timeout = _time(CONNECT_TIMEOUT_S)
    options._threads = 1  # they serve collectives; none is called here
    return ProcessGroupGloo(store, rank, 2, options)


def _device(address: str) -> ProcessGroupGloo.Device:
    """One for all pairs of the process: it has a thread of its own, which serves them all."""
    with _device_lock:
        if address not in _devices:
            _devices[address] = ProcessGroupGloo.create_device(hostname=address)
        return _devices[address]


def nccl_group(store: Store, rank: int) -> torch.distributed.ProcessGroupNCCL:
    """The same on GPUs."""
    options = torch.distributed.ProcessGroupNCCL.Options()
    # NCCL's watchdog ends the process when an operation outlasts this. Ours are given up before.
    options._timeout = _time(10 * TRANSFER_TIMEOUT_S)
    return torch.distributed.ProcessGroupNCCL(store, rank, 2, options)


def _time(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


def _said(error: BaseException) -> str:
    """Gloo's message without the place in its source, on one line."""
    return str(error).strip().partition("\n")[0].rpartition("] ")[2]
