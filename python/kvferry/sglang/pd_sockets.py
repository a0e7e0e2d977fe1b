"""Sockets over which a rank sends messages to other ranks."""

from __future__ import annotations

import threading
import time

import zmq

# A rank to which nothing was sent for so long has gone: to one that is there requests come.
_UNUSED_S = 600
_RECONNECT_MS, _MAX_RECONNECT_MS = 100, 2000  # The first wait, and the longest.


class Sockets:
    """One to each rank, from any thread.

    SGLang's own do not connect again: one whose first attempt fails, while the network is away,
    takes messages and loses them for ever. And they wait where a rank does not read, on the
    scheduler's thread too, which has the requests of all other ranks.
    """

    def __init__(self, context: zmq.Context):
        self._context = context
        self._lock = threading.Lock()
        self._sockets: dict[str, zmq.Socket] = {}
        self._used: dict[str, float] = {}  # When something was sent there last.

    def send(self, endpoint: str, parts: list[bytes], is_ipv6: bool = False) -> None:
        """Never waits. A message to a rank that is not there yet is kept for it, up to 1,000 of
        them (ZeroMQ's own limit). ConnectionError: it does not read; it will not get what it has
        not read so far."""
        with self._lock:
            if endpoint not in self._sockets:
                self._close_unused()
                self._sockets[endpoint] = self._connected(endpoint, is_ipv6)
            self._used[endpoint] = time.monotonic()
            try:
                self._sockets[endpoint].send_multipart(parts, zmq.NOBLOCK)
            except zmq.Again:
                # It would connect again for ever, and keep old messages for whoever comes next.
                self._close(endpoint)
                raise ConnectionError(f"{endpoint} does not read its messages") from None

    def _close_unused(self) -> None:
        """Ranks come and go, and a socket would connect for ever to one that has gone."""
        now = time.monotonic()
        for endpoint in [it for it, used in self._used.items() if now - used > _UNUSED_S]:
            self._close(endpoint)

    def _close(self, endpoint: str) -> None:
        del self._used[endpoint]
        self._sockets.pop(endpoint).close()

    def _connected(self, endpoint: str, is_ipv6: bool) -> zmq.Socket:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.IPV6, is_ipv6)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        socket.setsockopt(zmq.LINGER, 0)
        # A peer that is gone without a word is found out in 45 seconds, as SGLang has it.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        socket.connect(endpoint)
        return socket
