"""What becomes of the staging buffers of a Mooncake store when a call does not go through."""

import threading

import kvferry
import numpy as np
import pytest
from kvferry import mooncake
from test_kv_store import MooncakeOfOne, store_on


@pytest.fixture
def store(monkeypatch):
    made = store_on(MooncakeOfOne(), monkeypatch, staging_buffers=1)
    yield made
    made.close()


def works(store) -> bool:
    value = np.arange(10, dtype=np.uint8)
    store.put("a", value, timeout_ms=1000)
    return store.get_bytes("a", timeout_ms=1000).tobytes() == value.tobytes()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_buffer_comes_back_when_filling_it_fails(store, monkeypatch, error):
    def fails(*_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(mooncake, "_gather", fails)
        with pytest.raises(error):
            store.put("b", b"x")
    assert works(store)


class Interrupted:
    """Threads, and a Ctrl-C right before or behind the handing over of a call."""

    def __init__(self, threads, handed_over: bool):
        self.threads, self.handed_over = threads, handed_over

    def submit(self, *call):
        if self.handed_over:
            self.threads.submit(*call)
        raise KeyboardInterrupt


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_buffer_comes_back_when_the_handing_over_is_interrupted(store, monkeypatch, handed_over):
    with monkeypatch.context() as patched:
        patched.setattr(store, "_threads", Interrupted(store._threads, handed_over))
        with pytest.raises(KeyboardInterrupt):
            store.put("b", b"x")
    assert works(store)
    assert store._staging.qsize() == 1


def test_a_buffer_that_mooncake_has_comes_back_when_it_lets_go_of_it(store, monkeypatch):
    let_go, has_it = threading.Event(), threading.Event()

    def hangs(*_):
        has_it.set()
        assert let_go.wait(20)
        return 0

    with monkeypatch.context() as patched:
        patched.setattr(store._store, "upsert_from", hangs)
        with pytest.raises(kvferry.DeadlineExceeded):
            store.put("b", b"x", timeout_ms=300)
        assert has_it.is_set() and store._staging.empty()
    let_go.set()
    assert works(store)


def test_a_write_past_its_deadline_is_not_carried_out_after_a_later_one(monkeypatch):
    store = store_on(MooncakeOfOne(), monkeypatch, staging_buffers=2)
    let_go, upsert_from = threading.Event(), store._store.upsert_from

    def hangs(*args):
        assert let_go.wait(20)
        return upsert_from(*args)

    with monkeypatch.context() as patched:
        patched.setattr(store._store, "upsert_from", hangs)
        with pytest.raises(kvferry.DeadlineExceeded):
            store.put("b", b"old", timeout_ms=100)
    store.put("other", b"x", timeout_ms=5000)
    for later in (
        lambda: store.put("b", b"new", timeout_ms=100),
        lambda: store.erase("b", timeout_ms=100),
        lambda: store.put_batch([("b", b"new"), ("c", b"c")], timeout_ms=100)[0],
    ):
        with pytest.raises(kvferry.DeadlineExceeded):
            if (error := later()) is not None:
                raise error
    let_go.set()
    store.put("b", b"new", timeout_ms=5000)
    assert store.get_bytes("b").tobytes() == b"new"
    assert not store._writes
    store.close()
