"""Servers that tests and benchmarks start for themselves, on free ports of 127.0.0.1."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


class NoServer(RuntimeError):
    """Its program is not there; the text says what would bring it."""


def free_port() -> int:
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of so many in a row, all below those that the system hands out by itself: nobody
    gets one meanwhile."""
    for first in random.sample(range(10000, 32000), 100):
        with contextlib.ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return first
    raise RuntimeError(f"no {count} free ports in a row, a hundred times")


@contextlib.contextmanager
def silent_server() -> Iterator[socket.socket]:
    """Listens on a port of 127.0.0.1, and says nothing."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        yield silent


class Server:
    """A process that listens on a port of 127.0.0.1."""

    def __init__(self, program: str, command: list[str], port: int, log: Path):
        self.program, self.command, self.port, self.log = program, command, port, log
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, executable=self.program, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise RuntimeError(self.log.read_text()[-2000:]) from None
                time.sleep(0.01)

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGKILL)
        self.process.wait()


def redis_server(folder: Path, *options: str) -> Server:
    # One program goes by both names, and acts by the one it is called by.
    program = shutil.which("redis-server") or shutil.which("redis-check-rdb")
    if program is None:
        raise NoServer("no redis-server on PATH (Debian: redis-tools)")
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--appendonly", "no", *options]
    return Server(program, command, port, folder / "redis.log")


def mooncake_master(folder: Path) -> Server:
    try:
        import mooncake
    except ImportError as error:
        raise NoServer("no Mooncake (pip install mooncake-transfer-engine-non-cuda)") from error
    binary = Path(mooncake.__file__).parent / "mooncake_master"
    port, metrics_port = free_port(), free_port()
    options = [f"--rpc_port={port}", f"--metrics_port={metrics_port}", "--rpc_address=127.0.0.1"]
    return Server(str(binary), [str(binary), *options], port, folder / "mooncake_master.log")
