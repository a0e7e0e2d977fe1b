"""What workers of two engines hand over, and what becomes of a load that is given up."""

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
from kvferry.vllm.metadata import Load, LoadPart, Publication  # noqa: E402
from kvferry.vllm.telemetry import TransferStats  # noqa: E402
from kvferry.vllm.worker import _Fetch  # noqa: E402
from vllm_workers import LAYERS, Workers, publication, wait_for  # noqa: E402


def test_what_waits_in_the_decode_engine_is_kept():
    workers = Workers(lease_ms=4000)  # To connect and to ask in.
    workers.prefill.publish([publication(101, [1, 2]), publication(102, [3, 4])])
    workers.source.compute(workers.prefill, [1, 2, 3, 4])
    part = workers.part(101, [7, 8])

    def the_other_has_expired() -> bool:
        workers.decode.keep([part.tickets, ["no ticket"], ["t", "u", "v"]])
        workers.prefill.take_finished(set())
        return not workers.prefill._leases[102].live

    wait_for(the_other_has_expired)
    assert workers.prefill._stats.data["expired"] == [1]
    workers.load(part)
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == set()
    workers.close()


def test_parts_arrive_as_they_are_computed(workers: Workers):
    assert workers.prefill.asked_for([101, 102, 103]) == set()
    workers.load(workers.part(101, [7, 8]), workers.part(102, [9, 10]))
    wait_for(lambda: workers.prefill.asked_for([101, 102, 103]) == {101, 102})
    assert not workers.loaded()
    workers.prefill.publish([publication(101, [1, 2])])
    workers.source.compute(workers.prefill, [1, 2])
    # The first part is there while the second one is not published.
    wait_for(lambda: bool(workers.target.block(LAYERS - 1, 8).any()))
    assert not workers.loaded()
    assert workers.prefill.take_finished(set()) == set()
    workers.prefill.publish([publication(102, [3, 4])])
    workers.source.compute(workers.prefill, [3, 4])
    wait_for(workers.loaded)
    for block, source in zip([7, 8, 9, 10], [1, 2, 3, 4], strict=True):
        for layer in range(LAYERS):
            assert (workers.target.block(layer, block) == 1 + layer * 70 + source).all()
    assert workers.decode.take_missing_blocks() == set()
    assert workers.stats.data["bytes"] == [4 * LAYERS * 2 * 4 * 8 * 4]  # One load, not two.
    # The engine's blocks are free when it is done with the request and both leases have ended.
    wait_for(lambda: workers.prefill.take_finished({"p"}) == {"p"})
    assert workers.prefill.take_finished(set()) == set()


def test_what_the_endpoints_count_is_in_the_statistics(workers: Workers, monkeypatch):
    monkeypatch.setattr(TransferStats, "WATCH_S", 0.0)
    workers.load(workers.part(101, [7, 8]))
    workers.prefill.publish([publication(101, [1, 2])])
    workers.source.compute(workers.prefill, [1, 2])
    wait_for(workers.loaded)
    wait_for(lambda: workers.prefill.take_finished({"p"}) == {"p"})
    sent, received = workers.prefill._stats.take().data, workers.stats.take().data
    assert sent["counts"]["bytes_sent"] == sum(received["bytes"]) > 0
    assert sent["counts"]["transfers_ok"] == 1
    assert sent["gauges"].keys() == {"prefill p"} and received["gauges"].keys() == {"decode d"}
    assert (sent["gauges"]["prefill p"]["peers"], received["gauges"]["decode d"]["peers"]) == (1, 1)


def test_a_part_that_is_given_up_fails_the_load_and_lets_the_others_go(workers: Workers):
    workers.load(workers.part(101, [7, 8]), workers.part(102, [9, 10]))
    workers.prefill.publish([publication(101, [1, 2])])
    workers.source.compute(workers.prefill, [1, 2])
    workers.prefill.give_up([102])
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == {9, 10}
    assert workers.stats.data["failed"] == [1]
    wait_for(lambda: workers.prefill.take_finished({"p"}) == {"p"})


def test_blocks_stay_until_all_leases_of_their_request_have_ended(workers: Workers):
    workers.prefill.publish([publication(101, [1, 2]), publication(102, [3, 4])])
    workers.source.compute(workers.prefill, [1, 2, 3, 4])
    workers.load(workers.part(101, [7, 8]))
    wait_for(workers.loaded)

    def the_first_has_ended() -> bool:
        assert workers.prefill.take_finished({"p"}) == set()
        return workers.part_fetched(101)

    wait_for(the_first_has_ended)
    workers.decode.dismiss(workers.part(102, [9, 10]).tickets)
    wait_for(lambda: workers.prefill.take_finished(set()) == {"p"})


@pytest.mark.parametrize("num_tokens, num_blocks", [(17, 2), (16, 3)])
def test_a_ticket_for_another_prompt_is_not_fetched_but_let_go_of(
    workers: Workers, num_tokens: int, num_blocks: int
):
    workers.prefill.publish([publication(101, [1, 2])])
    workers.source.compute(workers.prefill, [1, 2])
    part = workers.part(101, [7, 8])
    part.num_blocks = num_blocks
    workers.decode.load([Load("d", [part], 0, num_tokens)])
    assert workers.decode.take_finished() == {"d"}  # At once.
    assert workers.decode.take_missing_blocks() == {7, 8}
    wait_for(lambda: workers.prefill.take_finished({"p"}) == {"p"})
    assert not workers.target.block(0, 7).any()


@pytest.mark.parametrize("ticket", ["no ticket", "\ud800", "kvferry1|tcp://a\udcff:1|1|1|2|16"])
def test_what_is_no_ticket_fails_its_load_and_not_the_engine(workers: Workers, ticket: str):
    workers.load(LoadPart([ticket], 0, [7, 8], 2))
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == {7, 8}
    workers.decode.dismiss([ticket])
    workers.decode.keep([[ticket]])
    assert workers.decode.take_finished() == set()


def test_a_load_that_is_known_not_to_work_leaves_its_tickets_alone(workers: Workers):
    """They may be another request's."""
    workers.prefill.publish([publication(101, [1, 2])])
    workers.source.compute(workers.prefill, [1, 2])
    part = workers.part(101, [7, 8])
    workers.decode.load([Load("wrong", [part], 0, 16, "the load of these tickets has failed")])
    assert workers.decode.take_finished() == {"wrong"}
    assert workers.decode.take_missing_blocks() == {7, 8}
    workers.load(part)
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == set()


def test_a_load_that_is_cancelled_frees_what_is_published_later(workers: Workers):
    workers.load(workers.part(101, [7, 8]), workers.part(102, [9, 10]))
    workers.decode.cancel(["d"])
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == {7, 8, 9, 10}
    # What is let go of is on its way, and so is this behind it.
    probe = workers.part(103, [20])
    workers.prefill.publish([Publication("other", 103, [30], 16)])
    workers.prefill.step_saved()
    workers.finished.clear()
    workers.load(probe)
    wait_for(workers.loaded)
    workers.prefill.publish([publication(101, [1, 2]), publication(102, [3, 4])])
    wait_for(lambda: workers.prefill.take_finished({"p"}) == {"p"})


def test_a_client_that_hangs_up_is_no_failed_fetch(
    workers: Workers, caplog: pytest.LogCaptureFixture
):
    workers.load(workers.part(101, [7, 8]))
    workers.decode.cancel(["d"])
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == {7, 8}
    assert workers.stats.data["failed"] == [] and workers.stats.data["bytes"] == []
    assert "failed" not in caplog.text


def test_two_requests_that_claim_the_same_lease(workers: Workers):
    workers.load(workers.part(101, [7, 8]))
    workers.prefill.publish([publication(101, [1, 2]), Publication("copy", 101, [3, 4], 16)])
    workers.source.compute(workers.prefill, [1, 2])
    wait_for(workers.loaded)
    assert (workers.target.block(0, 7) == 1 + 1).all()
    assert workers.prefill.take_finished({"copy"}) == {"copy"}
    wait_for(lambda: workers.prefill.take_finished({"p"}) == {"p"})
    workers.prefill.release_preempted(["p", "copy"])  # Neither is known any more.


def test_an_idle_engine_waits_for_its_load_instead_of_turning(workers: Workers):
    workers.decode.pause()  # Returns: there is nothing to wait for.
    workers.load(workers.part(101, [7, 8]))
    began, cpu = time.monotonic(), time.process_time()
    turns = 0
    while time.monotonic() - began < 0.3:
        workers.decode.pause()
        turns += 1
    assert 0 < turns <= 300  # A millisecond each, or longer.
    assert time.process_time() - cpu < 0.3
    workers.prefill.give_up([101])
    wait_for(workers.loaded)


def test_a_lease_that_is_published_again_is_a_warning_that_says_what_to_do(
    workers: Workers, caplog: pytest.LogCaptureFixture
):
    """As of a transfer_id that a router uses for a second attempt."""
    workers.prefill.publish([publication(101, [1])])
    workers.prefill.give_up([101])
    workers.prefill.publish([publication(101, [1])])
    (record,) = (r for r in caplog.records if "cannot publish" in r.message)
    assert record.levelname == "WARNING"
    assert "another attempt needs a new one" in record.message


def test_a_fetch_that_ends_badly_when_all_has_come_is_none_that_failed():
    """As one whose prefill engine goes before it has heard so."""
    ended = SimpleNamespace(done=True, ok=False, error="lost", missing_pages=lambda: [])
    fetch = _Fetch(LoadPart(["t"], 0, [7], 1), "t", handle=ended)
    assert fetch.done and fetch.error() == ""
    ended.missing_pages = lambda: [7]
    assert fetch.error() == "lost"


def test_an_idle_engine_does_not_wait_where_a_load_has_ended(workers: Workers):
    failed = Load("failed", [workers.part(101, [7, 8])], 0, 16, "why")
    workers.decode.load([failed])
    workers.load(workers.part(102, [9, 10]))
    workers.decode.pause()
    assert workers.decode.take_finished() == {"failed"}
    workers.prefill.give_up([102])
    wait_for(workers.loaded)


def test_closed_workers_have_ended_their_endpoints():
    workers = Workers()
    workers.close()
    for half in (workers.prefill, workers.decode):
        with pytest.raises(kvferry.FailedPrecondition):
            half._endpoint.metrics()
