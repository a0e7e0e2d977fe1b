"""What our connectors do for vLLM's MultiConnector, without an engine."""

import functools
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvferry.vllm import KVFerryConnector, layout, limits, siblings  # noqa: E402
from kvferry.vllm import connector as connector_module  # noqa: E402
from kvferry.vllm.metadata import (  # noqa: E402
    Addresses,
    StepMetadata,
    StoreAddress,
    WorkerAddress,
)
from kvferry.vllm.telemetry import Options, TransferMetrics, TransferStats  # noqa: E402
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (  # noqa: E402
    MultiConnector,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402

PULL = WorkerAddress("tcp://127.0.0.1:5000", 7)
STORE = StoreAddress("tcp://127.0.0.1:5001", "m", {})


class Worker:
    def __init__(self, address: WorkerAddress | StoreAddress):
        self.address = lambda: address


def test_each_connector_knows_the_addresses_of_all():
    pull, store, other = Worker(PULL), Worker(STORE), Worker(PULL)
    assert siblings.addresses("one", 0) is None
    siblings.enrol("one", 0, "pull", pull)
    siblings.enrol("two", 0, "pull", other)
    assert siblings.addresses("one", 0) == Addresses(PULL, None)
    siblings.enrol("one", 0, "store", store)
    assert siblings.addresses("one", 0) == Addresses(PULL, STORE)
    assert siblings.addresses("two", 0) == Addresses(PULL, None)
    assert siblings.addresses("one", 1) is None
    with pytest.raises(ValueError, match='engine one has two .* in mode "store"'):
        siblings.check_alone("one", 0, "store")
    del store  # An engine that starts again in this process finds nothing in its way.
    siblings.check_alone("one", 0, "store")
    assert siblings.addresses("one", 0) == Addresses(PULL, None)


def scheduler_half(prefill: list | None, store: list | None) -> KVFerryConnector:
    connector = object.__new__(KVFerryConnector)
    connector._prefill = None if prefill is None else SimpleNamespace(set_workers=prefill.append)
    connector._store = None if store is None else SimpleNamespace(set_workers=store.append)
    return connector


def test_a_scheduler_takes_its_own_out_of_the_addresses():
    both = {0: Addresses(PULL, STORE), 1: Addresses(PULL, STORE)}
    prefill, store = [], []
    scheduler_half(prefill, None).set_xfer_handshake_metadata(both)
    scheduler_half(None, store).set_xfer_handshake_metadata(both)
    scheduler_half(None, None).set_xfer_handshake_metadata({})  # A decode engine's.
    assert prefill == [{0: PULL, 1: PULL}]
    assert store == [{0: STORE, 1: STORE}]


@pytest.mark.parametrize("foreign", [{}, {0: object()}, {0: Addresses(pull=PULL)}])
def test_addresses_of_another_connector_are_no_index_error_later(foreign):
    with pytest.raises(RuntimeError, match="before connectors of other kinds"):
        scheduler_half(None, []).set_xfer_handshake_metadata(foreign)


def config(policy: str, role: str = "kv_both") -> SimpleNamespace:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy=policy,
            kv_role=role,
            is_kv_consumer=role in ("kv_consumer", "kv_both"),
        )
    )


OF_A_LAYER = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
FULL_ATTENTION = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=OF_A_LAYER)])


def test_the_engine_s_policy_counts_and_not_the_connector_s(monkeypatch):
    def check(child: str, engine: str | None):
        outer = engine and config(engine)
        monkeypatch.setattr(limits, "get_current_vllm_config_or_none", lambda: outer)
        limits.check_store_supported(config(child), KVConnectorRole.WORKER, FULL_ATTENTION)

    check("recompute", None)
    check("fail", "recompute")
    for child, engine in (("fail", None), ("recompute", "fail")):
        with pytest.raises(ValueError, match="kv_load_failure_policy.*of the whole engine"):
            check(child, engine)
    with pytest.raises(ValueError, match="kv_role"):
        producer = config("fail", "kv_producer")
        limits.check_store_supported(producer, KVConnectorRole.SCHEDULER, FULL_ATTENTION)


@pytest.mark.parametrize(
    "child, engine, is_refused",
    [
        ("kv_both", "kv_producer", True),
        ("kv_consumer", "kv_producer", True),
        ("kv_both", "kv_both", False),
        ("kv_both", "kv_consumer", False),
        ("kv_both", None, False),
        ("kv_producer", "kv_producer", False),
        ("kv_producer", "kv_both", False),
        ("kv_producer", None, False),
    ],
)
def test_who_loads_needs_an_engine_that_expects_it(monkeypatch, child, engine, is_refused):
    outer = engine and config("recompute", engine)
    monkeypatch.setattr(limits, "get_current_vllm_config_or_none", lambda: outer)
    own = config("recompute", child)
    limits.check_engine_role(own, KVConnectorRole.SCHEDULER)  # It cannot see the outer one.
    with pytest.raises(ValueError, match="kv_role.*whole") if is_refused else nullcontext():
        limits.check_engine_role(own, KVConnectorRole.WORKER)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
@pytest.mark.parametrize("mode", ["pull", "store"])
def test_what_a_store_does_not_get_need_not_be_delivered(mode: str, role: str):
    """vLLM asks whether a preempted request is to be computed again for it."""
    connector = object.__new__(KVFerryConnector)
    connector._options = Options.parse({"mode": mode})
    connector._kv_transfer_config = SimpleNamespace(is_kv_producer=role != "kv_consumer")
    assert connector.requires_kv_delivery == (mode == "pull" and role != "kv_consumer")


def test_workers_are_told_what_a_step_takes_back():
    connector = object.__new__(KVFerryConnector)
    connector._prefill_worker, connector._store_worker = MagicMock(), MagicMock()
    connector._decode_worker, connector._connector_metadata = None, None
    meta = StepMetadata(
        preempted=["a"],
        preempted_ended=["b"],
        store_preempted=["c"],
        store_preempted_ended=["d"],
        store_loads=["e"],
        store_cancelled=["f"],
    )
    connector.handle_preemptions(meta)
    connector._prefill_worker.release_preempted.assert_called_once_with(["a"], ["b"])
    connector._store_worker.end_saves.assert_called_once_with(["c"], ["d"])
    connector.bind_connector_metadata(meta)
    # A load of a request that has ended meanwhile is cancelled behind its beginning.
    assert connector._store_worker.mock_calls[-2:] == [call.load(["e"]), call.cancel(["f"])]


@pytest.mark.parametrize(
    "dp_rank, tp_rank, port", [(0, 0, 6000), (0, 1, 6001), (1, 0, 6002), (1, 1, 6003)]
)
def test_ranks_of_several_engines_of_one_configuration_listen_apart(
    monkeypatch, dp_rank: int, tp_rank: int, port: int
):
    connector = object.__new__(KVFerryConnector)
    transfer = SimpleNamespace(engine_id=f"e_dp{dp_rank}", is_kv_producer=True)
    transfer.is_kv_consumer = False
    parallel = SimpleNamespace(
        data_parallel_size=1,  # As vLLM has it of models without experts.
        data_parallel_rank=0,
        data_parallel_index=dp_rank,
        tensor_parallel_size=2,
    )
    connector._kv_transfer_config = transfer
    connector._vllm_config = SimpleNamespace(parallel_config=parallel)
    connector._kv_cache_config = connector._allocation = connector._stats = None
    connector._options = Options.parse({"listen_port": 6000})
    made = []
    connector.prefill_worker_class = lambda cache, *more: made.append(more) or Worker(PULL)
    cache = SimpleNamespace(knows_numbers=True)
    monkeypatch.setattr(layout, "AdoptedCache", lambda *_: cache)
    monkeypatch.setattr(layout, "model_identity", lambda *_, **__: "m")
    monkeypatch.setattr(connector_module, "get_tensor_model_parallel_rank", lambda: tp_rank)
    connector.register_kv_caches({})
    ((config, *_),) = made
    assert config.listen_port == port


def test_statistics_find_their_class_and_the_way_to_prometheus():
    data = {"bytes": [1000, 24], "move_ms": [2.0, 500.0], "failed": [1], "expired": []}
    stats = MultiConnector.build_kv_connector_stats({"KVFerryConnector": data})
    assert isinstance(stats["KVFerryConnector"], TransferStats)
    assert stats.reduce()["KVFerryConnector"]["Fetches"] == 2

    registry = CollectorRegistry()
    kinds = {
        kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)
    }
    metrics = TransferMetrics(
        SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"]}
    )
    for _ in range(2):
        metrics.observe(data, 0)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:kvferry_{name}", {"engine": "0"} | labels)

    assert value("fetched_bytes_total") == 2048
    assert value("fetch_seconds_count") == 4
    assert value("fetch_seconds_bucket", le="0.003") == 2
    assert value("failed_fetches_total") == 2
    assert value("expired_leases_total") == 0
