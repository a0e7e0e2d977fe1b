"""Engines whose ranks have other shares of the heads hand each other blocks."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvferry.vllm.layout import Ranks  # noqa: E402
from kvferry.vllm.metadata import Load, LoadPart  # noqa: E402
from vllm_workers import (  # noqa: E402
    LAYERS,
    Side,
    decode_worker,
    prefill_worker,
    publication,
    ticket_of,
    wait_for,
)


class Engines:
    """A prefill and a decode engine, each of several ranks."""

    def __init__(self, total_heads: int, prefill_size: int, decode_size: int) -> None:
        self.sources = [Side(Ranks(i, prefill_size, total_heads)) for i in range(prefill_size)]
        self.targets = [Side(Ranks(i, decode_size, total_heads)) for i in range(decode_size)]
        self.prefill = [prefill_worker(side) for side in self.sources]
        self.decode = [decode_worker(side) for side in self.targets]
        self._loaded: set[int] = set()
        self._freed: set[int] = set()

    def tickets(self, lease_id: int, blocks: int) -> list[str]:
        return [ticket_of(worker, lease_id, blocks) for worker in self.prefill]

    def compute(self, lease_id: int, blocks: list[int]) -> None:
        for worker, side in zip(self.prefill, self.sources, strict=True):
            worker.publish([publication(lease_id, blocks)])
            for layer in range(LAYERS):
                for block in blocks:
                    for page in heads(side, layer, block):
                        page[:] = computed(side, layer, block)
            side.save(worker)

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
