"""HiCacheStore: a store of kvferry as the third tier of SGLang's hierarchical cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

import kvferry
from kvferry.seldom_log import SeldomLog
from kvferry.sglang.options import Options, open_store
from kvferry.sglang.pages import Pages

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class HiCacheStore(HiCacheStorage):
    """Stores pages of SGLang's host pools in whatever kvferry.make_store() can open.

    What is wrong with the configuration or with a pool raises while SGLang attaches the backend.
    After that nothing raises but clear(): a backend that is down is a miss or a failed write, said
    in the log at most every half minute. It takes timeout_ms at most for each pool, and a second
    (see KvStore).
    Thread-safe. One object belongs to one rank.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict | None = None):
        self._config = storage_config
        self._options = Options.parse(storage_config.extra_config)
        self._store = open_store(self._options, storage_config)
        self._pages: dict[str, Pages] = {}
        self._log, self._name = SeldomLog(_logger), self._store.name

    # ---------------------------------------------------------------- pools

    def register_mem_pool_host(self, mem_pool_host) -> None:
        """The pool of the KV itself. ValueError when its pages cannot be stored."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, PoolName.KV, self._options.zero_copy)

    def register_mem_host_pool_v2(self, host_pool, host_pool_name) -> None:
        """A pool beside it, such as an indexer's or Mamba's. The KV's own has come before."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            self._register(host_pool, host_pool_name, zero_copy=True)

    def _register(self, pool, name: str, zero_copy: bool) -> None:
        pages = Pages(pool, name, self._config, self._options.namespace, zero_copy=zero_copy)
        limit = self._store.max_value_bytes
        if pages.page_bytes > limit:
            raise ValueError(
                f"hicache: a page of pool {str(name)!r} has {pages.page_bytes} bytes, more than "
                f"max_value_bytes of the store, {limit}"
            )
        self._pages[name] = pages

    # ---------------------------------------------------------------- pages in place

    def batch_set_v1(self, keys, host_indices, extra_info=None) -> list[bool]:
        return self._move(self._store.put_batch, "put", PoolName.KV, keys, host_indices)

    def batch_get_v1(self, keys, host_indices, extra_info=None) -> list[bool]:
        """What is in a page after False is undefined."""
        return self._move(self._store.get_batch, "get", PoolName.KV, keys, host_indices)

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info=None) -> dict[str, list[bool]]:
        put = self._store.put_batch
        return {t.name: self._move(put, "put", t.name, t.keys, t.host_indices) for t in transfers}

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info=None) -> dict[str, list[bool]]:
        get = self._store.get_batch
        return {t.name: self._move(get, "get", t.name, t.keys, t.host_indices) for t in transfers}

    def _move(self, call, what: str, name: str, hashes, indices) -> list[bool]:
        hashes = hashes or []

        def move() -> list[bool]:
            pages = self._pages_of(name, zero_copy=True)
            memory = pages.memory(indices.detach().to("cpu"), len(hashes))
            return self._batch(call, what, list(zip(pages.keys(hashes), memory, strict=True)))

        return self._try(what, move, [False] * len(hashes))

    # ---------------------------------------------------------------- pages as tensors

    def set(self, key, value=None, target_location=None, target_sizes=None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None) -> bool:
        """Whether all of them are stored; those that can be are."""

        def put() -> bool:
            pages = self._pages_of(PoolName.KV, zero_copy=False)
            data = [pages.flat(value.contiguous()) for value in values]
            items = list(zip(pages.keys(keys), data, strict=True))
            return all(self._batch(self._store.put_batch, "put", items))

        return self._try("put", put, False)

    def get(self, key, target_location=None, target_sizes=None) -> torch.Tensor | None:
        """`target_location`, a tensor of the page's size, filled; None for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys, target_locations=None, target_sizes=None
    ) -> list[torch.Tensor | None]:
        def get() -> list[torch.Tensor | None]:
            pages = self._pages_of(PoolName.KV, zero_copy=False)
            data = [pages.flat(target) for target in target_locations]
            items = list(zip(pages.keys(keys), data, strict=True))
            got = self._batch(self._store.get_batch, "get", items)
            return [t if ok else None for t, ok in zip(target_locations, got, strict=True)]

        return self._try("get", get, [None] * len(keys))

    # ---------------------------------------------------------------- what is there

    def exists(self, key) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys, extra_info=None) -> int:
        """How many of the pages, from the first on, are there without a gap."""

        def exists() -> int:
            names = self._pages_of(PoolName.KV).keys(keys)
            return self._store.exists(names, timeout_ms=self._options.timeout_ms)

        return self._try("exists", exists, 0)

    def batch_exists_v2(
        self, keys, pool_transfers: list[PoolTransfer] | None = None, extra_info=None
    ) -> PoolTransferResult:
        """The prefixes of KV for which the other pools have what belongs to them."""
        kv_pages = self.batch_exists(keys, extra_info)
        hits = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            # Blocks of another granularity decide nothing about the KV; they are not looked for.
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS or not restorable:
                continue
            there = self._try("exists", lambda t=transfer: self._there(t.name, keys[:kv_pages]), [])
            ends = _ends(there, transfer)
            if ends:
                hits[transfer.name] = max(ends)
            restorable &= ends
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def _there(self, name: str, hashes: list[str]) -> list[bool]:
        names = self._pages_of(name).keys(hashes)
        return self._store.exists_each(names, timeout_ms=self._options.timeout_ms)

    # ---------------------------------------------------------------- the rest

    def clear(self) -> None:
        """NotImplementedError, which SGLang logs and answers with a failure."""
        raise NotImplementedError(
            "kvferry has no way to list what is in a store: empty the backend itself, or give "
            "another namespace"
        )

    def close(self) -> None:
        """Later calls find nothing and store nothing."""
        self._store.close()

    def _pages_of(self, name: str, zero_copy: bool | None = None) -> Pages:
        pages = self._pages.get(name)
        if pages is None:
            raise kvferry.FailedPrecondition(f"no host pool {str(name)!r} is registered")
        # In place the bytes of a page may have another order than in a tensor.
        if zero_copy is not None and pages.zero_copy != zero_copy:
            raise kvferry.FailedPrecondition(
                f'"interface_v1" is {int(pages.zero_copy)}, which is another way to move pages'
            )
        return pages

    def _batch(self, call, what: str, items: list) -> list[bool]:
        errors = call(items, timeout_ms=self._options.timeout_ms)
        for error in errors:
            if error is not None and not isinstance(error, kvferry.NotFound):
                self._say_failed(what, error)
                break
        return [error is None for error in errors]

    def _say_failed(self, what: str, error: Exception) -> None:
        self._log.warn(
            "%s of %s failed, SGLang goes on without: %s: %s",
            what,
            self._name,
            type(error).__name__,
            error,
        )

    def _try(self, what: str, call: Callable[[], _Result], otherwise: _Result) -> _Result:
        # All of them: SGLang's threads run other requests too.
        try:
            return call()
        except Exception as error:
            self._say_failed(what, error)
            return otherwise


def _ends(there: list[bool], transfer: PoolTransfer) -> set[int]:
    """The lengths of prefix at which a pool can go on; `there` says which pages it has."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        length = there.index(False) if False in there else len(there)
        return set(range(1, length + 1))
    needed = max(1, len(transfer.keys or []))
    return {end for end in range(1, len(there) + 1) if all(there[max(0, end - needed) : end])}
