"""Calls that wait for others, in C++, and hear of signals all the same."""

import os
import signal
import threading
import time

import kvferry
import numpy as np
import pytest
from endpoints import MODEL, make_config
from kvferry import KVLookupBuffer
from pressing import PressedError, heeding, pressing
from servers import silent_server
from stores import need
from waiting import wait_for

LAYOUT = kvferry.KvLayout.mha(1, 4, 1, 8, "float32")
SOON_S = 15  # Long before TIMEOUT_MS, however busy the machine is.
TIMEOUT_MS = 60_000

STORE_CALLS = {
    "get_bytes": lambda store, pool: store.get_bytes("a", TIMEOUT_MS),
    "put": lambda store, pool: store.put("a", b"x", TIMEOUT_MS),
    "exists": lambda store, pool: store.exists(["a"], TIMEOUT_MS),
    "put_batch": lambda store, pool: store.put_batch([("a", b"x"), ("b", b"y")], TIMEOUT_MS),
    "get_pages": lambda store, pool: store.get_pages(["a", "b"], pool, [0, 1], TIMEOUT_MS),
}


def expect_heard(call) -> None:
    """That two presses change nothing, and the third one ends it."""
    begin = time.monotonic()
    with heeding(3) as heard, pressing(heard, 3), pytest.raises(PressedError):
        call()
    assert time.monotonic() - begin < SOON_S


@pytest.fixture
def pool():
    return kvferry.KvPool.create(LAYOUT, 4)


@pytest.mark.parametrize("call", STORE_CALLS)
def test_ctrl_c_ends_a_call_of_a_remote_store(call, pool):
    with silent_server() as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        config = make_config(connect_timeout_ms=TIMEOUT_MS)
        store = kvferry.RemoteStore(address, pool, config, MODEL)
        expect_heard(lambda: STORE_CALLS[call](store, pool))
        store.close()


@pytest.mark.parametrize("call", STORE_CALLS)
def test_ctrl_c_ends_a_call_of_a_redis_store(call, pool):
    need("RedisStore")
    with silent_server() as silent:
        port = silent.getsockname()[1]
        store = kvferry.RedisStore(port=port, connect_timeout_ms=TIMEOUT_MS)
        expect_heard(lambda: STORE_CALLS[call](store, pool))
        store.close()


def test_ctrl_c_ends_the_wait_for_a_connection():
    need("RedisStore")
    with silent_server() as silent:
        store = kvferry.RedisStore(port=silent.getsockname()[1], connections=1)

        def wait():
            with pytest.raises(kvferry.Unavailable):
                store.get_bytes("a", TIMEOUT_MS)

        other = threading.Thread(target=wait)
        other.start()
        client, _ = silent.accept()
        assert client.recv(1)
        expect_heard(lambda: store.get_bytes("b", TIMEOUT_MS))
        client.close()
        other.join()


def test_ctrl_c_ends_the_wait_for_a_layer():
    pool = kvferry.TokenKvPool.create(LAYOUT, 16)
    load = pool.layers.begin()
    expect_heard(lambda: pool.layers.wait(0, TIMEOUT_MS))
    expect_heard(lambda: pool.key_buffer(0, TIMEOUT_MS))
    pool.layers.ready(load, 1)
    pool.layers.wait(0, TIMEOUT_MS)


@pytest.fixture
def full():
    """A producer without room, or pages, for one entry more."""
    entry = np.zeros((1, 4, 1, 8), np.float32)
    with KVLookupBuffer(
        "producer",
        model=MODEL,
        pool=kvferry.KvPool.create(LAYOUT, 4),
        max_bytes=LAYOUT.page_bytes,
        tensor_pages=2,
    ) as it:
        it.insert([1, 2, 3, 4], None, entry, entry)
        yield it


@pytest.mark.parametrize("entries_before", [0, 1])
def test_ctrl_c_ends_an_insert(full, entries_before):
    entry = np.zeros((1, 4, 1, 8), np.float32)
    for _ in range(entries_before):  # Which waits for room, and has the last pages.
        other = threading.Thread(target=insert_until_closed, args=[full])
        other.start()
        wait_for(lambda: full.metrics()["lookup_entries"] == 2)
    expect_heard(lambda: full.insert([5, 6, 7, 8], None, entry, entry, timeout_ms=TIMEOUT_MS))
    expect_heard(lambda: full.insert_pages([5, 6, 7, 8], None, [0], timeout_ms=TIMEOUT_MS))
    assert full.metrics()["lookup_entries"] == 1 + entries_before
    assert full.take_gone() == []
    full.close()
    for _ in range(entries_before):
        other.join()


def insert_until_closed(buffer: KVLookupBuffer) -> None:
    entry = np.zeros((1, 4, 1, 8), np.float32)
    with pytest.raises(kvferry.Cancelled):
        buffer.insert([1, 2, 3, 4], None, entry, entry, timeout_ms=TIMEOUT_MS)


@pytest.mark.parametrize("raises", [False, True])
def test_a_handler_may_close_what_waits(full, raises):
    def close(*_):
        full.close()
        if raises:
            raise PressedError

    before = signal.signal(signal.SIGINT, close)
    press = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    press.start()
    error = PressedError if raises else kvferry.FailedPrecondition
    try:
        with pytest.raises(error, match=None if raises else "is closed"):
            full.insert_pages([5, 6, 7, 8], None, [0], timeout_ms=TIMEOUT_MS)
        press.join()
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(kvferry.FailedPrecondition, match="is closed"):
        full.metrics()


def test_a_handler_may_close_a_store_that_waits():
    need("RedisStore")
    with silent_server() as silent:
        store = kvferry.RedisStore(port=silent.getsockname()[1])

        def close(*_):
            store.close()
            raise PressedError

        before = signal.signal(signal.SIGINT, close)
        press = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
        press.start()
        try:
            with pytest.raises(PressedError):
                store.get_bytes("a", TIMEOUT_MS)
        finally:
            press.join()
            signal.signal(signal.SIGINT, before)
