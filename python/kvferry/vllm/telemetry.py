"""What the connector says about itself: log lines, a trace file, numbers for vLLM's metrics."""

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

import kvferry
from kvferry.vllm.stores import StoreOptions

logger = logging.getLogger("kvferry")
# The keys of kv_connector_extra_config that are no fields of Config.
TRACE_PATH = "trace_path"
MODE = "mode"
STORE = "store"
SHARE_KV_CACHE = "share_kv_cache"
NAMESPACE = "namespace"
MODES = ("pull", "store")


def setup_logging() -> None:
    """Sends our log where vLLM's goes, unless the application gave it handlers of its own."""
    engine = logging.getLogger("vllm")
    if logger.handlers or not engine.handlers:
        return
    logger.handlers = list(engine.handlers)
    logger.setLevel(engine.getEffectiveLevel())
    logger.propagate = False


class Options(NamedTuple):
    """A kv_connector_extra_config, checked."""

    fields: dict[str, Any]  # Of kvferry.Config.
    trace_path: str  # "": no trace.
    mode: str  # One of MODES.
    store: StoreOptions | None  # In store mode, as the next one.
    namespace: str  # Engines share blocks only when theirs is the same.
    share_kv_cache: bool  # With engines on this host that fetch.

    @staticmethod
    def parse(extra_config: dict[str, Any]) -> "Options":
        """Raises ValueError, listing the right keys, for a wrong key or value, and for a file that
        cannot be opened."""
        fields = dict(extra_config)
        trace_path = fields.pop(TRACE_PATH, "")
        if not isinstance(trace_path, str):
            raise ValueError(f"{TRACE_PATH} is {trace_path!r}; it has to be the path of a file")
        share = fields.pop(SHARE_KV_CACHE, True)
        if not isinstance(share, bool):
            raise ValueError(f"{SHARE_KV_CACHE} is {share!r}; it has to be true or false")
        mode = fields.pop(MODE, MODES[0])
        if mode not in MODES:
            raise ValueError(f"{MODE} is {mode!r}; it has to be one of {', '.join(MODES)}")
        for key in (STORE, NAMESPACE):
            if mode != "store" and key in fields:
                raise ValueError(f'{key} is of no use without "{MODE}": "store"')
        namespace = fields.pop(NAMESPACE, "")
        if not isinstance(namespace, str):
            raise ValueError(f"{NAMESPACE} is {namespace!r}; it has to be a text")
        store = StoreOptions.parse(fields.pop(STORE, None)) if mode == "store" else None
        try:
            config = kvferry.Config.make(fields)
        except ValueError as error:
            raise ValueError(
                f"kv_connector_extra_config: {error} (KVFerryConnector also takes {MODE}, "
                f"{NAMESPACE}, {SHARE_KV_CACHE}, {STORE} and {TRACE_PATH})"
            ) from error
        # What is used only when there is a model, which takes long to load.
        config.check_key_file()
        try:
            Trace(trace_path, 0).close()
        except OSError as error:
            raise ValueError(f"{TRACE_PATH}: {error}") from error
        return Options(fields, trace_path, mode, store, namespace, share)

    def config(self, rank: int) -> kvferry.Config:
        """For one worker: rank r takes the r-th port behind a fixed listen_port or data_port.
        Ranks count on over data-parallel ranks, which are engines of one configuration."""
        config = kvferry.Config.make(self.fields)
        fixed = {name: getattr(config, name) for name in ("listen_port", "data_port")}
        own = {name: port + rank for name, port in fixed.items() if port != 0}
        return kvferry.Config.make(self.fields | own)


class Trace:
    """One JSON object a line, appended to a file that several workers may share."""

    def __init__(self, path: str, tp_rank: int):
        """Raises OSError when the file cannot be opened. An empty path: nothing is written."""
        self._file = open(path, "a", encoding="utf-8") if path else None  # noqa: SIM115
        self._tp_rank = tp_rank

    def write(self, event: str, **fields: Any) -> None:
        if self._file is None:
            return
        line = {"event": event, "time": time.time(), "tp_rank": self._tp_rank, "pid": os.getpid()}
        try:
            self._file.write(json.dumps(line | fields) + "\n")
            self._file.flush()  # One write a line, at the end of the file: lines do not mix.
        except OSError as error:
            logger.error("trace_path: %s; tracing ends", error)
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass
class FetchRecord:
    """One finished fetch, for the log, the trace and the metrics."""

    request_id: str
    ok: bool
    error: str
    blocks: int  # Asked for.
    blocks_skipped: int  # In the local prefix cache already.
    blocks_missing: int  # Did not arrive whole.
    bytes: int  # Arrived.
    wait_ms: float  # Until the request left: hello and queueing.
    move_ms: float  # From there until all had arrived.
    cancelled: bool = False  # Its client has gone: that it has not arrived is no failure.

    @property
    def gb_per_s(self) -> float:
        return self.bytes / (self.move_ms * 1e6) if self.move_ms > 0 else 0.0

    def log(self) -> None:
        if self.ok:
            logger.info(
                "fetched KV of %s: %d blocks (%d more were cached), %d bytes, %.1f ms, %.2f GB/s",
                self.request_id,
                self.blocks,
                self.blocks_skipped,
                self.bytes,
                self.move_ms,
                self.gb_per_s,
            )
        elif self.cancelled:
            logger.info("fetching KV of %s ended early: it was aborted", self.request_id)
        else:
            logger.warning(
                "fetching KV of %s failed, %d of %d blocks are missing: %s",
                self.request_id,
                self.blocks_missing,
                self.blocks,
                self.error,
            )


# Of what endpoints count (transport/metrics.h), what vLLM's metrics have too, with what it means.
COUNTERS = {
    "bytes_sent": "Bytes of KV sent to other engines, or read by them in place.",
    "transfers_in_place": "Transfers to other engines that read the blocks where they lie.",
    "transfers_on_device": "Transfers to other engines by way of chunks in this one's GPU.",
    "transfers_direct": "Transfers to other engines by one-sided reads over the network.",
    "transfers_ok": "Transfers to other engines that ended well.",
    "transfers_failed": "Transfers to other engines that did not.",
    "fetches_refused": "Fetches of other engines that were refused.",
    "fetches_restarted": "Fetches that were asked anew, behind what had come: after silence, a "
    "preemption, or reads that failed or came too late.",
    "hellos_refused": "Engines that were refused: another model, layout, release or the like.",
    "peers_lost": "Sessions with other engines that ended, in order or not.",
    "strangers": "Connections that were closed because they did not become a peer's.",
    "messages_malformed": "Messages that were dropped because they were malformed.",
    "chunks_dropped": "Chunks that were dropped: of no live fetch, or contradicting one.",
    "checksum_failures": "Chunks whose checksum was wrong.",
}
GAUGES = {
    "peers": "Sessions with other engines.",
    "peers_mapped": "Of them, those to which KV goes through shared memory.",
    "transfers_active": "Transfers to other engines under way.",
    "fetches_active": "Fetches from other engines under way.",
    "leases_live": "Published prompts, or parts of them, that are not fetched yet.",
    "arena_chunks": "Chunks that the arena has room for.",
    "arena_chunks_taken": "Of them, those in use.",
}


class _Watch:
    """What one endpoint of this worker counts."""

    def __init__(self, metrics: Callable[[], dict[str, int]]):
        self._metrics = metrics
        self._counts: dict[str, int] = {}
        self._gauges: dict[str, int] = {}

    def take(self) -> tuple[dict[str, int], dict[str, int]]:
        """(what counters have gained since the last time, all gauges, or none if none has
        changed)"""
        try:
            now = self._metrics()
        except kvferry.Error:  # It is closed.
            return {}, {}
        counts = {name: now[name] for name in COUNTERS if name in now}
        gained = {
            name: more for name in counts if (more := counts[name] - self._counts.get(name, 0))
        }
        gauges = {name: now[name] for name in GAUGES if name in now}
        changed = {} if gauges == self._gauges else gauges
        self._counts, self._gauges = counts, gauges
        return gained, changed


@dataclass
class TransferStats(KVConnectorStats):
    """Numbers of one interval, which vLLM carries to its logger."""

    LISTS = ("bytes", "move_ms", "failed", "expired")
    # And two dicts: of counters what they gained, of all ranks together; of gauges the last values,
    # by whose they are: vLLM aggregates over ranks and over time alike.
    COUNTS, GAUGES = "counts", "gauges"
    # So often endpoints are asked at most. It takes some 30 us, and steps may be short.
    WATCH_S = 0.1

    def __post_init__(self) -> None:
        self.data = self._empty() | self.data
        self._watches: dict[str, _Watch] = {}
        self._watched = -self.WATCH_S  # time.monotonic()

    @classmethod
    def _empty(cls) -> dict[str, Any]:
        return {key: [] for key in cls.LISTS} | {cls.COUNTS: {}, cls.GAUGES: {}}

    def reset(self) -> None:
        self.data = self._empty()

    def watch(self, whose: str, metrics: Callable[[], dict[str, int]]) -> None:
        """From now on take() has what metrics() of an endpoint says, too. `whose`: of all ranks of
        an engine nobody else's."""
        self._watches[whose] = _Watch(metrics)

    def _ask_watched(self) -> None:
        now = time.monotonic()
        if not self._watches or now - self._watched < self.WATCH_S:
            return
        self._watched = now
        for whose, watch in self._watches.items():
            gained, gauges = watch.take()
            _add(self.data[self.COUNTS], gained)
            if gauges:
                self.data[self.GAUGES][whose] = gauges

    def record(self, fetch: FetchRecord) -> None:
        if fetch.ok:
            self.data["bytes"].append(fetch.bytes)
            self.data["move_ms"].append(fetch.move_ms)
        elif not fetch.cancelled:
            self.data["failed"].append(1)

    def record_expired(self) -> None:
        self.data["expired"].append(1)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key in self.LISTS:
            self.data[key].extend(other.data.get(key, []))
        _add(self.data[self.COUNTS], other.data.get(self.COUNTS, {}))
        self.data[self.GAUGES].update(other.data.get(self.GAUGES, {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        total, milliseconds = sum(self.data["bytes"]), sum(self.data["move_ms"])
        counts = dict(self.data[self.COUNTS])
        more = {"MB sent": round(sent / 1e6, 3)} if (sent := counts.pop("bytes_sent", 0)) else {}
        more |= {name.replace("_", " ").capitalize(): count for name, count in counts.items()}
        return {
            "Fetches": len(self.data["bytes"]),
            "MB fetched": round(total / 1e6, 3),
            "Avg ms": round(milliseconds / max(1, len(self.data["bytes"])), 3),
            "GB/s": round(total / (milliseconds * 1e6), 3) if milliseconds else 0.0,
            "Failed fetches": len(self.data["failed"]),
            "Expired leases": len(self.data["expired"]),
            **more,
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def take(self) -> "TransferStats | None":
        """These numbers, None if there are none; this object starts anew. Never raises."""
        self._ask_watched()
        if self.is_empty():
            return None
        taken = TransferStats(self.data)
        self.reset()
        return taken


def _add(counts: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


class TransferMetrics(KVConnectorPromMetrics):
    """The same numbers for Prometheus."""

    # fetch_timeout_ms is 30 s, and can be what max_fetch_timeout_ms is, 600 s.
    _SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._bytes = self._made(Counter, "fetched_bytes", "Bytes of KV fetched or loaded.")
        self._seconds = self._made(
            Histogram,
            "fetch_seconds",
            "Time that the KV of a request took to arrive.",
            buckets=self._SECONDS,
        )
        self._failed = self._made(Counter, "failed_fetches", "Fetches and loads that failed.")
        self._expired = self._made(Counter, "expired_leases", "Prompts that nobody fetched.")
        self._counters = {name: self._made(Counter, name, text) for name, text in COUNTERS.items()}
        # As vLLM's own: which of several API server processes an engine tells changes.
        self._gauges = {
            name: self._made(Gauge, name, text, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        # By engine and whose they are.
        self._last: dict[int, dict[str, dict[str, int]]] = {}

    def _made(self, kind: type, name: str, documentation: str, **more: Any) -> dict[int, Any]:
        classes = {
            Counter: self._counter_cls,
            Gauge: self._gauge_cls,
            Histogram: self._histogram_cls,
        }
        metric = classes[kind](
            name=f"vllm:kvferry_{name}",
            documentation=documentation,
            labelnames=self._labelnames,
            **more,
        )
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data = TransferStats(transfer_stats_data).data
        self._bytes[engine_idx].inc(sum(data["bytes"]))
        for milliseconds in data["move_ms"]:
            self._seconds[engine_idx].observe(milliseconds / 1e3)
        self._failed[engine_idx].inc(len(data["failed"]))
        self._expired[engine_idx].inc(len(data["expired"]))
        for name, count in data[TransferStats.COUNTS].items():
            self._counters[name][engine_idx].inc(count)
        if not data[TransferStats.GAUGES]:
            return
        last = self._last.setdefault(engine_idx, {})
        last.update(data[TransferStats.GAUGES])
        for name, gauge in self._gauges.items():
            gauge[engine_idx].set(sum(gauges.get(name, 0) for gauges in last.values()))
