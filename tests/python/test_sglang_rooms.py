"""Bootstrap rooms of SGLang's, by which it knows requests, that several have, one after another
or at once."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang_pools", reason="SGLang is not installed", exc_type=ImportError)

from kvferry.sglang import pd_requests  # noqa: E402
from sglang.srt.disaggregation.common.conn import KVTransferError  # noqa: E402
from sglang_faults import (  # noqa: E402
    handles,
    left_of,
    under_way,
)
from sglang_pd import (  # noqa: E402
    ROW,
    SOURCE,
    TARGET,
    TARGET_ROW,
    KVPoll,
    KVReceiver,
    Transfer,
    check_pages,
    copies,
    make_sides,
    rooms,
    wait_status,
    whole,
)
from waiting import wait_for  # noqa: E402


def test_the_rooms_that_were_used_last_are_remembered(monkeypatch):
    monkeypatch.setattr(pd_requests, "MAX_RECENT", 2)
    recent = pd_requests.Recent()
    assert [recent.add(room) for room in (1, 2, 1, 3)] == [None, None, None, 2]
    assert [room in recent for room in (1, 2, 3)] == [True, False, True]
    assert recent.take(1) and not recent.take(1) and not recent.take(2)


def test_room_0_is_refused(pair):
    """It is how SGLang knows metadata that have not come: it would wait for ever."""
    prefill, decode = pair
    sender, receiver = prefill.sender(0), decode.receiver(0)
    receiver.send_metadata(np.array(TARGET, np.int32), TARGET_ROW)
    wait_status([sender, receiver], KVPoll.Failed)
    with pytest.raises(KVTransferError, match="bootstrap_room 0 is what SGLang has"):
        receiver.failure_exception()
    sender.clear()


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


def test_a_second_request_of_a_room_ends_that_knows_no_prefill_rank_yet(pair):
    """The first one's do not make it ready to ask: SGLang's own classes raise AttributeError then,
    which ends the server."""
    decode = pair[1]
    first = decode.receiver(next(rooms))
    second = KVReceiver(decode.manager, "127.0.0.1:1", first.bootstrap_room)
    assert SAME_ROOM in decode.look_at_unasked(second).finished_reason.message
    assert SAME_ROOM in decode.look_at_unasked(first).finished_reason.message
    assert not decode.manager.failure_records and not decode.manager.request_status


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


def asked_again(prefill, decode):
    """A request whose pages have come, whose sender nobody has looked at since, and receivers that
    have asked for its room once more: SGLang's decode server has retracted it."""
    transfer = Transfer(prefill, decode, SOURCE, TARGET).begin()
    transfer.send(0, len(SOURCE))
    wait_status(transfer.receivers, KVPoll.Success)
    for it in transfer.receivers:
        it.clear()
    publishers = [it.manager._publishers[0] for it in prefill]
    wait_for(lambda: not any(it.metrics()["leases_live"] for it in publishers))
    again = [it.receiver(transfer.room) for it in decode]
    for it in again:
        it.send_metadata(np.array(TARGET, np.int32), TARGET_ROW)
    whole(prefill, decode, [1], [2])  # Messages come in order: what they ask has been read.
    return transfer, again


@pytest.mark.parametrize("first", ["the old sender ends", "the new sender begins"])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2)])
def test_a_request_is_computed_again_though_its_sender_had_not_ended(make, sizes, first):
    """As where the prefill server is paused, or computes a long chunk."""
    prefill, decode = make_sides(make, sizes)
    transfer, again = asked_again(prefill, decode)
    (old,), (rank,) = transfer.senders, prefill
    if first == "the old sender ends":
        assert old.poll() == KVPoll.Success
        old.clear()
    transfer.senders = [rank.sender(transfer.room)]
    transfer.receivers = again
    assert transfer.senders[0].poll() == KVPoll.WaitingForInput
    assert old.poll() == KVPoll.Success
    old.clear()  # The scheduler does, whoever has been first.
    assert not rank.manager._asked_again
    rank.write_row(ROW, transfer.room, token=transfer.room % 1000)
    transfer.senders[0].init(len(SOURCE), ROW)
    transfer.send(0, len(SOURCE))
    transfer.end(KVPoll.Success)
    assert not any(left_of(rank.manager)) and not rank.manager._live


def test_another_ranks_failure_of_what_had_ended_here_leaves_what_is_computed_again_alone(pair):
    prefill, decode = pair
    transfer, (again,) = asked_again([prefill], [decode])
    new = prefill.sender(transfer.room)
    with pytest.raises(KVTransferError):
        transfer.senders[0].failure_exception()
    assert transfer.room not in prefill.manager._given_up
    assert new.poll() == KVPoll.WaitingForInput
    new.abort()
    wait_status([again], KVPoll.Failed)
    again.clear()


def test_a_second_request_of_a_room_that_has_asked_ends_while_the_first_one_is_read(pair):
    """Its pages may not go before they have been fetched."""
    prefill, decode = pair
    transfer, _ = under_way(prefill, decode)
    again = decode.manager._incoming.pop(transfer.room)  # Or it would not ask.
    second = decode.receiver_beside(transfer.receivers[0])
    second.send_metadata(np.array(TARGET, np.int32), TARGET_ROW)
    wait_for(lambda: transfer.room in prefill.manager._asked_again)
    sender = prefill.sender(transfer.room)
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError, match=SAME_ROOM):
        sender.failure_exception()
    assert prefill.manager._publishers[0].metrics()["leases_live"] == 1
    transfer.senders[0].abort()
    wait_status([second], KVPoll.Failed)
    second.clear()
    for handle in handles(again):  # Ends by itself too, and not in the same moment.
        handle.cancel()
        wait_for(lambda handle=handle: handle.done)
