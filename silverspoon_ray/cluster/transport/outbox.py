"""The actor's end: answers that wait to be fetched."""

from __future__ import annotations

import datetime
import logging
import threading
import time
from typing import Any

import ray
import torch
from torch.distributed import TCPStore

from silverspoon_ray.cluster.codec import Encoded
from silverspoon_ray.cluster.transport.collective import Posted, ReplyTo, arrived, gone, new_name
from silverspoon_ray.cluster.transport.memory import private
from silverspoon_ray.cluster.transport.pair import ACTOR, CONNECT_TIMEOUT_S, SEND, Pair, PairBrokenError

logger = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 600.0
"""A student that wants nothing for so long is forgotten. If it comes back, it asks again and is connected anew."""


class Outbox:
    """Answers of this process that students have not fetched yet.

    Every student's stream has a thread that sends to it alone, so that none waits for another, nor the model for any.
    What waits is bounded by the students' windows: an answer goes when it is fetched, when it is not wanted any more,
    or when its student is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._senders: dict[str, Sender] = {}

    def post(self, encoded: Encoded, number: int, reply_to: ReplyTo | None) -> Encoded | Posted:
        """Keep an answer's buffers for the student and return what stands for it.

        Args:
            encoded: the answer, its buffers as tensors where ``reply_to`` is given.
            number: the student's, of the answer.
            reply_to: None: the answer travels as it is.
        """
        if reply_to is None or not encoded.buffers:
            return encoded
        buffers = private([buffer for buffer in encoded.buffers if isinstance(buffer, torch.Tensor)])
        by_nccl = reply_to.device_type == "cuda" and any(buffer.is_cuda for buffer in buffers)
        device = torch.device("cuda", torch.cuda.current_device()) if by_nccl else torch.device("cpu")
        buffers = [buffer.to(device) for buffer in buffers]
        if by_nccl:
            torch.cuda.current_stream(device).synchronize()  # another thread, hence another stream, reads them
        with self._lock:
            sender = self._senders.get(reply_to.stream)
            if sender is None or not sender.post(number, buffers, reply_to.settled):
                sender = self._senders[reply_to.stream] = Sender(self, reply_to, device)
                sender.post(number, buffers, reply_to.settled)
                sender.start()
        return Posted(
            encoded.value,
            tuple(buffer.numel() for buffer in buffers),
            number,
            ray.get_runtime_context().get_actor_id(),
            sender.generation,
            device.type,
        )

    def forget(self, sender: Sender) -> None:
        """Called by a sender that ends."""
        with self._lock:
            if self._senders.get(sender.stream) is sender:
                del self._senders[sender.stream]

    def stats(self) -> dict[str, int]:
        """Streams that are served, and bytes that wait for them."""
        with self._lock:
            senders = list(self._senders.values())
        return {"streams": len(senders), "unsent_bytes": sum(sender.nbytes for sender in senders)}


class Sender:
    """Sends one student what it orders."""

    def __init__(self, outbox: Outbox, reply_to: ReplyTo, device: torch.device) -> None:
        self.outbox = outbox
        self.stream = reply_to.stream
        self.generation = new_name()
        self._address = (reply_to.host, reply_to.port)
        self._device = device
        self._lock = threading.Lock()
        self._answers: dict[int, list[torch.Tensor]] = {}
        self._open = True

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"silverspoon-send-{self.stream[:8]}", daemon=True).start()

    def post(self, number: int, buffers: list[torch.Tensor], settled: int) -> bool:
        """Keep an answer; False where this sender has ended."""
        with self._lock:
            for other in [other for other in self._answers if other < settled]:
                del self._answers[other]
            if self._open:
                self._answers[number] = buffers
            return self._open

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(buffer.numel() for buffers in self._answers.values() for buffer in buffers)

    def _run(self) -> None:
        store: Any = None
        pair: Pair | None = None
        try:
            host, port = self._address
            store = TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=CONNECT_TIMEOUT_S))
            # It comes when it gets to this actor's first answer, and that may be while another one is restarted.
            store.wait([arrived(self.generation)], datetime.timedelta(seconds=IDLE_TIMEOUT_S))
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            pair = Pair(store, self.generation, ACTOR, self._device)
            while True:
                self._serve(pair)
        except (PairBrokenError, RuntimeError, torch.distributed.DistError) as error:
            # The usual end, also of a student that has finished: it just closes the connection.
            logger.debug("stream %s has ended: %s", self.stream, error)
        finally:
            with self._lock:
                self._open = False
                self._answers.clear()
            self.outbox.forget(self)
            if pair is not None:
                pair.abort()
            _say_gone(store, self.generation)

    def _serve(self, pair: Pair) -> None:
        what, number = pair.next_order(IDLE_TIMEOUT_S)
        with self._lock:
            buffers = self._answers.pop(number, None)
        if what != SEND:
            return
        if buffers is None:
            # It was taken for settled, which only a request that overtook another can bring about. Closing the
            # connection tells the student, who asks again.
            raise PairBrokenError(f"answer {number} is not here any more")
        pair.send(buffers)


def _say_gone(store: Any, generation: str) -> None:
    """So that a student that comes later does not wait for this sender; if it is still there."""
    try:
        if store is not None:
            store.set(gone(generation), str(time.time()))
    except (RuntimeError, torch.distributed.DistError):
        pass
