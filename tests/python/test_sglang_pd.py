"""kvferry between SGLang's prefill and decode servers, with SGLang's own classes on the CPU:
requests that arrive. How they end otherwise is in files of their own (test_sglang_*.py)."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang_pools", reason="SGLang is not installed", exc_type=ImportError)

from kvferry.sglang import disaggregation, plugin  # noqa: E402
from kvferry.sglang.pd_messages import Chunk  # noqa: E402
from servers import free_port  # noqa: E402
from sglang.srt.arg_groups import choices  # noqa: E402
from sglang.srt.disaggregation import utils as sglang_utils  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVArgs  # noqa: E402
from sglang.srt.disaggregation.common.conn import KVTransferError  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang_faults import (  # noqa: E402
    SlowDevice,
    held,
    sent_early,
)
from sglang_pd import (  # noqa: E402
    CHILD_ROOM,
    OTHER_SIZES,
    PAGE,
    ROW,
    ROWS,
    SOURCE,
    TARGET,
    TARGET_ROW,
    Deployment,
    KVPoll,
    RankOf,
    Transfer,
    check_pages,
    copies,
    failed,
    make_sides,
    move_heads,
    wait_status,
    whole,
)
from waiting import wait_for  # noqa: E402


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


def test_a_rank_that_wants_no_metadata_gets_none(pair):
    prefill, decode = pair
    transfer = Transfer([prefill], [decode], SOURCE, TARGET)
    transfer.receivers[0].send_metadata(np.array(TARGET, np.int32))
    wait_status(transfer.senders, KVPoll.WaitingForInput)
    prefill.write_row(ROW, transfer.room, token=7)
    transfer.senders[0].init(len(SOURCE), ROW)
    transfer.send(0, len(SOURCE))
    wait_status(transfer.receivers + transfer.senders, KVPoll.Success)
    assert all(decode.row(row).room != transfer.room for row in range(ROWS))
    for it in transfer.receivers + transfer.senders:
        it.clear()


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


def test_a_chunk_waits_for_the_device(pair):
    prefill, decode = pair
    transfer, hold = held(prefill, decode)
    assert prefill.manager._publishers[0].metrics()["leases_live"] == 0
    prefill.fill(seed=3)  # What the device was still at.
    before = copies(decode)
    hold.let_go()
    transfer.end(KVPoll.Success)
    check_pages(prefill, decode, before, SOURCE, TARGET)


def test_which_pages_they_are_may_be_computed_still(pair):
    """By a stream of SGLang's, of whose end it gives an event."""
    prefill, decode = pair
    before = copies(decode)
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    pages = np.zeros(len(SOURCE), np.int32)

    class Computed:
        def synchronize(self):
            pages[:] = SOURCE

    prefill.manager.add_transfer_request(
        transfer.room, pages, slice(0, len(SOURCE)), True, ROW, indices_event=Computed()
    )
    transfer.end(KVPoll.Success)
    check_pages(prefill, decode, before, SOURCE, TARGET)


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
    closed = decode.manager._incoming[first.room]
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
    assert not closed.fetches()  # Its pages are another request's.


def test_chunks_that_come_when_the_device_is_done_wait_for_those_before(make, monkeypatch):
    device = SlowDevice(monkeypatch)
    prefill, decode = make("prefill"), make("decode")
    prefill.fill(seed=1)
    before = copies(decode)
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    incoming = decode.manager._incoming[transfer.room]
    transfer.send(0, 1)
    wait_for(lambda: len(incoming.early) == 1)
    with monkeypatch.context() as patched:
        patched.setattr(decode.manager, "_take_early_chunks", lambda: None)  # Not its turn yet.
        device.let_go()
        wait_for(lambda: incoming.may_be_written)
        transfer.send(1, len(SOURCE))
        wait_for(lambda: len(incoming.early) == 2)
    transfer.end(KVPoll.Success)
    check_pages(prefill, decode, before, SOURCE, TARGET)


def test_as_many_early_chunks_as_can_come_are_kept_and_no_more(make, monkeypatch):
    """One with each page and a last one without any."""
    device = SlowDevice(monkeypatch)
    prefill, decode = make("prefill"), make("decode")
    prefill.fill(seed=1)
    before = copies(decode)
    good = Transfer([prefill], [decode], [9, 3], [20, 21]).begin()
    good.senders[0].num_kv_indices = 3  # So that these are not the last ones.
    good.send(0, 1)
    good.send(1, 2)
    good.senders[0].num_kv_indices = 2
    good.send(0, 0)
    wait_for(lambda: len(decode.manager._incoming[good.room].early) == 3)
    bad = Transfer([prefill], [decode], [9, 3], [5, 60]).begin()
    nothing = Chunk(bad.room, 0, 0, 0, "", False).frames()
    for _ in range(4):
        decode.manager._on_decode_message(nothing)
    assert len(decode.manager._incoming[bad.room].early) == 3
    device.let_go()
    good.end(KVPoll.Success)
    assert "more chunks than pages" in failed(bad)
    check_pages(prefill, decode, before, [9, 3], [20, 21])


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


@pytest.mark.parametrize("is_ready", [True, False])
def test_the_prefill_server_is_started_again_between_two_heartbeats(make, monkeypatch, is_ready):
    """At its old address, so that heartbeats go on; its ranks listen elsewhere."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2")
    prefill, decode = make("prefill"), make("decode")
    server = prefill.deployment._server
    whole([prefill], [decode], [1], [2])
    receiver = decode.receiver(prefill.sender(CHILD_ROOM).bootstrap_room)
    receiver.send_metadata(np.array(TARGET, np.int32), TARGET_ROW)
    prefill.close()
    again = make("prefill")
    if not is_ready:  # Its other ranks are still to come.
        server._registered_count = 0
    wait_status([receiver], KVPoll.Failed)
    with pytest.raises(KVTransferError, match="Lost connection with prefill instance"):
        receiver.failure_exception()
    server._registered_count = 1
    whole([again], [decode], SOURCE, TARGET)


class EndsWhenAskedOf(dict):
    """Statuses of requests that the scheduler ends right after somebody has found them."""

    def __contains__(self, room):
        return self.pop(room, None) is not None


def test_a_prefill_server_dies_as_a_request_of_it_ends(pair, monkeypatch):
    """The thread that finds the former out has to find out the next one's end too."""
    manager = pair[1].manager
    receiver = pair[1].receiver(CHILD_ROOM)
    monkeypatch.setattr(manager, "request_status", EndsWhenAskedOf(manager.request_status))
    manager._handle_node_failure(receiver.bootstrap_addr)
    assert not manager.failure_records and not manager.request_status
    receiver.clear()
