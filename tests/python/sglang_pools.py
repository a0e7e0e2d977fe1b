"""SGLang's own host pools and cache controller, on the CPU, for tests."""

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch._inductor.compile_fx  # Before the stand-in: torch would take it for the real one.

# Behind this Python's own packages: where ./dev puts SGLang, which no other test shall see.
sys.path += filter(None, [os.environ.get("KVFERRY_TEST_SGLANG")])


@contextlib.contextmanager
def stand_in_for_triton() -> Iterator[None]:
    """SGLang's modules decorate GPU kernels as they load. Triton has a gigabyte, and nothing here
    runs a kernel."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    names = ("triton", "triton.language", "triton.language.extra")
    for name in names:
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


with stand_in_for_triton():
    import sglang.srt.mem_cache.deepseek_v4_memory_pool  # noqa: F401  # The controller does later.
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache.device_pool_info import (
        KVBufferLayout,
        KVBuffers,
        MHABufferInfo,
        MLABufferInfo,
    )
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE, PAGES, LAYERS = 4, 16, 3
DTYPE = torch.bfloat16
_SHARED = {
    "page_size": PAGE,
    "host_to_device_ratio": 1.0,
    "host_size": 0,
    "pin_memory": False,
    "device": "cpu",
    "device_capacity_tokens": PAGE,
    "start_layer": 0,
    "end_layer": LAYERS,
    "host_token_capacity": PAGE * PAGES,
}


def _pointers(tensors) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def mha(layout: str, heads: int = 2) -> MHATokenToKVPoolHost:
    k, v = (tuple(torch.zeros(PAGE, heads, 8, dtype=DTYPE) for _ in range(LAYERS)) for _ in "kv")
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k,
            v=v,
            k_data_ptrs=_pointers(k),
            v_data_ptrs=_pointers(v),
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE,
        head_num=heads,
        head_dim=8,
        v_head_dim=8,
        dtype=DTYPE,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(1 << 30):
        return MHATokenToKVPoolHost(info, layout=layout, **_SHARED)


def mla(layout: str) -> MLATokenToKVPoolHost:
    buffers = tuple(torch.zeros(PAGE, 1, 12, dtype=DTYPE) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=_pointers(buffers),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        kv_cache_dim=12,
        dtype=DTYPE,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(1 << 30):
        return MLATokenToKVPoolHost(info, layout=layout, target_layer_num=LAYERS, **_SHARED)


def fill(pool, seed: int) -> None:
    """Random bits, NaNs among them: bytes have to come back, not numbers."""
    bits = torch.randint(
        -32768,
        32767,
        pool.kv_buffer.shape,
        dtype=torch.int16,
        generator=torch.Generator().manual_seed(seed),
    )
    pool.kv_buffer.view(torch.int16).copy_(bits)


def page_bytes(pool, index: int) -> bytes:
    return pool.get_data_page(index).contiguous().view(torch.uint8).numpy().tobytes()


def slots(pages) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def rank(extra: dict, **changes) -> HiCacheStorageConfig:
    """What SGLang's controller tells a backend about the rank that it is of."""
    values = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "org/model",
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**(values | changes))


class _NoDevice:
    device = "cpu"
    layer_num = LAYERS

    def register_layer_transfer_counter(self, counter) -> None:
        pass


def _alone(monkeypatch) -> SimpleNamespace:
    """The only rank, without a device; what a controller takes as its allocator."""
    parallel = SimpleNamespace(
        attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1
    )
    monkeypatch.setattr(cache_controller, "get_parallel", lambda: parallel)
    monkeypatch.setattr(cache_controller, "is_dp_attention_enabled", lambda: False)
    return SimpleNamespace(get_kvcache=_NoDevice)


def controller(monkeypatch, pool, extra: dict) -> cache_controller.HiCacheController:
    """SGLang's controller of one pool, with its storage threads."""
    made = cache_controller.HiCacheController(_alone(monkeypatch), pool, PAGE, None, None)
    made.attach_storage_backend("dynamic", PAGE, "org/model", extra)
    return made


def hybrid_controller(monkeypatch, pools: dict, extra: dict) -> HybridCacheController:
    """The one that SGLang's server has, of a pool for the KV and what is beside it."""
    entries = [
        PoolEntry(name, pool, None, lambda layer: layer, name == PoolName.KV)
        for name, pool in pools.items()
    ]
    return HybridCacheController(
        _alone(monkeypatch),
        HostPoolGroup(entries),
        PAGE,
        None,
        None,
        storage_backend="dynamic",
        prefetch_threshold=PAGE,
        model_name="org/model",
        storage_backend_extra_config=extra,
    )


def write(made, pages, hashes) -> int:
    """Backs pages up; how many tokens of them are stored."""
    made.write_storage(slots(pages), list(range(len(pages) * PAGE)), hashes)
    return made.ack_backup_queue.get(timeout=20).completed_tokens


def prefetch(made, tokens, pages) -> tuple[int, int]:
    """Loads the pages of a prompt; how many tokens were found, and how many loaded."""
    operation = made.prefetch("request", tokens)
    assert made.prefetch_hit_queue.get(timeout=20) is operation
    found = operation.storage_hit_count
    operation.host_indices = slots(pages)[:found]
    made.prefetch_buffer.put(operation)
    loaded, deadline = 0, time.monotonic() + 20
    while time.monotonic() < deadline:
        ack = made.ack_prefetch_queue.get(timeout=20)
        loaded = max(loaded, ack.completed_tokens or 0)
        if ack.completed_req:
            return found, loaded
    raise TimeoutError("the prefetch did not end")
