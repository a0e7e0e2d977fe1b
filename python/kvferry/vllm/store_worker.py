"""Store mode, the half in vLLM's worker processes: it moves blocks between cache and store.

Every method runs on the engine's own thread. Loads and saves have a thread each, so that neither
waits for the other nor the engine for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

import kvferry
from kvferry.seldom_log import SeldomLog
from kvferry.vllm.device import Point
from kvferry.vllm.layout import AdoptedCache
from kvferry.vllm.metadata import StoreAddress, StoreLoad, StoreSave
from kvferry.vllm.stores import SILENCE_S, StoreOptions, open_store, rank_key
from kvferry.vllm.telemetry import FetchRecord, Trace, TransferStats, logger

# A save that the deadline has not ended by then: all of the process may have stood still meanwhile.
_LATE_S = 5.0
_NO_ANSWER = (kvferry.Unavailable, kvferry.DeadlineExceeded)


@dataclass
class _Turns:
    """What a thread asks the store for, one batch after the other."""

    name: str
    silent_until: float = 0.0


@dataclass
class _Moved:
    """What came of one batch of blocks."""

    statuses: list[Exception | None]  # One a block.
    milliseconds: float


class StoreWorker:
    """Loads blocks into the engine's cache and saves blocks of it."""

    def __init__(
        self,
        cache: AdoptedCache,
        options: StoreOptions,
        config: kvferry.Config,
        model: str,
        name: str,
        tp_rank: int,
        dp_rank: int,
        trace: Trace,
        stats: TransferStats,
    ):
        """Opens the store. Raises ValueError for a wrong configuration and kvferry.Error for a
        store that cannot be opened."""
        self._pool = cache.pool
        self._device = cache.device
        self._rank = tp_rank
        self._timeout_ms = config.fetch_timeout_ms
        self._trace = trace
        self._stats = stats
        self._opened = open_store(options, cache.pool, config, model, name, tp_rank, dp_rank)
        if self._opened.metrics is not None:
            stats.watch(f"store {name}", self._opened.metrics)
        layout = cache.pool.layout
        self._address = StoreAddress.of(self._opened.address, model, layout)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvferry-load")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="kvferry-save")
        for thread in (self._loader, self._saver):
            thread.submit(int).result()  # Started here, and not in a step that the engine takes.
        self._loads: dict[str, tuple[StoreLoad, Future[_Moved]]] = {}
        self._saves: dict[str, list[Future[None]]] = {}  # Of requests the engine has not finished.
        self._finishing: set[str] = set()  # Finished, but for their saves.
        self._missing_blocks: set[int] = set()
        self._cancelled: set[str] = set()  # Loads nobody waits for any more.
        self._load_turns, self._save_turns = _Turns("loads"), _Turns("saves")
        self._unsaved = SeldomLog(logger, prefix="")

    def address(self) -> StoreAddress:
        return self._address

    # ---- Loading

    def load(self, loads: list[StoreLoad]) -> None:
        """Loads blocks. What has waited for the store for the time that one load may take is left
        to the engine to compute, and so is everything for a while after a load that the store did
        not answer."""
        deadline = time.monotonic() + self._timeout_ms / 1e3
        for load in loads:
            future = self._loader.submit(self._load, load, deadline)
            self._loads[load.request_id] = (load, future)

    def cancel(self, request_ids: list[str]) -> None:
        """Ends loads that have not begun; take_finished() reports all of them as usual."""
        for request_id in request_ids:
            if request_id in self._loads:
                self._cancelled.add(request_id)
                self._loads[request_id][1].cancel()

    def _load(self, load: StoreLoad, deadline: float) -> _Moved:
        begin = time.monotonic()
        get = self._opened.store.get_pages
        statuses = self._ask(self._load_turns, get, load.keys, load.block_ids, deadline)
        return _Moved(statuses, (time.monotonic() - begin) * 1e3)

    def _finish_load(self, load: StoreLoad, future: Future[_Moved]) -> None:
        try:
            moved = future.result()
        except Exception as error:  # Whatever it is: the engine computes the blocks itself.
            moved = _Moved([error] * len(load.block_ids), 0.0)
        errors = [error for error in moved.statuses if error is not None]
        missing = [
            block
            for block, error in zip(load.block_ids, moved.statuses, strict=True)
            if error is not None
        ]
        self._missing_blocks.update(missing)
        page_bytes = self._pool.layout.page_bytes
        record = FetchRecord(
            request_id=load.request_id,
            ok=not errors,
            error=str(errors[0]) if errors else "",
            cancelled=load.request_id in self._cancelled,
            blocks=len(load.block_ids),
            blocks_skipped=load.blocks_skipped,
            blocks_missing=len(missing),
            bytes=(len(load.block_ids) - len(missing)) * page_bytes,
            wait_ms=0.0,
            move_ms=round(moved.milliseconds, 3),
        )
        self._cancelled.discard(load.request_id)
        record.log()
        self._stats.record(record)
        self._trace.write("load", **vars(record), gb_per_s=round(record.gb_per_s, 4))

    # ---- Saving

    def save(self, saves: list[StoreSave]) -> None:
        """Saves blocks whose last token the engine has just computed, or asked its device for.

        The engine cannot reuse a finished request's blocks before they are saved, so a save that
        has waited for the store for the time that one may take is dropped, and so is every save
        for a while after one that the store did not answer.
        """
        if not saves:
            return
        deadline = time.monotonic() + self._timeout_ms / 1e3
        computed = self._device.point()
        for save in saves:
            futures = self._saves.setdefault(save.request_id, [])
            futures.append(self._saver.submit(self._save, save, deadline, computed))

    def _save(self, save: StoreSave, deadline: float, computed: Point | None) -> None:
        begin = time.monotonic()
        try:
            if computed is not None:
                computed()
            put = self._opened.store.put_pages
            statuses = self._ask(self._save_turns, put, save.keys, save.block_ids, deadline)
        except Exception as error:  # Nobody asks the future; a block that is not saved is no harm.
            statuses = [error] * len(save.block_ids)
        failed = [error for error in statuses if error is not None]
        if failed:
            # Where a store is full or down that is each save of each step.
            self._unsaved.warn(
                "%d of %d blocks of %s were not saved: %s",
                len(failed),
                len(statuses),
                save.request_id,
                failed[0],
            )
        self._trace.write(
            "save",
            request_id=save.request_id,
            blocks=len(statuses),
            failed=len(failed),
            move_ms=round((time.monotonic() - begin) * 1e3, 3),
        )

    def end_saves(self, preempted: list[str], ended: list[str]) -> None:
        """Ends saves of blocks that are about to be overwritten. Of requests that have ended they
        are still reported; of the others they are not.

        Raises kvferry.DeadlineExceeded if one does not end: going on would save other requests' KV
        under its keys.
        """
        for request_id in (*preempted, *ended):
            # Those that have not begun are dropped; one that has ends at its deadline.
            running = [it for it in self._saves.get(request_id, ()) if not it.cancel()]
            _wait_all(running, request_id, self._timeout_ms / 1e3 + 1)
        for request_id in preempted:
            self._saves.pop(request_id, None)

    # ---- Both

    def _ask(
        self,
        turns: _Turns,
        move: Callable[..., list[Exception | None]],
        keys: list[bytes],
        block_ids: list[int],
        deadline: float,
    ) -> list[Exception | None]:
        """move() of the store, but not when it is too late or the store did not answer lately."""
        begin = time.monotonic()
        if begin < turns.silent_until:
            raise kvferry.Unavailable("the KV store did not answer lately")
        left_ms = int((deadline - begin) * 1e3)
        if left_ms <= 0:
            raise kvferry.DeadlineExceeded(
                f"earlier {turns.name} took the KV store {self._timeout_ms} ms (fetch_timeout_ms)"
            )
        ours = [rank_key(key, self._rank) for key in keys]
        try:
            statuses = move(ours, self._pool, block_ids, timeout_ms=left_ms)
        except _NO_ANSWER as error:
            statuses = [error] * len(block_ids)
        if any(isinstance(error, _NO_ANSWER) for error in statuses):
            # Not most of the time waiting for a store that hangs.
            now = time.monotonic()
            turns.silent_until = now + max(SILENCE_S, now - begin)
        return statuses

    def take_finished(self, engine_finished: set[str]) -> tuple[set[str], set[str]]:
        """(finished requests whose saves have ended, requests whose loads have ended), each
        once."""
        self._finishing |= engine_finished & self._saves.keys()
        saved = {
            request_id
            for request_id in self._finishing
            if all(future.done() for future in self._saves[request_id])
        }
        self._finishing -= saved
        for request_id in saved:
            del self._saves[request_id]
        loaded = {key for key, (_, future) in self._loads.items() if future.done()}
        for request_id in loaded:
            self._finish_load(*self._loads.pop(request_id))
        return saved, loaded

    def take_missing_blocks(self) -> set[int]:
        """Blocks of the requests that take_finished() reported that were not loaded."""
        missing, self._missing_blocks = self._missing_blocks, set()
        return missing

    def close(self) -> None:
        self._loader.shutdown(wait=True, cancel_futures=True)
        self._saver.shutdown(wait=True)
        self._opened.close()


def _wait_all(saves: list[Future[None]], request_id: str, seconds: float) -> None:
    _, late = wait_for(saves, timeout=seconds)
    if not late:
        return
    logger.error("the KV store does not end a save of preempted %s", request_id)
    if wait_for(late, timeout=_LATE_S).not_done:
        raise kvferry.DeadlineExceeded(
            f"the KV store has not ended a save of preempted {request_id} within "
            f"{seconds + _LATE_S:.0f} s: its blocks may be read still; does a disk hang?"
        )
