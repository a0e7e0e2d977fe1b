"""Chunks of requests between SGLang's servers that wait for their turn: more than a prefill rank
takes fetches of."""

import contextlib
import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang_pools", reason="SGLang is not installed", exc_type=ImportError)

import kvferry  # noqa: E402
from kvferry.sglang.pd_fetches import Fetch, FetchQueues  # noqa: E402
from sglang_faults import (  # noqa: E402
    OutOfMemory,
    WithoutLayers,
    handles,
)
from sglang_pd import (  # noqa: E402
    SOURCE,
    TARGET,
    KVPoll,
    Transfer,
    check_pages,
    copies,
    failed,
    make_ranks,
    wait_status,
    whole,
)
from waiting import wait_for  # noqa: E402


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


def test_queues_of_prefill_ranks_that_have_gone_are_forgotten():
    queues = FetchQueues(1)
    ended, goes_on = SimpleNamespace(done=True), SimpleNamespace(done=False)
    for peer, handle in (("gone", ended), ("slow", goes_on), ("new", goes_on)):
        queues.add(peer, Fetch(0, time.monotonic() + 60, start=lambda _, it=handle: it))
    assert list(queues._queues) == ["slow", "new"]


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
