"""Stores for tests, each on a server of the test's own where it needs one."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvferry
import pytest
import servers
from servers import Server

MAX_VALUE_BYTES = 1 << 20
_counter = itertools.count()


def _or_skip(start: Callable[..., Server], *arguments: Any) -> Server:
    try:
        return start(*arguments)
    except servers.NoServer as missing:
        pytest.skip(str(missing))


def redis_server(folder: Path, *options: str) -> Server:
    return _or_skip(servers.redis_server, folder, *options)


def mooncake_master(folder: Path) -> Server:
    return _or_skip(servers.mooncake_master, folder)


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
