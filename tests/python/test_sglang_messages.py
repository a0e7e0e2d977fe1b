"""What ranks of SGLang's servers tell each other: what strangers send, and a network that fails."""

import contextlib
import dataclasses
import socket
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang_pools", reason="SGLang is not installed", exc_type=ImportError)

import zmq  # noqa: E402
from kvferry import seldom_log  # noqa: E402
from kvferry.sglang import pd_requests, pd_sockets  # noqa: E402
from kvferry.sglang.pd_messages import Chunk, Peer, Request, parse  # noqa: E402
from servers import free_port  # noqa: E402
from sglang.srt.disaggregation.common.conn import KVTransferError  # noqa: E402
from sglang_faults import (  # noqa: E402
    Clock,
    SlowDevice,
    left_of,
)
from sglang_pd import (  # noqa: E402
    SOURCE,
    TARGET,
    KVPoll,
    KVReceiver,
    Transfer,
    rooms,
    wait_status,
    whole,
)
from waiting import wait_for  # noqa: E402

CHUNK = Chunk(room=1, rank=0, first=0, pages=1, ticket="", is_last=False)
PEER = Peer("10.0.0.1", 80, aux_bytes=[4])


def changed(message, old, new):
    """Frames of a message in whose header that stands instead."""
    tag, header = message.frames()
    assert old in header
    return [tag, header.replace(old, new)]


def test_messages_are_read_back():
    request = Request(1 << 63, "10.0.0.1", 80, rank=1, readers=2, prefix=16, is_dummy=False)
    with_states = dataclasses.replace(CHUNK, states=["a ticket", ""])
    for message in (CHUNK, with_states, request, PEER):
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
        changed(CHUNK, b'"v": 1', b'"v": 2'),
        [b"KVFERRY", b'{"v": 1, "t": "other"}'],
        [b"KVFERRY", b'{"v": 1, "t": "chunk"}'],
        [*CHUNK.frames()[:1], CHUNK.frames()[1] + b" " * 4096],
        changed(CHUNK, b'"first": 0', b'"first": -1'),
        changed(CHUNK, b'"first": 0', b'"first": true'),
        changed(CHUNK, b'"first": 0', b'"first": 9999999999'),
        changed(CHUNK, b'"ticket": ""', b'"ticket": 1'),
        changed(CHUNK, b'"is_last": false', b'"is_last": 0'),
        changed(CHUNK, b'"states": []', b'"states": [1]'),
        changed(CHUNK, b'"first": 0, ', b""),
        changed(PEER, b"[4]", b'["4"]'),
        changed(PEER, b"[4]", b"4"),
        changed(PEER, b"10.0.0.1", b"1" * 256),
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
            for message in (
                frames, [b"ABORT"], [b"ABORT", b"x"], [b"ABORT", b"9" * 30], [b"ABORT", b"-1"],
                [b""], [b"KVFERRY_STATUS", b"1"],
            ):  # fmt: skip
                socket.send_multipart(message)
    context.term()
    whole(pair[:1], pair[1:], [1], [2])
    assert not list(pair[0].manager._aborted_early._items)


def test_messages_that_are_wrong_are_said_once_in_a_while(make, monkeypatch, caplog):
    """Whoever reaches SGLang's port can send as many as they like."""
    clock = Clock(monkeypatch, [seldom_log])
    manager = make("prefill").manager
    peer = Peer("10.0.0.1", 80, aux_bytes=[4]).frames()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"tcp://127.0.0.1:{manager.rank_port}")

        def send(*messages):
            """They are read in this order."""
            asks = Request(next(rooms), "127.0.0.1", 1, 0, readers=1, prefix=0, is_dummy=False)
            for frames in (*messages, asks.frames()):
                socket.send_multipart(frames)
            wait_for(lambda: asks.room in manager.transfer_infos)

        send([b"OTHER"], peer, [b"KVFERRY"])
        clock.now += 31
        send([b"OTHER"])
    said = [it.getMessage() for it in caplog.records if it.name.startswith("kvferry")]
    assert len(said) == 2
    assert "(0 more since the last)" in said[0] and "(2 more since the last)" in said[1]


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


def test_a_second_last_chunk_fails_the_request(pair):
    """Whose metadata would take the place of the first one's."""
    prefill, decode = pair
    transfer = Transfer([prefill], [decode], [], []).begin()
    last = dataclasses.replace(CHUNK, room=transfer.room, pages=0, is_last=True)
    rows = [bytes(size) for size in decode.args.aux_item_lens]
    for _ in range(2):
        decode.manager._on_decode_message(last.frames(*rows))
    wait_status(transfer.receivers, KVPoll.Failed)
    wait_status(transfer.senders, KVPoll.Failed)
    assert "pages [0, 0) of 0, behind 0" in transfer.reasons()[0]


def test_a_chunk_of_a_request_that_is_about_to_end_begins_no_fetch(pair):
    """Its pages may be another one's as soon as what was under way has ended."""
    prefill, decode = pair
    transfer = Transfer([prefill], [decode], [1], [3]).begin()
    incoming = decode.manager._incoming[transfer.room]
    assert decode.manager.cancel_incoming(transfer.room)
    ticket = "kvferry1|tcp://127.0.0.1:1|1|1|1|0"
    chunk = dataclasses.replace(CHUNK, room=transfer.room, ticket=ticket)
    decode.manager._on_decode_message(chunk.frames())
    assert not incoming.fetches()
    transfer.receivers[0].abort()
    wait_status(transfer.senders, KVPoll.Failed)
    for it in transfer.receivers + transfer.senders:
        it.clear()


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


@pytest.fixture
def silent_port():
    """Ports where nobody listens, another one with each call, and which this process does not take
    for an attempt to connect either."""
    with contextlib.ExitStack() as held:

        def hold():
            nobody = held.enter_context(socket.socket())
            nobody.bind(("127.0.0.1", 0))
            return nobody.getsockname()[1]

        yield hold


MOST_MESSAGES = 1000  # That ZeroMQ keeps for a rank which is not there yet.


def fill_queue(manager, port):
    """For a decode rank of which no more messages are kept. Returns the port."""
    for _ in range(MOST_MESSAGES):
        manager._send_multipart_locked(f"tcp://127.0.0.1:{port}", [b"old"])
    return port


def ask_in_vain(manager, room, port):
    """A decode rank that does not read has asked for that request."""
    asks = Request(room, "127.0.0.1", port, rank=0, readers=1, prefix=0, is_dummy=False)
    manager._on_prefill_message(asks.frames())


def test_a_prefill_rank_notes_so_many_requests_that_never_begin(make, monkeypatch, caplog):
    """SGLang's port is anybody's. Those that have begun stay."""
    monkeypatch.setattr(pd_requests, "MAX_RECENT", 10)
    manager = (prefill := make("prefill")).manager
    begun = next(rooms)
    sender = prefill.sender(begun)
    ask_in_vain(manager, begun, 1)
    many = [next(rooms) for _ in range(40)]
    for room in many:
        ask_in_vain(manager, room, 1)
    assert list(manager.transfer_infos) == [begun, *many[-10:]]
    assert set(manager.request_status) == {begun, *many[-10:]}
    assert sum("is forgotten" in record.message for record in caplog.records) == 1
    for rank in range(1, 5):  # More than there are to be.
        asks = Request(begun, "127.0.0.1", 1, rank, readers=1, prefix=0, is_dummy=False)
        manager._on_prefill_message(asks.frames())
    asks = dataclasses.replace(asks, room=next(rooms), readers=0)
    manager._on_prefill_message(asks.frames())
    assert list(manager.transfer_infos[begun]) == [0] and asks.room not in manager.transfer_infos
    sender.abort()


def test_a_rank_gets_what_was_sent_before_it_was_there(make):
    manager = make("prefill").manager
    port = fill_queue(manager, free_port())
    with zmq.Context() as context, context.socket(zmq.PULL) as rank:
        rank.RCVTIMEO = 10000
        rank.bind(f"tcp://127.0.0.1:{port}")
        assert [rank.recv_multipart() for _ in range(MOST_MESSAGES)] == [[b"old"]] * MOST_MESSAGES


def test_a_rank_at_the_address_of_one_that_did_not_read_gets_its_own_messages(make):
    manager = make("prefill").manager
    endpoint = f"tcp://127.0.0.1:{fill_queue(manager, free_port())}"
    with pytest.raises(ConnectionError, match="does not read its messages"):
        manager._send_multipart_locked(endpoint, [b"one too many"])
    manager._send_multipart_locked(endpoint, [b"new"])
    with zmq.Context() as context, context.socket(zmq.PULL) as rank:
        rank.RCVTIMEO = 10000
        rank.bind(endpoint)
        assert rank.recv_multipart() == [b"new"]


def test_a_rank_may_have_an_address_of_ipv6():
    with zmq.Context() as context, context.socket(zmq.PULL) as rank:
        rank.setsockopt(zmq.IPV6, 1)
        rank.RCVTIMEO = 10000
        try:
            port = rank.bind_to_random_port("tcp://[::1]")
        except zmq.ZMQError:
            pytest.skip("there is no IPv6 here")
        sockets = pd_sockets.Sockets(context)
        sockets.send(f"tcp://[::1]:{port}", [b"1"], is_ipv6=True)
        assert rank.recv_multipart() == [b"1"]
        for it in sockets._sockets.values():
            it.close(0)


def test_sockets_to_ranks_that_have_gone_are_closed(monkeypatch):
    clock = Clock(monkeypatch, [pd_sockets])
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


def test_requests_of_ranks_that_do_not_read_are_given_up_without_waiting(make, silent_port):
    """On the scheduler's thread, which has those of all other ranks too."""
    prefill = make("prefill")
    senders = [prefill.sender(next(rooms)) for _ in range(8)]
    for sender in senders:
        port = fill_queue(prefill.manager, silent_port())
        ask_in_vain(prefill.manager, sender.bootstrap_room, port)
    begin = time.monotonic()
    for sender in senders:
        sender.abort()
    assert time.monotonic() - begin < 6  # SGLang's own sockets wait a second for each.
    assert not any(left_of(prefill.manager))


def test_a_chunk_for_a_rank_that_does_not_read_ends_its_request_and_holds_up_no_other(
    pair, silent_port
):
    prefill, decode = pair
    others = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    senders = [prefill.sender(next(rooms)) for _ in range(8)]
    for sender in senders:
        port = fill_queue(prefill.manager, silent_port())
        ask_in_vain(prefill.manager, sender.bootstrap_room, port)
        sender.init(1, 2)
    begin = time.monotonic()
    for sender in senders:
        sender.send(np.array([50], np.int32))
    others.send(0, len(SOURCE))
    others.end(KVPoll.Success)
    wait_status(senders, KVPoll.Failed)
    assert time.monotonic() - begin < 6
    for sender in senders:
        with pytest.raises(KVTransferError, match="does not read its messages"):
            sender.failure_exception()
    assert not any(left_of(prefill.manager))


def test_a_prefill_rank_that_does_not_read_does_not_hold_up_a_decode_rank():
    rank, _ = KVReceiver._connect(f"tcp://127.0.0.1:{free_port()}")
    for _ in range(MOST_MESSAGES):
        rank.send_multipart([b"x"])
    begin = time.monotonic()
    with pytest.raises(zmq.Again):
        rank.send_multipart([b"x"])
    assert time.monotonic() - begin < 0.9
