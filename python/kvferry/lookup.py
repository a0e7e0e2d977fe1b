"""KVLookupBuffer: entries of KV by their tokens, from processes that compute to those that need.

    producer = KVLookupBuffer("producer", model="m", layout=layout, max_bytes=1 << 30)
    producer.insert(input_tokens, roi, key, value, hidden)     # [layers, tokens of roi, heads, dim]

    consumer = KVLookupBuffer("consumer", model="m", layout=layout, producers=[producer.address])
    found = consumer.drop_select(input_tokens, roi)            # takes it out of the producer
    found.key, found.value, found.hidden

An entry and a query match when the tokens that their rois mark are equal as far as the shorter
goes; the longest match wins, and each entry is delivered once. `connector/lookup_producer.h` and
`connector/lookup_consumer.h` have the whole contract.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvferry import _core
from kvferry.tensor_bytes import decode, encode

DEFAULT_MAX_BYTES = 1 << 30
DEFAULT_TIMEOUT_MS = 30000
# A wait inside C++ hears no Ctrl-C, so it is one of many short ones.
WAIT_MS = 200


class Found(NamedTuple):
    """An entry. The five of insert(), of the tokens that match, and what is left to say."""

    input_tokens: Any  # All of the entry's: those that its roi marked.
    roi: Any  # True for those that match the query, and whose KV follows.
    key: Any
    value: Any
    hidden: Any
    num_matched: int


class FoundPages(NamedTuple):
    """An entry in the caller's pages."""

    input_tokens: np.ndarray
    num_matched: int
    pages: list[int]  # Those that were filled, of the ones given.
    hidden: Any


def _array(values) -> np.ndarray:
    if hasattr(values, "detach"):  # Torch, which numpy takes from the CPU only.
        values = values.detach().numpy()
    return np.asarray(values)


def _tokens(tokens) -> np.ndarray | None:
    if tokens is None:
        return None
    array = _array(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"lookup: input_tokens are {array.dtype} of shape {array.shape}, "
            "not one row of integers"
        )
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise ValueError("lookup: a token does not fit in 32 bits")
    return np.ascontiguousarray(array, np.int32)


def _roi(roi) -> np.ndarray | None:
    if roi is None:
        return None
    array = _array(roi)
    if array.ndim != 1 or array.dtype != np.bool_:
        raise ValueError(
            f"lookup: roi is {array.dtype} of shape {array.shape}, not one row of bools"
        )
    return np.ascontiguousarray(array).view(np.uint8)


def _hidden(hidden) -> np.ndarray | None:
    if hidden is None:
        return None
    header, data = encode(hidden)
    return np.concatenate([np.frombuffer(header, np.uint8), _array(data)])


def _plain(tensor):
    return (
        tensor.detach().contiguous() if hasattr(tensor, "detach") else np.ascontiguousarray(tensor)
    )


def _check_can_be(framework: str, dtype: str) -> None:
    # Before a lookup takes an entry that then cannot be given to anybody.
    if framework == "torch" and importlib.util.find_spec("torch") is None:
        raise ValueError("lookup: framework 'torch' is not installed; take 'numpy', or pages")
    if framework == "numpy" and dtype == "bfloat16":
        raise ValueError(
            f"lookup: framework 'numpy' has no {dtype}, the layout's dtype; take framework "
            "'torch', or pages"
        )


def _end(lookup: _core.Lookup) -> None:
    """Ends a lookup: when it returns, no page is written to.

    That comes shortly after the cancel, or, when every byte has come and only the producer's answer
    is missing, with the lookup's own end. Another Ctrl-C changes nothing about it, nor does a want
    of memory.
    """
    while True:
        try:
            with contextlib.suppress(MemoryError):  # Then it ends by its deadline.
                lookup.cancel()
            while not lookup.done:
                _wait_a_moment(lookup)
            return
        except (KeyboardInterrupt, MemoryError):
            continue


def _wait_a_moment(lookup: _core.Lookup) -> None:
    # What it failed with is raised by whoever asks for its result.
    with contextlib.suppress(_core.Error):
        lookup.wait(WAIT_MS)


class _Loop:
    """The lookups that one event loop waits for. Their end is a number that can be read from a file
    descriptor, so no thread waits with them."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.events = _core.LookupEvents()
        self.waiting: dict[int, asyncio.Future] = {}
        self.last = 0

    def add(self) -> tuple[int, asyncio.Future]:
        if not self.waiting:
            self.loop.add_reader(self.events.fileno(), self._take)
        self.last += 1
        self.waiting[self.last] = self.loop.create_future()
        return self.last, self.waiting[self.last]

    def again(self, number: int) -> asyncio.Future:
        self.waiting[number] = self.loop.create_future()
        return self.waiting[number]

    def remove(self, number: int) -> None:
        last = self.waiting.pop(number, None) is not None and not self.waiting
        if last and not self.loop.is_closed():
            self.loop.remove_reader(self.events.fileno())

    def _take(self) -> None:
        for number in self.events.take():
            future = self.waiting.get(number)
            if future is not None and not future.done():
                future.set_result(None)


class KVLookupBuffer:
    """One side of a lookup buffer; role is "producer" or "consumer".

    Either `layout`: the buffer has a pool of its own, of tensor_pages pages (what max_bytes is
    worth; a producer has twice that, so that entries that wait for room can be found). Or `pool`,
    whose pages the page forms use: its last tensor_pages, by default none, are for tensors.

    A consumer's tensors are of `framework`. numpy has no bfloat16, which is refused, and no fp8,
    whose bits come as uint8.
    """

    def __init__(
        self,
        role: str,
        *,
        model: str,
        layout: _core.KvLayout | None = None,
        pool: _core.KvPool | None = None,
        producers: Sequence[str] = (),
        config: _core.Config | dict | None = None,
        name: str = "",
        partition: int = 0,
        max_bytes: int = DEFAULT_MAX_BYTES,
        tensor_pages: int | None = None,
        reply_lease_ms: int = 5000,
        framework: str = "torch",
    ):
        if role not in ("producer", "consumer"):
            raise ValueError(f"lookup: role is {role!r}, not 'producer' or 'consumer'")
        if framework not in ("torch", "numpy"):
            raise ValueError(f"lookup: framework is {framework!r}, not 'torch' or 'numpy'")
        if (layout is None) == (pool is None):
            raise ValueError("lookup: either a layout or a pool is needed")
        if role == "producer" and producers:
            raise ValueError("lookup: producers are for a consumer")
        if isinstance(producers, str):
            raise ValueError(
                f"lookup: producers is {producers!r}, one address, but must be a list of them"
            )
        if pool is None:
            pages = max(1, max_bytes // layout.page_bytes)
            if tensor_pages is None:
                tensor_pages = 2 * pages if role == "producer" else pages
            pool = _core.KvPool.create(layout, tensor_pages, at_once=False)  # May never be full.
        if role == "consumer" and tensor_pages:
            _check_can_be(framework, pool.layout.dtype)
        if not isinstance(config, _core.Config):
            config = _core.Config.make(config)
        self.pool = pool
        self.layout = pool.layout
        self.framework = framework
        self._loops: dict[asyncio.AbstractEventLoop, _Loop] = {}
        self._loops_lock = threading.Lock()  # Each thread may have one.
        common = {
            "pool": pool,
            "config": config,
            "model": model,
            "name": name,
            "partition": partition,
            "copy_pages": tensor_pages or 0,
        }
        self._producer = self._consumer = None
        if role == "producer":
            self._producer = _core.LookupProducer(
                max_bytes=max_bytes, reply_lease_ms=reply_lease_ms, **common
            )
        else:
            self._consumer = _core.LookupConsumer(producers=list(producers), **common)

    def __enter__(self) -> KVLookupBuffer:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends what is under way; a producer drops its entries."""
        (self._producer or self._consumer).close()

    def metrics(self) -> dict[str, int]:
        return (self._producer or self._consumer).metrics()

    # --- Producer ---

    def _as_producer(self) -> _core.LookupProducer:
        if self._producer is None:
            raise _core.FailedPrecondition("lookup: a consumer does not insert")
        return self._producer

    @property
    def address(self) -> str:
        """For the `producers` of consumers."""
        return self._as_producer().address

    def insert(
        self, input_tokens, roi, key, value, hidden=None, timeout_ms: int = DEFAULT_TIMEOUT_MS
    ) -> None:
        """Copies key and value: [layers, tokens that roi marks, heads, dim], torch or numpy.

        Waits for room. DeadlineExceeded when there was none in time, ResourceExhausted at once for
        an entry that can never fit.
        """
        self._as_producer().insert_tensors(
            self.layout,
            _tokens(input_tokens),
            _roi(roi),
            _plain(key),
            _plain(value),
            _hidden(hidden),
            timeout_ms,
        )

    def insert_pages(
        self, input_tokens, roi, pages, hidden=None, timeout_ms: int = DEFAULT_TIMEOUT_MS
    ) -> int:
        """Offers KV that lies in pages of the pool; they are the buffer's until take_gone() names
        the entry that this returns."""
        return self._as_producer().insert_pages(
            _tokens(input_tokens), _roi(roi), list(pages), _hidden(hidden), timeout_ms
        )

    def take_gone(self) -> list[tuple[int, str]]:
        """(entry, "fetched" | "dropped") of entries from insert_pages() that have left."""
        return self._as_producer().take_gone()

    # --- Consumer ---

    def drop_select(
        self, input_tokens=None, roi=None, timeout_ms: int = DEFAULT_TIMEOUT_MS
    ) -> Found:
        """Takes the entry with the longest match; without tokens any, the oldest first.

        DeadlineExceeded when none came in time, ResourceExhausted when the tensor pages are all in
        use: the entry can be found again then.
        """
        return self._found(self._wait(input_tokens, roi, None, timeout_ms))

    def drop_select_pages(
        self, input_tokens, roi, pages, timeout_ms: int = DEFAULT_TIMEOUT_MS
    ) -> FoundPages:
        """The same into pages of the pool. ResourceExhausted when they are too few. However it
        ends, Ctrl-C included, no page is written to any more."""
        return self._found_pages(self._wait(input_tokens, roi, list(pages), timeout_ms))

    async def drop_select_async(
        self, input_tokens=None, roi=None, timeout_ms: int = DEFAULT_TIMEOUT_MS
    ) -> Found:
        """drop_select() for event loops: no thread waits. Cancelling it cancels the lookup."""
        return self._found(await self._await(input_tokens, roi, None, timeout_ms))

    async def drop_select_pages_async(
        self, input_tokens, roi, pages, timeout_ms: int = DEFAULT_TIMEOUT_MS
    ) -> FoundPages:
        """drop_select_pages() for event loops. Cancelled, however often, it ends when no page is
        written to."""
        return self._found_pages(await self._await(input_tokens, roi, list(pages), timeout_ms))

    def _start(self, input_tokens, roi, pages, timeout_ms, events=None, event=0) -> _core.Lookup:
        if self._consumer is None:
            raise _core.FailedPrecondition("lookup: a producer does not look up")
        return self._consumer.drop_select(
            _tokens(input_tokens), _roi(roi), pages, timeout_ms, events, event
        )

    def _wait(self, input_tokens, roi, pages, timeout_ms: int) -> _core.Lookup:
        lookup = self._start(input_tokens, roi, pages, timeout_ms)
        try:
            while not lookup.done:  # It has a deadline of its own.
                _wait_a_moment(lookup)
        except BaseException:  # Ctrl-C.
            _end(lookup)
            raise
        return lookup

    async def _await(self, input_tokens, roi, pages, timeout_ms: int) -> _core.Lookup:
        loop = self._loop()
        number, future = loop.add()
        lookup = None
        try:
            lookup = self._start(input_tokens, roi, pages, timeout_ms, loop.events, number)
            await self._until_done(lookup, loop, number, future)
        except BaseException:  # When the loop is gone or interrupted, it cannot be awaited.
            if lookup is not None:
                _end(lookup)
            raise
        finally:
            loop.remove(number)
        return lookup

    def _loop(self) -> _Loop:
        """Of the running event loop. Those that are closed are forgotten."""
        running = asyncio.get_running_loop()
        with self._loops_lock:
            for closed in [loop for loop in self._loops if loop.is_closed()]:
                del self._loops[closed]
            if running not in self._loops:
                self._loops[running] = _Loop(running)
            return self._loops[running]

    @staticmethod
    async def _until_done(lookup, loop: _Loop, number: int, future: asyncio.Future) -> None:
        try:
            await future
        except asyncio.CancelledError:
            lookup.cancel()
            while not lookup.done:  # Shortly: until then its pages are being written.
                with contextlib.suppress(asyncio.CancelledError):  # It is ending already.
                    await loop.again(number)
            raise

    # --- Results ---

    def _tensor(self, array):
        if self.framework == "numpy":
            return np.from_dlpack(array)
        import torch

        tensor = torch.from_dlpack(array)
        if self.layout.dtype.startswith("float8"):  # DLPack has them as bytes.
            tensor = tensor.view(getattr(torch, self.layout.dtype))
        return tensor

    def _found(self, lookup: _core.Lookup) -> Found:
        tokens = lookup.tokens
        key, value = lookup.tensors()
        roi = np.arange(tokens.size) < lookup.num_matched
        if self.framework == "torch":
            import torch

            tokens, roi = torch.from_numpy(tokens), torch.from_numpy(roi)
        return Found(
            tokens,
            roi,
            self._tensor(key),
            self._tensor(value),
            self._decoded(lookup),
            lookup.num_matched,
        )

    def _found_pages(self, lookup: _core.Lookup) -> FoundPages:
        return FoundPages(lookup.tokens, lookup.num_matched, lookup.pages, self._decoded(lookup))

    @staticmethod
    def _decoded(lookup: _core.Lookup):
        hidden = lookup.hidden()
        return None if hidden is None else decode(hidden)
