"""Blocks of another size, order or dtype are made of the prefill engine's."""

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvferry.vllm.layout import Ranks  # noqa: E402
from kvferry.vllm.metadata import LoadPart, Publication  # noqa: E402
from vllm_workers import LAYERS, Side, Workers, publication, ticket_of, wait_for  # noqa: E402


def test_values_of_an_fp8_cache_are_made_of_the_prefill_engines():
    """A cache in fp8, of a scale of its own, from one in float32."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    workers = Workers(target=Side(dtype="float8_e4m3fn", scale=0.5))
    values = np.linspace(-9, 9, 4 * 8, dtype=np.float32)
    for layer in range(LAYERS):
        workers.source.pool.page(layer, 1, 3).view(np.float32)[:] = values * (layer + 1)
    workers.prefill.publish([publication(101, [3])])
    workers.source.save(workers.prefill)
    workers.load(workers.part(101, [7]))
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == set()
    for layer in range(LAYERS):
        got = torch.from_numpy(workers.target.pool.page(layer, 1, 7)).view(torch.float8_e4m3fn)
        want = torch.from_numpy(values * (layer + 1) / 0.5).to(torch.float8_e4m3fn)
        assert torch.equal(got.float(), want.float())
    workers.close()


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
    ranks = Ranks(0, 1, 2)
    workers = Workers(Side(ranks), Side(ranks, page_size, page_format))
    source, target, prefill = workers.source, workers.target, workers.prefill

    def load(lease_id: int, num_blocks: int, num_pages: int = 3) -> set[int]:
        ticket = ticket_of(prefill, lease_id, num_pages, tokens=11)
        workers.finished.clear()
        workers.load(LoadPart([ticket], 0, blocks, num_blocks), tokens=11)
        wait_for(workers.loaded)
        return workers.decode.take_missing_blocks()

    try:
        prefill.publish([Publication("p", lease, [5, 2, 6], 11) for lease in (101, 102, 103)])
        random = np.random.default_rng(1)
        for layer in range(LAYERS):
            for block in [5, 2, 6]:
                values = random.random(4 * 2 * 8, dtype=np.float32)
                source.pool.page(layer, 0, block)[:] = values.view(np.uint8)
        source.save(prefill)
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
        workers.close()
