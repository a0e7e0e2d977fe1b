"""What becomes of the staging buffers of a Mooncake store when a call does not go through."""

import threading
from concurrent.futures import ThreadPoolExecutor

import kvferry
import numpy as np
import pytest
from kvferry import mooncake
from test_kv_store import GIVEN_UP_MS, MooncakeOfOne, store_on
from waiting import wait_for


@pytest.fixture
def store(monkeypatch):
    made = store_on(MooncakeOfOne(), monkeypatch, staging_buffers=1)
    yield made
    made.close()


def works(store) -> bool:
    value = np.arange(10, dtype=np.uint8)
    store.put("a", value, timeout_ms=20_000)
    return store.get_bytes("a", timeout_ms=20_000).tobytes() == value.tobytes()


@pytest.mark.parametrize(
    "option, value",
    [
        ("staging_buffers", 0),
        ("staging_buffers", 257),
        ("max_value_bytes", 0),
        ("max_value_bytes", 1 << 41),
        ("connect_timeout_ms", 600_001),
        ("global_segment_bytes", -1),
    ],
)
def test_options_out_of_bounds_are_refused(monkeypatch, option, value):
    with pytest.raises(ValueError, match=f"{option} is {value} but must be"):
        store_on(MooncakeOfOne(), monkeypatch, **{option: value})


class Refuses(MooncakeOfOne):
    """Answers what is asked of it at the start with these codes."""

    def __init__(self, *codes: int):
        super().__init__()
        self.codes = list(codes)

    def setup(self, *_):
        return self.codes.pop(0)

    register_buffer = setup


@pytest.mark.parametrize("codes", [(-900,), (0, -900, 0), (0, 0, -900)])
def test_a_mooncake_that_cannot_be_joined_is_an_error(monkeypatch, codes):
    """Nor one to which a buffer is unknown: it could neither read nor write."""
    with pytest.raises(kvferry.Unavailable, match="h:1: error -900"):
        store_on(Refuses(*codes), monkeypatch, staging_buffers=2)


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
            store.put("b", b"x", timeout_ms=GIVEN_UP_MS)
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
            store.put("b", b"old", timeout_ms=GIVEN_UP_MS)
    store.put("other", b"x", timeout_ms=20_000)
    for later in (
        lambda: store.put("b", b"new", timeout_ms=100),
        lambda: store.erase("b", timeout_ms=100),
        lambda: store.put_batch([("b", b"new"), ("c", b"c")], timeout_ms=100)[0],
    ):
        with pytest.raises(kvferry.DeadlineExceeded):
            if (error := later()) is not None:
                raise error
    let_go.set()
    store.put("b", b"new", timeout_ms=20_000)
    assert store.get_bytes("b").tobytes() == b"new"
    wait_for(lambda: not store._writing)
    store.close()


class Filling:
    """Stands for the filling of a buffer: the first one waits until it is to go on, and may fail
    then."""

    def __init__(self, monkeypatch, error: Exception | None = None):
        self.has_begun, self.go_on = threading.Event(), threading.Event()
        self._gather, self._error, self._is_first = mooncake._gather, error, True
        monkeypatch.setattr(mooncake, "_gather", self)

    def __call__(self, *args):
        is_first, self._is_first = self._is_first, False
        if is_first:
            self.has_begun.set()
            assert self.go_on.wait(20)
            if self._error is not None:
                raise self._error
        self._gather(*args)


class Awaited(threading.Event):
    """Says when somebody waits for it."""

    def __init__(self):
        super().__init__()
        self.is_awaited = threading.Event()

    def wait(self, timeout=None):
        self.is_awaited.set()
        return super().wait(timeout)


def test_a_write_does_not_wait_for_one_that_will_never_be(monkeypatch):
    """Its buffer could not be filled, while another one of the key waited for it."""
    store = store_on(MooncakeOfOne(), monkeypatch, staging_buffers=2)
    filling = Filling(monkeypatch, MemoryError())
    with ThreadPoolExecutor(2) as callers:
        fails = callers.submit(store.put, "b", b"old", timeout_ms=20_000)
        assert filling.has_begun.wait(20)
        (call,) = store._writing
        call.is_over = Awaited()
        waits = callers.submit(store.put, "b", b"new", timeout_ms=20_000)
        assert call.is_over.is_awaited.wait(20)
        filling.go_on.set()
        with pytest.raises(MemoryError):
            fails.result(20)
        waits.result(15)  # Before its own deadline.
    assert store.get_bytes("b").tobytes() == b"new"
    assert not store._writing and store._staging.qsize() == 2
    store.close()


def test_nothing_is_left_of_a_write_that_is_interrupted_before_it_is_handed_over(store):
    """By Ctrl-C, as soon as others know of it."""

    class Interrupts(set):
        def add(self, call):
            super().add(call)
            raise KeyboardInterrupt

    store._writing = Interrupts()
    with pytest.raises(KeyboardInterrupt):
        store.put("a", b"x")
    assert not store._writing
    store._writing = set()
    assert works(store)


def test_a_call_that_is_handed_over_when_the_store_has_been_closed_fails_at_once(
    store, monkeypatch
):
    filling = Filling(monkeypatch)
    with ThreadPoolExecutor(1) as callers:
        late = callers.submit(store.put, "a", b"x", timeout_ms=60_000)
        assert filling.has_begun.wait(20)
        store.close()
        filling.go_on.set()
        with pytest.raises(kvferry.FailedPrecondition, match="closed"):
            late.result(20)
