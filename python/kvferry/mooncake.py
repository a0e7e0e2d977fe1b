"""Mooncake Store behind the methods of kvferry's own stores.

For deployments that have outgrown one machine: replicas, eviction and failover are Mooncake's job.
Needs `pip install mooncake-transfer-engine` (`-non-cuda` for machines without a GPU) and a running
`mooncake_master`. Nothing here is imported unless it is asked for.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import numpy as np

from kvferry import _core
from kvferry.store import MAX_TIMEOUT_MS

HEADER_BYTES = 24
MAX_KEY_BYTES = 256
# Of Mooncake's error codes, those that are not just "the store fails".
NOT_FOUND = {-704, -703}  # No such object, or one that is still being written.
NO_ROOM = {-200}
GREW = -600  # The value no longer fits: it was replaced between asking for its size and reading.
READS = 5
# So long close() waits for Mooncake.
CLOSE_S = 5.0
# A device's pages are in host memory so many at a time, as in C++ (connector/store/kv_store.h).
STAGED_BYTES = 16 << 20

_logger = logging.getLogger(__name__)


def _import_mooncake():
    try:
        from mooncake import store
    except ImportError as error:
        raise ImportError(
            "kvferry's Mooncake backend needs Mooncake's Python package: "
            "pip install mooncake-transfer-engine (mooncake-transfer-engine-non-cuda without GPU)"
        ) from error
    return store


def _key_bytes(key) -> bytes:
    if not isinstance(key, str | bytes):
        raise TypeError(f"a key is bytes or str, not {type(key).__name__}")
    data = key.encode() if isinstance(key, str) else key
    if not 1 <= len(data) <= MAX_KEY_BYTES:
        raise ValueError(f"store: a key of {len(data)} bytes; it must have 1 to {MAX_KEY_BYTES}")
    return data


def _flat(part, writable: bool) -> np.ndarray:
    """The memory of a buffer or CPU tensor as uint8, without a copy."""
    if hasattr(part, "is_contiguous"):  # torch: numpy knows not all of its types
        import torch

        if part.device.type != "cpu":
            raise ValueError("store: the memory is not the CPU's; copy it there first")
        if not part.is_contiguous():
            raise ValueError("store: the memory is not contiguous; make it so first")
        part = part.detach().reshape(-1).view(torch.uint8).numpy()
    try:
        view = memoryview(part)
    except TypeError:
        raise TypeError(f"store: {type(part).__name__} is no buffer") from None
    if not view.c_contiguous:
        raise ValueError("store: the memory is not contiguous; make it so first")
    if writable and view.readonly:
        raise TypeError(f"store: {type(part).__name__} is no buffer that can be written")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _parts(value, writable: bool = False) -> list[np.ndarray]:
    parts = value if isinstance(value, list | tuple) else [value]
    return [_flat(part, writable) for part in parts]


def _gather(parts: Sequence[np.ndarray], out: np.ndarray) -> None:
    begin = 0
    for part in parts:
        out[begin : begin + part.nbytes] = part
        begin += part.nbytes


def _scatter(value: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    begin = 0
    for part in parts:
        part[:] = value[begin : begin + part.nbytes]
        begin += part.nbytes


def _bytes_of(parts: Sequence[np.ndarray]) -> int:
    return sum(part.nbytes for part in parts)


def _left_ms(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000))


# Keys, and where in the batch each stands, with its memory.
_Group = dict[bytes, tuple[int, list[np.ndarray]]]


def _places(group: _Group) -> list[slice]:
    """Where the values of a group lie in a staging buffer, headers and all."""
    ends = np.cumsum([HEADER_BYTES + _bytes_of(parts) for _, parts in group.values()])
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _memory(staging: np.ndarray, places: list[slice]) -> tuple[list[int], list[int]]:
    """As Mooncake wants it: addresses and sizes."""
    return (
        [staging.ctypes.data + int(place.start) for place in places],
        [int(place.stop - place.start) for place in places],
    )


def _closed() -> Exception:
    return _core.FailedPrecondition("store: it is closed")


@dataclasses.dataclass(eq=False)
class _Call:
    """One of Mooncake's, and what it has until that has let go of it, or never will have it."""

    writes: frozenset[str]  # In Mooncake.
    future: Future = dataclasses.field(default_factory=Future)
    staging: np.ndarray | None = None
    # Not the future's end: who waits for that is not woken where it is cancelled, and no thread
    # will ever take it.
    is_over: threading.Event = dataclasses.field(default_factory=threading.Event)


class _Threads:
    """Threads for calls of Mooncake's, which can hang. At its end the interpreter joins those of
    concurrent.futures, and would wait for ever with them; it does not wait for these."""

    def __init__(self, count: int):
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ends = False  # Under the lock: nothing is put into the queue behind what ends them.
        # They know the queue alone, so that they end with this object.
        self._threads = [
            threading.Thread(
                target=self._work, args=(self._calls,), name="kvferry-mooncake", daemon=True
            )
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _work(calls: queue.SimpleQueue) -> None:
        while (call := calls.get()) is not None:
            future, run, staging = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(run(staging))
                except BaseException as error:  # The caller's, whatever it is.
                    future.set_exception(error)
            del call, future, run, staging  # Not kept until the next one comes.

    def submit(self, future: Future, run: Callable, staging: np.ndarray | None) -> None:
        """Unless it is cancelled before, it gets what run(staging) gives. Raises
        FailedPrecondition after end()."""
        with self._lock:
            if self._ends:
                raise _closed()
            self._calls.put((future, run, staging))

    def end(self) -> None:
        """As soon as they have run what was submitted before."""
        with self._lock:
            self._ends = True
            for _ in self._threads:
                self._calls.put(None)

    __del__ = end

    def have_ended(self, deadline: float) -> bool:
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


class MooncakeStore:
    """See connector/store/kv_store.h for what the methods promise.

    A put or erase that ran into its deadline may still be carried out, but not after a later one of
    the same key through this object: that waits until the earlier one has ended.

    Values go through memory of this object's own, registered with Mooncake once: a call that ran
    into its deadline goes on inside Mooncake, where nothing can stop it, and then touches that
    memory and not the caller's. `staging_buffers` of max_value_bytes each bound how many calls run
    at a time, those that are past their deadline among them. Values of a batch share one, as many
    as fit, and go in one call of Mooncake's.

    Mooncake could read and write the parts of a value where they lie, too, but not so here: a late
    write would land in pages that have another owner by then, its put of parts leaves an older
    value in place, and over TCP each part is a transfer of its own, slower than a copy and often
    failed where there are many.

    Where others keep the old value when there is no room for its successor, Mooncake may have
    dropped it by then. Room comes a moment later, when its master has evicted something.

    Mooncake's TCP transport has no checksum; kvferry's header (connector/store/value_header.h)
    stands in front of each value, and what does not match it is a miss, counted in errors.
    """

    name = "mooncake"

    def __init__(
        self,
        local_hostname: str,
        master_address: str,
        metadata_server: str = "P2PHANDSHAKE",
        global_segment_bytes: int = 0,
        local_buffer_bytes: int = 16 << 20,
        protocol: str = "tcp",
        device: str = "",
        key_prefix: str = "kvferry:",
        max_value_bytes: int = 16 << 20,
        staging_buffers: int = 2,
        connect_timeout_ms: int = 15000,
    ):
        for option, value, low, high in (
            ("global_segment_bytes", global_segment_bytes, 0, 1 << 50),
            ("local_buffer_bytes", local_buffer_bytes, 0, 1 << 50),
            ("max_value_bytes", max_value_bytes, 1, 1 << 40),
            ("staging_buffers", staging_buffers, 1, 256),
            ("connect_timeout_ms", connect_timeout_ms, 1, 600_000),
        ):
            if not low <= value <= high:
                raise ValueError(f"mooncake: {option} is {value} but must be {low} to {high}")
        module = _import_mooncake()
        self.max_value_bytes = max_value_bytes
        self._address = master_address
        self._prefix = key_prefix
        self._store = module.MooncakeDistributedStore()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("puts", "hits", "misses", "errors"), 0)
        self._closed, self._left = False, threading.Event()
        # Those that write, also when the callers have gone: at most one a staging buffer.
        self._writing: set[_Call] = set()
        self._threads = _Threads(staging_buffers)
        self._staging: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        self._buffers = [
            np.empty(max_value_bytes + HEADER_BYTES, np.uint8) for _ in range(staging_buffers)
        ]

        def connect(_staging) -> None:
            code = self._store.setup(
                local_hostname,
                metadata_server,
                global_segment_bytes,
                local_buffer_bytes,
                protocol,
                device,
                master_address,
            )
            for buffer in self._buffers if code == 0 else ():
                code = code or self._store.register_buffer(buffer.ctypes.data, buffer.nbytes)
            if code != 0:
                raise self._error(code)

        self._staging.put(self._buffers[0])
        self._call(connect, time.monotonic() + connect_timeout_ms / 1000)
        for buffer in self._buffers[1:]:
            self._staging.put(buffer)

    # ---------------------------------------------------------------- calls with a deadline

    def _deadline(self, timeout_ms: int) -> float:
        if not 0 <= timeout_ms <= MAX_TIMEOUT_MS:
            raise ValueError(f"timeout_ms is {timeout_ms} but must be 0 to {MAX_TIMEOUT_MS}")
        return time.monotonic() + timeout_ms / 1000

    def _count(self, *names: str) -> None:
        with self._lock:
            for name in names:
                self._counts[name] += 1

    def _error(self, code: int) -> Exception:
        if code in NOT_FOUND:
            return _core.NotFound("mooncake: no such entry")
        self._count("errors")
        where = f"mooncake {self._address}"
        if code in NO_ROOM:
            return _core.ResourceExhausted(f"{where}: no room (error {code})")
        return _core.Unavailable(f"{where}: error {code}")

    def _late(self) -> Exception:
        self._count("errors")
        return _core.DeadlineExceeded(f"mooncake {self._address}: no answer in time")

    def _begin(self, call: _Call, deadline: float) -> None:
        """Gives a call a staging buffer, once no other one writes what it writes, which may have
        begun and been given up while this one waited for a buffer."""
        while True:
            try:
                call.staging = self._staging.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._late() from None
            with self._lock:
                others = [it for it in self._writing if not it.writes.isdisjoint(call.writes)]
                if not others and call.writes:
                    self._writing.add(call)
            if not others:
                return
            self._give_back(call)
            for other in others:
                if not other.is_over.wait(max(0.0, deadline - time.monotonic())):
                    raise self._late()

    def _give_back(self, call: _Call) -> None:
        staging, call.staging = call.staging, None
        if staging is not None:
            self._staging.put(staging)

    def _end(self, call: _Call) -> None:
        with self._lock:
            self._writing.discard(call)
        call.is_over.set()
        self._give_back(call)

    def _call(
        self,
        run: Callable[[np.ndarray], object],
        deadline: float,
        fill=None,
        take=None,
        writes: Sequence[str] = (),
    ):
        """fill(staging buffer) here, run(it) in a thread, then take(what that gave, it) here.
        `writes`: what run() writes in Mooncake."""
        if self._closed:
            raise _closed()
        call = _Call(frozenset(writes))
        try:
            self._begin(call, deadline)
            if fill is not None:
                fill(call.staging)
            self._threads.submit(call.future, run, call.staging)
            result = call.future.result(timeout=max(0.0, deadline - time.monotonic()))
            return result if take is None else take(result, call.staging)
        except FutureTimeoutError:
            raise self._late() from None
        finally:  # After Ctrl-C too, wherever it comes.
            # At once, or, if Mooncake has it still, when that has let go of it.
            call.future.add_done_callback(lambda _: self._end(call))
            call.future.cancel()

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _check_size(self, size: int) -> None:
        if not 1 <= size <= self.max_value_bytes:
            raise ValueError(
                f"store: a value of {size} bytes; it must have 1 to {self.max_value_bytes}"
            )

    # ---------------------------------------------------------------- the methods of a store

    def put(self, key, value, timeout_ms: int = 5000) -> None:
        data, parts = _key_bytes(key), _parts(value)
        size = _bytes_of(parts)
        self._check_size(size)
        header = np.frombuffer(_core.value_header(data, parts), np.uint8)
        name = self._name(data)

        def upsert(staging: np.ndarray) -> None:
            # put_from() would leave an older value in place, and say that all is well.
            code = self._store.upsert_from(name, staging.ctypes.data, HEADER_BYTES + size)
            if code != 0:
                raise self._error(code)

        def fill(staging: np.ndarray) -> None:
            _gather([header, *parts], staging)

        self._call(upsert, self._deadline(timeout_ms), fill=fill, writes=[name])
        self._count("puts")

    @staticmethod
    def _check_length(got_bytes: int, want_bytes: int | None) -> None:
        if want_bytes is not None and got_bytes != HEADER_BYTES + want_bytes:
            raise _core.FailedPrecondition(
                f"mooncake: the value has {got_bytes - HEADER_BYTES} bytes but there is room for "
                f"{want_bytes}"
            )

    def _read(self, key: bytes, want_bytes: int | None) -> Callable[[np.ndarray], int]:
        def read_once(name: str, staging: np.ndarray) -> int:
            size = self._store.get_size(name)
            if size < 0:
                raise self._error(size)
            self._check_length(size, want_bytes)
            if size > staging.nbytes:
                return 0  # Nobody here put that.
            return self._store.get_into(name, staging.ctypes.data, size)

        def read(staging: np.ndarray) -> int:
            for _ in range(READS):
                got = read_once(self._name(key), staging)
                if got != GREW:
                    break
            if got < 0:
                raise self._error(got)
            return got

        return read

    def _get(self, key: bytes, want_bytes: int | None, timeout_ms: int, use):
        def take(got: int, staging: np.ndarray):
            if not _core.value_is_whole(key, staging[:got]):
                self._count("errors")
                raise _core.NotFound("mooncake: the entry is damaged or not kvferry's")
            # It may have been replaced since its size was asked for.
            self._check_length(got, want_bytes)
            return use(staging[HEADER_BYTES:got])

        try:
            result = self._call(self._read(key, want_bytes), self._deadline(timeout_ms), take=take)
        except _core.NotFound:
            self._count("misses")
            raise
        self._count("hits")
        return result

    def get_into(self, key, out, timeout_ms: int = 5000) -> None:
        parts = _parts(out, writable=True)
        self._get(
            _key_bytes(key), _bytes_of(parts), timeout_ms, lambda value: _scatter(value, parts)
        )

    def get_bytes(self, key, timeout_ms: int = 5000) -> np.ndarray:
        return self._get(_key_bytes(key), None, timeout_ms, np.ndarray.copy)

    def exists(self, keys: Sequence, timeout_ms: int = 5000) -> int:
        for count, there in enumerate(self._which(keys, timeout_ms)):
            if not there:
                return count
        return len(keys)

    def exists_each(self, keys: Sequence, timeout_ms: int = 5000) -> list[bool]:
        return list(self._which(keys, timeout_ms))

    def _which(self, keys: Sequence, timeout_ms: int) -> Iterator[bool]:
        names = [self._name(_key_bytes(key)) for key in keys]
        if not names:
            return
        codes = self._call(lambda _: self._store.batch_is_exist(names), self._deadline(timeout_ms))
        for code in codes:
            if code < 0 and code not in NOT_FOUND:
                raise self._error(code)
            yield code == 1

    def erase(self, key, timeout_ms: int = 5000) -> None:
        name = self._name(_key_bytes(key))
        # By force: Mooncake keeps what was read a moment ago under a lease.
        code = self._call(
            lambda _: self._store.remove(name, True), self._deadline(timeout_ms), writes=[name]
        )
        if code != 0 and code not in NOT_FOUND:
            raise self._error(code)

    def pin(self, key, timeout_ms: int = 5000) -> None:
        raise _core.Unimplemented("mooncake: entries cannot be pinned after they were put")

    def unpin(self, key, timeout_ms: int = 5000) -> None:
        raise _core.Unimplemented("mooncake: entries cannot be pinned after they were put")

    def put_batch(self, items: Iterable[tuple], timeout_ms: int = 5000) -> list:
        return self._batch(self._put_together, items, timeout_ms, writable=False)

    def get_batch(self, items: Iterable[tuple], timeout_ms: int = 5000) -> list:
        return self._batch(self._get_together, items, timeout_ms, writable=True)

    def put_pages(self, keys: Sequence, pool, pages: Sequence[int], timeout_ms: int = 5000) -> list:
        if (error := self._check_pages(keys, pool, pages)) is not None:
            return [error] * len(keys)
        if pool.memory != "host":
            return self._staged(self._put_from_device, keys, pool, pages, timeout_ms)
        return self.put_batch(self._page_items(keys, pool, pages), timeout_ms)

    def get_pages(self, keys: Sequence, pool, pages: Sequence[int], timeout_ms: int = 5000) -> list:
        if (error := self._check_pages(keys, pool, pages)) is not None:
            return [error] * len(keys)
        if pool.memory != "host":
            return self._staged(self._get_to_device, keys, pool, pages, timeout_ms)
        return self.get_batch(self._page_items(keys, pool, pages), timeout_ms)

    @staticmethod
    def _check_pages(keys: Sequence, pool, pages: Sequence[int]) -> Exception | None:
        """What each key is told of a page that the pool does not have, as by the stores in C++."""
        if len(keys) != len(pages):
            raise ValueError(f"store: {len(keys)} keys for {len(pages)} pages")
        for page in pages:
            if not 0 <= page < pool.num_pages:
                return _core.OutOfRange(f"store: page {page} of a pool of {pool.num_pages}")
        return None

    @staticmethod
    def _page_items(keys: Sequence, pool, pages: Sequence[int]) -> list[tuple]:
        layers, tensors = pool.layout.num_layers, len(pool.layout.tensors)
        return [
            (key, [pool.page(layer, at, page) for layer in range(layers) for at in range(tensors)])
            for key, page in zip(keys, pages, strict=True)
        ]

    # Pages of a device go through a host store of their layout: that one can read and write them.

    def _staged(
        self, move, keys: Sequence, pool, pages: Sequence[int], timeout_ms: int
    ) -> list[Exception | None]:
        deadline, errors = self._deadline(timeout_ms), []
        most = max(1, STAGED_BYTES // pool.layout.page_bytes)
        for first in range(0, len(keys), most):
            some_keys, some_pages = keys[first : first + most], pages[first : first + most]
            host = _core.HostStore(len(some_keys) * pool.layout.page_bytes, layout=pool.layout)
            names = [f"{at}" for at in range(len(some_keys))]
            errors += move(some_keys, pool, list(some_pages), host, names, deadline)
        return errors

    def _put_from_device(self, keys, pool, pages, host, names, deadline: float) -> list:
        errors = host.put_pages(names, pool, pages)
        there = [at for at, error in enumerate(errors) if error is None]
        items = [(keys[at], host.get_bytes(names[at])) for at in there]
        for at, error in zip(there, self.put_batch(items, _left_ms(deadline)), strict=True):
            errors[at] = error
        return errors

    def _get_to_device(self, keys, pool, pages, host, names, deadline: float) -> list:
        values = [np.empty(pool.layout.page_bytes, np.uint8) for _ in keys]
        errors = self.get_batch(list(zip(keys, values, strict=True)), _left_ms(deadline))
        there = [at for at, error in enumerate(errors) if error is None]
        for at in there:
            host.put(names[at], values[at])
        written = host.get_pages([names[at] for at in there], pool, [pages[at] for at in there])
        for at, error in zip(there, written, strict=True):
            errors[at] = error
        return errors

    def _batch(self, call, items: Iterable[tuple], timeout_ms: int, writable: bool) -> list:
        """call(group, deadline) for groups that fit into a staging buffer, no key twice in one."""
        deadline, values = self._deadline(timeout_ms), []
        for item in items:
            if not isinstance(item, tuple) or len(item) != 2:
                raise TypeError("store: an item of a batch is a tuple (key, buffer)")
            values.append((item[0], _parts(item[1], writable)))
        errors: list = [None] * len(values)
        group: _Group = {}
        room = 0

        def flush() -> None:
            if group:
                for (at, _), error in zip(group.values(), call(group, deadline), strict=True):
                    errors[at] = error
                group.clear()

        for at, (key, parts) in enumerate(values):
            size = _bytes_of(parts)
            try:
                data = _key_bytes(key)
                if not writable:
                    self._check_size(size)
            except ValueError as error:
                errors[at] = error
                continue
            if data in group or HEADER_BYTES + size > room:
                flush()
                room = HEADER_BYTES + self.max_value_bytes
            group[data] = (at, parts)
            room -= HEADER_BYTES + size
        flush()
        return errors

    def _singly(self, call, key: bytes, memory, deadline: float) -> Exception | None:
        try:
            call(key, memory, _left_ms(deadline))
        except (_core.Error, ValueError) as error:
            return error
        return None

    def _put_together(self, group: _Group, deadline: float) -> list:
        if len(group) == 1:
            ((key, (_, parts)),) = group.items()
            return [self._singly(self.put, key, parts, deadline)]
        names, places = [self._name(key) for key in group], _places(group)

        def fill(staging: np.ndarray) -> None:
            for (key, (_, parts)), place in zip(group.items(), places, strict=True):
                header = np.frombuffer(_core.value_header(key, parts), np.uint8)
                _gather([header, *parts], staging[place])

        def upsert(staging: np.ndarray) -> list[int]:
            return self._store.batch_upsert_from(names, *_memory(staging, places))

        try:
            codes = self._call(upsert, deadline, fill=fill, writes=names)
        except _core.Error as error:
            return [error] * len(group)
        self._count(*["puts"] * codes.count(0))
        return [None if code == 0 else self._error(code) for code in codes]

    def _get_together(self, group: _Group, deadline: float) -> list:
        names, places = [self._name(key) for key in group], _places(group)

        def read(staging: np.ndarray) -> list[int]:
            return self._store.batch_get_into(names, *_memory(staging, places))

        def take(codes: list[int], staging: np.ndarray) -> list:
            """None for what came whole, else the code."""
            for at, ((key, (_, parts)), place) in enumerate(
                zip(group.items(), places, strict=True)
            ):
                value = staging[place]
                if codes[at] == value.nbytes and _core.value_is_whole(key, value):
                    _scatter(value[HEADER_BYTES:], parts)
                    codes[at] = None
            return codes

        if len(group) == 1:
            codes = [0]
        else:
            try:
                codes = self._call(read, deadline, take=take)
            except _core.Error as error:
                return [error] * len(group)
        self._count(*["hits"] * codes.count(None))
        errors = []
        for (key, (_, parts)), code in zip(group.items(), codes, strict=True):
            if code is None:
                errors.append(None)
            elif code in NOT_FOUND:
                self._count("misses")
                errors.append(self._error(code))
            else:  # Of another length, damaged or failed: the single call says which.
                errors.append(self._singly(self.get_into, key, parts, deadline))
        return errors

    def stats(self) -> dict[str, int]:
        with self._lock:
            counts = dict(self._counts)
        unknown = dict.fromkeys(("entries", "bytes", "capacity_bytes", "pinned"), -1)
        return {**unknown, "evictions": 0, **counts}

    def close(self) -> None:
        """Waits for calls that are under way, then leaves Mooncake. Again: waits for the first.

        One that hangs in Mooncake is waited for CLOSE_S: then Mooncake is not left, and the memory
        that it was given stays, as long as the call that holds this object.
        """
        with self._lock:
            closes, self._closed = not self._closed, True
        if not closes:
            self._left.wait(CLOSE_S)  # Longer no other thread takes for it.
            return
        try:
            self._leave()
        finally:
            self._left.set()

    def _leave(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        self._threads.end()
        if self._threads.have_ended(deadline):
            leaving = _Threads(1)  # It asks its master, which may be what hangs.
            leaving.submit(Future(), lambda _: self._store.close(), None)
            leaving.end()
            if leaving.have_ended(deadline):
                return
        _logger.warning(
            "mooncake %s: it does not end a call within %.0f s of the close; its memory is kept",
            self._address,
            CLOSE_S,
        )
