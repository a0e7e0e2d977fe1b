"""Which blocks vLLM's own manager gives requests of models with windows, without an engine."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

from kvferry.vllm import layout  # noqa: E402
from kvferry.vllm.parts import blocks_of, handed_over, in_groups  # noqa: E402
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


def cache_config(drafts: int) -> KVCacheConfig:
    """drafts: tokens that a model with as many MTP modules drafts."""
    sizes = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    window = SlidingWindowSpec(
        **sizes, sliding_window=WINDOW, extra_retained_tokens=max(0, drafts - 1)
    )
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**sizes)),
        KVCacheGroupSpec(["window"], window, is_eagle_group=drafts > 0),
    ]
    return KVCacheConfig(num_blocks=400, kv_cache_tensors=[], kv_cache_groups=groups)


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
    missing = prompt - in_groups(layout.windows(config))
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
    windows = layout.windows(config)
    for prompt in [2, 100, *range(600, 600 + BLOCK)]:
        tokens = handed_over(windows, prompt)
        for group, allocated in enumerate(blocks_for_a_load(config, prompt, drafts)):
            assert allocated <= set(blocks_of(windows, group, tokens, BLOCK)), (prompt, group)
