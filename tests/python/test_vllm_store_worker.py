"""Store mode's worker half, over a store that takes its time: what it reports, and which blocks it
keeps meanwhile."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
from kvferry.vllm.device import Device, Host  # noqa: E402
from kvferry.vllm.metadata import StoreLoad, StoreSave  # noqa: E402
from kvferry.vllm.store_worker import StoreWorker  # noqa: E402
from kvferry.vllm.stores import rank_key  # noqa: E402
from kvferry.vllm.telemetry import Trace, TransferStats  # noqa: E402
from vllm_steps import SlowDevice  # noqa: E402
from vllm_store_scheduler import BLOCKS, HOST, LAYOUT, WAIT_S, fill, holds  # noqa: E402
from waiting import wait_for  # noqa: E402

# For tests that wait until it is over, and for what has begun by then on a machine that has much
# to do.
SHORT_MS = 1000


class HeldStore:
    """A store in which puts and gets wait until they are let go on, or for their deadline."""

    def __init__(self, store):
        self._store = store
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.puts = self.gets = 0
        self.late_s = 0.0  # What one takes beyond its deadline.

    def put_pages(self, keys, pool, pages, *, timeout_ms):
        self.puts += 1
        self._hold(timeout_ms)
        return self._store.put_pages(keys, pool, pages, timeout_ms=timeout_ms)

    def get_pages(self, keys, pool, pages, *, timeout_ms):
        self.gets += 1
        self._hold(timeout_ms)
        return self._store.get_pages(keys, pool, pages, timeout_ms=timeout_ms)

    def _hold(self, timeout_ms: int) -> None:
        self.began.set()
        if not self.go_on.wait(timeout_ms / 1e3 + self.late_s):
            raise kvferry.DeadlineExceeded("held")

    def __getattr__(self, name: str):
        return getattr(self._store, name)


class Worker:
    def __init__(self, timeout_ms: int, device: Device = Host(), rank: int = 0):  # noqa: B008
        self.pool = kvferry.KvPool.create(LAYOUT, BLOCKS)
        config = kvferry.Config.make({"fetch_timeout_ms": timeout_ms})
        cache = SimpleNamespace(pool=self.pool, device=device)
        of_rank = (rank, 0, Trace("", rank), TransferStats())
        self.half = StoreWorker(cache, HOST, config, "m", "n", *of_rank)
        self.store = self.half._opened.store = HeldStore(self.half._opened.store)

    def save(self, request_id: str, block: int) -> bytes:
        key = f"{request_id} {block}".encode()
        self.half.save([StoreSave(request_id, [key], [block])])
        return key

    def load(self, request_id: str, block: int) -> None:
        self.half.load([StoreLoad(request_id, [b"of nobody"], [block], 0)])

    def wait_loaded(self, request_ids: set[str]) -> None:
        left = set(request_ids)

        def reported() -> bool:
            left.difference_update(self.half.take_finished(set())[1])
            return not left

        wait_for(reported)

    def wait_saved(self, finished: set[str]) -> None:
        """Until the finished requests, all of them, are reported."""
        left = set(finished)

        def reported() -> bool:
            left.difference_update(self.half.take_finished(finished)[0])
            return not left

        wait_for(reported)

    def close(self) -> None:
        self.store.go_on.set()
        self.half.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    it = Worker(timeout_ms=int(WAIT_S * 1e3))
    yield it
    it.close()


def test_a_step_starts_no_thread(monkeypatch):
    """One that the system refuses would end the engine."""

    def refuses(_):
        raise RuntimeError("can't start new thread")

    it = Worker(timeout_ms=int(WAIT_S * 1e3))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuses)
        it.store.go_on.set()
        it.save("a", 1)
        it.load("b", 2)
        it.wait_loaded({"b"})
        with pytest.raises(RuntimeError, match="new thread"):
            Worker(timeout_ms=1000)
    it.close()


def test_blocks_of_ranks_have_keys_of_their_own():
    worker = Worker(timeout_ms=int(WAIT_S * 1e3), rank=1)
    worker.store.go_on.set()
    key = worker.save("r", 1)
    worker.wait_saved({"r"})
    assert [worker.store.exists([rank_key(key, rank)]) for rank in range(2)] == [0, 1]
    worker.close()


def test_blocks_stay_until_all_saves_of_their_request_have_ended(worker: Worker):
    worker.store.go_on.set()
    worker.save("r", 1)
    (first,) = worker.half._saves["r"]
    first.result(WAIT_S)
    worker.store.go_on.clear()
    worker.save("r", 2)
    assert worker.half.take_finished({"r"}) == (set(), set())
    worker.store.go_on.set()
    worker.wait_saved({"r"})


@pytest.mark.parametrize("what", ["save", "load"])
def test_a_store_is_closed_when_what_has_begun_has_ended(worker: Worker, what: str, caplog):
    """And what was to be saved, but not what was to be loaded."""
    for block in range(3):
        getattr(worker, what)(f"r{block}", block)
    assert worker.store.began.wait(WAIT_S)
    closing = threading.Thread(target=worker.half.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    worker.store.go_on.set()
    closing.join(WAIT_S)
    assert (worker.store.puts, worker.store.gets) == ((3, 0) if what == "save" else (0, 1))
    assert "not saved" not in caplog.text


def test_saves_that_wait_are_dropped_when_their_blocks_are_taken(worker: Worker):
    worker.save("other", 0)
    assert worker.store.began.wait(WAIT_S)
    key = worker.save("preempted", 1)
    worker.half.end_saves(["preempted"], [])  # Returns at once: its save has not begun.
    fill(worker.pool, 1, 7)  # Another request's.
    worker.store.go_on.set()
    worker.save("last", 2)
    worker.wait_saved({"other", "last"})
    assert worker.store.exists([rank_key(key, 0)]) == 0
    # Nobody keeps blocks for it any more, so it must not be reported.
    assert worker.half.take_finished({"preempted"}) == (set(), set())


def test_saves_of_a_request_that_was_preempted_and_has_ended_are_dropped_and_reported(
    worker: Worker,
):
    worker.save("other", 0)
    assert worker.store.began.wait(WAIT_S)
    key = worker.save("ended", 1)
    worker.half.end_saves([], ["ended"])
    assert worker.half.take_finished({"ended"}) == ({"ended"}, set())  # At once.
    worker.store.go_on.set()
    worker.save("last", 2)
    worker.wait_saved({"other", "last"})
    assert worker.store.exists([rank_key(key, 0)]) == 0


def test_a_load_of_a_preempted_request_is_all_that_is_reported(worker: Worker):
    worker.store.go_on.set()
    key = worker.save("r", 1)
    assert worker.store.began.wait(WAIT_S)  # One that has not is dropped.
    worker.half.end_saves(["r"], [])
    worker.half.load([StoreLoad("r", [key], [2], 0)])
    reported: list[set[str]] = [set(), set()]

    def loaded() -> bool:
        for all_of_kind, kind in zip(reported, worker.half.take_finished({"r"}), strict=True):
            all_of_kind |= kind
        return reported[1] == {"r"}

    wait_for(loaded)
    assert reported[0] == set() and worker.half.take_missing_blocks() == set()


def test_blocks_of_a_save_that_does_not_end_are_not_given_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvferry.vllm.store_worker._LATE_S", 0.1)
    worker = Worker(timeout_ms=SHORT_MS)
    worker.store.late_s = WAIT_S
    worker.save("preempted", 1)
    assert worker.store.began.wait(WAIT_S)
    with pytest.raises(kvferry.DeadlineExceeded, match="preempted"):
        worker.half.end_saves(["preempted"], [])
    worker.close()


def test_a_store_that_hangs_holds_blocks_no_longer_than_one_save_may_take():
    worker = Worker(timeout_ms=SHORT_MS)
    requests = {f"r{n}" for n in range(20)}
    for name in requests:
        worker.save(name, 1)
    worker.wait_saved(requests)
    assert worker.store.puts == 1
    worker.close()


def test_loads_do_not_wait_for_a_store_that_hangs_one_behind_the_other():
    worker = Worker(timeout_ms=SHORT_MS)
    for block in range(BLOCKS):
        worker.load(f"r{block}", block)
    worker.wait_loaded({f"r{block}" for block in range(BLOCKS)})
    assert worker.store.gets == 1
    assert worker.half.take_missing_blocks() == set(range(BLOCKS))
    assert worker.half.take_missing_blocks() == set()
    # Nor does the next one, but what is saved may go elsewhere.
    worker.load("later", 1)
    worker.wait_loaded({"later"})
    assert worker.store.gets == 1
    worker.store.go_on.set()
    worker.save("saved", 1)
    worker.wait_saved({"saved"})
    assert worker.store.puts == 1
    worker.close()


def test_the_time_that_a_load_may_take_begins_when_it_is_asked_for():
    worker = Worker(timeout_ms=SHORT_MS)
    worker.store.late_s = WAIT_S
    worker.load("slow", 1)
    worker.load("behind", 2)
    asked = time.monotonic()
    assert worker.store.began.wait(WAIT_S)
    wait_for(lambda: time.monotonic() - asked > 1.1 * SHORT_MS / 1e3)
    worker.store.go_on.set()
    worker.wait_loaded({"slow", "behind"})
    assert worker.store.gets == 1
    assert worker.half.take_missing_blocks() == {1, 2}
    worker.close()


def test_a_load_that_nobody_waits_for_does_not_wait_for_others(worker: Worker):
    worker.load("other", 0)
    assert worker.store.began.wait(WAIT_S)
    worker.load("aborted", 1)
    worker.half.cancel(["aborted", "unknown"])
    worker.wait_loaded({"aborted"})
    assert worker.half._stats.data["failed"] == []  # It is no fault of the store.
    worker.store.go_on.set()
    worker.wait_loaded({"other"})
    assert worker.store.gets == 1 and worker.half._cancelled == set()


def test_a_block_is_saved_when_the_device_has_computed_it():
    device = SlowDevice()
    worker = Worker(timeout_ms=int(WAIT_S * 1e3), device=device)
    worker.store.go_on.set()
    key = worker.save("r", 1)
    fill(worker.pool, 1, 7)
    device.finish(1)
    worker.wait_saved({"r"})
    worker.half.load([StoreLoad("s", [key], [2], 0)])
    wait_for(lambda: "s" in worker.half.take_finished(set())[1])
    assert worker.half.take_missing_blocks() == set()
    assert holds(worker.pool, 2, 7)
    worker.close()


def test_a_block_that_the_device_failed_to_compute_is_not_saved():
    device = SlowDevice()
    device.fails = True
    worker = Worker(timeout_ms=int(WAIT_S * 1e3), device=device)
    worker.store.go_on.set()
    key = worker.save("r", 1)
    device.finish(1)
    worker.wait_saved({"r"})
    assert worker.store.puts == 0 and worker.store.exists([rank_key(key, 0)]) == 0
    worker.close()


class FullStore:
    def __init__(self, store):
        self._store = store

    def put_pages(self, keys, pool, pages, *, timeout_ms):
        return [kvferry.ResourceExhausted("the disk is full")] * len(keys)

    def __getattr__(self, name: str):
        return getattr(self._store, name)


def test_saves_that_fail_are_said_once_in_a_while(caplog):
    """Of a full store they would be a line for each step of each request."""
    worker = Worker(timeout_ms=60_000)
    worker.half._opened.store = FullStore(worker.half._opened.store)
    for block in range(3):
        worker.save("it", block)
    wait_for(lambda: worker.half.take_finished({"it"})[0] == {"it"})
    said = [it.getMessage() for it in caplog.records if "not saved" in it.getMessage()]
    assert said == ["1 of 1 blocks of it were not saved: the disk is full (0 more since the last)"]
    worker.half.close()
