"""kvferry between SGLang's prefill and decode servers, with SGLang's own classes on the CPU."""

import contextlib
import itertools
import pickle
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang_pools", reason="SGLang is not installed", exc_type=ImportError)

import kvferry  # noqa: E402
import torch  # noqa: E402
import zmq  # noqa: E402
from kvferry.sglang import disaggregation, plugin  # noqa: E402
from kvferry.sglang.pd_messages import Chunk, Request, parse  # noqa: E402
from servers import free_port  # noqa: E402
from sglang.srt.arg_groups import choices  # noqa: E402
from sglang.srt.disaggregation import utils as sglang_utils  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVArgs, StateType  # noqa: E402
from sglang.srt.disaggregation.common.conn import KVTransferError  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang_pd import (  # noqa: E402
    CHILD_ROOM,
    HEADS,
    PAGE,
    PAGES,
    ROWS,
    Deployment,
    KVPoll,
    RankOf,
    wait_status,
)
from waiting import wait_for  # noqa: E402

ROW, TARGET_ROW = 3, 5  # Of the metadata, on the prefill and the decode side.
_rooms = itertools.count(1 << 60)


@pytest.fixture
def deployment():
    with contextlib.closing(Deployment()) as it:
        yield it


@pytest.fixture
def make(deployment):
    """RankOf(...) that are closed at the end."""
    ranks = []

    def made(mode, *args, **kwargs):
        ranks.append(RankOf(deployment, mode, *args, **kwargs))
        return ranks[-1]

    yield made
    for rank in ranks:
        rank.close()


@pytest.fixture
def pair(make):
    prefill, decode = make("prefill"), make("decode")
    prefill.fill(seed=1)
    decode.fill(seed=2)
    return prefill, decode


class Transfer:
    """One request through the schedulers of both servers: pages `source` to pages `target`."""

    def __init__(self, prefill, decode, source, target, prefix=0):
        """Lists of ranks, and of pages."""
        self.room, self.source, self.target = next(_rooms), source, target
        self.prefill, self.decode, self.prefix = prefill, decode, prefix
        self.senders = [it.sender(self.room) for it in prefill]
        self.receivers = [it.receiver(self.room) for it in decode]

    def begin(self):
        for receiver in self.receivers:
            receiver.send_metadata(
                np.array(self.target, np.int32), TARGET_ROW, None, decode_prefix_len=self.prefix
            )
        wait_status(self.senders, KVPoll.WaitingForInput)
        for sender, rank in zip(self.senders, self.prefill, strict=True):
            assert sender.pop_decode_prefix_len() == self.prefix
            rank.write_row(ROW, self.room, token=self.room % 1000)
            sender.init(len(self.source), ROW)
        return self

    def send(self, first, end):
        for sender in self.senders:
            sender.send(np.array(self.source[first:end], np.int32))

    def end(self, status):
        wait_status(self.receivers, status)
        wait_status(self.senders, status)
        if status == KVPoll.Success:
            for rank in self.decode:
                row = rank.row(TARGET_ROW)
                assert (row.token, row.room) == (self.room % 1000, self.room)
        for it in self.receivers + self.senders:
            it.clear()

    def reasons(self):
        """Why it has failed, of receivers and senders."""
        reasons = []
        for it in self.receivers + self.senders:
            with pytest.raises(KVTransferError) as error:
                it.failure_exception()
            reasons.append(error.value.failure_reason)
        return reasons


def whole(prefill, decode, source, target, chunks=1, prefix=0):
    transfer = Transfer(prefill, decode, source, target, prefix).begin()
    ends = [len(source) * n // chunks for n in range(chunks + 1)]
    for first, end in itertools.pairwise(ends):
        transfer.send(first, end)
    transfer.end(KVPoll.Success)


def copies(rank):
    return [buffer.clone() for buffer in rank.pages()]


def check_pages(prefill, decode, before, source, target):
    """Of two ranks with the same heads: these pages have come, and no other has changed."""
    untouched = [page for page in range(PAGES) if page not in target]
    for sent, got, old in zip(prefill.pages(), decode.pages(), before, strict=True):
        assert torch.equal(got[target], sent[source])
        assert torch.equal(got[untouched], old[untouched])


SOURCE, TARGET = [9, 3, 40, 41, 42, 7], [20, 21, 5, 60, 6, 1]


@pytest.mark.parametrize("is_mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_pages_and_the_first_token_arrive(make, is_mla, chunks):
    prefill, decode = (make(mode, is_mla=is_mla) for mode in ("prefill", "decode"))
    prefill.fill(seed=1)
    decode.fill(seed=2)
    before = copies(decode)
    whole([prefill], [decode], SOURCE, TARGET, chunks, prefix=8 * PAGE)
    check_pages(prefill, decode, before, SOURCE, TARGET)
    assert prefill.manager._publisher.metrics()["leases_live"] == 0


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


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 4), (4, 2), (8, 2), (2, 8), (8, 1)])
def test_other_numbers_of_ranks(make, sizes):
    """Every decode rank gets its heads, whichever ranks had them."""
    prefill, decode = (
        [make(mode, rank, size) for rank in range(size)]
        for mode, size in zip(("prefill", "decode"), sizes, strict=True)
    )
    kv = torch.randn(len(prefill[0].pages()), PAGES, PAGE, HEADS, 8).to(torch.bfloat16)

    def of_rank(rank, size):
        count = max(1, HEADS // size)
        first = rank * HEADS // size
        return kv[:, :, :, first : first + count]

    for rank, it in enumerate(prefill):
        for buffer, values in zip(it.pages(), of_rank(rank, sizes[0]), strict=True):
            buffer.copy_(values)
    whole(prefill, decode, SOURCE, TARGET, chunks=2)
    for rank, it in enumerate(decode):
        for buffer, values in zip(it.pages(), of_rank(rank, sizes[1]), strict=True):
            assert torch.equal(buffer[TARGET], values[SOURCE])


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 2)])
def test_other_numbers_of_ranks_with_mla(make, sizes):
    prefill, decode = (
        [make(mode, rank, size, is_mla=True) for rank in range(size)]
        for mode, size in zip(("prefill", "decode"), sizes, strict=True)
    )
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
    assert prefill.manager._publisher.metrics()["leases_live"] == 0
    prefill.fill(seed=3)  # What the device was still at.
    before = copies(decode)
    hold.let_go()
    transfer.end(KVPoll.Success)
    check_pages(prefill, decode, before, SOURCE, TARGET)


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
    assert prefill.manager._publisher.metrics()["leases_live"] == 0


def test_a_chunk_is_not_published_after_the_abort(pair):
    prefill, decode = pair
    transfer, hold = held(prefill, decode)
    transfer.senders[0].abort()
    transfer.senders[0].clear()  # From here on the pages are another request's.
    hold.let_go()
    wait_status(transfer.receivers, KVPoll.Failed)
    transfer.receivers[0].clear()
    whole([prefill], [decode], [1], [2])
    assert prefill.manager._publisher.metrics()["leases_live"] == 0


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
    waiting = prefill.manager._publisher = WithoutLayers(prefill.manager._publisher)
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    transfer.send(0, len(SOURCE))
    incoming = decode.manager._incoming[transfer.room]
    wait_for(lambda: bool(incoming.handles()))
    (handle,) = incoming.handles()
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
    prefill.manager._publisher = waiting.endpoint
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
    assert prefill.manager._publisher.metrics()["leases_live"] == 0
    assert not prefill.manager._outgoing and not decode.manager._incoming


@pytest.mark.parametrize("sent", [0, 3])
def test_the_prefill_side_aborts(pair, sent):
    prefill, decode = pair
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    transfer.send(0, sent)
    transfer.senders[0].abort()
    assert prefill.manager._publisher.metrics()["leases_live"] == 0  # Its pages are free now.
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
    assert prefill.manager._publisher.metrics()["leases_live"] == 0


def test_leases_that_nobody_fetches_end_the_request(make, monkeypatch):
    monkeypatch.setenv("KVFERRY_LEASE_MS", "300")
    prefill, decode = make("prefill"), make("decode")
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    monkeypatch.setattr(decode.manager, "_take", lambda *_: None)
    transfer.send(0, 3)
    wait_status(transfer.senders, KVPoll.Failed)
    wait_status(transfer.receivers, KVPoll.Failed)
    assert set(transfer.reasons()) == {"the decode side did not fetch in time"}


# ---------------------------------------------------------------- sides that do not fit


def test_another_dtype_is_refused(make):
    prefill, decode = make("prefill"), make("decode")
    decode.close()
    decode = make("decode", kv_cache_dtype_str="fp8_e4m3")
    decode.manager.kv_cache_dtype_str = "bfloat16"  # SGLang's own look at it comes first.
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    transfer.send(0, len(SOURCE))
    wait_status(transfer.receivers, KVPoll.Failed)
    wait_status(transfer.senders, KVPoll.Failed)
    assert "fp8_e4m3" in transfer.reasons()[0]


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
        ({"state_types": [StateType.MAMBA, StateType.SWA]}, "mamba, swa"),
        ({"num_draft_entries": 2}, "draft model"),
        ({"kv_item_lens": [256, 256, 128] * 2}, "needs the same in every layer"),
        ({"total_kv_head_num": 3}, "needs the same in every layer"),
        ({"kv_item_lens": [256] * 5, "kv_data_lens": [256] * 5}, "as many of each"),
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
    for message in (CHUNK, request):
        assert parse(message.frames(b"a", b"")) == (message, [b"a", b""])


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


# ---------------------------------------------------------------- at random


class Scheduler:
    """Free pages and rows of a rank. What is in free pages must stay as it was left."""

    def __init__(self, rank):
        self.buffers = rank.pages()
        self.free = list(range(1, PAGES))
        self.rows = list(range(1, ROWS))
        self.left = {}

    def contents(self, pages):
        return [buffer[pages].clone() for buffer in self.buffers]

    def take(self, count, rng):
        rng.shuffle(self.free)
        pages = [self.free.pop() for _ in range(count)]
        for page in pages:
            for now, then in zip(self.contents([page]), self.left.pop(page, []), strict=False):
                assert torch.equal(now, then), "a page was written after it was given back"
        return pages

    def give(self, pages):
        for page in pages:
            self.left[page] = self.contents([page])
        self.free += pages


class RandomRequest:
    def __init__(self, prefill, decode, source, target, rng):
        count = rng.randint(0, min(12, len(source.free), len(target.free)))
        self.rng, self.source, self.target = rng, source, target
        self.source_pages, self.target_pages = source.take(count, rng), target.take(count, rng)
        self.source_row, self.target_row = source.rows.pop(), target.rows.pop()
        for buffer in source.buffers:
            buffer[self.source_pages] = torch.randn(buffer[self.source_pages].shape).bfloat16()
        self.expected = source.contents(self.source_pages)
        self.room = next(_rooms)
        prefill.write_row(self.source_row, self.room, self.room % 997)
        self.decode = decode
        self.sender, self.receiver = prefill.sender(self.room), decode.receiver(self.room)
        self.has_asked = self.is_begun = False
        self.sent = 0
        self.outcomes = {}

    def step(self):
        """Whether it is over on both sides."""
        if not self.has_asked and self.rng.random() < 0.5:
            self.has_asked = True
            self.receiver.send_metadata(np.array(self.target_pages, np.int32), self.target_row)
        for side in (self.sender, self.receiver):
            if side not in self.outcomes and self.rng.random() < 0.01:
                side.abort()
        if self.receiver not in self.outcomes:
            self.look_at_receiver()
        if self.sender not in self.outcomes:
            self.look_at_sender()
        return len(self.outcomes) == 2

    def look_at_sender(self):
        status = self.sender.poll()
        if status == KVPoll.WaitingForInput and not self.is_begun:
            self.is_begun = True
            self.sender.init(len(self.source_pages), self.source_row)
            if not self.source_pages:
                self.sender.send(np.array([], np.int32))
        elif status == KVPoll.WaitingForInput and self.sent < len(self.source_pages):
            end = self.rng.randint(self.sent + 1, len(self.source_pages))
            self.sender.send(np.array(self.source_pages[self.sent : end], np.int32))
            self.sent = end
        elif status in (KVPoll.Success, KVPoll.Failed):
            self.outcomes[self.sender] = status
            self.finish(self.sender, status)
            for buffer in self.source.buffers:
                buffer[self.source_pages] = 0  # Whoever still reads it reads something else.
            self.source.give(self.source_pages)
            self.source.rows.append(self.source_row)

    def look_at_receiver(self):
        status = self.receiver.poll()
        if status == KVPoll.Success:
            for got, sent in zip(
                self.target.contents(self.target_pages), self.expected, strict=True
            ):
                assert torch.equal(got, sent)
            row = self.decode.row(self.target_row)
            assert (row.room, row.token) == (self.room, self.room % 997)
        if status in (KVPoll.Success, KVPoll.Failed):
            self.outcomes[self.receiver] = status
            self.finish(self.receiver, status)
            self.target.give(self.target_pages)
            self.target.rows.append(self.target_row)

    def finish(self, side, status):
        if status == KVPoll.Success:
            side.clear()
            return
        with pytest.raises(KVTransferError):
            side.failure_exception()


@pytest.mark.parametrize("seed", [1, 2])
def test_requests_at_random(pair, seed):
    """Aborts on either side at any moment: what arrives is right, and nothing arrives late."""
    prefill, decode = pair
    torch.manual_seed(seed)
    rng = random.Random(seed)
    source, target = Scheduler(prefill), Scheduler(decode)
    running, outcomes = [], []
    deadline = time.monotonic() + 60
    while len(outcomes) < 300:
        assert time.monotonic() < deadline, f"{len(outcomes)} requests, {len(running)} running"
        if len(running) < ROWS - 1 and rng.random() < 0.5:
            running.append(RandomRequest(prefill, decode, source, target, rng))
        for request in list(running):
            if request.step():
                running.remove(request)
                outcomes.append(sorted(request.outcomes.values()))
    assert outcomes.count([KVPoll.Success, KVPoll.Success]) > 50
    assert outcomes.count([KVPoll.Failed, KVPoll.Failed]) > 20
    target.take(len(target.free), rng)  # Looks at what is in them.


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
