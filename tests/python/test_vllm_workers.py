"""The halves of the connector in two engines' workers, with real endpoints and without engines."""

import functools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
from kvferry.vllm.device import Host  # noqa: E402
from kvferry.vllm.layout import Ranks  # noqa: E402
from kvferry.vllm.metadata import Load, LoadPart, Publication  # noqa: E402
from kvferry.vllm.telemetry import Trace, TransferStats  # noqa: E402
from kvferry.vllm.worker import (  # noqa: E402
    _ATTEMPTS,
    _PREEMPTION_ATTEMPTS,
    DecodeWorker,
    PrefillWorker,
    _Fetch,
)
from vllm_steps import SlowDevice  # noqa: E402
from waiting import wait_for as wait  # noqa: E402

LAYERS = 3
DEADLINE_S = 10.0
wait_for = functools.partial(wait, seconds=DEADLINE_S)


class Side:
    """One rank's cache, as far as the workers look at it."""

    def __init__(
        self,
        ranks: Ranks = Ranks(0, 1, 1),  # noqa: B008
        page_size: int = 4,
        page_format: str = "NHD",
        dtype: str = "float32",
        scale: float = 1,
    ) -> None:
        self.ranks = ranks
        heads = kvferry.heads_of_rank(ranks.total_heads, ranks.rank, ranks.size)
        self.heads = range(heads[0], sum(heads))
        layout = kvferry.KvLayout(
            num_layers=LAYERS,
            page_size=page_size,
            dtype=dtype,
            page_format=page_format,
            tensors=[("k", len(self.heads), 8), ("v", len(self.heads), 8)],
        )
        self.pool = kvferry.KvPool.create(layout, 64)
        self.layer_index = {f"layer.{layer}": layer for layer in range(LAYERS)}
        self.group_of = dict.fromkeys(self.layer_index, 0)
        self.num_layers = LAYERS
        self.device = Host()
        self.converts_pages = True
        self.scales = [scale] * (2 * LAYERS)

    def block(self, layer: int, block: int) -> np.ndarray:
        return np.concatenate([self.pool.page(layer, tensor, block) for tensor in range(2)])

    def compute(self, worker: PrefillWorker, blocks: list[int]) -> None:
        """One step: each layer is written, then saved."""
        self.fill(blocks)
        for name in self.layer_index:
            worker.layer_saved(name)
        worker.step_saved()

    def fill(self, blocks: list[int]) -> None:
        for layer in range(LAYERS):
            for block in blocks:
                for tensor in range(2):
                    self.pool.page(layer, tensor, block)[:] = 1 + layer * 70 + block


class Workers:
    def __init__(self, **options) -> None:
        config = kvferry.Config.make({"publish_grace_ms": 0} | options)
        self.source, self.target = Side(), Side()
        self.stats = TransferStats()
        trace = Trace("", 0)
        self.prefill = PrefillWorker(self.source, config, "m", "p", trace, TransferStats())
        self.decode = DecodeWorker(self.target, config, "m", "d", trace, self.stats)
        self.finished: set[str] = set()

    def part(self, lease_id: int, blocks: list[int]) -> LoadPart:
        ticket = kvferry.Ticket(
            address=self.prefill.address().address,
            epoch=0,
            lease_id=lease_id,
            num_pages=len(blocks),
            num_tokens=16,
        )
        return LoadPart([str(ticket)], 0, blocks, len(blocks))

    def load(self, *parts: LoadPart) -> None:
        self.decode.load([Load("d", list(parts), 0, 16)])

    def part_fetched(self, lease_id: int) -> bool:
        return not self.prefill._leases[lease_id].live

    def loaded(self) -> bool:
        self.decode.pause()
        self.finished |= self.decode.take_finished()
        return "d" in self.finished

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


def test_closed_workers_have_ended_their_endpoints():
    workers = Workers()
    workers.close()
    for half in (workers.prefill, workers.decode):
        with pytest.raises(kvferry.FailedPrecondition):
            half._endpoint.metrics()


def publication(lease_id: int, blocks: list[int]) -> Publication:
    return Publication("p", lease_id, blocks, 16)


def test_what_waits_in_the_decode_engine_is_kept():
    workers = Workers(lease_ms=1000)
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


def overwrite(side: Side, blocks: list[int]) -> None:
    """As another request does that is given these blocks."""
    for layer in range(LAYERS):
        for block in blocks:
            for tensor in range(2):
                side.pool.page(layer, tensor, block)[:] = 0


def test_a_load_goes_on_when_a_preempted_request_is_computed_again(
    workers: Workers, caplog: pytest.LogCaptureFixture
):
    workers.load(workers.part(101, [7, 8]), workers.part(102, [9, 10]), workers.part(103, [11]))
    workers.prefill.publish([publication(101, [1, 2])])
    workers.source.compute(workers.prefill, [1, 2])
    wait_for(lambda: not workers.prefill.take_finished(set()) and workers.part_fetched(101))
    # The second one is not computed to its end.
    workers.prefill.publish([publication(102, [3, 4])])
    workers.prefill.release_preempted(["p"])
    overwrite(workers.source, [1, 2, 3, 4])
    assert not workers.loaded()
    # In other blocks. The first part has arrived, and nobody comes for it again.
    workers.prefill.publish([publication(101, [21, 22]), publication(102, [23, 24])])
    workers.source.compute(workers.prefill, [21, 22, 23, 24])
    workers.prefill.publish([publication(103, [25])])
    workers.source.compute(workers.prefill, [25])
    wait_for(workers.loaded)
    assert "cannot publish" not in caplog.text
    for block, source in zip([7, 8, 9, 10, 11], [1, 2, 23, 24, 25], strict=True):
        for layer in range(LAYERS):
            assert (workers.target.block(layer, block) == 1 + layer * 70 + source).all()
    assert workers.decode.take_missing_blocks() == set()
    wait_for(lambda: workers.prefill.take_finished({"p"}) == {"p"})
    assert workers.prefill._ended_before == {} and workers.prefill._computing == []


class LateEndpoint:
    """A prefill endpoint that takes leases back, but does not say so in time."""

    def __init__(self, endpoint: kvferry.PrefillEndpoint, times: int):
        self._endpoint = endpoint
        self.times = times

    def unpublish(self, lease_id: int, *, timeout_ms: int) -> None:
        self._late(self._endpoint.unpublish, lease_id, timeout_ms)

    def release(self, lease_id: int, *, timeout_ms: int) -> None:
        self._late(self._endpoint.release, lease_id, timeout_ms)

    def _late(self, take_back: Callable[..., None], lease_id: int, timeout_ms: int) -> None:
        if self.times == 1:
            take_back(lease_id, timeout_ms=timeout_ms)
        if self.times > 0:
            self.times -= 1
            raise kvferry.DeadlineExceeded("late")
        take_back(lease_id, timeout_ms=timeout_ms)

    def __getattr__(self, name: str):
        return getattr(self._endpoint, name)


def begin_transfer(workers: Workers) -> None:
    """Of block 1, all but its last layer."""
    workers.load(workers.part(101, [7]))
    workers.prefill.publish([publication(101, [1])])
    workers.source.fill([1])
    for layer in list(workers.source.layer_index)[:-1]:
        workers.prefill.layer_saved(layer)
    wait_for(lambda: not workers.loaded() and workers.target.block(LAYERS - 2, 7).any())


@pytest.mark.parametrize("times", [1, _PREEMPTION_ATTEMPTS - 1])
def test_a_lease_that_is_taken_back_late_is_published_again(
    workers: Workers, caplog: pytest.LogCaptureFixture, times: int
):
    workers.prefill._endpoint = LateEndpoint(workers.prefill._endpoint, times)
    begin_transfer(workers)
    workers.prefill.release_preempted(["p"])
    overwrite(workers.source, [1])
    workers.prefill.publish([publication(101, [2])])
    workers.source.compute(workers.prefill, [2])
    wait_for(workers.loaded)
    assert (workers.target.block(LAYERS - 1, 7) == 1 + (LAYERS - 1) * 70 + 2).all()
    assert caplog.text.count("may be read still") == times
    assert "cannot publish" not in caplog.text


@pytest.mark.parametrize("times", [0, 1, _PREEMPTION_ATTEMPTS - 1])
def test_a_preempted_request_that_has_ended_is_read_no_more_and_reported(
    workers: Workers, times: int
):
    workers.prefill._endpoint = LateEndpoint(workers.prefill._endpoint, times)
    begin_transfer(workers)
    workers.prefill.publish([publication(102, [2])])  # Nobody has come for this one.
    workers.prefill.release_preempted([], ["p", "unknown"])
    assert workers.prefill._endpoint.metrics()["transfers_active"] == 0
    overwrite(workers.source, [1, 2])
    workers.prefill.step_saved()
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == {7}
    wait_for(lambda: workers.prefill.take_finished({"p"}) == {"p"})
    assert workers.prefill._leases == {}


def test_blocks_of_a_request_that_has_ended_are_not_given_away_either(workers: Workers):
    late = LateEndpoint(workers.prefill._endpoint, _PREEMPTION_ATTEMPTS)
    workers.prefill._endpoint = late
    begin_transfer(workers)
    with pytest.raises(kvferry.DeadlineExceeded):
        workers.prefill.release_preempted([], ["p"])
    assert late.times == 0


def test_blocks_that_may_be_read_still_are_not_given_away(workers: Workers):
    late = LateEndpoint(workers.prefill._endpoint, _PREEMPTION_ATTEMPTS)
    workers.prefill._endpoint = late
    begin_transfer(workers)
    with pytest.raises(kvferry.DeadlineExceeded):
        workers.prefill.release_preempted(["p"])
    assert late.times == 0


def test_a_lease_that_ends_as_its_request_is_preempted_is_in_the_trace(
    workers: Workers, tmp_path: Path
):
    path = tmp_path / "trace"
    workers.prefill._trace = Trace(str(path), 0)
    workers.prefill.publish([publication(101, [1, 2])])
    workers.source.compute(workers.prefill, [1, 2])
    workers.load(workers.part(101, [7, 8]))
    wait_for(lambda: workers.prefill._endpoint.metrics()["leases_live"] == 0)
    workers.prefill.release_preempted(["p"])
    workers.prefill.publish([publication(101, [3, 4])])  # Nobody would come for it.
    assert workers.prefill.take_finished({"p"}) == {"p"}
    (event,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert event["outcome"] == "fetched"
    assert workers.prefill._leases == {}


def test_a_preempted_request_that_is_aborted_fails_its_load(workers: Workers):
    workers.load(workers.part(101, [7, 8]))
    workers.prefill.publish([publication(101, [1, 2])])
    workers.prefill.release_preempted(["p"])
    assert not workers.loaded() and workers.prefill._leases == {}
    workers.prefill.give_up([101])
    assert workers.prefill.take_finished({"p"}) == set()  # The engine has its blocks already.
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == {7, 8}


def test_an_idle_engine_does_not_wait_where_a_load_has_ended(workers: Workers):
    failed = Load("failed", [workers.part(101, [7, 8])], 0, 16, "why")
    workers.decode.load([failed])
    workers.load(workers.part(102, [9, 10]))
    workers.decode.pause()
    assert workers.decode.take_finished() == {"failed"}
    workers.prefill.give_up([102])
    wait_for(workers.loaded)


def test_an_idle_engine_waits_for_its_load_instead_of_turning(workers: Workers):
    began = time.monotonic()
    workers.decode.pause()  # Nothing to wait for.
    assert time.monotonic() - began < 0.5
    workers.load(workers.part(101, [7, 8]))
    cpu = time.process_time()
    turns = 0
    while time.monotonic() - began < 0.3:
        workers.decode.pause()
        turns += 1
    assert 0 < turns <= 300  # A millisecond each, or longer.
    assert time.process_time() - cpu < 0.3
    workers.prefill.give_up([101])
    wait_for(workers.loaded)


class Engines:
    """A prefill and a decode engine, each of several ranks."""

    def __init__(self, total_heads: int, prefill_size: int, decode_size: int) -> None:
        config = kvferry.Config.make({"publish_grace_ms": 0})
        trace = Trace("", 0)
        self.sources = [Side(Ranks(i, prefill_size, total_heads)) for i in range(prefill_size)]
        self.targets = [Side(Ranks(i, decode_size, total_heads)) for i in range(decode_size)]
        self.prefill = [
            PrefillWorker(side, config, "m", "p", trace, TransferStats()) for side in self.sources
        ]
        self.decode = [
            DecodeWorker(side, config, "m", "d", trace, TransferStats()) for side in self.targets
        ]
        self._loaded: set[int] = set()
        self._freed: set[int] = set()

    def tickets(self, lease_id: int, blocks: int) -> list[str]:
        return [
            str(
                kvferry.Ticket(
                    address=worker.address().address,
                    epoch=0,
                    lease_id=lease_id,
                    num_pages=blocks,
                    num_tokens=16,
                )
            )
            for worker in self.prefill
        ]

    def compute(self, lease_id: int, blocks: list[int]) -> None:
        for worker, side in zip(self.prefill, self.sources, strict=True):
            worker.publish([publication(lease_id, blocks)])
            for layer in range(LAYERS):
                for block in blocks:
                    for page in heads(side, layer, block):
                        page[:] = computed(side, layer, block)
            for name in side.layer_index:
                worker.layer_saved(name)
            worker.step_saved()

    def loaded(self) -> bool:
        """Every rank has said so, each once."""
        self._loaded.update(n for n, it in enumerate(self.decode) if it.take_finished())
        return len(self._loaded) == len(self.decode)

    def freed(self) -> bool:
        """The same of the prefill engine, as vLLM wants it before it frees blocks."""
        self._freed.update(n for n, it in enumerate(self.prefill) if it.take_finished({"p"}))
        return len(self._freed) == len(self.prefill)

    def close(self) -> None:
        for worker in self.decode + self.prefill:
            worker.close()


def test_values_of_an_fp8_cache_are_made_of_the_prefill_engines():
    """A cache in fp8, of a scale of its own, from one in float32."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    config, trace = kvferry.Config.make({"publish_grace_ms": 0}), Trace("", 0)
    source, target = Side(), Side(dtype="float8_e4m3fn", scale=0.5)
    prefill = PrefillWorker(source, config, "m", "p", trace, TransferStats())
    decode = DecodeWorker(target, config, "m", "d", trace, TransferStats())
    values = np.linspace(-9, 9, 4 * 8, dtype=np.float32)
    for layer in range(LAYERS):
        source.pool.page(layer, 1, 3).view(np.float32)[:] = values * (layer + 1)
    prefill.publish([publication(101, [3])])
    for name in source.layer_index:
        prefill.layer_saved(name)
    prefill.step_saved()
    address = prefill.address().address
    ticket = kvferry.Ticket(address=address, epoch=0, lease_id=101, num_pages=1, num_tokens=4)
    decode.load([Load("d", [LoadPart([str(ticket)], 0, [7], 1)], 0, 4)])
    wait_for(lambda: decode.pause() or "d" in decode.take_finished())
    assert decode.take_missing_blocks() == set()
    for layer in range(LAYERS):
        got = torch.from_numpy(target.pool.page(layer, 1, 7)).view(torch.float8_e4m3fn)
        want = torch.from_numpy(values * (layer + 1) / 0.5).to(torch.float8_e4m3fn)
        assert torch.equal(got.float(), want.float())
    decode.close()
    prefill.close()


def heads(side: Side, layer: int, block: int) -> list[np.ndarray]:
    """[tokens, heads, bytes] of a block's keys, and of its values."""
    pages = [side.pool.page(layer, tensor, block) for tensor in range(2)]
    return [page.reshape(4, len(side.heads), -1) for page in pages]


def computed(side: Side, layer: int, block: int) -> np.ndarray:
    """By head, whichever rank has it."""
    return np.array([[1 + head * 50 + layer * 10 + block] for head in side.heads], dtype=np.uint8)


@pytest.fixture
def make_engines() -> Iterator[Callable[..., Engines]]:
    made: list[Engines] = []

    def make(*arguments: int) -> Engines:
        made.append(Engines(*arguments))
        return made[-1]

    yield make
    for engines in made:
        engines.close()


@pytest.mark.parametrize(
    "total_heads, prefill_size, decode_size",
    [(4, 1, 2), (4, 2, 1), (4, 4, 2), (2, 4, 1), (2, 1, 4), (1, 2, 1), (1, 1, 2), (2, 4, 4)],
)
def test_engines_with_different_numbers_of_ranks(
    make_engines, total_heads: int, prefill_size: int, decode_size: int
):
    engines = make_engines(total_heads, prefill_size, decode_size)
    for worker in engines.decode:
        worker.load([Load("d", [LoadPart(engines.tickets(101, 3), 1, [7, 8], 3)], 1, 16)])
    engines.compute(101, [1, 2, 3])
    wait_for(engines.loaded)
    for worker, side in zip(engines.decode, engines.targets, strict=True):
        assert worker.take_missing_blocks() == set()
        for layer in range(LAYERS):
            for to, block in zip([7, 8], [2, 3], strict=True):
                for page in heads(side, layer, to):
                    assert (page == computed(side, layer, block)).all()
    wait_for(engines.freed)


@pytest.mark.parametrize("prefill_size, decode_size", [(4, 2), (2, 4)])
def test_all_ranks_let_go_of_what_is_cached(make_engines, prefill_size: int, decode_size: int):
    engines = make_engines(2, prefill_size, decode_size)
    for worker in engines.decode:
        worker.dismiss(engines.tickets(101, 3))
        worker.take_finished()
    engines.compute(101, [1, 2, 3])
    wait_for(engines.freed)


def test_a_rank_that_lets_go_leaves_the_lease_to_the_others(make_engines):
    engines = make_engines(2, 1, 2)
    here, other = engines.decode
    tickets = engines.tickets(101, 1)
    here.dismiss(tickets)
    engines.compute(101, [1])
    wait_for(lambda: not here.take_finished() and not here._dismissals)
    other.load([Load("d", [LoadPart(tickets, 0, [7], 1)], 0, 16)])
    wait_for(lambda: "d" in other.take_finished())
    assert other.take_missing_blocks() == set()
    wait_for(engines.freed)


def test_what_cannot_be_let_go_of_is_said_in_one_line(make_engines, caplog):
    engines = make_engines(4, 1, 1)
    (worker,), leases = engines.decode, range(101, 106)
    for lease in leases:
        worker.dismiss(engines.tickets(lease, 1))
    worker.dismiss(["no ticket"])
    worker.dismiss(["none either"])
    worker.take_finished()  # The engine may be idle from then on.
    for block, lease in enumerate(leases):
        engines.prefill[0].publish([publication(lease, [block])])
    engines.sources[0].compute(engines.prefill[0], list(range(5)))
    wait_for(engines.freed)
    wait_for(lambda: not worker.take_finished() and not worker._dismissals)
    told = [it.message for it in caplog.records if "could not let go" in it.message]
    assert len(told) == 1 and told[0].startswith("could not let go of 2 tickets; 'no ticket'")


def test_a_rank_that_fails_reports_its_blocks_once(make_engines):
    engines = make_engines(4, 2, 1)
    (worker,) = engines.decode
    worker.load([Load("d", [LoadPart(engines.tickets(101, 2), 0, [7, 8], 2)], 0, 16)])
    engines.prefill[0].publish([publication(101, [1, 2])])
    engines.sources[0].compute(engines.prefill[0], [1, 2])
    engines.prefill[1].give_up([101])
    wait_for(engines.loaded)
    assert worker.take_missing_blocks() == {7, 8}
    assert worker.take_failed() == {"d"} and worker.take_failed() == set()
    assert worker._stats.data["failed"] == [1]
    wait_for(lambda: engines.prefill[0].take_finished({"p"}) == {"p"})


def test_numbers_of_ranks_that_cannot_share_the_heads_out(make_engines):
    engines = make_engines(4, 2, 2)
    for worker in engines.decode:
        part = LoadPart([*engines.tickets(101, 2), "and a third"], 0, [7, 8], 2)
        worker.load([Load("d", [part], 0, 16)])
        assert worker.take_finished() == {"d"}
        assert worker.take_missing_blocks() == {7, 8}
        worker.dismiss(part.tickets)  # Says so in the log.
        worker.keep([part.tickets])  # The load says so.


def test_layers_of_a_group_are_ready_when_that_group_has_saved_them(workers: Workers):
    """Two groups share the pool's layers: a block holds what one of them has of each."""
    names = [f"{group}.{layer}" for group in range(2) for layer in range(LAYERS)]
    workers.source.layer_index = {name: n % LAYERS for n, name in enumerate(names)}
    workers.source.group_of = {name: n // LAYERS for n, name in enumerate(names)}
    first, second = workers.part(101, [7]), workers.part(102, [8])
    workers.prefill.publish([Publication("p", 101, [1], 16), Publication("p", 102, [2], 16, 1)])
    workers.load(first, second)
    workers.source.fill([1, 2])
    for name in names[:LAYERS]:
        workers.prefill.layer_saved(name)
    wait_for(lambda: workers.part_fetched(101) or workers.prefill.take_finished(set()))
    assert not workers.target.block(0, 8).any()
    for name in names[LAYERS:]:
        workers.prefill.layer_saved(name)
    wait_for(workers.loaded)
    assert (workers.target.block(LAYERS - 1, 8) == 1 + (LAYERS - 1) * 70 + 2).all()
    workers.prefill.step_saved()


@pytest.fixture
def device(workers: Workers) -> Iterator[SlowDevice]:
    """That of the prefill side."""
    workers.source.device = SlowDevice()
    yield workers.source.device
    workers.source.device.finish(len(workers.source.device.points))


def test_a_layer_is_sent_when_the_device_has_computed_it(workers: Workers, device: SlowDevice):
    workers.load(workers.part(101, [7, 8]))
    workers.prefill.publish([publication(101, [1, 2])])
    for name in workers.source.layer_index:
        workers.prefill.layer_saved(name)
    workers.prefill.step_saved()
    assert len(device.points) == LAYERS  # The last call has nothing more to say.
    # Nothing has been computed yet, and nothing must have been read.
    for layer in range(LAYERS):
        assert not workers.loaded()
        assert not workers.target.block(layer, 8).any()
        for block in (1, 2):
            for tensor in range(2):
                workers.source.pool.page(layer, tensor, block)[:] = 50 + layer
        device.finish(layer + 1)
        wait_for(lambda at=layer: (workers.target.block(at, 8) == 50 + at).all())
    wait_for(workers.loaded)
    wait_for(lambda: workers.prefill.take_finished({"p"}) == {"p"})


class Listening:
    """A prefill endpoint, and which leases it was told layers of."""

    def __init__(self, endpoint: kvferry.PrefillEndpoint):
        self._endpoint = endpoint
        self.told: list[int] = []

    def layer_ready(self, lease_id: int, layer: int) -> None:
        self.told.append(lease_id)
        self._endpoint.layer_ready(lease_id, layer)

    def __getattr__(self, name: str):
        return getattr(self._endpoint, name)


def test_a_layer_is_not_ready_before_those_below_it(workers: Workers):
    endpoint = workers.prefill._endpoint = Listening(workers.prefill._endpoint)
    workers.prefill.publish([publication(101, [1])])
    workers.prefill.layer_saved("layer.1")
    assert endpoint.told == []
    workers.prefill.layer_saved("layer.0")
    assert endpoint.told == [101]
    workers.prefill.step_saved()


def test_what_was_asked_for_before_a_lease_was_taken_back_says_nothing_of_the_next_one(
    workers: Workers, device: SlowDevice
):
    endpoint = workers.prefill._endpoint = Listening(workers.prefill._endpoint)
    workers.load(workers.part(101, [7]))
    workers.prefill.publish([publication(101, [1])])
    workers.source.compute(workers.prefill, [1])
    # Before the device has done that, the engine preempts the request and begins it elsewhere.
    workers.prefill.release_preempted(["p"])
    overwrite(workers.source, [1])
    workers.prefill.publish([publication(101, [2])])
    device.finish(len(device.points))
    workers.prefill._announcer.submit(lambda: None).result(DEADLINE_S)  # It has looked at all.
    assert endpoint.told == []
    workers.source.compute(workers.prefill, [2])
    device.finish(len(device.points))
    wait_for(workers.loaded)
    for layer in range(LAYERS):
        assert (workers.target.block(layer, 7) == 1 + layer * 70 + 2).all()


def test_what_a_device_failed_to_compute_is_never_sent(
    workers: Workers, device: SlowDevice, caplog: pytest.LogCaptureFixture
):
    device.fails = True
    endpoint = workers.prefill._endpoint = Listening(workers.prefill._endpoint)
    workers.prefill.publish([publication(101, [1])])
    workers.source.compute(workers.prefill, [1])
    device.finish(len(device.points))
    workers.prefill._announcer.submit(lambda: None).result(DEADLINE_S)
    assert endpoint.told == []
    assert "an illegal memory access" in caplog.text


class OutOfMemory:
    """An endpoint that finds no memory for so many calls of one kind."""

    def __init__(self, endpoint, name: str, times: int = 1):
        self._endpoint, self._name = endpoint, name
        self.times = times

    def __getattr__(self, name: str):
        fails = name == self._name and self.times > 0
        return self._fail if fails else getattr(self._endpoint, name)

    def _fail(self, *args, **kwargs) -> None:
        self.times -= 1
        raise MemoryError


@pytest.mark.parametrize("on_device", [False, True])
def test_a_lease_that_finds_no_memory_is_told_again_what_is_ready(
    workers: Workers, on_device: bool, caplog: pytest.LogCaptureFixture
):
    if on_device:
        workers.source.device = SlowDevice()
    workers.load(workers.part(101, [7]), workers.part(102, [8]))
    workers.prefill.publish([publication(101, [1]), publication(102, [2])])
    workers.source.fill([1, 2])
    workers.prefill._endpoint = OutOfMemory(workers.prefill._endpoint, "layer_ready")
    workers.prefill.step_saved()
    if on_device:
        workers.source.device.finish(1)
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == set()
    assert caplog.text.count(f"cannot tell whoever fetches p that {LAYERS} layers are ready") == 1


def test_a_lease_that_never_finds_memory_keeps_nothing_from_those_behind_it(workers: Workers):
    workers.load(workers.part(102, [8]))
    workers.prefill.publish([publication(101, [1]), publication(102, [2])])
    workers.source.fill([1, 2])
    endpoint = OutOfMemory(workers.prefill._endpoint, "layer_ready", _ATTEMPTS)
    workers.prefill._endpoint = endpoint
    workers.prefill.step_saved()
    assert endpoint.times == 0
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == set()


def test_what_goes_wrong_beside_the_engine_is_in_the_log(
    workers: Workers, device: SlowDevice, caplog: pytest.LogCaptureFixture, monkeypatch
):
    def fails(grown) -> None:
        raise MemoryError

    monkeypatch.setattr(workers.prefill, "_mark_ready", fails)
    workers.prefill.publish([publication(101, [1])])
    workers.prefill.step_saved()
    device.finish(1)
    wait_for(lambda: "were not announced: MemoryError()" in caplog.text)


def test_a_cancel_that_finds_no_memory_does_not_end_the_engine(workers: Workers):
    workers.load(workers.part(101, [7, 8]))
    (fetch,) = workers.decode._loading["d"].fetches
    fetch.handle = OutOfMemory(fetch.handle, "cancel")
    workers.decode.cancel(["d"])
    assert fetch.handle.times == 0
    workers.decode.cancel(["d"])
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == {7, 8}


def test_a_fetch_that_ends_badly_when_all_has_come_is_none_that_failed():
    """As one whose prefill engine goes before it has heard so."""
    ended = SimpleNamespace(done=True, ok=False, error="lost", missing_pages=lambda: [])
    fetch = _Fetch(LoadPart(["t"], 0, [7], 1), "t", handle=ended)
    assert fetch.done and fetch.error() == ""
    ended.missing_pages = lambda: [7]
    assert fetch.error() == "lost"


def test_a_load_that_finds_no_memory_fails_with_its_blocks(workers: Workers):
    endpoint = OutOfMemory(workers.decode._endpoint, "fetch")
    workers.decode._endpoint = endpoint
    workers.load(workers.part(101, [7, 8]))
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == {7, 8}
    assert workers.decode.take_failed() == {"d"}
    endpoint.times = 1
    workers.decode.dismiss(workers.part(102, [9]).tickets)
    workers.decode.take_finished()


def test_a_prompt_that_finds_no_memory_is_not_published_and_the_next_one_is(
    workers: Workers, caplog: pytest.LogCaptureFixture
):
    endpoint = OutOfMemory(workers.prefill._endpoint, "publish")
    workers.prefill._endpoint = endpoint
    workers.load(workers.part(101, [7]), workers.part(102, [8]))
    workers.prefill.publish([publication(101, [1]), publication(102, [2])])
    assert "cannot publish the KV of p: MemoryError" in caplog.text
    workers.source.compute(workers.prefill, [2])
    wait_for(workers.loaded)  # Not at the first one's deadline.
    assert workers.decode.take_missing_blocks() == {7}
    wait_for(lambda: workers.prefill.take_finished({"p"}) == {"p"})


@pytest.mark.parametrize("call", ["release", "give_up"])
def test_what_is_taken_back_without_memory_does_not_end_the_engine(workers: Workers, call: str):
    workers.prefill.publish([publication(101, [1])])
    workers.prefill._endpoint = OutOfMemory(workers.prefill._endpoint, call)
    workers.prefill.withdraw(["p"])
    workers.prefill.give_up([102])
    assert workers.prefill._endpoint.times == 0


def by_token(side: Side, layer: int, blocks: list[int]) -> np.ndarray:
    """[tokens, heads, dim] of K, in whichever order the blocks hold them."""
    tokens, heads = side.pool.layout.page_size, len(side.heads)
    nhd = side.pool.layout.page_format == "NHD"
    shape = (tokens, heads, 8) if nhd else (heads, tokens, 8)
    pages = [side.pool.page(layer, 0, it).view(np.float32).reshape(shape) for it in blocks]
    return np.concatenate([page if nhd else page.swapaxes(0, 1) for page in pages])


@pytest.mark.parametrize("page_size, blocks", [(8, [7, 9]), (2, [7, 9, 3, 1, 40, 2])])
@pytest.mark.parametrize("page_format", ["NHD", "HND"])
def test_an_engine_with_blocks_of_another_size_and_order(
    page_size: int, blocks: list[int], page_format: str
):
    """A prompt of 11 tokens, in three blocks of 4."""
    config = kvferry.Config.make({"publish_grace_ms": 0})
    ranks = Ranks(0, 1, 2)
    source, target = Side(ranks), Side(ranks, page_size, page_format)
    trace = Trace("", 0)
    prefill = PrefillWorker(source, config, "m", "p", trace, TransferStats())
    decode = DecodeWorker(target, config, "m", "d", trace, TransferStats())
    address = prefill.address().address

    def load(lease_id: int, num_blocks: int, num_pages: int = 3) -> set[int]:
        ticket = kvferry.Ticket(
            address=address, epoch=0, lease_id=lease_id, num_pages=num_pages, num_tokens=11
        )
        decode.load([Load("d", [LoadPart([str(ticket)], 0, blocks, num_blocks)], 0, 11)])

        def loaded() -> bool:
            decode.pause()
            return "d" in decode.take_finished()

        wait_for(loaded)
        return decode.take_missing_blocks()

    try:
        prefill.publish([Publication("p", lease, [5, 2, 6], 11) for lease in (101, 102, 103)])
        random = np.random.default_rng(1)
        for layer in range(LAYERS):
            for block in [5, 2, 6]:
                values = random.random(4 * 2 * 8, dtype=np.float32)
                source.pool.page(layer, 0, block)[:] = values.view(np.uint8)
        for name in source.layer_index:
            prefill.layer_saved(name)
        prefill.step_saved()
        # As if the ticket counted this engine's blocks.
        assert load(101, len(blocks)) == set(blocks)
        # The second as of a request that both engines were given, which know their own blocks.
        for lease, count in ((102, 3), (103, len(blocks))):
            for layer in range(LAYERS):
                for block in blocks:
                    target.pool.page(layer, 0, block)[:] = 0
            assert load(lease, count, count) == set()
            for layer in range(LAYERS):
                got, want = by_token(target, layer, blocks), by_token(source, layer, [5, 2, 6])
                assert (got[:11] == want[:11]).all() and want.all()
        wait_for(lambda: prefill.take_finished({"p"}) == {"p"})
    finally:
        decode.close()
        prefill.close()


def test_whoever_waits_is_told_where_there_is_no_memory_the_first_time(workers: Workers):
    workers.prefill._endpoint = OutOfMemory(workers.prefill._endpoint, "give_up")
    workers.load(workers.part(101, [7]))
    workers.prefill.give_up([101])
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == {7}


def test_what_is_asked_again_anyway_may_find_no_memory(workers: Workers, caplog):
    workers.prefill._endpoint = OutOfMemory(workers.prefill._endpoint, "asked_for")
    workers.load(workers.part(101, [7]))
    assert workers.prefill.asked_for([101]) == set()
    wait_for(lambda: workers.prefill.asked_for([101]) == {101})
    workers.prefill.give_up([101])
    wait_for(workers.loaded)
    workers.decode._endpoint = OutOfMemory(workers.decode._endpoint, "keep")
    workers.decode.keep([workers.part(102, [8]).tickets])
    assert "cannot ask for leases to be kept: MemoryError" in caplog.text


def test_layers_that_no_thread_announces_are_announced_with_the_next(
    workers: Workers, device: SlowDevice, caplog
):
    workers.load(workers.part(101, [7]))
    workers.prefill.publish([publication(101, [1])])
    workers.source.fill([1])
    announcer = ThreadPoolExecutor(1)
    announcer.shutdown()
    workers.prefill._announcer = announcer  # Which starts nothing any more.
    workers.prefill.layer_saved(next(iter(workers.source.layer_index)))
    assert "layers stay unsent until the next are ready" in caplog.text
    workers.prefill._announcer = None
    workers.prefill.step_saved()
    device.finish(2)
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == set()
