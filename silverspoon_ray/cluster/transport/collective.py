"""What passes between student and actor through Ray, where the tensors themselves do not."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import torch

SELF_TEST_BYTES = 4096
SELF_TEST_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ReplyTo:
    """Where an answer's tensors are to be sent.

    Attributes:
        stream: the student's stream; no other has that name.
        host, port: of the store that the student's process holds.
        device_type: ``"cuda"`` where the student can receive on a GPU.
        settled: answers with a smaller number are not wanted any more.
    """

    stream: str
    host: str
    port: int
    device_type: str
    settled: int


@dataclass(frozen=True)
class Posted:
    """Stands for an encoded value whose buffers wait in the process that made it.

    Attributes:
        value: as in :class:`~silverspoon_ray.cluster.codec.Encoded`.
        sizes: bytes of each buffer.
        number: of the answer.
        actor: Ray's id of the actor; the same after a restart.
        generation: of its connection with the student; another after a restart.
        device_type: ``"cuda"`` where the tensors come through NCCL.
    """

    value: Any
    sizes: tuple[int, ...]
    number: int
    actor: str
    generation: str
    device_type: str

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


def new_name() -> str:
    return uuid.uuid4().hex


def arrived(generation: str) -> str:
    """The key in the store by which a student says that it is about to connect."""
    return f"{generation}/student"


def gone(generation: str) -> str:
    """The key in the store by which an actor says that it has given up."""
    return f"{generation}/gone"


def known_bytes() -> torch.Tensor:
    """What the self-test sends."""
    return torch.arange(SELF_TEST_BYTES, dtype=torch.int64).to(torch.uint8)
