"""Which blocks vLLM's own manager gives requests of models with windows, without an engine."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

from kvferry.vllm import layout  # noqa: E402
from kvferry.vllm.parts import (  # noqa: E402
    blocks_of,
    handed_over,
    in_groups,
    most_blocks_computing,
    most_blocks_loading,
)
from kvferry.vllm.room import Room  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request  # noqa: E402

BLOCK = 16
WINDOW = 128
NULL_BLOCK = 0


def vllm_config(max_model_len: int = 4096, in_flight: int = 8192, lookahead: int = 0):
    return SimpleNamespace(
        max_in_flight_tokens=in_flight,
        num_lookahead_tokens=lookahead,
        model_config=SimpleNamespace(max_model_len=max_model_len),
    )


def cache_config(drafts: int = 0, window: int = WINDOW, windows: int = 1) -> KVCacheConfig:
    """drafts: tokens that a model with as many MTP modules drafts. windows: groups of that kind."""
    sizes = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    spec = SlidingWindowSpec(
        **sizes, sliding_window=window, extra_retained_tokens=max(0, drafts - 1)
    )
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**sizes))]
    for n in range(windows):
        groups.append(KVCacheGroupSpec([f"window.{n}"], spec, is_eagle_group=drafts > 0))
    return KVCacheConfig(num_blocks=1000, kv_cache_tensors=[], kv_cache_groups=groups)


def manager_of(config: KVCacheConfig, drafts: int) -> KVCacheManager:
    return KVCacheManager(
        config,
        max_model_len=4096,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        use_eagle=drafts > 0,
        num_prefill_lookahead=drafts,
    )


def of_vllm(prompt: int) -> Request:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    params = SamplingParams(max_tokens=8)
    return Request("r", list(range(prompt)), params, None, block_hasher=hasher)


def blocks_for_a_load(config: KVCacheConfig, prompt: int, drafts: int) -> list[set[int]]:
    """By group, the places of those that vLLM allocates, and caches when they have come."""
    manager, it = manager_of(config, drafts), of_vllm(prompt)
    hit, *_ = manager.get_computed_blocks(it)
    missing = prompt - in_groups(layout.windows(vllm_config(), config))
    assert manager.allocate_slots(
        it,
        0,
        new_computed_blocks=hit,
        num_external_computed_tokens=missing,
        delay_cache_blocks=True,
    )
    tables = manager.get_block_ids("r")
    return [{at for at, block in enumerate(ids) if block != NULL_BLOCK} for ids in tables]


@pytest.mark.parametrize("drafts", [0, 1, 3, 16])
def test_every_block_that_vllm_allocates_is_loaded(drafts: int):
    """Whoever begins with the same tokens later finds all of them in the prefix cache."""
    config = cache_config(drafts)
    windows = layout.windows(vllm_config(), config)
    for prompt in [2, 100, *range(600, 600 + BLOCK)]:
        tokens = handed_over(windows, prompt)
        for group, allocated in enumerate(blocks_for_a_load(config, prompt, drafts)):
            assert allocated <= set(blocks_of(windows, group, tokens, BLOCK)), (prompt, group)


def num_allocated(manager: KVCacheManager) -> int:
    return sum(block != NULL_BLOCK for ids in manager.get_block_ids("r") for block in ids)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("step", [50, 64, 1000])
def test_a_prompt_that_is_computed_never_has_more_blocks_than_are_counted(step: int, drafts: int):
    """With one step beside another one, as vLLM schedules asynchronously, and drafts."""
    config = cache_config(drafts, windows=2)
    most_of_all = 0
    for prompt in (10, 200, *range(1500, 1500 + BLOCK)):
        manager, it = manager_of(config, drafts), of_vllm(prompt)
        most, earlier = 0, 0
        while it.num_computed_tokens < prompt:
            tokens = min(step, prompt - it.num_computed_tokens)
            it.num_in_flight_tokens = earlier
            assert manager.allocate_slots(it, tokens, num_lookahead_tokens=drafts)
            most = max(most, num_allocated(manager))
            it.num_computed_tokens += tokens
            earlier = tokens
        windows = layout.windows(vllm_config(in_flight=2 * step, lookahead=drafts), config)
        counted = most_blocks_computing(windows, prompt, BLOCK)
        at_end = -(-drafts // BLOCK) * len(windows)  # What is drafted behind a prompt.
        assert most <= counted + at_end, (prompt, most, counted)
        most_of_all = max(most_of_all, most - counted)
    assert most_of_all >= -3 * len(windows)  # And not many fewer.


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_load_never_has_more_blocks_than_are_counted(drafts: int):
    config = cache_config(drafts, windows=2)
    windows = layout.windows(vllm_config(), config)
    for prompt in [2, 100, *range(600, 600 + BLOCK)]:
        allocated = sum(map(len, blocks_for_a_load(config, prompt, drafts)))
        counted = most_blocks_loading(windows, prompt, BLOCK)
        assert counted - len(windows) <= allocated <= counted, prompt


@pytest.mark.parametrize(
    "window, windows, num_blocks, loads",
    [(128, 1, 17_400, 17), (1024, 6, 40_000, 31)],
    ids=["as gpt-oss", "as Gemma 3"],
)
def test_many_prompts_of_a_model_with_windows_are_loaded_at_a_time(
    window: int, windows: int, num_blocks: int, loads: int
):
    """8,000 tokens each, in a cache for two prompts of 131,072 tokens or so."""
    config = vllm_config(max_model_len=131_072)
    kept = layout.windows(config, cache_config(window=window, windows=windows))
    room = Room(num_blocks, most_blocks_computing(kept, 131_072, BLOCK))
    blocks = most_blocks_loading(kept, 8000, BLOCK)
    let_in = 0
    while room.lets_in(let_in, blocks):
        room.loads.take(let_in, blocks)
        let_in += 1
    assert let_in == loads
