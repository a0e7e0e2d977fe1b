"""The halves of the connector in two engines' workers, with real endpoints and without engines.

Only for modules that have skipped themselves where vLLM is not installed.
"""

import functools

import kvferry
import numpy as np
from kvferry.vllm.device import Host
from kvferry.vllm.layout import Ranks
from kvferry.vllm.metadata import Load, LoadPart, Publication
from kvferry.vllm.telemetry import Trace, TransferStats
from kvferry.vllm.worker import DecodeWorker, PrefillWorker
from waiting import wait_for as wait

LAYERS = 3
DEADLINE_S = 20.0
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
        self.save(worker)

    def save(self, worker: PrefillWorker) -> None:
        for name in self.layer_index:
            worker.layer_saved(name)
        worker.step_saved()

    def fill(self, blocks: list[int]) -> None:
        for layer in range(LAYERS):
            for block in blocks:
                for tensor in range(2):
                    self.pool.page(layer, tensor, block)[:] = 1 + layer * 70 + block


def prefill_worker(side: Side, **options) -> PrefillWorker:
    config = kvferry.Config.make({"publish_grace_ms": 0} | options)
    return PrefillWorker(side, config, "m", "p", Trace("", 0), TransferStats())


def decode_worker(side: Side, **options) -> DecodeWorker:
    config = kvferry.Config.make({"publish_grace_ms": 0} | options)
    return DecodeWorker(side, config, "m", "d", Trace("", 0), TransferStats())


def ticket_of(worker: PrefillWorker, lease_id: int, pages: int, tokens: int = 16) -> str:
    """As the scheduler writes it, which does not know the worker's epoch."""
    return str(
        kvferry.Ticket(
            address=worker.address().address,
            epoch=0,
            lease_id=lease_id,
            num_pages=pages,
            num_tokens=tokens,
        )
    )


class Workers:
    """A prefill engine's, whose request is "p", and a decode engine's, which loads it as "d"."""

    def __init__(self, source: Side | None = None, target: Side | None = None, **options) -> None:
        self.source, self.target = source or Side(), target or Side()
        self.prefill = prefill_worker(self.source, **options)
        self.decode = decode_worker(self.target, **options)
        self.stats = self.decode._stats
        self.finished: set[str] = set()

    def part(self, lease_id: int, blocks: list[int]) -> LoadPart:
        ticket = ticket_of(self.prefill, lease_id, len(blocks))
        return LoadPart([ticket], 0, blocks, len(blocks))

    def load(self, *parts: LoadPart, tokens: int = 16) -> None:
        self.decode.load([Load("d", list(parts), 0, tokens)])

    def part_fetched(self, lease_id: int) -> bool:
        return not self.prefill._leases[lease_id].live

    def loaded(self) -> bool:
        self.decode.pause()
        self.finished |= self.decode.take_finished()
        return "d" in self.finished

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


def publication(lease_id: int, blocks: list[int]) -> Publication:
    return Publication("p", lease_id, blocks, 16)


def overwrite(side: Side, blocks: list[int]) -> None:
    """As another request does that is given these blocks."""
    for layer in range(LAYERS):
        for block in blocks:
            for tensor in range(2):
                side.pool.page(layer, tensor, block)[:] = 0
