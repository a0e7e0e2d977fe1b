"""Fetches of a decode rank. A prefill rank refuses those beyond `max_fetches_per_peer`, so as many
are under way at a time, and the others wait for their turn."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Hashable

import kvferry
from kvferry.errors import reason_of


@dataclasses.dataclass
class Fetch:
    """Of a chunk, or of a state."""

    rank: int  # Of the prefill side.
    deadline: float  # Of time.monotonic().
    start: Callable[[int], kvferry.FetchHandle]  # Takes the milliseconds that are left.
    handle: kvferry.FetchHandle | None = None  # Once it is under way.
    error: str = ""  # Of one that never was.

    @property
    def is_over(self) -> bool:
        """Once true, nothing is written for it any more."""
        return bool(self.error) or (self.handle is not None and self.handle.done)

    @property
    def failure(self) -> str:
        """Empty while it goes on, and after success."""
        return self.error or (self.handle.error if self.handle is not None else "")

    def cancel(self) -> bool:
        """True: it is over now; else it is soon, and who waits for that asks again."""
        if self.handle is None:
            self.error = self.error or "given up"
        elif not self.handle.done:
            with contextlib.suppress(MemoryError):  # The next one that asks may find some.
                self.handle.cancel()
            return False
        return True

    def begin(self) -> None:
        """Never raises: others wait behind it, in the thread that reads messages."""
        left_ms = int((self.deadline - time.monotonic()) * 1e3)
        try:
            if left_ms <= 0:
                raise ValueError("the time limit was over before other fetches let it begin")
            self.handle = self.start(left_ms)
        except Exception as error:  # Of memory that is out too.
            self.error = f"from prefill rank {self.rank}: {reason_of(error)}"


@dataclasses.dataclass
class _Queue:
    running: list[kvferry.FetchHandle] = dataclasses.field(default_factory=list)
    waiting: deque[Fetch] = dataclasses.field(default_factory=deque)

    def advance(self, most: int) -> None:
        """Begins those that have their turn."""
        if len(self.running) >= most:
            self.running = [handle for handle in self.running if not handle.done]
        while self.waiting and len(self.running) < most:
            fetch = self.waiting.popleft()
            if not fetch.is_over:  # Given up meanwhile.
                fetch.begin()
            if fetch.handle is not None:
                self.running.append(fetch.handle)

    def is_idle(self) -> bool:
        return not self.waiting and all(handle.done for handle in self.running)


class FetchQueues:
    """One for each endpoint of a prefill rank that is fetched from. Not thread-safe."""

    def __init__(self, most: int):
        """most: under way at a time, in each."""
        self._most = most
        self._queues: dict[Hashable, _Queue] = {}

    def add(self, peer: Hashable, fetch: Fetch) -> None:
        """Begins it, at once or when it has its turn."""
        if peer not in self._queues:  # Prefill ranks come and go.
            self._queues = {key: it for key, it in self._queues.items() if not it.is_idle()}
            self._queues[peer] = _Queue()
        self._queues[peer].waiting.append(fetch)
        self._queues[peer].advance(self._most)

    def advance(self) -> bool:
        """Begins those that have their turn. Whether others wait still."""
        waiting = [it for it in self._queues.values() if it.waiting]
        for queue in waiting:
            queue.advance(self._most)
        return any(queue.waiting for queue in waiting)
