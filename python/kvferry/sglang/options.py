"""What stands in --hicache-storage-backend-extra-config, and the store that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import kvferry
from kvferry.store import check_config, in_folders

_OURS = ("store", "namespace", "timeout_ms")
# Read by SGLang, which leaves some of them in what it hands on.
_SGLANGS = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "allocator",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)
# Stores that other processes reach too.
_SHARED = ("redis", "mooncake")
_MAX_TIMEOUT_MS = 600_000


class Options(NamedTuple):
    store: dict[str, Any]  # As kvferry.make_store() takes it.
    namespace: str  # Deployments of different names share nothing.
    timeout_ms: int  # Of one call, which is a batch of up to 128 pages.
    zero_copy: bool  # SGLang calls batch_get_v1 and batch_set_v1, not batch_get and batch_set.

    @staticmethod
    def parse(extra: Mapping[str, Any] | None) -> Options:
        """ValueError for what is unknown, missing or out of bounds; open_store() shows the rest."""
        extra = dict(extra or {})
        for key in extra:
            if key not in _OURS + _SGLANGS:
                raise ValueError(
                    f"hicache: extra config has no {key!r}; kvferry knows {', '.join(_OURS)}, and "
                    f"SGLang {', '.join(_SGLANGS)}"
                )
        store = extra.get("store")
        if not isinstance(store, Mapping):
            raise ValueError(
                f"hicache: store is {store!r}; it has to be an object as kvferry.make_store() "
                f'takes it, such as {{"backend": "redis", "host": "10.0.0.1"}}'
            )
        namespace = extra.get("namespace", "")
        if not isinstance(namespace, str):
            raise ValueError(f"hicache: namespace is {namespace!r}; it has to be a string")
        timeout_ms = extra.get("timeout_ms", 5000)
        if type(timeout_ms) is not int or not 1 <= timeout_ms <= _MAX_TIMEOUT_MS:
            raise ValueError(
                f"hicache: timeout_ms is {timeout_ms!r}; it has to be 1 to {_MAX_TIMEOUT_MS}"
            )
        return Options(dict(store), namespace, timeout_ms, bool(extra.get("interface_v1", 0)))


def open_store(options: Options, config) -> Any:
    """The store of one rank; `config` is SGLang's HiCacheStorageConfig.

    ValueError for a configuration that is wrong or cannot serve all ranks, ImportError for a
    backend that is not built in, kvferry.Error for one that cannot be opened. A server that is
    down is none of these: it may come up later.
    """
    if config.should_split_heads:
        raise ValueError(
            f"hicache: tp_lcm_size is {config.tp_lcm_size}; kvferry does not split heads among "
            f"tensor-parallel sizes"
        )
    if config.is_mla_model and config.tp_size > 1 and not _is_shared(options.store):
        raise ValueError(
            f"hicache: store is {options.store.get('backend')!r}, which one process has for "
            f"itself; with MLA one of {config.tp_size} tensor-parallel ranks writes for all, so "
            f"it has to be {' or '.join(_SHARED)}, or tiered with redis as the lower tier"
        )
    check_config(options.store)
    rank = (
        f"tp{config.tp_rank}of{config.tp_size}-pp{config.pp_rank}of{config.pp_size}"
        f"-cp{config.attn_cp_rank}of{config.attn_cp_size}-dp{config.dp_rank}"
    )
    return kvferry.make_store(in_folders(options.store, rank))


def _is_shared(store: Mapping[str, Any]) -> bool:
    if store.get("backend") == "tiered" and isinstance(store.get("lower"), Mapping):
        return _is_shared(store["lower"])
    return store.get("backend") in _SHARED
