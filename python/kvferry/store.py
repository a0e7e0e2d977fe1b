"""KVStoreBuffer: tensors under keys, in whatever store the deployment has.

    with KVStoreBuffer({"backend": "host", "capacity_bytes": 1 << 30}) as store:
        store.put("layer 3", tensor)
        tensor = store.get("layer 3")  # None when it is not, or no longer, there

A store is a cache: see connector/store/kv_store.h for what its backends promise.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import numbers
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvferry import _core
from kvferry.tensor_bytes import decode, encode, fill

Key = str | bytes

# So long after its deadline a store has ended a call, or it hangs.
GRACE_S = 1.0
# As of the stores in C++ (python/kv_store.h).
MAX_TIMEOUT_MS = 366 * 24 * 3600 * 1000

# What make_store() takes: keys of a configuration, those that must be there, and the class.
_BACKENDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "host": ("HostStore", ("capacity_bytes",), ("page_bytes", "max_value_bytes")),
    "rocksdb": ("RocksDbStore", ("path",), ("capacity_bytes", "max_value_bytes", "sync")),
    "redis": (
        "RedisStore",
        (),
        (
            "host",
            "port",
            "username",
            "password",
            "password_file",
            "database",
            "key_prefix",
            "ttl_ms",
            "connect_timeout_ms",
            "max_value_bytes",
            "connections",
        ),
    ),
    "tiered": ("TieredStore", ("upper", "lower"), ()),
    "mooncake": (
        "MooncakeStore",
        ("local_hostname", "master_address"),
        (
            "metadata_server",
            "global_segment_bytes",
            "local_buffer_bytes",
            "protocol",
            "device",
            "key_prefix",
            "max_value_bytes",
            "staging_buffers",
            "connect_timeout_ms",
        ),
    ),
}
_TIERS = ("upper", "lower")
# What is no whole number among their keys.
_TEXTS = {
    "path",
    "host",
    "username",
    "password",
    "password_file",
    "key_prefix",
    "local_hostname",
    "master_address",
    "metadata_server",
    "protocol",
    "device",
}
_FLAGS = {"sync"}
_LIBRARIES = {"RocksDbStore": "librocksdb-dev", "RedisStore": "libhiredis-dev"}


def _store_class(name: str):
    if name == "MooncakeStore":
        return importlib.import_module("kvferry.mooncake").MooncakeStore
    try:
        return getattr(_core, name)
    except AttributeError:
        library = _LIBRARIES.get(name, "its library")
        raise ImportError(
            f"this build of kvferry has no {name}: install Debian's {library}, then build again"
        ) from None


def _check_value(backend: str, key: str, value: Any) -> None:
    if key in _TEXTS:
        # Without the value: it may be a password.
        if not isinstance(value, str):
            kind = type(value).__name__
            raise ValueError(f"store: {key} of {backend} is of type {kind} but must be a string")
    elif key in _FLAGS:
        if not isinstance(value, bool):
            raise ValueError(f"store: {key} of {backend} is {value!r} but must be true or false")
    elif not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ValueError(f"store: {key} of {backend} is {value!r} but must be a whole number")


def check_config(config: Mapping[str, Any]) -> None:
    """ValueError names what is wrong with a configuration, tiers and all; opening the store shows
    the rest."""
    if not isinstance(config, Mapping):
        raise TypeError(f"store: a configuration is a dict, not {type(config).__name__}")
    backend = config.get("backend")
    if not isinstance(backend, str) or backend not in _BACKENDS:
        known = ", ".join(_BACKENDS)
        raise ValueError(f"store: backend {backend!r} is not one of {known}")
    _, needed, optional = _BACKENDS[backend]
    for key in config:
        if key not in ("backend", *needed, *optional):
            known = ", ".join(needed + optional)
            raise ValueError(f"store: {backend} knows no {key!r}; it knows {known}")
    for key in needed:
        if key not in config:
            raise ValueError(f"store: {backend} needs {key!r}")
    tiers = {tier: config[tier] for tier in _TIERS if tier in config}
    for tier, of_tier in tiers.items():
        if not isinstance(of_tier, Mapping):
            raise ValueError(
                f"store: the {tier} tier is {of_tier!r}; it has to be an object with a backend"
            )
        if of_tier.get("backend") == "mooncake":
            raise ValueError(f"store: mooncake cannot be the {tier} tier: it has tiers of its own")
    for key, value in config.items():
        if key != "backend" and key not in _TIERS:
            _check_value(backend, key, value)
    for of_tier in tiers.values():
        check_config(of_tier)


def in_folders(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A checked configuration for one process of several: a `path` belongs to one, so each has a
    folder of that name in it."""
    config = dict(config)
    for tier in _TIERS:
        if tier in config:
            config[tier] = in_folders(config[tier], name)
    if config["backend"] == "rocksdb" and isinstance(config["path"], str):
        config["path"] = os.path.join(config["path"], name)
    return config


def make_store(config: Mapping[str, Any]):
    """The store that a configuration describes; ValueError names what is wrong with it."""
    check_config(config)
    options = dict(config)
    name, _, _ = _BACKENDS[options.pop("backend")]
    for tier in _TIERS:
        if tier in options:
            options[tier] = make_store(options[tier])
    return _store_class(name)(**options)


def _left_ms(deadline: float) -> int:
    return max(0, math.ceil((deadline - time.monotonic()) * 1000))


async def _wait_until(moment: float, waiting: asyncio.Future) -> asyncio.CancelledError | None:
    """Waits for it until then, also where the task is cancelled meanwhile: returns that, if so."""
    cancelled = None
    while not waiting.done() and (left := moment - time.monotonic()) > 0:
        try:
            await asyncio.wait([waiting], timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


class KVStoreBuffer:
    """Puts tensors (torch or numpy, on the CPU) or bytes into a store, and gets them back.

    `backend` is a store or the configuration of one ({"backend": "redis", "host": ...}). What a
    store does not have is None; everything else that goes wrong raises one of kvferry's errors, a
    server that is down among them, at the latest timeout_ms after the call. Thread-safe, as far as
    two calls do not share an `out`.
    """

    def __init__(self, backend, *, timeout_ms: int = 5000):
        if not 0 <= timeout_ms <= MAX_TIMEOUT_MS:  # Nor is it no number.
            raise ValueError(f"store: timeout_ms is {timeout_ms} but must be 0 to {MAX_TIMEOUT_MS}")
        self._owned = isinstance(backend, Mapping)
        if not self._owned and not hasattr(backend, "get_bytes"):
            kind = type(backend).__name__
            raise TypeError(f"store: a backend is a store or the dict that makes one, not {kind}")
        self._store = make_store(backend) if self._owned else backend
        self._timeout_ms = timeout_ms
        # One thread: asyncio calls take turns, and wait for nobody else's threads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvferry-store")
        self._closed = False

    @property
    def backend(self):
        return self._store

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_ms / 1000

    # ---------------------------------------------------------------- one entry

    def put(self, key: Key, value) -> None:
        """Stores a tensor with its dtype and shape; None erases the entry.

        A tensor that is not contiguous is copied first. One on a GPU is a ValueError.
        """
        self._put(self._deadline(), key, value)

    def _put(self, deadline: float, key: Key, value) -> None:
        if value is None:
            self._store.erase(key, timeout_ms=_left_ms(deadline))
        else:
            self._store.put(key, encode(value), timeout_ms=_left_ms(deadline))

    def get(self, key: Key, out=None):
        """What was put: a torch tensor, a numpy array or bytes; None for a miss.

        With `out`, a contiguous tensor on the CPU, fills and returns that: FailedPrecondition when
        it is not of the stored dtype and shape. What is in it after an error is undefined.
        """
        return self._get(self._deadline(), key, out)

    def _get(self, deadline: float, key: Key, out=None):
        try:
            if out is None:
                return decode(self._store.get_bytes(key, timeout_ms=_left_ms(deadline)))
            target = fill(out)
            self._store.get_into(key, target.parts, timeout_ms=_left_ms(deadline))
        except _core.NotFound:
            return None
        target.check()
        return out

    # ---------------------------------------------------------------- many

    def exists(self, keys: Key | Sequence[Key]) -> int:
        """How many of the keys, from the first on, are there without a gap."""
        return self._exists(self._deadline(), keys)

    def _exists(self, deadline: float, keys: Key | Sequence[Key]) -> int:
        keys = [keys] if isinstance(keys, str | bytes) else list(keys)
        return self._store.exists(keys, timeout_ms=_left_ms(deadline))

    def put_batch(self, items: Mapping[Key, Any] | Iterable[tuple[Key, Any]]) -> None:
        """Stores all that it can, then raises the first error, if there was one."""
        self._put_batch(self._deadline(), items)

    def _put_batch(self, deadline: float, items) -> None:
        pairs = items.items() if isinstance(items, Mapping) else items
        batch = [(key, encode(value)) for key, value in pairs]
        for error in self._store.put_batch(batch, timeout_ms=_left_ms(deadline)):
            if error is not None:
                raise error

    def get_batch(self, keys: Sequence[Key], outs: Sequence[Any] | None = None) -> list:
        """A list as of get(). With `outs` it is one batch, and without one call after another."""
        return self._get_batch(self._deadline(), keys, outs)

    def _get_batch(self, deadline: float, keys: Sequence[Key], outs=None) -> list:
        if isinstance(keys, str | bytes):
            raise ValueError(f"store: keys is {keys!r}, one key, but must be a list of them")
        if outs is None:  # The first is used last, and so dropped last.
            return [self._get(deadline, key) for key in reversed(list(keys))][::-1]
        if len(outs) != len(keys):
            raise ValueError(f"store: {len(keys)} keys but {len(outs)} outs")
        targets = [fill(out) for out in outs]
        batch = [(key, target.parts) for key, target in zip(keys, targets, strict=True)]
        errors = self._store.get_batch(batch, timeout_ms=_left_ms(deadline))
        results = []
        for error, target, out in zip(errors, targets, outs, strict=True):
            if error is not None and not isinstance(error, _core.NotFound):
                raise error
            if error is None:
                target.check()
            results.append(out if error is None else None)
        return results

    # ---------------------------------------------------------------- the rest

    def pin(self, key: Key) -> None:
        """Keeps an entry from being evicted; counted. NotFound when it is not there."""
        self._store.pin(key, timeout_ms=self._timeout_ms)

    def unpin(self, key: Key) -> None:
        self._store.unpin(key, timeout_ms=self._timeout_ms)

    def stats(self) -> dict[str, int]:
        return self._store.stats()

    def close(self) -> None:
        """Ends the thread, and closes the backend unless it was given as an object.

        An asyncio call that has begun ends first; those whose turn has not come fail.
        """
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._owned:
            self._store.close()

    def __enter__(self) -> KVStoreBuffer:
        return self

    def __exit__(self, *_exception) -> None:
        self.close()

    # ---------------------------------------------------------------- asyncio
    #
    # None of these blocks the event loop. They take turns, and the wait for it is part of
    # timeout_ms. Cancelled, one that has begun ends before it raises, so that the memory it was
    # given is the caller's again. Only a store that hangs for GRACE_S beyond the deadline is not
    # waited for: the error comes while it may use that memory still.

    async def aput(self, key: Key, value) -> None:
        await self._in_thread(self._put, key, value)

    async def aget(self, key: Key, out=None):
        return await self._in_thread(self._get, key, out)

    async def aexists(self, keys: Key | Sequence[Key]) -> int:
        return await self._in_thread(self._exists, keys)

    async def aput_batch(self, items: Mapping[Key, Any] | Iterable[tuple[Key, Any]]) -> None:
        await self._in_thread(self._put_batch, items)

    async def aget_batch(self, keys: Sequence[Key], outs: Sequence[Any] | None = None) -> list:
        return await self._in_thread(self._get_batch, keys, outs)

    def _submit(self, call, deadline: float, *args) -> Future:
        # It is in line before its thread is started, and would be done by the next one's.
        is_in_line = [True]

        def do():
            if is_in_line:
                return self._call_in_time(call, deadline, *args)

        try:
            return self._thread.submit(do)
        except RuntimeError as error:
            is_in_line.clear()
            if self._closed:
                raise _core.FailedPrecondition("store: it is closed") from error
            raise _core.ResourceExhausted(
                f"store: the system refused a thread for asynchronous calls ({error}); allow more "
                "(pids.max, ulimit -u)"
            ) from error

    async def _in_thread(self, call, *args):
        if self._closed:
            raise _core.FailedPrecondition("store: it is closed")
        deadline = self._deadline()
        future = self._submit(call, deadline, *args)
        waiting = asyncio.wrap_future(future)
        # Or asyncio logs an error that nobody was left to hear.
        waiting.add_done_callback(lambda it: it.cancelled() or it.exception())
        try:
            await asyncio.wait([waiting], timeout=max(0.0, deadline - time.monotonic()))
            cancelled = None
        except asyncio.CancelledError as error:
            cancelled = error
        if not future.done() and not future.cancel():  # It has begun.
            cancelled = await _wait_until(deadline + GRACE_S, waiting) or cancelled
        waiting.cancel()  # Does nothing if it is done.
        if cancelled is not None:
            raise cancelled
        if not future.done():
            raise self._late("it has not ended a call, and may use the memory of it still")
        if not future.cancelled():
            return future.result()
        if self._closed:
            raise _core.FailedPrecondition("store: it is closed")
        raise self._late("calls before this one took all of its time")

    def _call_in_time(self, call, deadline: float, *args):
        if time.monotonic() >= deadline:
            raise self._late("calls before this one took all of its time")
        return call(deadline, *args)

    def _late(self, why: str) -> Exception:
        return _core.DeadlineExceeded(f"store: {self._timeout_ms} ms are over: {why}")
