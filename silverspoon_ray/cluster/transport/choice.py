"""Which way answers come."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from silverspoon_ray.cluster.transport.collective import SELF_TEST_TIMEOUT_S, known_bytes
from silverspoon_ray.cluster.transport.inbox import Delivery, Inbox, on_gpu
from silverspoon_ray.errors import ConfigError, SilverspoonError, TeacherError

if TYPE_CHECKING:
    from silverspoon_ray.cluster.handle import TeacherHandle

logger = logging.getLogger(__name__)


def chosen_inbox(handle: TeacherHandle, transport: str) -> Inbox | None:
    """The inbox of a new stream; None where its answers come through the object store.

    Args:
        handle: the teacher.
        transport: ``"object_store"``, ``"collective"``, or ``"auto"``: for a student on a GPU the collective transport
            if a trial shows that it works, otherwise the object store.

    Raises:
        ConfigError: none of those.
        TeacherError: ``"collective"``, and this process cannot receive.
    """
    if transport == "object_store":
        return None
    if transport not in ("collective", "auto"):
        raise ConfigError("transport", transport, "object_store, collective or auto")
    # On CPUs of one machine the object store hands over shared memory, which nothing that goes through a socket beats:
    # the collective transport has 0.6 to 0.7 of its speed at 32 MB, and is not clearly faster at any size
    # (benchmarks/results/transport.json).
    if transport == "auto" and not on_gpu():
        return None
    try:
        inbox = Inbox(len(handle.replicas))
        if transport == "auto":
            try_out(handle, inbox)
    except (SilverspoonError, RuntimeError) as error:
        if transport == "collective":
            raise TeacherError(f"this process cannot receive by the collective transport: {error}") from None
        logger.warning("answers of the teacher come through the object store; the collective transport: %s", str(error))
        return None
    return inbox


def try_out(handle: TeacherHandle, inbox: Inbox) -> None:
    """Have every actor send something that is known, by the way that answers will take.

    Raises:
        TeacherError: it did not come within :data:`SELF_TEST_TIMEOUT_S`, or is not what was sent.
    """
    deadline = time.monotonic() + SELF_TEST_TIMEOUT_S
    deliveries = []
    for rank, replica in enumerate(handle.replicas):
        for worker in replica:
            number = handle.numbered()
            ref = worker.greet.remote(number, inbox.reply_to(number))
            remaining = max(deadline - time.monotonic(), 0.1)
            deliveries.append(Delivery(number, [ref], rank, "self-test", remaining, lambda parts: parts[0]))
            inbox.expect(deliveries[-1])
    for delivery in deliveries:
        logits = delivery.result(SELF_TEST_TIMEOUT_S).logits
        if logits is None or not torch.equal(logits.cpu(), known_bytes()):
            raise TeacherError("what arrived is not what was sent", rank=delivery.rank)
