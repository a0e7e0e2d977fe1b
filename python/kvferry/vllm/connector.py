"""KVFerryConnector: what vLLM loads. It only passes calls on: to schedulers and workers."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.forward_context import ForwardContext
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from kvferry.vllm import layout, limits, releases, siblings
from kvferry.vllm.decode_scheduler import DecodeScheduler
from kvferry.vllm.metadata import Addresses, AskedFor, StepMetadata
from kvferry.vllm.parts import in_groups, most_blocks_computing, not_final
from kvferry.vllm.prefill_scheduler import PrefillScheduler
from kvferry.vllm.room import Room
from kvferry.vllm.shared_cache import SharedAllocation
from kvferry.vllm.store_scheduler import StoreScheduler
from kvferry.vllm.store_worker import StoreWorker
from kvferry.vllm.telemetry import (
    Options,
    Trace,
    TransferMetrics,
    TransferStats,
    logger,
    setup_logging,
)
from kvferry.vllm.worker import DecodeWorker, PrefillWorker

if TYPE_CHECKING:
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves the KV of prompts from prefill engines to decode engines, whole blocks, asynchronously.

    Or, with "mode": "store", keeps blocks in a store and loads them when a prompt begins with them
    again, in this engine or in another one.

    Limits, each refused at start with a message: full attention, sliding windows and recurrent
    states (in store mode full attention), pipeline and context parallel size 1. Both engines need
    the same model; a wrong pairing is refused when they meet. What else of them may differ, such as
    block sizes, KV dtypes and tensor-parallel sizes, is in docs/vllm.md.
    """

    _cache_hit_source = CacheHitSource.P2P
    # What tests replace.
    prefill_worker_class = PrefillWorker
    decode_worker_class = DecodeWorker

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ):
        """Raises ValueError for wrong options, NotImplementedError beyond the limits."""
        super().__init__(vllm_config, role, kv_cache_config)
        setup_logging()
        if role == KVConnectorRole.SCHEDULER and (warning := releases.warning()):
            logger.warning("%s", warning)
        transfer = self._kv_transfer_config
        self._options = Options.parse(transfer.kv_connector_extra_config)
        limits.check_supported(vllm_config, kv_cache_config)
        limits.check_engine_role(vllm_config, role)
        self._windows = layout.windows(vllm_config, kv_cache_config)
        self._prefill: PrefillScheduler | None = None
        self._decode: DecodeScheduler | None = None
        self._prefill_worker: PrefillWorker | None = None
        self._decode_worker: DecodeWorker | None = None
        self._store: StoreScheduler | None = None
        self._store_worker: StoreWorker | None = None
        # Else a layer is saved once for each part of a batch.
        self._layer_by_layer = not vllm_config.parallel_config.use_ubatching
        self._stats = TransferStats()
        self._tp_rank = 0  # Of a worker, as the following one.
        self._allocation: SharedAllocation | None = None
        if self._options.store is not None:
            limits.check_store_supported(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            block_size = layout.block_size(kv_cache_config)
            if self._options.store is not None:
                self._store = StoreScheduler(
                    block_size,
                    self._options.store,
                    self._options.namespace,
                    self._options.config(0),
                    not_final(vllm_config),
                )
                return
            max_model_len = vllm_config.model_config.max_model_len
            room = Room(
                kv_cache_config.num_blocks - 1,  # Block 0 is vLLM's own.
                most_blocks_computing(self._windows, max_model_len, block_size),
                both_ways=transfer.is_kv_producer and transfer.is_kv_consumer,
            )
            if transfer.is_kv_producer:
                timeout_ms = self._options.config(0).fetch_timeout_ms
                self._prefill = PrefillScheduler(
                    vllm_config, block_size, self._windows, room, timeout_ms
                )
            if transfer.is_kv_consumer:
                config = self._options.config(0)
                self._decode = DecodeScheduler(
                    vllm_config,
                    block_size,
                    self._windows,
                    room,
                    config.max_fetches_per_peer,
                    config.lease_ms,
                )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """One block of one layer has to be one run of bytes."""
        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        return "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No. GPU engines ask when they are configured: before they load the model for nothing."""
        Options.parse(extra_config)
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """No, as limits.check_supported() says. vLLM asks from 0.33 on, before it loads a model."""
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return TransferStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- Scheduler process

    @property
    def requires_kv_delivery(self) -> bool:
        """What a store does not get is computed again: a preempted request need not be, for it."""
        return self._options.store is None and super().requires_kv_delivery

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Raises RuntimeError when the workers' addresses are another connector's."""
        ours = {rank: it for rank, it in metadata.items() if isinstance(it, Addresses)}
        if self._prefill is not None:
            self._prefill.set_workers(_all_known({rank: it.pull for rank, it in ours.items()}))
        if self._store is not None:
            self._store.set_workers(_all_known({rank: it.store for rank, it in ours.items()}))

    def on_new_request(self, request: "Request") -> None:
        if self._store is not None:
            self._store.on_new_request(request)
            return
        _warn_wrong_role(request, self._kv_transfer_config.kv_role)
        if self._prefill is not None:
            self._prefill.on_new_request(request)
        if self._decode is not None:
            self._decode.on_new_request(request)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._store is not None:
            return self._store.get_num_new_matched_tokens(request, num_computed_tokens)
        if self._prefill is not None and not self._prefill.may_begin(request):
            return None, False
        if self._decode is None:
            return 0, False
        return self._decode.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if self._store is not None:
            self._store.update_state_after_alloc(request, blocks, num_external_tokens)
        if self._prefill is not None:
            self._prefill.update_state_after_alloc(request)
        if self._decode is not None:
            self._decode.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = StepMetadata()
        if self._store is not None:
            assert self._kv_cache_manager is not None
            self._store.fill(meta, scheduler_output, self._kv_cache_manager)
        if self._prefill is not None:
            assert self._kv_cache_manager is not None
            self._prefill.fill(meta, scheduler_output, self._kv_cache_manager)
        if self._decode is not None:
            self._decode.fill(meta)
        meta.idle = scheduler_output.total_num_scheduled_tokens == 0
        return meta

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._store is not None:
            return self._store.request_finished(request), None
        if self._decode is not None:
            self._decode.request_finished(request)
        if self._prefill is not None:
            return self._prefill.request_finished(request)
        return False, None

    def reset_cache(self) -> bool | None:
        return None if self._store is None else self._store.reset_cache()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._store is not None:
            self._store.update_connector_output(connector_output)
        if self._prefill is not None:
            self._prefill.update_connector_output(connector_output)
        if self._decode is not None:
            self._decode.update_connector_output(connector_output)

    # ---- Worker processes

    def get_mem_pool_context(self) -> AbstractContextManager | None:
        """Where the engine is to allocate its KV cache: decode engines on this host then copy
        blocks out of it, instead of out of what we have copied them into."""
        if self._shares_kv_cache():
            self._allocation = self._allocation or SharedAllocation()
        return self._allocation

    def _shares_kv_cache(self) -> bool:
        return (
            self._options.share_kv_cache
            and self._options.store is None
            and self._kv_transfer_config.is_kv_producer
            and self._options.config(0).same_host_path in ("auto", "in_place")
            and current_platform.is_cpu()
        )

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Adopts the engine's cache and opens the endpoints.

        Raises NotImplementedError for a cache of unknown arrangement, kvferry.Error for an address
        that is taken.
        """
        tp_rank = self._tp_rank = get_tensor_model_parallel_rank()
        engine_id, mode = self._kv_transfer_config.engine_id, self._options.mode
        siblings.check_alone(engine_id, tp_rank, mode)
        cache = layout.AdoptedCache(
            self._vllm_config, self._kv_cache_config, kv_caches, tp_rank, self._allocation
        )
        model = layout.model_identity(
            self._vllm_config, of_ranks=False, of_bytes=not cache.knows_numbers
        )
        name = f"{engine_id}/{tp_rank}"[:128]
        parallel = self._vllm_config.parallel_config
        dp_rank = parallel.data_parallel_index  # vLLM resets data_parallel_rank of dense models.
        config = self._options.config(dp_rank * parallel.tensor_parallel_size + tp_rank)
        trace = Trace(self._options.trace_path, tp_rank)
        if self._options.store is not None:
            self._store_worker = StoreWorker(
                cache,
                self._options.store,
                config,
                layout.model_identity(self._vllm_config, of_ranks=True, of_bytes=True),
                name,
                tp_rank,
                dp_rank,
                trace,
                self._stats,
            )
            siblings.enrol(engine_id, tp_rank, mode, self._store_worker)
            return
        if self._kv_transfer_config.is_kv_producer:
            self._prefill_worker = self.prefill_worker_class(
                cache, config, model, name, trace, self._stats
            )
            siblings.enrol(engine_id, tp_rank, mode, self._prefill_worker)
        if self._kv_transfer_config.is_kv_consumer:
            self._decode_worker = self.decode_worker_class(
                cache, config, model, name, trace, self._stats
            )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return siblings.addresses(self._kv_transfer_config.engine_id, self._tp_rank)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        meta = kv_connector_metadata
        if self._prefill_worker is not None:
            self._prefill_worker.release_preempted(meta.preempted, meta.preempted_ended)
        if self._store_worker is not None:
            self._store_worker.end_saves(meta.store_preempted, meta.store_preempted_ended)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step begins.

        Unlike start_load_kv(), which vLLM calls after the forward for asynchronous loads, this
        comes before it: fetches run beside the forward, and prompts are published before their
        layers are.
        """
        super().bind_connector_metadata(connector_metadata)
        if (prefill := self._prefill_worker) is not None:
            prefill.withdraw(connector_metadata.withdrawn)
            prefill.give_up(connector_metadata.given_up)
            prefill.publish(connector_metadata.publications)
        if (decode := self._decode_worker) is not None:
            decode.load(connector_metadata.loads)
            decode.cancel(connector_metadata.cancelled)
            for tickets in connector_metadata.dismissed:
                decode.dismiss(tickets)
            decode.keep(connector_metadata.kept)
        if (store := self._store_worker) is not None:
            store.load(connector_metadata.store_loads)
            store.cancel(connector_metadata.store_cancelled)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: see bind_connector_metadata()."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled when all its layers are there."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        if self._prefill_worker is not None and self._layer_by_layer:
            self._prefill_worker.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        if self._prefill_worker is not None:
            self._prefill_worker.step_saved()
        if self._store_worker is not None:
            self._store_worker.save(self._get_connector_metadata().store_saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._store_worker is not None:
            saved, loaded = self._store_worker.take_finished(finished_req_ids)
            return saved or None, loaded or None
        prefill, decode = self._prefill_worker, self._decode_worker
        if decode is not None and self._get_connector_metadata().idle:
            decode.pause()
        sent = prefill.take_finished(finished_req_ids) if prefill is not None else None
        received = decode.take_finished() if decode is not None else None
        return sent or None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        failed = self._decode_worker.take_failed() if self._decode_worker is not None else set()
        if self._fails_requests:
            results.failed_recving = failed
        return results

    @property
    def _fails_requests(self) -> bool:
        """Whether loads fail as a whole, as vLLM wants it where there are several block tables, and
        what is left of a window is of no use without the rest."""
        return in_groups(self._windows)

    def get_block_ids_with_load_errors(self) -> set[int]:
        worker = self._decode_worker or self._store_worker
        missing = worker.take_missing_blocks() if worker is not None else set()
        return set() if self._fails_requests else missing

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._prefill_worker is None:
            return None
        asked_for = self._prefill_worker.asked_for(self._get_connector_metadata().unasked)
        return AskedFor(asked_for) if asked_for else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._stats.take()

    def shutdown(self) -> None:
        for part in (
            self._decode_worker,
            self._prefill_worker,
            self._store_worker,
            self._store,
        ):
            if part is not None:
                part.close()
        self._decode_worker = self._prefill_worker = self._store_worker = self._store = None


def _all_known(addresses: dict[int, Any]) -> dict[int, Any]:
    if not addresses or None in addresses.values():
        raise RuntimeError(
            "KVFerryConnector did not get the addresses of its workers: under MultiConnector it "
            "has to stand before connectors of other kinds"
        )
    return addresses


def _warn_wrong_role(request: "Request", role: str | None) -> None:
    """Says so when a request asks for what an engine of this kv_role does not do."""
    params = request.kv_transfer_params or {}
    for key, wrong_role, consequence in (
        ("do_remote_decode", "kv_consumer", "it hands out no ticket"),
        ("do_remote_prefill", "kv_producer", "it computes the prompt itself"),
    ):
        if params.get(key) and role == wrong_role:
            logger.warning(
                "%s asks for %s, but this engine is a %s: %s",
                request.request_id,
                key,
                role,
                consequence,
            )
