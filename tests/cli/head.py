"""``ray start --head`` for one test, beside whatever other Rays this machine has."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it has no types, and nothing else here needs them

HOST = "127.0.0.1"
RAY = str(Path(sys.executable).with_name("ray"))
ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120
END_TIMEOUT_S = 30
# Above those of Ray's workers (from 10002), below those that Linux gives out by itself (from 32768).
OUR_PORTS = range(20_000, 32_768)
# Every port that `ray start` would otherwise take from a fixed place; workers take any (see --min-worker-port).
PORT_OPTIONS = (
    "--port",
    "--dashboard-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
    "--node-manager-port",
    "--object-manager-port",
    "--ray-client-server-port",
)
PORT_VARIABLES = ("DASHBOARD_METRIC_PORT", "AUTOSCALER_METRIC_PORT")


@dataclass(frozen=True)
class Head:
    """A Ray head that runs.

    Attributes:
        dashboard: where ``ray job submit`` reaches it.
        environment: for commands that use it.
    """

    dashboard: str
    environment: dict[str, str]


@contextlib.contextmanager
def ray_head(directory: Path) -> Iterator[Head]:
    """Start a head in this working directory; at the end, end every process of it by its id.

    ``ray stop`` would end every Ray of this machine. The address file, by which others find a Ray, stays theirs too:
    it is in the temporary directory, and this head has its own.
    """
    ports = dict(zip([*PORT_OPTIONS, *PORT_VARIABLES], _free_ports(len(PORT_OPTIONS + PORT_VARIABLES)), strict=True))
    # Without what another Ray has left in this process; and with a token of its own instead of the user's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_PROXY": HOST}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Without this Ray takes 127.0.0.1 for a slip, and listens on the address that other machines see.
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    environment |= {name: str(ports[name]) for name in PORT_VARIABLES}
    environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # no job is left that would need it
    # Not under pytest's directories: names of sockets in it have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        command = [RAY, "start", "--head", "--block", "--disable-usage-stats", f"--temp-dir={temporary}"]
        command += [f"--node-ip-address={HOST}", f"--dashboard-host={HOST}", "--include-dashboard=true"]
        command += [f"{option}={ports[option]}" for option in PORT_OPTIONS]
        command += ["--min-worker-port=0", "--max-worker-port=0", "--num-cpus=4", f"--object-store-memory={2**27}"]
        log = Path(temporary) / "start.log"
        with log.open("wb") as output:
            head = subprocess.Popen(
                command,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            token = environment["RAY_AUTH_TOKEN"]
            _wait(head, ports["--dashboard-port"], "/api/version", token, log)
            _wait(head, ports["--dashboard-agent-listen-port"], "/api/local_raylet_healthz", token, log)
            yield Head(f"http://{HOST}:{ports['--dashboard-port']}", environment)
        finally:
            _end(head)


def _free_ports(count: int) -> list[int]:
    """Not those that the system gives out by itself, which may be gone before Ray asks for them."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(OUR_PORTS, len(OUR_PORTS)):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind((HOST, port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"{count} free ports needed; of {OUR_PORTS} only {len(ports)} are")


def _wait(head: subprocess.Popen[bytes], port: int, path: str, token: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(port, path, token):
        if head.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no answer from port {port}, exit code {head.poll()}:\n{log.read_text()}")
        time.sleep(0.2)


def _answers(port: int, path: str, token: str) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _end(head: subprocess.Popen[bytes]) -> None:
    # Asked for while they still have their parents. psutil keeps the time of each one's start beside its id, and so
    # signals no stranger that got the same id later.
    started = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
    head.terminate()  # it ends its own
    with contextlib.suppress(subprocess.TimeoutExpired):
        head.wait(END_TIMEOUT_S)
    for process in _alive(started):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    head.kill()
    head.wait()
    deadline = time.monotonic() + END_TIMEOUT_S
    while left := _alive(started):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def _alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Without those that have ended and that only their new parent has not asked about yet."""
    alive = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive
