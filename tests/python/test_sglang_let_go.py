"""Pages of requests between SGLang's servers that have ended are free when nothing uses them,
whatever stands still or finds no memory meanwhile."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang_pools", reason="SGLang is not installed", exc_type=ImportError)

import kvferry  # noqa: E402
from kvferry.sglang import pd_manager  # noqa: E402
from sglang.srt.disaggregation.common.conn import KVTransferError  # noqa: E402
from sglang_faults import (  # noqa: E402
    Clock,
    SlowDevice,
    WithoutMemory,
    left_of,
    under_way,
)
from sglang_pd import (  # noqa: E402
    SOURCE,
    TARGET,
    KVPoll,
    KVReceiver,
    Transfer,
    wait_status,
    whole,
)
from waiting import wait_for  # noqa: E402


class FailsOnceAsked:
    """A fetch that fails right after somebody has asked for its error."""

    def __init__(self, handle):
        self.done, self.ok, self.cancel = False, False, handle.cancel

    @property
    def error(self):
        before = "lost" if self.done else ""
        self.done = True
        return before


def test_a_fetch_that_fails_between_two_questions_has_failed(pair):
    prefill, decode = pair
    transfer, (handle,) = under_way(prefill, decode)
    (fetch,) = decode.manager._incoming[transfer.room].fetches()
    fetch.handle = FailsOnceAsked(handle)
    assert transfer.receivers[0].poll() != KVPoll.Success
    wait_status(transfer.receivers, KVPoll.Failed)
    with pytest.raises(KVTransferError, match="lost"):
        transfer.receivers[0].failure_exception()
    handle.cancel()
    wait_for(lambda: handle.done)
    transfer.senders[0].abort()


class StandsStill:
    """What asks for the end of fetches, and has none: all of the process stands still then, and the
    endpoint's thread has no turn."""

    def __init__(self, monkeypatch, manager, times):
        self.clock, self.cancel, self.times = Clock(monkeypatch), manager.cancel_incoming, times
        monkeypatch.setattr(manager, "cancel_incoming", self)

    def __call__(self, room):
        if self.times == 0:
            return self.cancel(room)
        self.times -= 1
        self.clock.now += 60
        return False


@pytest.mark.parametrize("times", [1, pd_manager._SETTLE_ATTEMPTS - 1])
def test_pages_are_not_freed_before_they_are_written_no_more(pair, monkeypatch, caplog, times):
    prefill, decode = pair
    transfer, (handle,) = under_way(prefill, decode)
    StandsStill(monkeypatch, decode.manager, times)
    with pytest.raises(KVTransferError):
        transfer.receivers[0].failure_exception()
    assert handle.done and not decode.manager._incoming
    assert caplog.text.count("may be written still") == times
    transfer.senders[0].abort()


def test_pages_that_may_be_written_still_are_never_freed(pair, monkeypatch):
    """SGLang would free them after any Exception."""
    prefill, decode = pair
    transfer, (handle,) = under_way(prefill, decode)
    still = StandsStill(monkeypatch, decode.manager, pd_manager._SETTLE_ATTEMPTS)
    with pytest.raises(pd_manager.PagesInUse, match="may be written still"):
        transfer.receivers[0].failure_exception()
    assert still.times == 0 and not handle.done
    assert not issubclass(pd_manager.PagesInUse, Exception)
    transfer.receivers[0].clear()
    transfer.senders[0].abort()


def end_before_a_poll(transfer, mode):
    """As SGLang does where another rank has failed: it takes every Exception for how."""
    (ended,) = transfer.receivers if mode == "decode" else transfer.senders
    with contextlib.suppress(Exception):
        ended.failure_exception()


def test_fetches_that_find_no_memory_for_their_cancel_are_cancelled_nevertheless(pair):
    prefill, decode = pair
    transfer, its_handles = under_way(prefill, decode, chunks=2)
    fetches = decode.manager._incoming[transfer.room].fetches()
    for fetch in fetches:
        fetch.handle = WithoutMemory(fetch.handle, "cancel", 2)
    end_before_a_poll(transfer, "decode")
    assert all(handle.done for handle in its_handles)
    assert [fetch.handle.times for fetch in fetches] == [0, 0]
    assert not decode.manager._incoming
    transfer.senders[0].abort()


def test_leases_that_find_no_memory_for_their_release_are_released_nevertheless(pair):
    prefill, decode = pair
    transfer, _ = under_way(prefill, decode, chunks=2)
    without = WithoutMemory(prefill.manager._publishers[0], "release", 3)
    prefill.manager._publishers = [without]
    end_before_a_poll(transfer, "prefill")
    assert without.times == 0 and without.metrics()["leases_live"] == 0
    assert not any(left_of(prefill.manager)) and not prefill.manager._live
    wait_status(transfer.receivers, KVPoll.Failed)
    transfer.receivers[0].clear()


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_pages_are_let_go_of_where_the_other_side_cannot_be_told(pair, mode, monkeypatch):
    prefill, decode = pair
    transfer, (handle,) = under_way(prefill, decode)

    def without_memory(*_args, **_kwargs):
        raise MemoryError

    monkeypatch.setattr(prefill.manager, "send_kv_status_message", without_memory)
    monkeypatch.setattr(KVReceiver, "ensure_abort_notified", without_memory)
    end_before_a_poll(transfer, mode)
    if mode == "decode":
        assert handle.done
    else:
        assert prefill.manager._publishers[0].metrics()["leases_live"] == 0
    monkeypatch.undo()
    for it in transfer.receivers + transfer.senders:
        it.clear()


@pytest.mark.parametrize(("mode", "what"), [("prefill", "_is_released"), ("decode", "cancel")])
def test_pages_of_which_nothing_is_found_out_are_never_freed(pair, mode, what, monkeypatch, caplog):
    """SGLang would free them after any Exception. A later clear() tries again."""
    prefill, decode = pair
    transfer, (handle,) = under_way(prefill, decode)
    monkeypatch.setattr(pd_manager, "_SETTLE_TIMEOUT_MS", 50)

    def fails(*_):
        raise RuntimeError("of whatever")

    (fetch,) = decode.manager._incoming[transfer.room].fetches()
    monkeypatch.setattr({"prefill": prefill.manager, "decode": fetch}[mode], what, fails)
    with pytest.raises(pd_manager.PagesInUse):
        end_before_a_poll(transfer, mode)
    assert caplog.text.count("of whatever") == pd_manager._SETTLE_ATTEMPTS  # Each says once.
    assert not handle.done and prefill.manager._publishers[0].metrics()["leases_live"] == 1
    monkeypatch.undo()
    for it in transfer.receivers + transfer.senders:
        it.clear()
    assert handle.done and prefill.manager._publishers[0].metrics()["leases_live"] == 0
    assert not decode.manager._incoming
    assert not prefill.manager._outgoing and not prefill.manager._by_lease


def test_pages_are_waited_for_where_nothing_can_be_said(pair, monkeypatch):
    """For want of memory, which is when there is most to say."""
    prefill, decode = pair
    transfer, (handle,) = under_way(prefill, decode)
    monkeypatch.setattr(pd_manager, "_SETTLE_TIMEOUT_MS", 50)

    def finds_no_memory(*_):
        raise MemoryError

    (fetch,) = decode.manager._incoming[transfer.room].fetches()
    monkeypatch.setattr(fetch, "cancel", finds_no_memory)
    monkeypatch.setattr(pd_manager._logger, "error", finds_no_memory)
    with pytest.raises(pd_manager.PagesInUse):
        end_before_a_poll(transfer, "decode")
    monkeypatch.undo()
    for it in transfer.receivers + transfer.senders:
        it.clear()
    assert handle.done


class LateEndpoint:
    """A prefill endpoint that does not say in time that it has taken leases back."""

    def __init__(self, endpoint, clock, times):
        self.endpoint, self.clock, self.times = endpoint, clock, times
        self.waited_ms = []

    def release(self, lease_id, timeout_ms):
        self.waited_ms.append(timeout_ms)
        if self.times > 0:
            self.times -= 1
            self.clock.now += timeout_ms / 1e3
            raise kvferry.DeadlineExceeded("late")
        self.endpoint.release(lease_id, timeout_ms)

    def __getattr__(self, name):
        return getattr(self.endpoint, name)


def test_pages_are_not_freed_before_they_are_read_no_more(pair, monkeypatch, caplog):
    prefill, decode = pair
    transfer, _ = under_way(prefill, decode, chunks=3)
    clock = Clock(monkeypatch)
    late = LateEndpoint(prefill.manager._publishers[0], clock, times=6)
    prefill.manager._publishers = [late]
    transfer.senders[0].abort()
    assert late.endpoint.metrics()["leases_live"] == 0
    # The leases of a request have one deadline an attempt.
    longest = pd_manager._SETTLE_TIMEOUT_MS
    assert late.waited_ms == [longest, 0, 0] * 2 + [longest] * 3
    assert caplog.text.count("may be read still") == 2
    wait_status(transfer.receivers, KVPoll.Failed)
    transfer.receivers[0].clear()


def test_pages_that_may_be_read_still_are_never_freed(pair, monkeypatch):
    prefill, decode = pair
    transfer, _ = under_way(prefill, decode)
    clock = Clock(monkeypatch)
    late = LateEndpoint(prefill.manager._publishers[0], clock, pd_manager._SETTLE_ATTEMPTS)
    prefill.manager._publishers = [late]
    with pytest.raises(pd_manager.PagesInUse, match="may be read still"):
        transfer.senders[0].abort()
    assert late.times == 0
    wait_status(transfer.receivers, KVPoll.Failed)
    transfer.receivers[0].clear()


def without_memory_once(monkeypatch, manager, name):
    """What is called so finds none the first time. Says whether it has been called."""
    right, calls = getattr(manager, name), []

    def call(*of):
        calls.append(of)
        if len(calls) == 1:
            raise MemoryError
        right(*of)

    monkeypatch.setattr(manager, name, call)
    return lambda: bool(calls)


def test_a_failure_that_finds_no_memory_does_not_end_the_thread_that_publishes(pair, monkeypatch):
    """All other requests would wait for their time limits."""
    prefill, decode = pair
    has_failed = without_memory_once(monkeypatch, prefill.manager, "_fail_outgoing")
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    with monkeypatch.context() as broken:
        broken.setattr(prefill.manager, "_lease", lambda *_: 1 / 0)
        transfer.send(0, len(SOURCE))
        wait_for(has_failed)
    whole([prefill], [decode], [1], [2])
    transfer.senders[0].abort()
    wait_status(transfer.receivers, KVPoll.Failed)
    transfer.receivers[0].clear()


def test_a_failure_that_finds_no_memory_does_not_end_the_thread_that_waits_for_the_device(
    make, monkeypatch
):
    device = SlowDevice(monkeypatch)
    prefill, decode = make("prefill"), make("decode")
    has_failed = without_memory_once(monkeypatch, decode.manager, "_fail")
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    device.let_go(RuntimeError("an illegal memory access"))
    wait_for(has_failed)
    device.error = None
    whole([prefill], [decode], [1], [2])
    transfer.receivers[0].abort()
    wait_status(transfer.receivers + transfer.senders, KVPoll.Failed)
    for it in transfer.receivers + transfer.senders:
        it.clear()
