"""vLLM's KV cache tensors as a kvferry pool, without copying them."""

import hashlib
import itertools
import os
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

import kvferry
from kvferry.vllm.device import device_of
from kvferry.vllm.parts import (
    LAST_STATE,
    STATE,
    WHOLE,
    Kind,
    Window,
    has_states,
    in_groups,
)
from kvferry.vllm.shared_cache import SharedAllocation

_MAX_MODEL_BYTES = 256  # What a hello may carry.


def attention_specs(kv_cache_config: KVCacheConfig) -> list[AttentionSpec]:
    """Of the groups of layers with attention."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [spec for spec in specs if not isinstance(spec, MambaSpec)]


def windows(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[Window]:
    """By group of layers, as kvferry.vllm.parts has them."""
    groups = kv_cache_config.kv_cache_groups
    return [_window(vllm_config, group.kv_cache_spec) for group in groups]


def _window(vllm_config: VllmConfig, spec: KVCacheSpec) -> Window:
    if isinstance(spec, MambaSpec):
        return LAST_STATE if spec.mamba_cache_mode == "align" else STATE
    if not isinstance(spec, SlidingWindowSpec):
        return WHOLE
    most_blocks = spec.max_admission_blocks_per_request(
        # What is drafted takes room too.
        max_in_flight_tokens=vllm_config.max_in_flight_tokens + vllm_config.num_lookahead_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
    )
    # Tokens before the window, for drafts that go back to them (MTP with several modules), are in
    # blocks that vLLM allocates for a load, and caches when it has come.
    return Window(Kind.WINDOW, spec.sliding_window + spec.extra_retained_tokens, most_blocks)


def block_size(kv_cache_config: KVCacheConfig) -> int:
    """Tokens in one block of KV."""
    return attention_specs(kv_cache_config)[0].block_size


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
    of_bytes: nobody makes another kind of numbers out of what is in them.
    """
    model = vllm_config.model_config
    shard = f" tp {vllm_config.parallel_config.tensor_parallel_size}" if of_ranks else ""
    revision = f" revision {model.revision}" if model.revision else ""
    quantization = f" quantization {model.quantization}" if model.quantization else ""
    # Small numbers of any kind lie in tensors of bytes, which may be all that a layout knows.
    if of_bytes and _is_quantized(vllm_config):
        quantization += f" KV {_kv_dtype(vllm_config)}"
    name = os.path.basename(os.path.normpath(model.model))  # Paths differ from node to node.
    room = _MAX_MODEL_BYTES - len((revision + quantization + shard).encode())
    return name.encode()[:room].decode(errors="ignore") + revision + quantization + shard


def _kv_dtype(vllm_config: VllmConfig) -> str:
    """The KV dtype by one name, whichever way the engine was told."""
    given = vllm_config.cache_config.cache_dtype
    if given == "auto":
        return str(vllm_config.model_config.dtype).removeprefix("torch.")
    return "fp8_e4m3" if given == "fp8" else given


def _is_quantized(vllm_config: VllmConfig) -> bool:
    return get_kv_quant_mode(vllm_config.cache_config.cache_dtype) != KVQuantMode.NONE


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
        block are not one run, or that lie neither in host memory nor on a GPU, or differ from layer
        to layer, or do not have the rank's share of the model's heads.
        """
        if not kv_caches:
            raise ValueError("vLLM registered no KV cache")
        # By name of a layer that has a cache of its own.
        self.group_of = _group_of(kv_cache_config)
        # What is kept for a window begins at a block, and with blocks of another size elsewhere;
        # and of a state nothing can be made but the same one.
        kept = windows(vllm_config, kv_cache_config)
        self.converts_pages = not in_groups(kept)
        adopt = _blocks if has_states(kept) else _attention
        adopted = adopt(vllm_config, kv_cache_config, kv_caches, tp_rank)
        self.layer_index = adopted.layer_index
        self.num_layers = adopted.layout.num_layers
        self.device = device_of(adopted.tensors)
        self.ranks = adopted.ranks
        self.scales = adopted.scales
        self.knows_numbers = adopted.knows_numbers
        self.pool = kvferry.KvPool.adopt(
            adopted.layout,
            adopted.buffers,
            adopted.tensors,
            allocation and allocation.holding(adopted.tensors),
            self.device.memory,
        )


def _group_of(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    return {
        name: group
        for group, layers in enumerate(kv_cache_config.kv_cache_groups)
        for name in layers.layer_names
    }


class _Adopted(NamedTuple):
    """What there is to adopt."""

    layout: kvferry.KvLayout
    buffers: list[tuple[int, int]]  # (address, bytes)
    tensors: list[torch.Tensor]  # All of them.
    layer_index: dict[str, int]  # By name of a layer: which layer of the layout its cache is.
    ranks: Ranks
    scales: list[float]
    knows_numbers: bool  # Whether the layout says what the bytes of a block stand for.


def _attention(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: dict[str, torch.Tensor],
    tp_rank: int,
) -> _Adopted:
    """Of layers that are all alike: what lies where in a block is known, or its name is."""
    distinct: dict[int, torch.Tensor] = {}  # By address: some layers share another one's cache.
    layer_index: dict[str, int] = {}
    first: tuple[str, _Arrangement] | None = None
    for name, cache in kv_caches.items():
        spec = _spec_of(name, kv_cache_config)
        arrangement = _arrangement(vllm_config, name, cache, kv_cache_config.num_blocks, spec)
        first = first or (name, arrangement)
        if arrangement != first[1]:
            raise NotImplementedError(
                f"KVFerryConnector needs the same KV cache in every layer: {first[0]} has "
                f"{first[1]} and {name} has {arrangement}"
            )
        distinct.setdefault(cache.data_ptr(), cache)
        layer_index[name] = list(distinct).index(cache.data_ptr())
    assert first is not None
    tensors, of_each = list(distinct.values()), first[1]
    numbers = None
    if of_each.page_format in _KNOWN_ORDERS:  # Else only the same engine knows where values lie.
        numbers = _fp8_numbers(vllm_config, layer_index)
    pool_layout = kvferry.KvLayout(
        num_layers=len(tensors),
        page_size=block_size(kv_cache_config),
        dtype=numbers.dtype if numbers else of_each.dtype,
        page_format=of_each.page_format,
        tensors=[("kv", of_each.heads, of_each.values)],
    )
    return _Adopted(
        pool_layout,
        [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors],
        tensors,
        layer_index,
        _ranks(vllm_config, tp_rank, of_each),
        numbers.scales if numbers else [],
        numbers is not None or not _is_quantized(vllm_config),
    )


def _spec_of(name: str, kv_cache_config: KVCacheConfig) -> KVCacheSpec:
    """Of the layer's group; of one that shares another one's cache any with attention."""
    for group in kv_cache_config.kv_cache_groups:
        if name in group.layer_names:
            return group.kv_cache_spec
    return attention_specs(kv_cache_config)[0]


def _blocks(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: dict[str, torch.Tensor | list[torch.Tensor]],
    tp_rank: int,
) -> _Adopted:
    """Of a model whose layers with attention and with states share their memory: a block holds KV
    of so many tokens or one state, and is moved as so many bytes, to engines that arrange both
    alike."""
    tokens = block_size(kv_cache_config)
    block_bytes = _bytes_of_blocks(kv_cache_config)
    # By address, what blocks there hold, each with its group; None: it is of another layer's cache.
    slabs: dict[int, list[tuple[int | None, Any]]] = {}
    layer_index: dict[str, int] = {}
    tensors: list[torch.Tensor] = []
    group_of = _group_of(kv_cache_config)
    for name, cache in kv_caches.items():
        parts = cache if isinstance(cache, (list, tuple)) else [cache]
        address = min(part.data_ptr() for part in parts)
        holds = [_block_part(name, it, address, kv_cache_config, block_bytes) for it in parts]
        spec = _spec_of(name, kv_cache_config)
        holds.append(_layer_format(vllm_config, name, parts[0], spec, ""))
        slabs.setdefault(address, []).append((group_of.get(name), holds))
        layer_index[name] = list(slabs).index(address)
        tensors += parts
    size = kv_cache_config.num_blocks * block_bytes
    if any(low + size > high for low, high in itertools.pairwise(sorted(slabs))):
        raise NotImplementedError(
            "KVFerryConnector needs the blocks of a layer one behind the other in memory "
            "(VLLM_KV_CACHE_LAYOUT LBHNC)"
        )
    arrangement = hashlib.sha256(repr(list(slabs.values())).encode()).hexdigest()[:16]
    pool_layout = kvferry.KvLayout(
        num_layers=len(slabs),
        page_size=tokens,
        dtype="uint8",
        page_format=f"vllm-with-states-{arrangement}",
        tensors=[("block", 1, block_bytes // tokens)],
    )
    return _Adopted(
        pool_layout,
        [(address, size) for address in slabs],
        tensors,
        layer_index,
        _ranks_of_blocks(vllm_config, tp_rank),
        [],
        knows_numbers=False,
    )


def _bytes_of_blocks(kv_cache_config: KVCacheConfig) -> int:
    sizes = {group.kv_cache_spec.page_size_bytes for group in kv_cache_config.kv_cache_groups}
    tokens = block_size(kv_cache_config)
    if len(sizes) != 1 or min(sizes) % tokens != 0:
        raise NotImplementedError(
            f"KVFerryConnector needs blocks of as many bytes in all layers, a multiple of their "
            f"{tokens} tokens, not {sorted(sizes)}"
        )
    return sizes.pop()


def _block_part(
    name: str, part: torch.Tensor, address: int, kv_cache_config: KVCacheConfig, block_bytes: int
) -> tuple[Any, ...]:
    """What a tensor over all blocks, or a part of each, has of one. Some cut a block in several,
    for their kernels.

    Raises NotImplementedError, naming the layer, where blocks are not so many bytes apart.
    """
    cut, rest = divmod(part.shape[0], kv_cache_config.num_blocks)
    begin, item = part.data_ptr() - address, part.element_size()
    counts = (cut, *part.shape[1:])
    span = 1 + sum((n - 1) * step for n, step in zip(counts, part.stride(), strict=True))
    if rest or part.stride(0) * cut * item != block_bytes or begin + span * item > block_bytes:
        raise NotImplementedError(
            f"KV cache of layer {name}: shape {tuple(part.shape)}, strides {part.stride()}, of "
            f"{item} bytes at byte {begin}, with {kv_cache_config.num_blocks} blocks of "
            f"{block_bytes} bytes: this arrangement is unknown to KVFerryConnector"
        )
    return begin, tuple(part.shape[1:]), part.stride(), cut, str(part.dtype)


def _ranks_of_blocks(vllm_config: VllmConfig, tp_rank: int) -> Ranks:
    """Of blocks that are not cut: what a rank has is nobody else's."""
    size = vllm_config.parallel_config.tensor_parallel_size
    return Ranks(tp_rank, size, size)


class _Arrangement(NamedTuple):
    """What one layer's tensor holds."""

    heads: int  # 1 of blocks that are not cut.
    values: int  # Of a head and token.
    page_format: str
    dtype: str


def _ranks(vllm_config: VllmConfig, tp_rank: int, arrangement: _Arrangement) -> Ranks:
    if arrangement.page_format.startswith(_PACKED):
        return _ranks_of_blocks(vllm_config, tp_rank)
    size, num_heads = vllm_config.parallel_config.tensor_parallel_size, arrangement.heads
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


def _arrangement(
    vllm_config: VllmConfig, name: str, cache: torch.Tensor, num_blocks: int, spec: KVCacheSpec
) -> _Arrangement:
    """Of [blocks, heads, tokens, values], as vLLM shows every cache, wherever these lie."""
    assert isinstance(spec, AttentionSpec)
    if not isinstance(cache, torch.Tensor):
        raise NotImplementedError(f"layer {name} registered a {type(cache).__name__}, not a tensor")
    values = spec.state_content_size_bytes // cache.element_size()
    shape = (num_blocks, spec.num_heads, spec.block_size, values)
    if tuple(cache.shape) == shape and cache.is_contiguous():
        order = "HND"
    elif tuple(cache.shape) == shape and cache.transpose(1, 2).is_contiguous():
        order = "NHD"
    else:
        raise NotImplementedError(
            f"KV cache of layer {name}: shape {tuple(cache.shape)}, strides {cache.stride()}, of "
            f"{cache.dtype} on {cache.device}, where vLLM's {type(spec).__name__} says {shape}, "
            f"one behind the other: this arrangement is unknown to KVFerryConnector"
        )
    heads = spec.num_heads
    if _is_packed(spec):
        heads, values = 1, heads * values
    page_format = _layer_format(vllm_config, name, cache, spec, order)
    dtype = str(cache.dtype).removeprefix("torch.")
    if dtype == "int8":  # Bytes, as the scales among them are.
        dtype = "uint8"
    return _Arrangement(heads, values, page_format, dtype)


class _Numbers(NamedTuple):
    """What the bytes of a cache stand for."""

    dtype: str
    scales: list[float]  # As endpoints are told.


_FP8_DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}  # By _kv_dtype().


def _fp8_numbers(vllm_config: VllmConfig, layer_index: dict[str, int]) -> _Numbers | None:
    """Of an fp8 cache whose layers say what they divide by before they store.

    None of any other, and of one in which values that lie in one buffer have several scales.
    """
    dtype = _FP8_DTYPES.get(_kv_dtype(vllm_config))
    if dtype is None or current_platform.is_fp8_fnuz():
        return None
    by_layer: dict[int, float] = {}
    for name, index in layer_index.items():
        attention = vllm_config.compilation_config.static_forward_context.get(name)
        k, v = _scale(attention, "_k_scale"), _scale(attention, "_v_scale")
        if k is None or v is None:
            return None
        # A latent is stored with K's.
        if k != v and not vllm_config.model_config.use_mla:
            return None
        if by_layer.setdefault(index, k) != k:
            return None
    return _Numbers(dtype, [by_layer[layer] for layer in range(len(by_layer))])


def _scale(attention: Any, name: str) -> float | None:
    """None where there is none, or several: of those by head vLLM has the greatest as a number."""
    several = getattr(attention, name, None)
    if several is None or several.numel() != 1:
        return None
    return getattr(attention, f"{name}_float", None)


# Orders of values in a block by which blocks are converted, also to other block sizes. Blocks of
# any other name are exchanged as they are, with engines that have the same.
_KNOWN_ORDERS = ("HND", "NHD")
_PACKED = "vllm-packed-"


def _layer_format(
    vllm_config: VllmConfig, name: str, cache: torch.Tensor, spec: KVCacheSpec, order: str
) -> str:
    """A name for the order of values in a block."""
    attention: Any = vllm_config.compilation_config.static_forward_context.get(name)
    if _is_packed(spec):
        backend = attention.get_attn_backend().get_name()
        return f"{_PACKED}{_kv_dtype(vllm_config)}-{backend}-{order}"
    if cache.device.type != "cpu":
        return order
    # The CPU backend packs K in the way of the instruction set that its attention kernel uses.
    return f"vllm-cpu-{getattr(attention, 'isa', 'unknown')}-{order}"


def _is_packed(spec: KVCacheSpec) -> bool:
    """Whether what a token has of a head lies apart in a block, where the backend wants it: K and V
    in planes, scales behind the values."""
    if not isinstance(spec, AttentionSpec):
        return False
    mode = spec.kv_quant_mode
    in_rows = mode in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
    in_rows = in_rows or mode.is_per_token_head or mode.is_turboquant or mode.is_ultraquant
    return spec.num_head_slots is not None or not in_rows
