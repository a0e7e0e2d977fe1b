"""Stores for tests, each on a server of the test's own where it needs one."""

import itertools
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import kvferry
import pytest

MAX_VALUE_BYTES = 1 << 20
_counter = itertools.count()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


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
        pytest.skip("no redis-server on PATH (Debian: redis-tools)")
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--appendonly", "no", *options]
    return Server(program, command, port, folder / "redis.log")


def mooncake_master(folder: Path) -> Server:
    reason = "no Mooncake (pip install mooncake-transfer-engine-non-cuda)"
    mooncake = pytest.importorskip("mooncake", reason=reason)
    binary = Path(mooncake.__file__).parent / "mooncake_master"
    port, metrics_port = free_port(), free_port()
    options = [f"--rpc_port={port}", f"--metrics_port={metrics_port}", "--rpc_address=127.0.0.1"]
    return Server(str(binary), [str(binary), *options], port, folder / "mooncake_master.log")


def need(name: str) -> None:
    if not hasattr(kvferry, name):
        pytest.skip(f"this build of kvferry has no {name}")


def start_server(backend: str, folder: Path) -> Server | None:
    if "rocksdb" in backend:
        need("RocksDbStore")
    if backend in ("redis", "tiered_redis"):
        need("RedisStore")
        return redis_server(folder)
    if backend == "mooncake":
        return mooncake_master(folder)
    return None


def config(backend: str, folder: Path, server: Server | None) -> dict:
    """For kvferry.make_store(); `server` is what start_server() returned."""
    number = next(_counter)
    host = {"backend": "host", "capacity_bytes": 32 << 20, "max_value_bytes": MAX_VALUE_BYTES}
    if backend == "host":
        return host
    if backend in ("redis", "tiered_redis"):
        redis = {
            "backend": "redis",
            "port": server.port,
            "key_prefix": f"{number}:",
            "max_value_bytes": MAX_VALUE_BYTES,
        }
        return redis if backend == "redis" else tiered(host, redis)
    if "rocksdb" in backend:
        rocksdb = {
            "backend": "rocksdb",
            "path": str(folder / f"rocksdb{number}"),
            "max_value_bytes": MAX_VALUE_BYTES,
        }
        return rocksdb if backend == "rocksdb" else tiered(host, rocksdb)
    assert backend == "mooncake"
    return {
        "backend": "mooncake",
        "local_hostname": "127.0.0.1",
        "master_address": f"127.0.0.1:{server.port}",
        "global_segment_bytes": 64 << 20,
        "key_prefix": f"{number}:",
        "max_value_bytes": MAX_VALUE_BYTES,
    }


def tiered(upper: dict, lower: dict) -> dict:
    return {"backend": "tiered", "upper": upper, "lower": lower}


BACKENDS = ["host", "rocksdb", "redis", "tiered_rocksdb", "tiered_redis", "mooncake"]
