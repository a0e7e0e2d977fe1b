"""Which store an engine uses in store mode, and how each of its processes reaches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import kvferry
from kvferry.store import check_config, in_folders
from kvferry.vllm.metadata import StoreAddress

# Stores inside the worker process. Others ask the worker for what is in them.
_EMBEDDED = ("host", "rocksdb", "tiered")
_BACKENDS = (*_EMBEDDED, "remote", "redis", "mooncake")
# A store that did not answer is not asked for so long.
SILENCE_S = 5.0
_DEFAULT = {"backend": "host", "capacity_bytes": 1 << 30}


class StoreOptions(NamedTuple):
    """The `store` of a kv_connector_extra_config."""

    config: dict[str, Any]  # Nothing is left out.

    @staticmethod
    def parse(config: Any) -> StoreOptions:
        """Raises ValueError for what is no configuration of a store; opening it shows the rest."""
        config = _DEFAULT if config is None else config
        if not isinstance(config, dict) or config.get("backend") not in _BACKENDS:
            # Without the rest of it: a password may be there.
            given = {"backend": config.get("backend")} if isinstance(config, dict) else config
            raise ValueError(
                f"store is {given!r}; it has to be an object with a backend, one of "
                f"{', '.join(_BACKENDS)}"
            )
        return StoreOptions(_complete(dict(config)))

    @property
    def embedded(self) -> bool:
        return self.config["backend"] in _EMBEDDED


@dataclass
class OpenedStore:
    """A worker's store, and where others find it ("" when they go to the backend themselves)."""

    store: Any
    address: str
    close: Callable[[], None]
    metrics: Callable[[], dict[str, int]] | None = None  # Of the endpoint where others find it.


def rank_key(key: bytes, rank: int) -> bytes:
    """The key of one tensor-parallel rank's part of a block."""
    return key + rank.to_bytes(4, "little")


def open_store(
    options: StoreOptions,
    pool: kvferry.KvPool,
    config: kvferry.Config,
    model: str,
    name: str,
    rank: int,
    dp_rank: int = 0,
) -> OpenedStore:
    """Opens the store of a worker, of a tensor-parallel and a data-parallel rank. Raises
    ValueError, ImportError or kvferry.Error."""
    if options.config["backend"] == "remote":
        store = _remote(options.config, pool, config, model, name, rank)
        return OpenedStore(store, "", store.close)
    if not options.embedded:
        store = kvferry.make_store(_of_pages(options.config, pool.layout))
        return OpenedStore(store, "", store.close)
    host, tiered = _open_embedded(options.config, pool.layout, rank, dp_rank)
    store = tiered or host
    server = kvferry.StoreServer(host, config, model, name, tiered=tiered)

    def close() -> None:
        server.close()
        store.close()

    return OpenedStore(store, server.address, close, server.metrics)


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    """With what is left out. Raises ValueError for a wrong key or value."""
    backend = config["backend"]
    if backend == "remote":
        _check_remote(config)
        return config
    if backend == "host":
        return _complete_host(config)
    if backend == "rocksdb":  # Others are served out of memory.
        config = {"backend": "tiered", "lower": config}
    if config["backend"] == "tiered":
        upper = config.get("upper", _DEFAULT)
        if not isinstance(upper, dict) or upper.get("backend") != "host":
            raise ValueError(
                'store: "tiered" needs an upper tier of backend "host" and a lower one'
            )
        config = config | {"upper": _complete_host(upper)}
    check_config(config)
    return config


def _complete_host(config: dict[str, Any]) -> dict[str, Any]:
    unknown = config.keys() - {"backend", "capacity_bytes"}
    if unknown:
        raise ValueError(f"store: host knows no {sorted(unknown)}; it knows capacity_bytes")
    config = _DEFAULT | config
    check_config(config)
    return config


def _open_embedded(
    config: dict[str, Any], layout: kvferry.KvLayout, rank: int, dp_rank: int
) -> tuple[kvferry.HostStore, kvferry.TieredStore | None]:
    """(the host store that blocks are served from, what has it as its upper tier, if anything)"""
    if config["backend"] == "host":
        return kvferry.HostStore(config["capacity_bytes"], layout=layout), None
    engine = f"dp{dp_rank}-" if dp_rank > 0 else ""
    config = in_folders(config, f"{engine}rank{rank}")
    host = kvferry.HostStore(config["upper"]["capacity_bytes"], layout=layout)
    return host, kvferry.TieredStore(host, kvferry.make_store(config["lower"]))


def _of_pages(config: dict[str, Any], layout: kvferry.KvLayout) -> dict[str, Any]:
    """Mooncake's buffers have a size, and a block has to fit."""
    if config["backend"] != "mooncake":
        return config
    return {"max_value_bytes": layout.page_bytes} | config


def _check_remote(config: dict[str, Any]) -> None:
    if config.keys() != {"backend", "address"}:
        raise ValueError(
            f"store: remote takes an address, tcp://host:port, or one a rank, not {config!r}"
        )


def _remote(
    config: dict[str, Any],
    pool: kvferry.KvPool,
    node: kvferry.Config,
    model: str,
    name: str,
    rank: int,
) -> kvferry.RemoteStore:
    _check_remote(config)
    address = config["address"]
    if isinstance(address, list):
        if rank >= len(address):
            raise ValueError(f"store: {len(address)} addresses and none for rank {rank}")
        address = address[rank]
    return kvferry.RemoteStore(address, pool, node, model, name)


def scheduler_stores(
    options: StoreOptions, workers: list[StoreAddress], config: kvferry.Config
) -> list[Any]:
    """What the scheduler asks, by rank; one for all ranks where they share a backend."""
    if not options.embedded and options.config["backend"] != "remote":
        # It only asks: Mooncake's share of memory is the workers' to give.
        config = _of_pages(options.config, workers[0].kv_layout())
        if config["backend"] == "mooncake":
            config = config | {"global_segment_bytes": 0}
        return [kvferry.make_store(config)]
    stores = []
    for rank, worker in enumerate(workers):
        # Nothing moves into this pool: it stands for the layout.
        pool = kvferry.KvPool.create(worker.kv_layout(), 1)
        remote = options.config
        if options.embedded:
            remote = {"backend": "remote", "address": worker.address}
        stores.append(_remote(remote, pool, config, worker.model, f"scheduler/{rank}", rank))
    return stores
