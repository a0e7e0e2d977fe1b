"""vLLM's KV cache tensors as a kvferry pool, without copying them."""

import os
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

import kvferry
from kvferry.vllm.device import device_of
from kvferry.vllm.parts import in_groups
from kvferry.vllm.shared_cache import SharedAllocation

_MAX_MODEL_BYTES = 256  # What a hello may carry.


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises NotImplementedError, naming the setting, for engines we would serve wrongly."""
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if (size := getattr(parallel, name, 1)) != 1:
            raise NotImplementedError(f"KVFerryConnector needs {name} 1, not {size}")
    if vllm_config.model_config.enable_sleep_mode:
        raise NotImplementedError(
            "KVFerryConnector does not serve engines with enable_sleep_mode: one that sleeps takes "
            "the memory of blocks away that another engine may still be reading"
        )
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        known = isinstance(spec, (FullAttentionSpec, SlidingWindowSpec))
        if not known or isinstance(spec, SlidingWindowMLASpec):
            raise NotImplementedError(
                f"KVFerryConnector serves models with full attention and sliding windows, not "
                f"{type(spec).__name__}"
            )
    sizes = {group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups}
    if len(sizes) != 1:
        raise NotImplementedError(
            f"KVFerryConnector needs blocks of one size in all layers, not {sorted(sizes)}"
        )


def check_store_supported(
    vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
) -> None:
    """Raises, naming the setting, for engines that a store would fail: ValueError, or
    NotImplementedError for a model that it does not serve."""
    if in_groups(windows(kv_cache_config)):
        raise NotImplementedError(
            'KVFerryConnector in mode "store" serves models with full attention alone. '
            "--disable-hybrid-kv-cache-manager lets models that have other layers too keep all "
            "blocks of all of them"
        )
    transfer = vllm_config.kv_transfer_config
    if role == KVConnectorRole.WORKER and not _recomputes(vllm_config):
        raise ValueError(
            'KVFerryConnector in mode "store" needs "kv_load_failure_policy": "recompute", of the '
            "whole engine (under MultiConnector: beside the outer kv_connector_extra_config): a "
            "store may drop a block after it has promised it, and such a request should not fail"
        )
    if transfer.kv_role != "kv_both":
        raise ValueError(
            f'KVFerryConnector in mode "store" needs "kv_role": "kv_both", not {transfer.kv_role!r}'
        )


def _recomputes(vllm_config: VllmConfig) -> bool:
    """Of the engine: under MultiConnector a connector is given a configuration of its own, and
    vLLM heeds the outer one, which only workers can see."""
    engine = get_current_vllm_config_or_none() or vllm_config
    return engine.kv_transfer_config.kv_load_failure_policy == "recompute"


def windows(kv_cache_config: KVCacheConfig) -> list[int | None]:
    """By group of layers: of how many tokens before the next one it keeps the blocks; None: all."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None for spec in specs]


def block_size(kv_cache_config: KVCacheConfig) -> int:
    """Tokens in one block."""
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size


class Ranks(NamedTuple):
    """Which of an engine's tensor-parallel ranks somebody is, and what they share out."""

    rank: int
    size: int
    total_heads: int  # KV heads of the model; 1 of a latent (MLA), which every rank holds.

    @property
    def heads(self) -> tuple[int, int]:
        """(first, total), as endpoints are told."""
        return kvferry.heads_of_rank(self.total_heads, self.rank, self.size)[0], self.total_heads


def model_identity(vllm_config: VllmConfig, *, of_ranks: bool, of_bytes: bool) -> str:
    """What both sides have to have in common beside the layout of their KV.

    of_ranks: of blocks as engines with as many tensor-parallel ranks have them, whichever rank's.
    of_bytes: nobody makes another kind of fp8 out of what is in them.
    """
    model = vllm_config.model_config
    shard = f" tp {vllm_config.parallel_config.tensor_parallel_size}" if of_ranks else ""
    revision = f" revision {model.revision}" if model.revision else ""
    quantization = f" quantization {model.quantization}" if model.quantization else ""
    # Both kinds of fp8 lie in tensors of bytes, which may be all that a layout knows of them.
    cache_dtype = vllm_config.cache_config.cache_dtype
    if of_bytes and _is_fp8(vllm_config):
        quantization += f" KV {'fp8_e4m3' if cache_dtype == 'fp8' else cache_dtype}"
    name = os.path.basename(os.path.normpath(model.model))  # Paths differ from node to node.
    room = _MAX_MODEL_BYTES - len((revision + quantization + shard).encode())
    return name.encode()[:room].decode(errors="ignore") + revision + quantization + shard


def _is_fp8(vllm_config: VllmConfig) -> bool:
    return vllm_config.cache_config.cache_dtype.startswith("fp8")


class AdoptedCache:
    """The pool over an engine's KV cache, what of it a layer's name stands for, and which heads.

    A layer of the pool may hold one layer of each group, in blocks that are the groups' own.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_caches: dict[str, torch.Tensor],
        tp_rank: int,
        allocation: SharedAllocation | None = None,
    ):
        """Adopts the tensors and keeps them alive. allocation: what they may have come from.

        Raises NotImplementedError, naming layer and shape, for tensors in which the bytes of a
        block are not one run (or two: K and V), or that lie neither in host memory nor on a GPU, or
        differ from layer to layer, or do not have the rank's share of the model's heads.
        """
        if not kv_caches:
            raise ValueError("vLLM registered no KV cache")
        num_blocks, tokens = kv_cache_config.num_blocks, block_size(kv_cache_config)
        distinct: dict[int, torch.Tensor] = {}  # By address: some layers share another one's cache.
        self.layer_index: dict[str, int] = {}
        # By name of a layer that has a cache of its own.
        self.group_of: dict[str, int] = {
            name: group
            for group, layers in enumerate(kv_cache_config.kv_cache_groups)
            for name in layers.layer_names
        }
        first: tuple[str, _Arrangement] | None = None
        for name, cache in kv_caches.items():
            arrangement = _arrangement(name, cache, num_blocks, tokens)
            first = first or (name, arrangement)
            if arrangement != first[1]:
                raise NotImplementedError(
                    f"KVFerryConnector needs the same KV cache in every layer: {first[0]} has "
                    f"{first[1]} and {name} has {arrangement}"
                )
            distinct.setdefault(cache.data_ptr(), cache)
            self.layer_index[name] = list(distinct).index(cache.data_ptr())
        assert first is not None
        tensors = list(distinct.values())
        self.device = device_of(tensors)
        self.num_layers = len(tensors)
        self.ranks = _ranks(vllm_config, tp_rank, first[1].parts[0][1])
        # What is kept for a window begins at a block, and with blocks of another size elsewhere.
        self.converts_pages = not in_groups(windows(kv_cache_config))
        page_format = _page_format(vllm_config, kv_caches, first[1].order)
        numbers = None
        if page_format == first[1].order:  # Else only the same engine knows where values lie.
            numbers = _fp8_numbers(vllm_config, self.layer_index, len(first[1].parts))
        self.scales = numbers.scales if numbers else []
        # Whether the layout says what the bytes of a block stand for.
        self.knows_numbers = numbers is not None or not _is_fp8(vllm_config)
        self.pool = kvferry.KvPool.adopt(
            kvferry.KvLayout(
                num_layers=self.num_layers,
                page_size=tokens,
                dtype=numbers.dtype if numbers else first[1].dtype,
                page_format=page_format,
                tensors=first[1].parts,
            ),
            _buffers(tensors, len(first[1].parts)),
            tensors,
            allocation and allocation.holding(tensors),
            self.device.memory,
        )


def _ranks(vllm_config: VllmConfig, tp_rank: int, num_heads: int) -> Ranks:
    """Of a rank with a cache of so many heads."""
    size = vllm_config.parallel_config.tensor_parallel_size
    if size == 1:
        return Ranks(0, 1, num_heads)
    model = vllm_config.model_config
    total = 1 if model.use_mla else model.get_total_num_kv_heads()
    if kvferry.heads_of_rank(total, tp_rank, size)[1] != num_heads:
        raise NotImplementedError(
            f"the KV cache has {num_heads} heads, of {total} that {size} tensor-parallel ranks "
            f"share out: this arrangement is unknown to KVFerryConnector"
        )
    return Ranks(tp_rank, size, total)


class _Arrangement(NamedTuple):
    """What one layer's tensor holds."""

    parts: list[tuple[str, int, int]]  # Name, heads, head dim.
    order: str  # Of a block's values: "HND", "NHD" or "ND".
    dtype: str


def _arrangement(name: str, cache: torch.Tensor, num_blocks: int, tokens: int) -> _Arrangement:
    if not isinstance(cache, torch.Tensor):
        raise NotImplementedError(f"layer {name} registered a {type(cache).__name__}, not a tensor")
    shape = tuple(cache.shape)
    dtype = str(cache.dtype).removeprefix("torch.")
    problem = "this arrangement is unknown to KVFerryConnector"
    is_fused = len(shape) == 4 and (shape[0], shape[2]) == (num_blocks, tokens)
    if is_fused and cache.is_contiguous():
        return _Arrangement([("kv", shape[1], shape[3])], "HND", dtype)
    if is_fused and cache.transpose(1, 2).is_contiguous():
        return _Arrangement([("kv", shape[1], shape[3])], "NHD", dtype)
    if not cache.is_contiguous():
        problem = f"strides {cache.stride()} are not contiguous"
    elif len(shape) == 3 and shape[:2] == (num_blocks, tokens):
        return _Arrangement([("latent", 1, shape[2])], "ND", dtype)
    elif len(shape) == 5 and shape[:2] == (2, num_blocks) and tokens in shape[2:4]:
        order, heads = ("NHD", shape[3]) if shape[2] == tokens else ("HND", shape[2])
        return _Arrangement([("k", heads, shape[4]), ("v", heads, shape[4])], order, dtype)
    raise NotImplementedError(
        f"KV cache of layer {name}: shape {shape} on {cache.device}, with {num_blocks} blocks of "
        f"{tokens} tokens: {problem}"
    )


def _buffers(tensors: list[torch.Tensor], num_parts: int) -> list[tuple[int, int]]:
    """(address, bytes): the first part of every layer, then the second."""
    buffers = []
    for part in range(num_parts):
        for tensor in tensors:
            size = tensor.nbytes // num_parts
            buffers.append((tensor.data_ptr() + part * size, size))
    return buffers


class _Numbers(NamedTuple):
    """What the bytes of a cache stand for."""

    dtype: str
    scales: list[float]  # As endpoints are told.


_FP8_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def _fp8_numbers(
    vllm_config: VllmConfig, layer_index: dict[str, int], num_parts: int
) -> _Numbers | None:
    """Of an fp8 cache whose layers say what they divide by before they store.

    None of any other, and of one in which values that lie in one buffer have several scales.
    """
    dtype = _FP8_DTYPES.get(vllm_config.cache_config.cache_dtype)
    if dtype is None or current_platform.is_fp8_fnuz():
        return None
    by_layer: dict[int, tuple[float, ...]] = {}
    for name, index in layer_index.items():
        attention = vllm_config.compilation_config.static_forward_context.get(name)
        k = getattr(attention, "_k_scale_float", None)
        v = getattr(attention, "_v_scale_float", None)
        if k is None or v is None:
            return None
        if num_parts == 1 and k != v and not vllm_config.model_config.use_mla:
            return None
        scales = (k, v)[:num_parts]  # A latent is stored with K's.
        if by_layer.setdefault(index, scales) != scales:
            return None
    layers = range(len(by_layer))
    return _Numbers(dtype, [by_layer[layer][part] for part in range(num_parts) for layer in layers])


def _page_format(vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor], order: str) -> str:
    """A name for the order of values in a block. Blocks of equal names are exchanged as they are;
    those of NHD and HND are converted, also to other block sizes.

    Raises NotImplementedError when layers differ in it.
    """
    formats = {_layer_format(vllm_config, name, it, order) for name, it in kv_caches.items()}
    if len(formats) != 1:
        raise NotImplementedError(
            f"KVFerryConnector needs the same order of values in every layer, not {sorted(formats)}"
        )
    return formats.pop()


def _layer_format(vllm_config: VllmConfig, name: str, cache: torch.Tensor, order: str) -> str:
    if cache.device.type != "cpu":
        return order
    # The CPU backend packs K in the way of the instruction set that its attention kernel uses.
    attention: Any = vllm_config.compilation_config.static_forward_context.get(name)
    return f"vllm-cpu-{getattr(attention, 'isa', 'unknown')}-{order}"
