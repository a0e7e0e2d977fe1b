"""kvferry between SGLang's prefill and decode servers, with SGLang's own classes on the CPU."""

import contextlib
import dataclasses
import mmap
import pickle
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang_pools", reason="SGLang is not installed", exc_type=ImportError)

import kvferry  # noqa: E402
import zmq  # noqa: E402
from kvferry.sglang import disaggregation, pd_device, pd_sockets, plugin  # noqa: E402
from kvferry.sglang.pd_fetches import Fetch, FetchQueues  # noqa: E402
from kvferry.sglang.pd_messages import Chunk, Request, parse  # noqa: E402
from servers import free_port  # noqa: E402
from sglang.srt.arg_groups import choices  # noqa: E402
from sglang.srt.disaggregation import utils as sglang_utils  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVArgs, StateType  # noqa: E402
from sglang.srt.disaggregation.common.conn import KVTransferError  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang_pd import (  # noqa: E402
    CHILD_ROOM,
    OTHER_SIZES,
    PAGE,
    TARGET_ROW,
    Deployment,
    KVPoll,
    KVReceiver,
    RankOf,
    Transfer,
    check_pages,
    copies,
    failed,
    make_ranks,
    make_sides,
    move_heads,
    refused,
    rooms,
    wait_status,
    whole,
)
from waiting import wait_for  # noqa: E402


@pytest.fixture
def make():
    with make_ranks() as it:
        yield it


@pytest.fixture
def pair(make):
    prefill, decode = make("prefill"), make("decode")
    prefill.fill(seed=1)
    decode.fill(seed=2)
    return prefill, decode


SOURCE, TARGET = [9, 3, 40, 41, 42, 7], [20, 21, 5, 60, 6, 1]


@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_pages_and_the_first_token_arrive(make, kind, chunks, has_draft):
    prefill, decode = (make(mode, kind=kind, has_draft=has_draft) for mode in ("prefill", "decode"))
    prefill.fill(seed=1)
    decode.fill(seed=2)
    before = copies(decode)
    whole([prefill], [decode], SOURCE, TARGET, chunks, prefix=8 * PAGE)
    check_pages(prefill, decode, before, SOURCE, TARGET)
    assert prefill.manager._publishers[0].metrics()["leases_live"] == 0


def test_a_last_chunk_without_pages(pair):
    prefill, decode = pair
    before = copies(decode)
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    transfer.senders[0].num_kv_indices = len(SOURCE) + 1  # So that this is not the last one.
    transfer.send(0, len(SOURCE))
    assert [it.poll() for it in transfer.receivers] == [KVPoll.WaitingForInput]
    transfer.senders[0].num_kv_indices = len(SOURCE)
    transfer.send(0, 0)
    transfer.end(KVPoll.Success)
    check_pages(prefill, decode, before, SOURCE, TARGET)


def test_all_is_cached_on_the_decode_side(pair):
    prefill, decode = pair
    before = copies(decode)
    transfer = Transfer([prefill], [decode], [], [], prefix=6 * PAGE).begin()
    transfer.send(0, 0)
    transfer.end(KVPoll.Success)
    check_pages(prefill, decode, before, [], [])


@pytest.mark.parametrize(("heads", "prefill", "decode"), OTHER_SIZES)
def test_other_numbers_of_ranks(make, heads, prefill, decode):
    move_heads(make, "mha", heads, (prefill, decode), (SOURCE, TARGET))


def test_heads_that_no_rank_has_that_is_asked_fail_the_request(make):
    """SGLang chooses whom a rank asks. What nobody sent must not look like success."""
    transfer = Transfer(*make_sides(make, (3, 2), heads=6), SOURCE, TARGET).ask()
    wait_status(transfer.receivers, KVPoll.Failed)
    wait_status(transfer.senders[:2], KVPoll.Failed)  # SGLang has the third one not asked at all.
    assert [it.partition(": ")[2] for it in transfer.reasons()[:2]] == [
        "this rank has heads [0, 3) and asks prefill ranks [0] of 3, none of which has head 2",
        "this rank has heads [3, 6) and asks prefill ranks [1] of 3, none of which has head 4",
    ]


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 2)])
def test_other_numbers_of_ranks_with_mla(make, sizes):
    prefill, decode = make_sides(make, sizes, "mla")
    for it in prefill:
        it.fill(seed=1)
    before = [copies(it) for it in decode]
    whole(prefill, decode, SOURCE, TARGET, chunks=2)
    for it, old in zip(decode, before, strict=True):
        check_pages(prefill[0], it, old, SOURCE, TARGET)


# ---------------------------------------------------------------- ends before the end


class Hold:
    """What SGLang gives a chunk to wait for: a device's event."""

    def __init__(self):
        self._let_go = threading.Event()
        self.is_awaited = threading.Event()

    def synchronize(self):
        self.is_awaited.set()
        assert self._let_go.wait(20)

    def let_go(self):
        self._let_go.set()


def held(prefill, decode):
    """A transfer whose only chunk waits to be let go."""
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    hold = transfer.senders[0]._early_send_wait_event = Hold()
    transfer.send(0, len(SOURCE))
    assert hold.is_awaited.wait(20)
    return transfer, hold


def test_a_chunk_waits_for_the_device(pair):
    prefill, decode = pair
    transfer, hold = held(prefill, decode)
    assert prefill.manager._publishers[0].metrics()["leases_live"] == 0
    prefill.fill(seed=3)  # What the device was still at.
    before = copies(decode)
    hold.let_go()
    transfer.end(KVPoll.Success)
    check_pages(prefill, decode, before, SOURCE, TARGET)


class SlowDevice:
    """What a decode server's device is still at, for requests that had the pages before."""

    def __init__(self, monkeypatch):
        self._let_go, self.is_awaited = threading.Event(), threading.Event()
        self.waits, self.error = 0, None
        monkeypatch.setattr(pd_device, "wait_on", lambda device, index: self._wait)

    def _wait(self):
        self.waits += 1
        self.is_awaited.set()
        assert self._let_go.wait(20)
        if self.error:
            raise self.error

    def let_go(self, error=None):
        self.error = error
        self._let_go.set()


def sent_early(prefill, decode, target=TARGET):
    """A request of which all has been sent before its pages may be written."""
    transfer = Transfer([prefill], [decode], SOURCE, target).begin()
    transfer.send(0, 1)
    transfer.send(1, len(SOURCE))
    wait_for(lambda: len(decode.manager._incoming[transfer.room].early) == 2)
    return transfer


def test_pages_are_not_written_before_the_device_is_done_with_them(make, monkeypatch):
    device = SlowDevice(monkeypatch)
    prefill, decode = make("prefill"), make("decode")
    prefill.fill(seed=1)
    transfer = sent_early(prefill, decode)
    assert not decode.manager._incoming[transfer.room].senders
    decode.fill(seed=3)  # What the device was still at.
    before = copies(decode)
    device.let_go()
    transfer.end(KVPoll.Success)
    check_pages(prefill, decode, before, SOURCE, TARGET)
    assert device.waits == 1 and not decode.manager._with_early_chunks


def test_an_early_chunk_that_is_wrong_ends_its_request_alone(make, monkeypatch):
    device = SlowDevice(monkeypatch)
    prefill, decode = make("prefill"), make("decode")
    prefill.fill(seed=1)
    manager = decode.manager
    wrong = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    chunk = Chunk(wrong.room, 0, 0, len(SOURCE), "\ud800", False)  # No Unicode.
    manager._on_decode_message(chunk.frames())
    other = sent_early(prefill, decode, [22, 23, 8, 61, 10, 2])
    device.let_go()
    other.end(KVPoll.Success)
    assert "from prefill rank 0" in failed(wrong)


def test_what_waits_for_the_device_ends_with_its_request(make, monkeypatch):
    device = SlowDevice(monkeypatch)
    prefill, decode = make("prefill"), make("decode")
    first = sent_early(prefill, decode)
    assert device.is_awaited.wait(20)
    second = sent_early(prefill, decode, [22, 23, 8, 61, 10, 2])
    before = copies(decode)
    first.receivers[0].abort()
    wait_status(first.receivers + first.senders, KVPoll.Failed)
    assert first.reasons() == ["Aborted by AbortReq.", "Aborted by the decode side"]
    device.let_go(RuntimeError("an illegal memory access"))
    assert "the device of the pages failed: an illegal memory access" in failed(second)
    assert all(torch.equal(*it) for it in zip(decode.pages(), before, strict=True))
    assert device.waits == 2
    wait_for(lambda: not decode.manager._with_early_chunks)


def test_a_chunk_that_comes_after_the_abort_is_not_written(pair):
    prefill, decode = pair
    before = copies(decode)
    transfer, hold = held(prefill, decode)
    transfer.receivers[0].abort()
    transfer.receivers[0].clear()  # From here on the pages are another request's.
    hold.let_go()
    wait_status(transfer.senders, KVPoll.Failed)
    assert transfer.senders[0].conclude_state == KVPoll.Failed
    transfer.senders[0].clear()
    whole([prefill], [decode], [1], [2])  # Messages come in order: the late one has been read.
    check_pages(prefill, decode, before, [1], [2])
    assert prefill.manager._publishers[0].metrics()["leases_live"] == 0


def test_a_chunk_is_not_published_after_the_abort(pair):
    prefill, decode = pair
    transfer, hold = held(prefill, decode)
    transfer.senders[0].abort()
    transfer.senders[0].clear()  # From here on the pages are another request's.
    hold.let_go()
    wait_status(transfer.receivers, KVPoll.Failed)
    transfer.receivers[0].clear()
    whole([prefill], [decode], [1], [2])
    assert prefill.manager._publishers[0].metrics()["leases_live"] == 0


def handles(incoming):
    """Of its fetches that are under way, or have been."""
    return [fetch.handle for fetch in incoming.fetches() if fetch.handle is not None]


class WithoutLayers:
    """A prefill endpoint none of whose layers is ready: fetches wait."""

    def __init__(self, endpoint):
        self.endpoint = endpoint
        self.tickets = []

    def publish(self, pages, ready_layers):
        self.tickets.append(self.endpoint.publish(pages))
        return self.tickets[-1]

    def __getattr__(self, name):
        return getattr(self.endpoint, name)


@pytest.mark.parametrize("how", ["abort", "another rank's failure"])
def test_a_fetch_under_way_has_ended_when_the_request_has(pair, how):
    prefill, decode = pair
    waiting = WithoutLayers(prefill.manager._publishers[0])
    prefill.manager._publishers = [waiting]
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    transfer.send(0, len(SOURCE))
    incoming = decode.manager._incoming[transfer.room]
    wait_for(lambda: bool(handles(incoming)))
    (handle,) = handles(incoming)
    assert not handle.done
    receiver = transfer.receivers[0]
    if how == "abort":
        receiver.abort()
        assert receiver.poll() == KVPoll.Transferring or handle.done
        wait_status([receiver], KVPoll.Failed)
    else:
        with pytest.raises(KVTransferError):
            receiver.failure_exception()
    assert handle.done and not handle.ok
    before = copies(decode)
    with contextlib.suppress(kvferry.Error):
        waiting.endpoint.all_layers_ready(kvferry.Ticket.parse(waiting.tickets[0]).lease_id)
    receiver.clear()
    transfer.senders[0].abort()
    transfer.senders[0].clear()
    prefill.manager._publishers = [waiting.endpoint]
    whole([prefill], [decode], [1], [2])
    check_pages(prefill, decode, before, [1], [2])


@pytest.mark.parametrize("sent", [0, 3])
def test_the_decode_side_aborts(pair, sent):
    prefill, decode = pair
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    transfer.send(0, sent)
    transfer.receivers[0].abort()
    wait_status(transfer.receivers, KVPoll.Failed)
    wait_status(transfer.senders, KVPoll.Failed)
    assert transfer.reasons() == ["Aborted by AbortReq.", "Aborted by the decode side"]
    assert prefill.manager._publishers[0].metrics()["leases_live"] == 0
    assert not prefill.manager._outgoing and not decode.manager._incoming


@pytest.mark.parametrize("sent", [0, 3])
def test_the_prefill_side_aborts(pair, sent):
    prefill, decode = pair
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    transfer.send(0, sent)
    transfer.senders[0].abort()
    assert prefill.manager._publishers[0].metrics()["leases_live"] == 0  # Its pages are free now.
    wait_status(transfer.receivers, KVPoll.Failed)
    # What comes first: SGLang's message, or what a fetch is told.
    says = "Aborted by the prefill side|took the request back|has already been released"
    assert re.search(says, transfer.reasons()[0])


def test_the_prefill_side_aborts_before_the_decode_side_asks(pair):
    prefill, decode = pair
    transfer = Transfer([prefill], [decode], SOURCE, TARGET)
    transfer.senders[0].abort()
    transfer.senders[0].clear()
    transfer.receivers[0].send_metadata(np.array(TARGET, np.int32), TARGET_ROW)
    wait_status(transfer.receivers, KVPoll.Failed)
    transfer.receivers[0].clear()


def left_of(manager):
    """What a prefill rank keeps of requests, without bound."""
    return [
        manager.request_status, manager.transfer_infos, manager.req_to_decode_prefix_len,
        manager.failure_records, manager._outgoing, manager._by_lease,
    ]  # fmt: skip


@pytest.mark.parametrize("sent", [None, 3])
def test_nothing_is_left_of_a_request_that_the_prefill_side_aborts(pair, sent):
    """SGLang forgets some of them right behind abort(), and looks at others once more."""
    prefill, decode = pair
    transfer = Transfer([prefill], [decode], SOURCE, TARGET)
    if sent is not None:
        transfer.begin().send(0, sent)
    (sender,) = transfer.senders
    sender.abort()
    assert not any(left_of(prefill.manager))
    assert sender.poll() == KVPoll.Failed
    following = prefill.sender(transfer.room)  # A room may be used again.
    sender.abort()
    sender.clear()
    with pytest.raises(KVTransferError, match="Aborted by AbortReq") as error:
        sender.failure_exception()
    assert not error.value.is_from_another_rank
    assert following.poll() == KVPoll.Bootstrapping
    following.abort()
    transfer.receivers[0].abort()
    transfer.receivers[0].clear()


def test_the_prefill_side_ends_a_request_by_its_time_limit(make):
    """Who has asked is told, and who asks later: they would wait for their own time limit."""
    (prefill,), decode = make_sides(make, (1, 2))
    prefill.manager.bootstrap_timeout = 0.2
    transfer = Transfer([prefill], decode, SOURCE, TARGET)
    early, late = transfer.receivers
    early.send_metadata(np.array(TARGET, np.int32), TARGET_ROW)
    wait_status(transfer.senders, KVPoll.Failed)
    with pytest.raises(KVTransferError, match="timed out .* in KVPoll.Bootstrapping"):
        transfer.senders[0].failure_exception()
    wait_status([early], KVPoll.Failed)
    late.send_metadata(np.array(TARGET, np.int32), TARGET_ROW)
    wait_status([late], KVPoll.Failed)
    with pytest.raises(KVTransferError, match="timed out .* in KVPoll.Bootstrapping"):
        early.failure_exception()
    with pytest.raises(KVTransferError, match="Aborted by the prefill side"):
        late.failure_exception()
    assert not any(left_of(prefill.manager))


def test_a_failure_is_told_once_and_not_to_who_said_so(pair, monkeypatch):
    prefill, decode = pair
    told = []
    monkeypatch.setattr(
        prefill.manager, "send_kv_status_message", lambda **message: told.append(message)
    )
    by_decode, by_prefill = (
        Transfer([prefill], [decode], SOURCE, TARGET).begin() for _ in range(2)
    )
    by_decode.receivers[0].abort()
    wait_status(by_decode.senders, KVPoll.Failed)
    assert by_decode.reasons()[1] == "Aborted by the decode side"
    assert not told
    monkeypatch.setattr(prefill.manager, "_lease", lambda *_: 1 / 0)
    by_prefill.send(0, len(SOURCE))
    wait_status(by_prefill.senders, KVPoll.Failed)
    assert by_prefill.reasons()[1] == "publishing pages: division by zero"
    assert [it["failure_reason"] for it in told] == ["publishing pages: division by zero"]


def test_a_failure_of_another_rank_is_told(make):
    """SGLang says so by failure_exception() alone, whatever this rank's own status is."""
    prefill, decode = make_sides(make, (2, 2))
    transfer = Transfer(prefill, decode, SOURCE, TARGET).begin()
    with pytest.raises(KVTransferError) as error:
        transfer.receivers[0].failure_exception()
    assert error.value.is_from_another_rank
    wait_status(transfer.senders[:1], KVPoll.Failed)
    with pytest.raises(KVTransferError) as error:
        transfer.senders[1].failure_exception()
    assert error.value.is_from_another_rank
    wait_status(transfer.receivers[1:], KVPoll.Failed)
    for it in (*transfer.receivers, *transfer.senders):
        it.clear()


def aborted_before_it_comes(prefill, decode, receiver):
    receiver.send_metadata(np.array(TARGET, np.int32), TARGET_ROW)
    wait_for(lambda: bool(prefill.manager.transfer_infos))
    receiver.abort()
    receiver.clear()
    whole([prefill], [decode], [1], [2])  # Messages come in order: the abort has been read.


def test_nothing_is_left_of_a_request_that_never_comes(pair):
    """The router may give it to the decode side alone."""
    prefill, decode = pair
    receiver = decode.receiver(next(rooms))
    aborted_before_it_comes(prefill, decode, receiver)
    assert not any(left_of(prefill.manager))


def test_nothing_is_left_of_a_request_that_never_comes_of_a_room_that_had_one(pair):
    """SGLang gives what it computes again, of a request that it has retracted, the same room."""
    prefill, decode = pair
    receiver = decode.receiver(whole([prefill], [decode], [1], [2]))
    aborted_before_it_comes(prefill, decode, receiver)
    assert not any(left_of(prefill.manager))
    assert not prefill.manager._live


def test_the_decode_side_aborts_before_the_prefill_side_begins(pair):
    """The router gives a request to both, and either may be late."""
    prefill, decode = pair
    receiver = decode.receiver(room := next(rooms))
    receiver.abort()
    # Messages come in order: what follows is of another request, and shows that the abort was read.
    whole([prefill], [decode], [1], [2])
    sender = prefill.sender(room)
    wait_status([sender], KVPoll.Failed)
    with pytest.raises(KVTransferError, match="Aborted by the decode side"):
        sender.failure_exception()
    for it in (sender, receiver):
        it.clear()


def test_an_abort_of_a_request_that_has_ended_does_not_end_the_next_of_its_room(pair):
    prefill, decode = pair
    room = whole([prefill], [decode], [1], [2])
    receiver = decode.receiver(room)
    receiver.abort()
    receiver.clear()
    whole([prefill], [decode], [3], [4])  # The abort has been read.
    sender = prefill.sender(room)
    assert sender.poll() == KVPoll.Bootstrapping
    sender.abort()
    sender.clear()


def test_another_rank_fails(make):
    """SGLang ends a request on all ranks when one's transfer has failed: pages are free then."""
    prefill = make("prefill")
    decode = [make("decode", rank, 2) for rank in range(2)]
    transfer = Transfer([prefill], decode, SOURCE, TARGET).begin()
    transfer.send(0, 3)
    decode[0].manager._fail(transfer.room, "a reason")
    wait_status(transfer.receivers[:1], KVPoll.Failed)
    reasons = transfer.reasons()
    assert reasons[0] == "a reason"
    assert all(not it.manager._incoming for it in decode)
    assert prefill.manager._publishers[0].metrics()["leases_live"] == 0


def test_time_limits_are_sglangs(make, monkeypatch):
    """Not the one that fetches have without one, which is longer than chunks take but for a prefill
    server that is held up; nor one that is longer than kvferry's longest."""
    monkeypatch.setenv("KVFERRY_FETCH_TIMEOUT_MS", "100")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "1000000")
    prefill, decode = make("prefill"), make("decode")
    endpoint = prefill.manager._publishers[0]
    prefill.manager._publishers = [waiting := WithoutLayers(endpoint)]
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    transfer.send(0, len(SOURCE))
    incoming = decode.manager._incoming[transfer.room]
    wait_for(lambda: bool(handles(incoming)))
    with pytest.raises(kvferry.DeadlineExceeded):
        handles(incoming)[0].wait(500)
    assert transfer.receivers[0].poll() == KVPoll.WaitingForInput
    endpoint.all_layers_ready(kvferry.Ticket.parse(waiting.tickets[0]).lease_id)
    transfer.end(KVPoll.Success)


def test_leases_that_nobody_fetches_end_the_request(make, monkeypatch):
    monkeypatch.setenv("KVFERRY_LEASE_MS", "300")
    prefill, decode = make("prefill"), make("decode")
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    monkeypatch.setattr(decode.manager, "_take", lambda *_: None)
    transfer.send(0, 3)
    wait_status(transfer.senders, KVPoll.Failed)
    wait_status(transfer.receivers, KVPoll.Failed)
    assert set(transfer.reasons()) == {"the decode side did not fetch in time"}


# ---------------------------------------------------------------- a process that stands still


class Clock:
    """Of kvferry.sglang.disaggregation, and of what tests move it on by."""

    def __init__(self, monkeypatch, module=disaggregation):
        self.now = time.monotonic()
        self.sleep = time.sleep
        monkeypatch.setattr(module, "time", self)

    def monotonic(self):
        return self.now


def under_way(prefill, decode, chunks=1):
    """A transfer of which nothing arrives, and the handles of its fetches."""
    prefill.manager._publishers = [WithoutLayers(prefill.manager._publishers[0])]
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    for n in range(chunks):
        transfer.send(n * len(SOURCE) // chunks, (n + 1) * len(SOURCE) // chunks)
    incoming = decode.manager._incoming[transfer.room]
    wait_for(lambda: len(handles(incoming)) == chunks)
    return transfer, handles(incoming)


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


@pytest.mark.parametrize("times", [1, disaggregation._SETTLE_ATTEMPTS - 1])
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
    still = StandsStill(monkeypatch, decode.manager, disaggregation._SETTLE_ATTEMPTS)
    with pytest.raises(disaggregation.PagesInUse, match="may be written still"):
        transfer.receivers[0].failure_exception()
    assert still.times == 0 and not handle.done
    assert not issubclass(disaggregation.PagesInUse, Exception)
    transfer.receivers[0].clear()
    transfer.senders[0].abort()


class WithoutMemory:
    """A fetch, an endpoint or what else is called, that finds no memory the first `times` times."""

    def __init__(self, of, name, times):
        self._of, self._name, self.times = of, name, times

    def __getattr__(self, name):
        if name == self._name and self.times > 0:
            self.times -= 1
            raise MemoryError
        return getattr(self._of, name)


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
    monkeypatch.setattr(disaggregation, "_SETTLE_TIMEOUT_MS", 50)

    def fails(*_):
        raise RuntimeError("of whatever")

    (fetch,) = decode.manager._incoming[transfer.room].fetches()
    monkeypatch.setattr({"prefill": prefill.manager, "decode": fetch}[mode], what, fails)
    with pytest.raises(disaggregation.PagesInUse):
        end_before_a_poll(transfer, mode)
    assert caplog.text.count("of whatever") == disaggregation._SETTLE_ATTEMPTS  # Each says once.
    assert not handle.done and prefill.manager._publishers[0].metrics()["leases_live"] == 1
    monkeypatch.undo()
    for it in transfer.receivers + transfer.senders:
        it.clear()
    assert handle.done and prefill.manager._publishers[0].metrics()["leases_live"] == 0
    assert not decode.manager._incoming
    assert not prefill.manager._outgoing and not prefill.manager._by_lease


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
    longest = disaggregation._SETTLE_TIMEOUT_MS
    assert late.waited_ms == [longest, 0, 0] * 2 + [longest] * 3
    assert caplog.text.count("may be read still") == 2
    wait_status(transfer.receivers, KVPoll.Failed)
    transfer.receivers[0].clear()


def test_pages_that_may_be_read_still_are_never_freed(pair, monkeypatch):
    prefill, decode = pair
    transfer, _ = under_way(prefill, decode)
    clock = Clock(monkeypatch)
    late = LateEndpoint(prefill.manager._publishers[0], clock, disaggregation._SETTLE_ATTEMPTS)
    prefill.manager._publishers = [late]
    with pytest.raises(disaggregation.PagesInUse, match="may be read still"):
        transfer.senders[0].abort()
    assert late.times == 0
    wait_status(transfer.receivers, KVPoll.Failed)
    transfer.receivers[0].clear()


# ---------------------------------------------------------------- rooms


def test_a_failure_that_comes_as_its_request_ends_is_not_the_next_ones(pair, monkeypatch):
    """Of that room: threads say so that do not know when the scheduler is done with a request."""
    manager = pair[0].manager
    sender = pair[0].sender(next(rooms))
    record = manager.record_failure

    def ends_meanwhile(room, reason):
        sender.clear()
        record(room, reason)

    monkeypatch.setattr(manager, "record_failure", ends_meanwhile)
    manager._fail(sender.bootstrap_room, "late")
    assert not any(left_of(manager))


def test_two_requests_of_one_room_both_end(pair):
    """What the second one asked for would take the first one's place, whose pages are written."""
    prefill, decode = pair
    transfer, (handle,) = under_way(prefill, decode)
    second = decode.receiver_beside(transfer.receivers[0])
    before = copies(decode)
    second.send_metadata(np.array([30, 31, 32, 33, 34, 35], np.int32), TARGET_ROW)
    receivers = [*transfer.receivers, second]
    wait_status(receivers, KVPoll.Failed)
    assert handle.done and not handle.ok
    reasons = transfer.reasons()
    with pytest.raises(KVTransferError):
        second.failure_exception()
    assert reasons[0].startswith(SAME_ROOM)
    assert not decode.manager._incoming and not decode.manager.failure_records
    check_pages(prefill, decode, before, [], [])
    prefill.manager._publishers = [prefill.manager._publishers[0].endpoint]
    whole([prefill], [decode], [1], [2])


SAME_ROOM = "two requests have this bootstrap_room, as SGLang gives it to all"


def arrived(prefill, decode):
    """A request all of whose pages have come, which its scheduler has not looked at yet."""
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    transfer.send(0, len(SOURCE))
    incoming = decode.manager._incoming[transfer.room]
    wait_for(incoming.has_all)
    return transfer, handles(incoming)


@pytest.mark.parametrize("first", ["has arrived", "is under way", "was aborted", "has failed"])
def test_a_second_request_of_a_room_that_has_not_asked_yet_ends(pair, first):
    """SGLang ends its server where such a one seems to arrive."""
    prefill, decode = pair
    transfer, its_handles = (arrived if first == "has arrived" else under_way)(prefill, decode)
    second = decode.receiver_beside(transfer.receivers[0])
    if first == "was aborted":
        transfer.receivers[0].abort()
    if first == "has failed":
        decode.manager._fail(transfer.room, "lost")
    request = decode.look_at_unasked(second)
    assert SAME_ROOM in request.finished_reason.message
    assert all(handle.done for handle in its_handles)
    second.clear()
    assert transfer.receivers[0].poll() == KVPoll.Failed
    with pytest.raises(KVTransferError):
        transfer.receivers[0].failure_exception()
    assert not decode.manager._incoming and not decode.manager.failure_records
    wait_for(lambda: transfer.senders[0].poll() in (KVPoll.Failed, KVPoll.Success))
    transfer.senders[0].clear()
    assert prefill.manager._publishers[0].metrics()["leases_live"] == 0


def test_a_second_request_of_a_room_may_be_aborted_before_it_asks(pair):
    prefill, decode = pair
    transfer, (handle,) = under_way(prefill, decode)
    second = decode.receiver_beside(transfer.receivers[0])
    second.abort()
    assert "Aborted by AbortReq" in decode.look_at_unasked(second).finished_reason.message
    assert handle.done and transfer.receivers[0].poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match=SAME_ROOM):
        transfer.receivers[0].failure_exception()
    transfer.senders[0].abort()


def test_what_ended_with_another_request_of_its_room_leaves_the_next_one_alone(pair):
    prefill, decode = pair
    transfer, _ = under_way(prefill, decode)
    second = decode.receiver_beside(transfer.receivers[0])
    decode.look_at_unasked(second)
    wait_status(transfer.senders, KVPoll.Failed)
    transfer.senders[0].clear()
    prefill.manager._publishers = [prefill.manager._publishers[0].endpoint]
    third = Transfer([prefill], [decode], SOURCE, TARGET, room=transfer.room).begin()
    for it in (second, transfer.receivers[0]):
        assert it.poll() == KVPoll.Failed
        it.abort()
        it.clear()
    third.send(0, len(SOURCE))
    third.end(KVPoll.Success)


def test_a_second_request_of_a_room_ends_on_the_prefill_side(pair):
    """SGLang ends its server where a request arrives that nobody has asked for."""
    prefill, decode = pair
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    transfer.send(0, len(SOURCE))
    wait_status(transfer.receivers, KVPoll.Success)
    wait_for(lambda: prefill.manager._publishers[0].metrics()["leases_live"] == 0)
    second = prefill.sender(transfer.room)
    assert prefill.look_at_new(second)
    with pytest.raises(KVTransferError, match=SAME_ROOM):
        second.failure_exception()
    second.abort()
    second.clear()
    transfer.end(KVPoll.Success)
    assert not any(left_of(prefill.manager)) and not prefill.manager._live


def test_a_request_whose_room_has_ended_with_another_request_fails(pair):
    """SGLang's own classes raise KeyError then, which ends the server."""
    first = pair[1].receiver(room := next(rooms))
    second = pair[1].receiver(room)
    first.abort()
    first.clear()
    assert second.poll() == KVPoll.Failed
    second.clear()


# ---------------------------------------------------------------- more chunks than fetches


@contextlib.contextmanager
def at_a_time(monkeypatch, most):
    """(prefill rank whose layers are ready when it says so, decode rank with so many fetches)"""
    monkeypatch.setenv("KVFERRY_MAX_FETCHES_PER_PEER", str(most))
    with make_ranks() as make:
        prefill, decode = make("prefill"), make("decode")
        prefill.fill(seed=1)
        decode.fill(seed=2)
        prefill.manager._publishers = [WithoutLayers(prefill.manager._publishers[0])]
        yield prefill, decode


@pytest.fixture
def two_at_a_time(monkeypatch):
    with at_a_time(monkeypatch, 2) as ranks:
        yield ranks


@pytest.fixture
def one_at_a_time(monkeypatch):
    with at_a_time(monkeypatch, 1) as ranks:
        yield ranks


def let_go(prefill, n):
    """The layers of its n-th chunk are ready."""
    publisher = prefill.manager._publishers[0]
    wait_for(lambda: len(publisher.tickets) > n)
    publisher.all_layers_ready(kvferry.Ticket.parse(publisher.tickets[n]).lease_id)


def send_chunks(transfer):
    """Of a page each. What the decode side knows of the request."""
    for n in range(len(transfer.source)):
        transfer.send(n, n + 1)
    incoming = transfer.decode[0].manager._incoming[transfer.room]
    wait_for(lambda: len(incoming.fetches()) == len(transfer.source))
    return incoming


def test_more_chunks_than_a_prefill_rank_takes_fetches_of_wait_for_their_turn(two_at_a_time):
    """Also while the scheduler is at something else, which is who polls."""
    prefill, decode = two_at_a_time
    before = copies(decode)
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    incoming = send_chunks(transfer)
    for n in range(len(SOURCE)):
        assert len(handles(incoming)) <= n + 2
        assert [it.poll() for it in transfer.receivers] == [KVPoll.WaitingForInput]
        let_go(prefill, n)
        wait_for(lambda n=n: len(handles(incoming)) == min(n + 3, len(SOURCE)))
    transfer.end(KVPoll.Success)
    check_pages(prefill, decode, before, SOURCE, TARGET)


def test_chunks_that_wait_go_with_their_request(two_at_a_time):
    prefill, decode = two_at_a_time
    before = copies(decode)
    first, second = (Transfer([prefill], [decode], [n], [n + 9]).begin() for n in (1, 2))
    waiting = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    for transfer in (first, second):
        send_chunks(transfer)
    incoming = send_chunks(waiting)
    assert waiting.receivers[0].poll() == KVPoll.WaitingForInput
    waiting.receivers[0].abort()
    assert waiting.receivers[0].poll() == KVPoll.Failed  # At once: nothing is under way.
    assert "Aborted" in waiting.reasons()[0]
    for n, transfer in enumerate((first, second)):
        let_go(prefill, n)
        wait_status(transfer.receivers + transfer.senders, KVPoll.Success)
        for it in transfer.receivers + transfer.senders:
            it.clear()
    assert not handles(incoming)
    check_pages(prefill, decode, before, [1, 2], [10, 11])


def test_a_fetch_that_has_no_time_left_when_it_has_its_turn_fails():
    late = Fetch(rank=3, deadline=time.monotonic() - 1, start=lambda _: pytest.fail("it began"))
    FetchQueues(1).add("a peer", late)
    assert late.is_over
    assert late.failure.startswith("from prefill rank 3: the time limit was over")


class OutOfMemory:
    """A decode endpoint, or what else is called, that finds no memory the n-th time."""

    def __init__(self, of, name, n):
        self._of, self._name, self._left = of, name, n

    def __getattr__(self, name):
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                raise MemoryError
        return getattr(self._of, name)


def test_a_fetch_that_finds_no_memory_when_it_has_its_turn_ends_its_request_alone(one_at_a_time):
    prefill, decode = one_at_a_time
    decode.manager._fetchers = [OutOfMemory(decode.manager._fetchers[0], "fetch", 2)]
    transfer = Transfer([prefill], [decode], [1, 2], [10, 11]).begin()
    send_chunks(transfer)
    let_go(prefill, 0)
    assert failed(transfer) == "from prefill rank 0: MemoryError"
    prefill.manager._publishers = [prefill.manager._publishers[0].endpoint]
    whole([prefill], [decode], SOURCE, TARGET)


def test_a_turn_that_finds_no_memory_is_taken_again(one_at_a_time, caplog):
    prefill, decode = one_at_a_time
    queues = decode.manager._fetch_queues
    decode.manager._fetch_queues = OutOfMemory(queues, "advance", 1)
    prefill.manager._publishers = [prefill.manager._publishers[0].endpoint]
    whole([prefill], [decode], SOURCE, TARGET, chunks=2)
    assert "what waits for its turn has to wait on: MemoryError" in caplog.text


# ---------------------------------------------------------------- sides that do not fit


def ends_with(prefill, decode):
    """Why a request ends that SGLang's schedulers have just got. It does on both sides."""
    senders = [it.sender(room := next(rooms)) for it in prefill[:1]]
    senders += [it.sender(room) for it in prefill[1:]]
    receiver = decode.begin_receiver(room)
    wait_status([receiver], KVPoll.Failed)
    with pytest.raises(KVTransferError) as error:
        receiver.failure_exception()
    wait_status(senders[:1], KVPoll.Failed)  # SGLang ends it on the others.
    for it in senders:
        with pytest.raises(KVTransferError):
            it.failure_exception()
    return error.value.failure_reason


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"page_size": 8}, "prefill server has page_size=4, but decode server has page_size=8"),
        ({"kv_cache_dtype_str": "fp8_e4m3"}, "kv_cache_dtype=bfloat16, .* kv_cache_dtype=fp8_e4m3"),
    ],
)
def test_a_server_with_other_pages_ends_its_requests_and_nothing_else(make, changes, says):
    """Each of them, with the same reason, however often: SGLang gives up after 15 times, with a
    reason of its own."""
    prefill, decode = make("prefill"), make("decode", **changes)
    for _ in range(17):
        reason = ends_with([prefill], decode)
        assert re.search(says, reason), reason
        assert decode.deployment.address in reason
    assert not decode.manager.failure_records and not decode.manager.request_status
    assert not any(left_of(prefill.manager))


def test_a_server_whose_ranks_do_not_fit_ends_its_requests_and_nothing_else(make):
    (prefill,), decode = make_sides(make, (1, 2), "mla")
    prefill.deployment._server.enable_kv_cache_sharding = True
    assert "requires equal prefill/decode attn TP sizes" in ends_with([prefill], decode[0])


def test_a_server_that_is_started_again_with_the_right_pages_is_used(make):
    prefill, decode = make("prefill"), make("decode")
    server = prefill.deployment._server
    server.page_size, right = 32, server.page_size
    assert "page_size=32" in ends_with([prefill], decode)
    server.page_size = right
    whole([prefill], [decode], SOURCE, TARGET)


def test_all_data_parallel_ranks_of_a_server_hear_that_it_does_not_fit(make, monkeypatch):
    """It is not known yet which of them has the request."""
    prefill, decode = make("prefill"), make("decode", page_size=8)
    server = prefill.deployment._server
    second = make("prefill")  # Registered in the place of the first one.
    with_second = server.prefill_port_table.pop(0)
    prefill.manager.register_to_bootstrap()
    server.prefill_port_table[1] = with_second
    room = next(rooms)
    senders = [it.sender(room) for it in (prefill, second)]
    receiver = decode.begin_receiver(room)
    wait_status([receiver, *senders], KVPoll.Failed)
    for it in (receiver, *senders):
        with pytest.raises(KVTransferError):
            it.failure_exception()


def test_another_model_is_refused(make):
    prefill = make("prefill", model="/here/Llama-1B")
    there, other = (make("decode", model=it) for it in ("/there/Llama-1B/", "/here/Llama-3B"))
    whole([prefill], [there], SOURCE, TARGET)
    reason = refused([prefill], [other], SOURCE, TARGET)
    assert "Llama-1B" in reason and "Llama-3B" in reason


def test_hierarchical_sparse_attention_is_refused_at_the_start(make, monkeypatch):
    options = SimpleNamespace(enable_hisparse=True)
    monkeypatch.setattr(disaggregation, "get_memory", lambda: options, raising=False)
    for mode in ("prefill", "decode"):
        with pytest.raises(NotImplementedError, match="--enable-hisparse"):
            make(mode)


@contextlib.contextmanager
def memory_of_a_device():
    """The address of what this process has, and cannot read."""
    with mmap.mmap(-1, 1 << 16, prot=0) as memory:
        yield np.frombuffer(memory, np.uint8).ctypes.data


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_metadata_rows_on_a_device_are_refused_at_the_start(make, mode):
    """The first request would end the server with a segmentation fault."""
    rows = make(mode).args.aux_data_ptrs
    says = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
    with memory_of_a_device() as address, pytest.raises(NotImplementedError, match=says):
        make(mode, aux_data_ptrs=[*rows[:-1], address])


BF16, FP16 = {"dtype": torch.bfloat16}, {"dtype": torch.float16}


@pytest.mark.parametrize("kind", ["mha", "mla", "swa"])
def test_values_of_another_dtype_are_refused(make, kind):
    """Of one size, which the two servers' options both call "auto"."""
    prefill, decode = (
        make(mode, kind=kind, pool=pool, kv_cache_dtype_str="auto")
        for mode, pool in (("prefill", BF16), ("decode", FP16))
    )
    before = copies(decode)
    reason = refused([prefill], [decode], SOURCE, TARGET)
    assert " bfloat16" in reason and " float16" in reason
    check_pages(prefill, decode, before, [], [])


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_draft_models_values_of_another_dtype_are_refused(make, kind):
    prefill, decode = (
        make(mode, kind=kind, has_draft=True, draft_pool=pool)
        for mode, pool in (("prefill", BF16), ("decode", FP16))
    )
    reason = refused([prefill], [decode], SOURCE, TARGET)
    assert "bfloat16 draft bfloat16" in reason and "bfloat16 draft float16" in reason


@pytest.mark.parametrize(
    "of",
    [{"pool": {"dtype": torch.int16}}, {"has_draft": True, "draft_pool": {"dtype": torch.int16}}],
)
def test_pools_of_other_values_are_refused_at_the_start(make, of):
    with pytest.raises(NotImplementedError, match="KV of int16 in SGLang, as in MHATokenToKVPool"):
        make("decode", **of)


def test_pools_that_nobody_tells_of_are_refused_at_the_start(make):
    with pytest.raises(NotImplementedError, match="its plug-in is for SGLang 0.5.23"):
        make("decode", kvferry_pools=None)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_draft_model_on_one_side_alone_is_refused(make, kind):
    prefill, decode = make("prefill", kind=kind), make("decode", kind=kind, has_draft=True)
    assert "bfloat16 draft bfloat16" in refused([prefill], [decode], SOURCE, TARGET)


def test_draft_models_of_mla_with_other_numbers_of_ranks(make):
    """Every rank has all of it."""
    prefill, decode = make_sides(make, (2, 1), "mla", has_draft=True)
    for rank in prefill + decode:
        rank.fill(seed=1)
    before = copies(decode[0])
    whole(prefill, decode, SOURCE, TARGET)
    check_pages(prefill[0], decode[0], before, SOURCE, TARGET)


def test_draft_models_of_mha_with_other_numbers_of_ranks_fail(make):
    """Nobody knows how the draft model's heads lie."""
    transfer = Transfer(*make_sides(make, (2, 1), has_draft=True), SOURCE, TARGET).ask()
    assert "between servers of one tensor-parallel size" in failed(transfer)


def test_other_metadata_rows_are_refused(make):
    prefill, decode = make("prefill", hidden=16), make("decode", hidden=32)
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    transfer.send(0, len(SOURCE))
    wait_status(transfer.receivers, KVPoll.Failed)
    wait_status(transfer.senders, KVPoll.Failed)
    assert "the same options of SGLang" in transfer.reasons()[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"state_types": [StateType.SWA_RING, StateType.SWA]}, "not this model's swa_ring"),
        ({"state_types": [StateType.SWA, StateType.SWA]}, "not this model's swa, swa"),
        ({"num_draft_entries": 3}, "and 3 of a draft model"),
        ({"num_draft_entries": 2, "kv_item_lens": [256] * 4 + [512, 512]}, "a draft model's too"),
        ({"kv_item_lens": [256, 256, 128] * 2}, "needs the same in every layer"),
        ({"total_kv_head_num": 3}, "needs the same in every layer"),
        ({"kv_item_lens": [256] * 5, "kv_data_lens": [256] * 5}, "as many of each"),
        ({"kv_cache_dtype_str": "fp4_mx_block16"}, "--kv-cache-dtype fp4_mx_block16"),
        ({"kv_cache_dtype_str": "nvfp4"}, "--kv-cache-dtype nvfp4"),
        ({"kv_cache_dtype_str": "of a later release"}, "--kv-cache-dtype of a later release"),
    ],
)
def test_what_is_not_served_is_refused_at_the_start(make, changes, says):
    if "state_types" in changes:
        changes = changes | {"state_item_lens": [[8], [8]]}
    with pytest.raises(NotImplementedError, match=says):
        make("decode", **changes)


# ---------------------------------------------------------------- messages of strangers

CHUNK = Chunk(room=1, rank=0, first=0, pages=1, ticket="", is_last=False)


def test_messages_are_read_back():
    request = Request(1 << 63, "10.0.0.1", 80, rank=1, readers=2, prefix=16, is_dummy=False)
    with_states = dataclasses.replace(CHUNK, states=["a ticket", ""])
    for message in (CHUNK, with_states, request):
        assert parse(message.frames(b"a", b"")) == (message, [b"a", b""])


def test_a_chunk_of_a_release_that_knows_no_states():
    tag, header = CHUNK.frames()
    assert b', "states": []' in header
    assert parse([tag, header.replace(b', "states": []', b"")]) == (CHUNK, [])


@pytest.mark.parametrize(
    "frames",
    [
        [b"KVFERRY"],
        [b"OTHER", b"{}"],
        [b"KVFERRY", b"[]"],
        [b"KVFERRY", b"{"],
        [b"KVFERRY", b'{"v": 2, "t": "chunk"}'],
        [b"KVFERRY", b'{"v": 1, "t": "other"}'],
        [b"KVFERRY", b'{"v": 1, "t": "chunk"}'],
        [b"KVFERRY", b" " * 5000],
        CHUNK.frames()[:1] + [CHUNK.frames()[1].replace(b'"first": 0', b'"first": -1')],
        CHUNK.frames()[:1] + [CHUNK.frames()[1].replace(b'"first": 0', b'"first": true')],
        CHUNK.frames()[:1] + [CHUNK.frames()[1].replace(b'"first": 0', b'"first": 9999999999')],
        CHUNK.frames()[:1] + [CHUNK.frames()[1].replace(b'"ticket": ""', b'"ticket": 1')],
        CHUNK.frames()[:1] + [CHUNK.frames()[1].replace(b'"states": []', b'"states": [1]')],
        CHUNK.frames()[:1] + [CHUNK.frames()[1].replace(b'"first": 0, ', b"")],
    ],
)
def test_messages_that_are_wrong_are_dropped(frames, pair):
    with pytest.raises(ValueError):
        parse(frames)
    context = zmq.Context()
    for rank in pair:
        with context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 5000)
            socket.connect(f"tcp://127.0.0.1:{rank.manager.rank_port}")
            for message in (frames, [b"ABORT"], [b"ABORT", b"x"], [b""], [b"KVFERRY_STATUS", b"1"]):
                socket.send_multipart(message)
    context.term()
    whole(pair[:1], pair[1:], [1], [2])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rank": 1}, "only ranks [0] were asked"),
        ({"first": 1}, "pages [1, 3) of 2"),
        ({"pages": 3}, "pages [0, 3) of 2"),
        ({"pages": 1, "is_last": True}, "1 pages where 2 were expected"),
        ({"ticket": "kvferry1|nonsense"}, "ticket"),
        ({"ticket": "kvferry1|tcp://10.1.2.3:80|1|1|2|0"}, "allowed_hosts"),
        ({"is_last": True}, "metadata rows of [] bytes"),
        ({"ticket": "kvferry1|tcp://127.0.0.1:1|1|1|3|0"}, "3 pages or rows where 2 were"),
    ],
)
def test_a_chunk_that_was_not_asked_for_fails_the_request(pair, wrong, says):
    prefill, decode = pair
    transfer = Transfer([prefill], [decode], [1, 2], [3, 4]).begin()
    fields = {"room": transfer.room, "pages": 2, "ticket": "kvferry1|tcp://127.0.0.1:1|1|1|2|0"}
    message = Chunk(**CHUNK.__dict__ | fields | wrong)
    decode.manager._on_decode_message(message.frames())
    wait_status(transfer.receivers, KVPoll.Failed)
    wait_status(transfer.senders, KVPoll.Failed)  # It has been told.
    assert says in transfer.reasons()[0]


@pytest.mark.parametrize("is_early", [False, True])
def test_rows_behind_a_chunk_that_is_not_the_last_one_fail_the_request(make, monkeypatch, is_early):
    """They would be kept until the pages may be written, of any number and size."""
    device = SlowDevice(monkeypatch) if is_early else None
    prefill, decode = make("prefill"), make("decode")
    transfer = Transfer([prefill], [decode], [1, 2], [3, 4]).begin()
    message = dataclasses.replace(CHUNK, room=transfer.room, pages=0)
    decode.manager._on_decode_message(message.frames(b"x" * 1000))
    assert not decode.manager._incoming[transfer.room].early
    wait_status(transfer.receivers, KVPoll.Failed)
    wait_status(transfer.senders, KVPoll.Failed)
    assert "rows of [1000] bytes, here a chunk before the last one has []" in transfer.reasons()[0]
    if device:
        device.let_go()


# ---------------------------------------------------------------- a network that fails


def test_messages_arrive_again_when_the_network_is_back(make):
    manager = make("prefill").manager
    with zmq.Context() as context, context.socket(zmq.PULL) as first:
        endpoint = f"tcp://127.0.0.1:{first.bind_to_random_port('tcp://127.0.0.1')}"
        manager._send_multipart_locked(endpoint, [b"before"])
        assert first.recv_multipart() == [b"before"]
        first.close(0)
        for _ in range(2):  # SGLang finds out at the first one, and connects anew for the second.
            manager._send_multipart_locked(endpoint, [b"lost, or late"])
            time.sleep(0.3)
        with context.socket(zmq.PULL) as again:
            again.RCVTIMEO = 10000
            again.bind(endpoint)
            manager._send_multipart_locked(endpoint, [b"after"])
            while again.recv_multipart() != [b"after"]:
                pass


MOST_MESSAGES = 1000  # That ZeroMQ keeps for a rank which is not there yet.


def fill_queue(manager):
    """The port of a decode rank for which no more messages are kept."""
    port = free_port()
    for _ in range(MOST_MESSAGES):
        manager._send_multipart_locked(f"tcp://127.0.0.1:{port}", [b"old"])
    return port


def ask_in_vain(manager, room, port):
    """A decode rank that does not read has asked for that request."""
    asks = Request(room, "127.0.0.1", port, rank=0, readers=1, prefix=0, is_dummy=False)
    manager._on_prefill_message(asks.frames())


def test_a_rank_gets_what_was_sent_before_it_was_there(make):
    manager = make("prefill").manager
    port = fill_queue(manager)
    with zmq.Context() as context, context.socket(zmq.PULL) as rank:
        rank.RCVTIMEO = 10000
        rank.bind(f"tcp://127.0.0.1:{port}")
        assert [rank.recv_multipart() for _ in range(MOST_MESSAGES)] == [[b"old"]] * MOST_MESSAGES


def test_a_rank_at_the_address_of_one_that_did_not_read_gets_its_own_messages(make):
    manager = make("prefill").manager
    endpoint = f"tcp://127.0.0.1:{fill_queue(manager)}"
    with pytest.raises(ConnectionError, match="does not read its messages"):
        manager._send_multipart_locked(endpoint, [b"one too many"])
    manager._send_multipart_locked(endpoint, [b"new"])
    with zmq.Context() as context, context.socket(zmq.PULL) as rank:
        rank.RCVTIMEO = 10000
        rank.bind(endpoint)
        assert rank.recv_multipart() == [b"new"]


def test_sockets_to_ranks_that_have_gone_are_closed(monkeypatch):
    clock = Clock(monkeypatch, pd_sockets)
    with zmq.Context() as context:
        ranks = [context.socket(zmq.PULL) for _ in range(3)]
        gone, used, new = (
            f"tcp://127.0.0.1:{it.bind_to_random_port('tcp://127.0.0.1')}" for it in ranks
        )
        sockets = pd_sockets.Sockets(context)
        sockets.send(gone, [b"1"])
        of_gone = sockets._sockets[gone]
        for _ in range(2):
            sockets.send(used, [b"1"])
            clock.now += 400
        sockets.send(new, [b"1"])
        assert of_gone.closed and set(sockets._sockets) == set(sockets._used) == {used, new}
        sockets.send(gone, [b"again"])  # A rank that was quiet for long, after all.
        while ranks[0].recv_multipart() != [b"again"]:
            pass
        for it in (*ranks, *sockets._sockets.values()):
            it.close(0)


def test_requests_of_ranks_that_do_not_read_are_given_up_without_waiting(make):
    """On the scheduler's thread, which has those of all other ranks too."""
    prefill = make("prefill")
    senders = [prefill.sender(next(rooms)) for _ in range(8)]
    for sender in senders:
        ask_in_vain(prefill.manager, sender.bootstrap_room, fill_queue(prefill.manager))
    begin = time.monotonic()
    for sender in senders:
        sender.abort()
    assert time.monotonic() - begin < 2
    assert not any(left_of(prefill.manager))


def test_a_chunk_for_a_rank_that_does_not_read_ends_its_request_and_holds_up_no_other(pair):
    prefill, decode = pair
    others = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    senders = [prefill.sender(next(rooms)) for _ in range(8)]
    for sender in senders:
        ask_in_vain(prefill.manager, sender.bootstrap_room, fill_queue(prefill.manager))
        sender.init(1, 2)
    begin = time.monotonic()
    for sender in senders:
        sender.send(np.array([50], np.int32))
    others.send(0, len(SOURCE))
    others.end(KVPoll.Success)
    wait_status(senders, KVPoll.Failed)
    assert time.monotonic() - begin < 2
    for sender in senders:
        with pytest.raises(KVTransferError, match="does not read its messages"):
            sender.failure_exception()
    assert not any(left_of(prefill.manager))


def test_a_prefill_rank_that_does_not_read_does_not_hold_up_a_decode_rank():
    socket, _ = KVReceiver._connect(f"tcp://127.0.0.1:{free_port()}")
    begin = time.monotonic()
    with pytest.raises(zmq.Again):
        for _ in range(MOST_MESSAGES + 1):
            socket.send_multipart([b"x"])
    assert time.monotonic() - begin < 0.9


# ---------------------------------------------------------------- in SGLang's server


def test_sglang_knows_the_backend():
    """By its own plugins, as it is installed."""
    load_plugins()
    backend = sglang_utils.TransferBackend("kvferry")
    assert backend is sglang_utils.TransferBackend.KVFERRY
    assert pickle.loads(pickle.dumps(backend)) is backend
    assert list(sglang_utils.TransferBackend)[-1] is backend
    plugin.register()  # Once more: no harm.
    assert choices.DISAGG_TRANSFER_BACKEND_CHOICES.count("kvferry") == 1
    kinds = sglang_utils.KVClassType
    get = sglang_utils.get_kv_class
    assert get(backend, kinds.KVARGS) is KVArgs
    assert get(backend, kinds.MANAGER) is disaggregation.KVManager
    assert get(backend, kinds.SENDER) is disaggregation.KVSender
    assert get(backend, kinds.RECEIVER) is disaggregation.KVReceiver
    assert get(backend, kinds.BOOTSTRAP_SERVER) is disaggregation.KVBootstrapServer
    assert get(sglang_utils.TransferBackend.FAKE, kinds.SENDER).__name__ == "FakeKVSender"


# ---------------------------------------------------------------- a server that dies


def test_the_prefill_server_dies(monkeypatch):
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2")
    port = free_port()
    folder = Path(__file__).parent
    child = subprocess.Popen(
        [sys.executable, str(folder / "sglang_pd.py"), str(port)], stdout=subprocess.PIPE
    )
    deployment = Deployment(port, has_server=False)
    decode = RankOf(deployment, "decode")
    try:
        assert child.stdout.readline() == b"ready\n"
        receiver = decode.receiver(CHILD_ROOM)
        receiver.send_metadata(np.arange(1, 9, dtype=np.int32), TARGET_ROW)
        # Half of the request has come, and no more of it will.
        wait_for(lambda: (decode.pages()[0][1:5] == 7).all())
        assert receiver.poll() == KVPoll.WaitingForInput
        child.kill()
        wait_status([receiver], KVPoll.Failed)
        with pytest.raises(KVTransferError):
            receiver.failure_exception()
    finally:
        child.kill()
        child.wait()
        decode.close()
        deployment.close()
