"""Requests between SGLang's prefill and decode servers that end before their pages have arrived:
aborts, failures and time limits, on either side."""

import contextlib
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang_pools", reason="SGLang is not installed", exc_type=ImportError)

import kvferry  # noqa: E402
from sglang.srt.disaggregation.common.conn import KVTransferError  # noqa: E402
from sglang_faults import (  # noqa: E402
    WithoutLayers,
    handles,
    held,
    left_of,
)
from sglang_pd import (  # noqa: E402
    SOURCE,
    TARGET,
    TARGET_ROW,
    KVPoll,
    Transfer,
    check_pages,
    copies,
    make_sides,
    rooms,
    wait_status,
    whole,
)
from waiting import wait_for  # noqa: E402


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


def test_the_first_end_of_a_request_counts(pair):
    prefill, decode = pair
    fails, arrives = (Transfer([prefill], [decode], [n], [n + 9]).begin() for n in (1, 2))
    for reason in ("first", "second"):
        decode.manager._fail(fails.room, reason)
    wait_status(fails.receivers + fails.senders, KVPoll.Failed)
    assert fails.reasons()[0] == "first"
    arrives.send(0, 1)
    wait_status(arrives.receivers + arrives.senders, KVPoll.Success)
    for manager in (prefill.manager, decode.manager):
        manager._fail(arrives.room, "late")
        assert manager.request_status[arrives.room] == KVPoll.Success
        assert not manager.failure_records
    for it in arrives.receivers + arrives.senders:
        it.clear()


def test_an_abort_of_what_has_failed_does_not_change_why(pair):
    prefill, decode = pair
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    decode.manager._fail(transfer.room, "lost")
    transfer.receivers[0].abort()
    wait_status(transfer.receivers, KVPoll.Failed)
    wait_status(transfer.senders, KVPoll.Failed)
    assert transfer.reasons()[0] == "lost"


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
    wait_for(lambda: transfer.room in prefill.manager.transfer_infos)  # Before anybody polls.
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
    wait_for(lambda: bool(told))  # It has failed before that.
    assert [it["failure_reason"] for it in told] == ["publishing pages: division by zero"]


class Meanwhile:
    """A lock, and what another thread does as soon as it has been let go of and that holds."""

    def __init__(self, lock, holds, do):
        self.lock, self.holds, self.do = lock, holds, do

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()
        if self.holds():
            self.holds = lambda: False
            self.do()


def test_why_a_request_fails_is_told_where_its_scheduler_has_taken_note_of_it_meanwhile(
    pair, monkeypatch
):
    prefill, decode = pair
    manager = prefill.manager
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()

    def take_note():
        with pytest.raises(KVTransferError, match="division by zero"):
            transfer.senders[0].failure_exception()

    manager._lock = Meanwhile(manager._lock, lambda: transfer.room in manager._given_up, take_note)
    monkeypatch.setattr(manager, "_lease", lambda *_: 1 / 0)
    transfer.send(0, len(SOURCE))
    wait_status(transfer.receivers, KVPoll.Failed)
    with pytest.raises(KVTransferError, match="division by zero"):
        transfer.receivers[0].failure_exception()
    assert not any(left_of(manager))


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


def test_the_decode_side_aborts_as_the_prefill_side_begins(pair, monkeypatch):
    """What SGLang has just noted of the request is gone then."""
    manager = pair[0].manager
    begun = manager.begun

    def aborted_meanwhile(room):
        manager._aborted_early.add(room)
        manager._forget(room)
        begun(room)

    monkeypatch.setattr(manager, "begun", aborted_meanwhile)
    sender = pair[0].sender(next(rooms))
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="Aborted by the decode side"):
        sender.failure_exception()
    assert not any(left_of(manager))


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


@pytest.mark.parametrize("has_ended", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2)])
def test_the_decode_side_aborts_what_the_prefill_side_has_not_begun_to_compute_again(
    make, sizes, has_ended
):
    """Its sender would wait for its time limit, and the one before has not been aborted."""
    (prefill,), decode = make_sides(make, sizes)
    transfer = Transfer([prefill], decode, SOURCE, TARGET).begin()
    transfer.send(0, len(SOURCE))
    wait_status(transfer.receivers, KVPoll.Success)
    (old,) = transfer.senders
    wait_for(lambda: prefill.manager._publishers[0].metrics()["leases_live"] == 0)
    if has_ended:
        wait_status([old], KVPoll.Success)
        old.clear()
    for it in transfer.receivers:
        it.clear()
    again = [it.receiver(transfer.room) for it in decode]
    for it in again:
        it.send_metadata(np.array(TARGET, np.int32), TARGET_ROW)
    for it in again:
        it.abort()
        it.clear()
    whole([prefill], decode, [1], [2])  # Messages come in order: the aborts have been read.
    assert old.poll() == KVPoll.Success
    old.clear()
    assert not any(left_of(prefill.manager)) and not prefill.manager._asked_again
    sender = prefill.sender(transfer.room)
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match="Aborted by the decode side"):
        sender.failure_exception()
    assert not any(left_of(prefill.manager)) and not prefill.manager._live


@pytest.mark.parametrize("is_over", [False, True])
def test_computing_a_retracted_request_again_fails(pair, is_over):
    """As SGLang's thread says that has asked the prefill server to."""
    prefill, decode = pair
    room = whole([prefill], [decode], [1], [2])
    receiver = decode.receiver(room)
    receiver.send_metadata(np.array(TARGET, np.int32), TARGET_ROW)
    if is_over:
        receiver.abort()
        receiver.clear()
        decode.manager.failure_records.pop(room)  # As failure_exception() does.
    decode.manager._fail_prefill_recompute(receiver, "status=500")
    if not is_over:
        assert receiver.poll() == KVPoll.Failed and receiver.abort_notified
        with pytest.raises(KVTransferError, match="status=500"):
            receiver.failure_exception()
    assert not decode.manager.failure_records


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
