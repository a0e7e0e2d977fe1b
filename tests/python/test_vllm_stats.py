"""What endpoints count, on its way to vLLM's log and its Prometheus endpoint."""

import functools
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
import msgspec  # noqa: E402
from kvferry.vllm.connector import KVFerryConnector  # noqa: E402
from kvferry.vllm.device import Host  # noqa: E402
from kvferry.vllm.store_worker import StoreWorker  # noqa: E402
from kvferry.vllm.stores import StoreOptions  # noqa: E402
from kvferry.vllm.telemetry import (  # noqa: E402
    COUNTERS,
    GAUGES,
    FetchRecord,
    Trace,
    TransferMetrics,
    TransferStats,
)
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402


class Endpoint:
    """Counts what a test says."""

    def __init__(self, **counts: int):
        self.counts = counts

    def metrics(self) -> dict[str, int]:
        return dict(self.counts)


@pytest.fixture(autouse=True)
def asked_each_time(monkeypatch) -> None:
    monkeypatch.setattr(TransferStats, "WATCH_S", 0.0)


def watching(**endpoints: Endpoint) -> TransferStats:
    stats = TransferStats()
    for whose, endpoint in endpoints.items():
        stats.watch(whose, endpoint.metrics)
    return stats


class Prometheus:
    def __init__(self):
        self._registry = CollectorRegistry()
        kinds = {
            kind: functools.partial(kind, registry=self._registry)
            for kind in (Gauge, Counter, Histogram)
        }
        engines = {0: ["0"], 1: ["1"]}
        config = SimpleNamespace(kv_transfer_config=None)
        self._metrics = TransferMetrics(config, kinds, ["engine"], engines)

    def observe(self, stats: TransferStats, engine: int = 0) -> None:
        """As it comes from the engine's process."""
        data = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
        self._metrics.observe(data, engine)

    def names(self) -> set[str]:
        samples = (it.name for family in self._registry.collect() for it in family.samples)
        return {name.removeprefix("vllm:kvferry_") for name in samples}

    def value(self, name: str, engine: int = 0, **labels: str) -> float | None:
        labels |= {"engine": str(engine)}
        return self._registry.get_sample_value(f"vllm:kvferry_{name}", labels)


def test_counters_are_what_they_gained_and_gauges_what_they_are():
    endpoint = Endpoint(strangers=2, peers=1, bytes_sent=0, no_metric_of_ours=7)
    stats, prometheus = watching(it=endpoint), Prometheus()
    prometheus.observe(stats.take())
    assert (prometheus.value("strangers_total"), prometheus.value("peers")) == (2, 1)
    assert stats.take() is None  # Nothing has changed.
    endpoint.counts |= {"strangers": 5, "peers": 0, "bytes_sent": 3_000_000}
    taken = stats.take()
    prometheus.observe(taken)
    assert (prometheus.value("strangers_total"), prometheus.value("peers")) == (5, 0)
    assert prometheus.value("bytes_sent_total") == 3_000_000
    line = taken.reduce()
    assert (line["Strangers"], line["MB sent"]) == (3, 3.0)


def test_endpoints_are_not_asked_in_each_step(monkeypatch):
    monkeypatch.setattr(TransferStats, "WATCH_S", 3600.0)
    endpoint = Endpoint(strangers=1)
    stats = watching(it=endpoint)
    assert stats.take().data["counts"] == {"strangers": 1}
    endpoint.counts["strangers"] = 2
    assert stats.take() is None


def test_stats_add_up():
    stats = TransferStats()
    assert stats.is_empty() and stats.take() is None
    stats.record(FetchRecord("a", True, "", 2, 0, 0, 3_000_000, 1.0, 2.0))
    stats.record(FetchRecord("b", False, "lost", 2, 0, 2, 0, 1.0, 2.0))
    stats.record(FetchRecord("c", False, "cancelled", 2, 0, 2, 0, 1.0, 2.0, cancelled=True))
    stats.record_expired()
    taken = stats.take()
    assert taken is not None and stats.is_empty()
    total = TransferStats().aggregate(taken).aggregate(TransferStats(dict(taken.to_dict())))
    assert total.reduce() == {
        "Fetches": 2,
        "MB fetched": 6.0,
        "Avg ms": 2.0,
        "GB/s": 1.5,
        "Failed fetches": 2,
        "Expired leases": 2,
    }


def outputs(*ranks: TransferStats) -> list[ModelRunnerOutput]:
    """Of the workers of one step, as they come from their processes."""
    return [
        ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=KVConnectorOutput(
                kv_connector_stats=pickle.loads(pickle.dumps(stats.take()))
            ),
        )
        for stats in ranks
    ]


def test_ranks_and_both_modes_of_an_engine_add_up():
    first, second, store = Endpoint(), Endpoint(), Endpoint()
    for peers, endpoint in enumerate((first, second, store), start=1):
        endpoint.counts = {"peers": peers, "peers_lost": 1}
    ranks = [watching(rank0=first, store0=store), watching(rank1=second)]
    prometheus, aggregator = Prometheus(), KVOutputAggregator(2)
    for _ in range(2):
        output = aggregator.aggregate(outputs(*ranks))
        prometheus.observe(output.kv_connector_output.kv_connector_stats)
        second.counts["peers"] = 7  # Then one rank alone has something to say.
        first.counts["peers_lost"] = 2
    assert prometheus.value("peers") == 1 + 7 + 3
    assert prometheus.value("peers_lost_total") == 4
    assert prometheus.value("peers", engine=1) == 0
    prometheus.observe(watching(rank0=Endpoint(peers=5)).take(), engine=1)
    assert (prometheus.value("peers"), prometheus.value("peers", engine=1)) == (11, 5)


def test_over_time_the_last_gauges_count():
    endpoint = Endpoint(peers=3, hellos_refused=1)
    stats, prometheus = watching(it=endpoint), Prometheus()
    total = KVFerryConnector.build_kv_connector_stats(stats.take().to_dict())
    endpoint.counts |= {"peers": 2, "hellos_refused": 3}
    total = total.aggregate(KVFerryConnector.build_kv_connector_stats(stats.take().to_dict()))
    assert total.reduce()["Hellos refused"] == 3
    prometheus.observe(total)
    assert prometheus.value("peers") == 2


def test_a_fetch_may_take_longer_than_its_default_deadline():
    prometheus = Prometheus()
    prometheus.observe(TransferStats({"bytes": [1, 1], "move_ms": [29_000.0, 200_000.0]}))
    assert prometheus.value("fetch_seconds_bucket", le="30.0") == 1
    assert prometheus.value("fetch_seconds_bucket", le="300.0") == 2


LAYOUT = kvferry.KvLayout.mha(2, 16, 2, 8, "float32")


def test_a_closed_endpoint_is_no_error():
    pool = kvferry.KvPool.create(LAYOUT, 1)
    endpoint = kvferry.PrefillEndpoint(pool, kvferry.Config.make({}), "m")
    stats = TransferStats()
    stats.watch("it", endpoint.metrics)
    assert stats.take().data["gauges"]["it"]["arena_chunks"] > 0
    endpoint.close()
    assert stats.take() is None


def test_the_server_of_a_store_is_watched_too():
    cache = SimpleNamespace(pool=kvferry.KvPool.create(LAYOUT, 1), device=Host())
    options = StoreOptions.parse({"backend": "host", "capacity_bytes": 1 << 20})
    stats, trace = TransferStats(), Trace("", 0)
    worker = StoreWorker(cache, options, kvferry.Config.make({}), "m", "n", 0, 0, trace, stats)
    assert stats.take().data["gauges"].keys() == {"store n"}
    worker.close()
    assert stats.take() is None


def test_alerts_are_on_what_is_exported():
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    alerts = text.split("## What to alert on\n")[1].split("\n## ")[0]
    watched = set(re.findall(r"vllm:kvferry_(\w+)", alerts))
    made = Prometheus().names()
    assert watched and watched <= made, watched - made


def test_all_that_is_counted_is_described():
    pool, config = kvferry.KvPool.create(LAYOUT, 1), kvferry.Config.make({})
    prefill = kvferry.PrefillEndpoint(pool, config, "m")
    decode = kvferry.DecodeEndpoint(pool, config, "m")
    known = prefill.metrics().keys() | decode.metrics().keys()
    prefill.close()
    decode.close()
    assert COUNTERS.keys() | GAUGES.keys() <= known
    lines = (Path(__file__).parents[2] / "docs" / "operations.md").read_text().splitlines()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    described = {name: kind for name, kind, *_ in (row for row in rows if len(row) > 3)}
    assert known <= described.keys()
    assert {described[name] for name in COUNTERS} == {"counter"}
    assert {described[name] for name in GAUGES} == {"gauge"}
    exported = {row[0] for row in rows if len(row) > 4 and row[4] == "yes"}
    assert exported == COUNTERS.keys() | GAUGES.keys()
