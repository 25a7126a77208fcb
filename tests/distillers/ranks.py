"""Running a function on several ranks of a Gloo process group, each a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from typing import Any

TIME_LIMIT_S = 120.0
_CONTEXT = multiprocessing.get_context("forkserver")
# Imported once in the server that ranks are forked from: a rank then starts in a tenth of a second, not in ten.
_CONTEXT.set_forkserver_preload(["tests.distillers.kinds", "silverspoon_ray.distillers"])


def on_ranks(function: Callable[..., Any], *arguments: Any, ranks: int = 2) -> list[Any]:
    """What ``function(*arguments)`` returns on every rank; it must be importable by name.

    Raises:
        AssertionError: a rank raised (with its traceback), or did not end in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(ranks):
        here, there = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_run, args=(there, rank, ranks, port, function, arguments), daemon=True)
        process.start()
        there.close()
        workers.append((process, here))
    results = []
    try:
        for rank, (_, pipe) in enumerate(workers):
            assert pipe.poll(TIME_LIMIT_S), f"rank {rank} of {ranks} did not answer within {TIME_LIMIT_S} s"
            failure, result = pickle.loads(pipe.recv_bytes())
            assert failure is None, f"rank {rank} of {ranks} raised:\n{failure}"
            results.append(result)
    finally:
        for process, pipe in workers:
            process.join(0 if len(results) < ranks else 30)
            if process.is_alive():
                process.kill()
            pipe.close()
    return results


def _run(pipe: Any, rank: int, ranks: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        HF_HUB_OFFLINE="1",
    )
    import torch

    torch.set_num_threads(1)
    try:
        answer = (None, function(*arguments))
    except BaseException:
        answer = (traceback.format_exc(), None)
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
