"""What the connector makes of vLLM's KV cache tensors, and of which engines, without an engine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

from kvferry.vllm.device import device_of  # noqa: E402
from kvferry.vllm.layout import (  # noqa: E402
    AdoptedCache,
    _arrangement,
    _fp8_numbers,
    block_size,
    model_identity,
    windows,
)
from kvferry.vllm.limits import check_store_supported, check_supported  # noqa: E402
from kvferry.vllm.parts import LAST_STATE, STATE, WHOLE, Kind  # noqa: E402
from kvferry.vllm.shared_cache import SharedAllocation  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

BLOCK = 16


def engine_config(
    context: dict | None = None,
    *,
    cache_dtype: str = "auto",
    size: int = 1,
    use_mla: bool = False,
    dtype: torch.dtype = torch.float32,
) -> SimpleNamespace:
    """What is read of vLLM's where a cache is adopted. context: layers by name. size: how many
    tensor-parallel ranks have two KV heads each. dtype: of the model."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context or {}),
        parallel_config=SimpleNamespace(tensor_parallel_size=size),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(
            dtype=dtype,
            use_mla=use_mla,
            get_total_num_kv_heads=lambda: 2 * size,
            model="/models/m",
            revision=None,
            quantization=None,
        ),
    )


def vllm_config() -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=False, max_model_len=4096),
        max_in_flight_tokens=512,
        num_lookahead_tokens=0,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
    )


def test_a_kv_cache_allocated_in_our_context_can_be_shared():
    allocation = SharedAllocation()
    outside = torch.zeros(2 << 20, dtype=torch.int8)
    with allocation:
        cache = torch.zeros(2 << 20, dtype=torch.int8, device=torch.device("cpu"))
        wide = torch.zeros((3, 1 << 19), dtype=torch.bfloat16)
        small = torch.zeros(100)
        meta = torch.zeros(2 << 20, device="meta")
        other = torch.empty(2 << 20)
    assert cache.shape == (2 << 20,) and cache.dtype == torch.int8 and not cache.any()
    assert wide.shape == (3, 1 << 19) and wide.dtype == torch.bfloat16
    shared = allocation.holding([cache, cache[4096:]])
    assert shared is not None and shared.bytes >= cache.nbytes
    cache[17] = 5
    assert shared.array()[17] == 5
    assert allocation.holding([wide]) not in (None, shared)
    for tensors in ([cache, wide], [small], [outside], [other], [cache, outside]):
        assert allocation.holding(tensors) is None
    assert meta.device.type == "meta"
    del cache, allocation  # The memory is its tensors'.
    assert wide.sum() == 0


def arrangement(cache, attention=None, **spec):
    config = engine_config({"layer.7": attention})
    heads = {"num_kv_heads": 3, "head_size": 64, "dtype": torch.bfloat16}
    return _arrangement(config, "layer.7", cache, 10, full_attention(**(heads | spec)))


def test_known_arrangements_of_a_cache():
    sizes = {"dtype": torch.bfloat16, "device": "meta"}
    cache = torch.zeros((10, 3, BLOCK, 128), **sizes)
    assert arrangement(cache) == (3, 128, "HND", "bfloat16")
    # Heads may lie beside each other in a token.
    cache = torch.zeros((10, BLOCK, 3, 128), **sizes).transpose(1, 2)
    assert arrangement(cache) == (3, 128, "NHD", "bfloat16")
    latent = {"num_kv_heads": 1, "head_size": 576, "head_size_v": 0}
    assert arrangement(torch.zeros((10, 1, BLOCK, 576), **sizes), **latent)[:2] == (1, 576)
    # On a CPU it is the backend that knows.
    cache = torch.zeros((10, 3, BLOCK, 128), dtype=torch.bfloat16)
    assert arrangement(cache, SimpleNamespace(isa="vec")).page_format == "vllm-cpu-vec-HND"


def test_a_cache_lies_on_one_device_that_is_known():
    host, elsewhere = torch.zeros(1), torch.zeros(1, device="meta")
    device = device_of([host, host])
    assert device.memory == "host" and device.point() is None
    with pytest.raises(NotImplementedError, match="not on meta"):
        device_of([elsewhere])
    with pytest.raises(NotImplementedError, match="not on cpu, meta"):
        device_of([elsewhere, host])


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(9, 3, BLOCK, 128, dtype=torch.bfloat16),
        torch.zeros(10, 6, BLOCK, 128, dtype=torch.bfloat16),
        torch.zeros(10, 3, BLOCK, 128),
        torch.zeros(10, 3, 128, BLOCK, dtype=torch.bfloat16).transpose(2, 3),
        torch.zeros(3, 10, BLOCK, 128, dtype=torch.bfloat16).transpose(0, 1),
        torch.zeros(10, 3 * BLOCK * 128, dtype=torch.bfloat16),
        [torch.zeros(10, 3, BLOCK, 128, dtype=torch.bfloat16)],
    ],
    ids=["blocks", "heads", "dtype", "strided", "heads outermost", "dimensions", "not a tensor"],
)
def test_unknown_arrangements_name_the_layer(cache):
    with pytest.raises(NotImplementedError, match=r"layer\.7"):
        arrangement(cache)


def cache_config(*specs) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def full_attention(**changes) -> FullAttentionSpec:
    sizes = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    return FullAttentionSpec(**(sizes | changes))


def sliding_window(window: int) -> SlidingWindowSpec:
    sizes = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    return SlidingWindowSpec(sliding_window=window, **sizes)


def test_engines_beyond_the_limits_are_refused():
    with pytest.raises(NotImplementedError, match="not OtherSpec"):
        check_supported(vllm_config(), cache_config(full_attention(), type("OtherSpec", (), {})()))
    for specs in ([full_attention(), full_attention(block_size=2 * BLOCK)], []):
        with pytest.raises(NotImplementedError, match="blocks of one size"):
            check_supported(vllm_config(), cache_config(*specs))
    config = vllm_config()
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(NotImplementedError, match="pipeline_parallel_size"):
        check_supported(config, cache_config(full_attention()))
    config = vllm_config()
    config.model_config.enable_sleep_mode = True
    with pytest.raises(NotImplementedError, match="enable_sleep_mode"):
        check_supported(config, cache_config(full_attention()))


def test_windows_are_known_by_group():
    config = cache_config(sliding_window(64), full_attention(), full_attention(sliding_window=64))
    check_supported(vllm_config(), config)
    of_window, *others = windows(vllm_config(), config)
    # vLLM without its hybrid manager keeps all blocks, whatever the window.
    assert (of_window.kind, of_window.tokens) == (Kind.WINDOW, 64)
    assert others == [WHOLE, WHOLE]
    for it in (config, cache_config(sliding_window(64)), cache_config(*[full_attention()] * 2)):
        with pytest.raises(NotImplementedError, match="disable-hybrid-kv-cache-manager"):
            check_store_supported(vllm_config(), KVConnectorRole.SCHEDULER, it)


def test_a_store_takes_no_blocks_that_are_given_back_early():
    given_back = RSWASpec(
        block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, rswa_window=32
    )
    config = cache_config(given_back)
    check_supported(vllm_config(), config)  # A prompt's blocks are kept.
    with pytest.raises(NotImplementedError, match='"store" .* not those of RSWASpec'):
        check_store_supported(vllm_config(), KVConnectorRole.SCHEDULER, config)


def state(**changes) -> MambaSpec:
    sizes = {"block_size": 4096, "shapes": ((3, 8), (2, 4, 4)), "page_size_padded": 2048}
    return MambaSpec(**(sizes | {"dtypes": (torch.bfloat16, torch.float32)} | changes))


def test_states_are_known_by_group():
    config = cache_config(state(), full_attention(), state())
    check_supported(vllm_config(), config)
    assert windows(vllm_config(), config) == [STATE, WHOLE, STATE]
    assert block_size(config) == BLOCK
    cached = state(mamba_cache_mode="align", block_size=BLOCK)
    check_supported(vllm_config(), cache_config(full_attention(), cached))
    config_of_cached = cache_config(full_attention(), cached)
    assert windows(vllm_config(), config_of_cached) == [WHOLE, LAST_STATE]
    for changes, problem in (
        ({"mamba_cache_mode": "align"}, "not of 4096"),
        ({"mamba_cache_mode": "all"}, "not all"),
        ({"num_speculative_blocks": 2}, "speculated"),
    ):
        with pytest.raises(NotImplementedError, match=problem):
            check_supported(vllm_config(), cache_config(full_attention(), state(**changes)))
    with pytest.raises(NotImplementedError, match="layers with attention"):
        check_supported(vllm_config(), cache_config(state()))
    with pytest.raises(NotImplementedError, match="full attention alone$"):
        check_store_supported(vllm_config(), KVConnectorRole.SCHEDULER, config)


NUM_BLOCKS, BLOCK_BYTES = 10, 2048


class Slabs:
    """Memory for `layers` layers of each group, as vLLM lays it out: a block is KV of 16 tokens, or
    a state of two parts."""

    def __init__(self, layers: int = 2, gap: int = 0):
        self.config = SimpleNamespace(
            num_blocks=NUM_BLOCKS,
            kv_cache_groups=[
                SimpleNamespace(kv_cache_spec=spec, layer_names=[f"{kind}.{i}" for i in range(2)])
                for kind, spec in (("state", state()), ("attention", full_attention()))
            ],
        )
        self.size = NUM_BLOCKS * BLOCK_BYTES
        self.memory = torch.zeros(layers * (self.size + gap), dtype=torch.int8)
        self.begins = [layer * (self.size + gap) for layer in range(layers)]
        self.caches = {}
        for layer in range(layers):
            self.caches[f"state.{layer}"] = self.states(layer)
            self.caches[f"attention.{layer}"] = self.attention(layer)

    def slab(self, layer: int) -> torch.Tensor:
        return self.memory[self.begins[layer] :][: self.size]

    def states(self, layer: int, apart: int = BLOCK_BYTES) -> list[torch.Tensor]:
        slab = self.slab(layer)
        conv = slab.view(torch.bfloat16).as_strided((NUM_BLOCKS, 3, 8), (apart // 2, 8, 1))
        rest = slab[48:-2000].view(torch.float32)
        return [conv, rest.as_strided((NUM_BLOCKS, 2, 4, 4), (apart // 4, 16, 4, 1))]

    def attention(self, layer: int, cut: int = 1) -> torch.Tensor:
        return self.slab(layer).view(torch.float32).view(NUM_BLOCKS * cut, 2, BLOCK // cut, 16)

    def adopt(self, context: dict | None = None, rank: int = 0, size: int = 1) -> AdoptedCache:
        config = engine_config(context, size=size)
        return AdoptedCache(config, self.config, self.caches, rank)


def test_blocks_of_states_and_of_kv_are_pages_of_one_pool():
    slabs = Slabs()
    cache = slabs.adopt()
    assert (cache.num_layers, cache.pool.num_pages) == (2, NUM_BLOCKS)
    layout = cache.pool.layout
    assert (layout.page_size, layout.dtype) == (BLOCK, "uint8")
    assert [tuple(it) for it in layout.tensors] == [("block", 1, BLOCK_BYTES // BLOCK)]
    assert cache.layer_index == {"state.0": 0, "attention.0": 0, "state.1": 1, "attention.1": 1}
    assert cache.group_of == {"state.0": 0, "state.1": 0, "attention.0": 1, "attention.1": 1}
    assert (cache.ranks, cache.converts_pages) == ((0, 1, 1), False)
    base = slabs.memory.data_ptr()
    assert [info[0] for info in cache.pool.buffer_infos()] == [base + it for it in slabs.begins]
    assert Slabs().adopt(rank=1, size=2).ranks == (1, 2, 2)


def test_blocks_are_moved_to_engines_alone_that_arrange_them_alike():
    def page_format(slabs: Slabs) -> str:
        return slabs.adopt().pool.layout.page_format

    assert page_format(Slabs()) == page_format(Slabs(gap=4096))  # Wherever they lie.
    assert len(page_format(Slabs())) <= 64
    cut, typed, moved = Slabs(), Slabs(), Slabs()
    cut.caches["attention.1"] = cut.attention(1, cut=2)
    typed.caches["state.0"][0] = typed.caches["state.0"][0].view(torch.float16)
    moved.caches["state.1"][1] = (
        moved.slab(1)[64:-1984]
        .view(torch.float32)
        .as_strided((NUM_BLOCKS, 2, 4, 4), (BLOCK_BYTES // 4, 16, 4, 1))
    )
    others = {page_format(it) for it in (Slabs(), Slabs(layers=1), cut, typed, moved)}
    assert len(others) == 5


def test_blocks_of_unknown_arrangements_are_refused():
    apart, outermost, beyond = Slabs(), Slabs(), Slabs()
    apart.caches["state.1"] = apart.states(1, apart=BLOCK_BYTES // 2)
    outermost.caches["attention.0"] = outermost.attention(0).view(2, NUM_BLOCKS, 2, 8, 16)
    beyond.caches["state.0"][1] = (
        beyond.slab(0)[1936:-112]
        .view(torch.float32)
        .as_strided((NUM_BLOCKS - 1, 2, 4, 4), (BLOCK_BYTES // 4, 16, 4, 1))
    )
    for slabs, layer in ((apart, "state.1"), (outermost, "attention.0"), (beyond, "state.0")):
        with pytest.raises(NotImplementedError, match=layer):
            slabs.adopt()
    mixed = Slabs()
    mixed.begins[1] = BLOCK_BYTES // 2
    mixed.caches |= {"state.1": mixed.states(1), "attention.1": mixed.attention(1)}
    with pytest.raises(NotImplementedError, match="one behind the other"):
        mixed.adopt()
    sizes = Slabs()
    sizes.config.kv_cache_groups[0].kv_cache_spec = state(page_size_padded=4096)
    with pytest.raises(NotImplementedError, match="as many bytes"):
        sizes.adopt()


class Scaled(SimpleNamespace):
    """A layer that divides K and V by these, or by one of each head."""

    def __init__(self, *scales: float | list[float] | None):
        super().__init__()
        for name, scale in zip(("_k_scale", "_v_scale"), scales, strict=True):
            if scale is not None:
                each = torch.tensor(scale)
                setattr(self, name, each)
                setattr(self, f"{name}_float", each.max().item())


def fp8_numbers(cache_dtype: str, scales: dict[str, tuple], use_mla: bool = False):
    """scales: of K and V, by layer. Those of one name but for what follows a dot share a cache."""
    context = {name: Scaled(*of_both) for name, of_both in scales.items()}
    config = engine_config(context, cache_dtype=cache_dtype, use_mla=use_mla)
    caches = list(dict.fromkeys(name.split(".")[0] for name in scales))
    index = {name: caches.index(name.split(".")[0]) for name in scales}
    return _fp8_numbers(config, index)


def test_an_fp8_cache_says_what_its_bytes_stand_for():
    assert fp8_numbers("fp8", {"a": (2, 2), "b": (3, 3)}) == ("float8_e4m3fn", [2, 3])
    assert fp8_numbers("fp8_e4m3", {"a": (2, 2), "b": (3, 3)}) == ("float8_e4m3fn", [2, 3])
    assert fp8_numbers("fp8_e5m2", {"a.0": (2, 2), "a.1": (2, 2)}) == ("float8_e5m2", [2])
    # A latent is stored with K's.
    assert fp8_numbers("fp8", {"a": (2, 3)}, use_mla=True) == ("float8_e4m3fn", [2])


@pytest.mark.parametrize(
    "cache_dtype, scales",
    [
        ("auto", (1, 1)),
        ("fp8_ds_mla", (1, 1)),  # Its blocks have scales of their own.
        ("fp8_per_token_head", (1, 1)),
        ("fp8", (1, 2)),  # K and V lie in one buffer.
        ("fp8", ([2, 3], [2, 3])),  # And so do heads.
        ("fp8", (None, None)),
    ],
)
def test_other_caches_are_bytes(cache_dtype: str, scales: tuple):
    assert fp8_numbers(cache_dtype, {"a": scales}) is None


def test_a_cache_that_layers_of_several_scales_share_is_bytes(monkeypatch: pytest.MonkeyPatch):
    assert fp8_numbers("fp8", {"a.0": (1, 1), "a.1": (2, 2)}) is None
    # And so is one in a format of other processors.
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda _: True))
    assert fp8_numbers("fp8", {"a": (2, 2)}) is None


class Backend:
    """A layer, and what it computes attention by."""

    def __init__(self, name: str):
        self._name = name

    def get_attn_backend(self) -> "Backend":
        return self

    def get_name(self) -> str:
        return self._name


# [K data | K scales | V data | V scales], for which vLLM has twice as many heads; what each holds.
NVFP4 = full_attention(
    block_size=2 * BLOCK,
    head_size=64,
    dtype=torch.uint8,
    kv_quant_mode=KVQuantMode.NVFP4,
    num_head_slots=4,
    state_content_bytes=64 // 2 + 64 // 16,
)
# All of K and all of V, for which it has two heads.
B12X = full_attention(num_head_slots=2, state_content_bytes=2 * 8 * 4)


def packed(spec, backend: str, cache_dtype: str = "auto", rank: int = 0, size: int = 1):
    caches = {"layer": torch.zeros(spec_shape(spec), dtype=spec.dtype)}
    config = engine_config(
        {"layer": Backend(backend)}, cache_dtype=cache_dtype, size=size, dtype=spec.dtype
    )
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
    kv_cache_config = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[group])
    return AdoptedCache(config, kv_cache_config, caches, rank)


def spec_shape(spec) -> tuple[int, ...]:
    values = spec.state_content_size_bytes // spec.dtype.itemsize
    return NUM_BLOCKS, spec.num_heads, spec.block_size, values


def test_blocks_that_a_backend_packs_are_not_cut():
    for spec, backend, cache_dtype in (
        (B12X, "B12X", "auto"),
        (NVFP4, "FLASHINFER", "nvfp4"),
        (replace(NVFP4, num_head_slots=None), "FLASHINFER", "nvfp4"),
    ):
        cache = packed(spec, backend, cache_dtype)
        layout = cache.pool.layout
        dtype = "float32" if cache_dtype == "auto" else cache_dtype
        assert layout.page_format == f"vllm-packed-{dtype}-{backend}-HND"
        values = spec.page_size_bytes // spec.block_size // spec.dtype.itemsize
        assert [tuple(it) for it in layout.tensors] == [("kv", 1, values)]
        assert (layout.page_size, cache.ranks, cache.scales) == (spec.block_size, (0, 1, 1), [])
        assert cache.knows_numbers == (cache_dtype == "auto")
        # What a rank has is for the one in its place, of as many.
        assert packed(spec, backend, cache_dtype, rank=1, size=2).ranks == (1, 2, 2)
    formats = {packed(NVFP4, name, "nvfp4").pool.layout.page_format for name in ("A", "B")}
    assert len(formats) == 2


@pytest.mark.parametrize(
    "spec, spellings",
    [(replace(B12X, dtype=torch.bfloat16), ("auto", "bfloat16")), (NVFP4, ("fp8", "fp8_e4m3"))],
)
def test_a_kv_dtype_has_one_name_however_it_is_spelled(spec, spellings: tuple[str, str]):
    formats = {packed(spec, "B12X", it).pool.layout.page_format for it in spellings}
    assert formats == {f"vllm-packed-{spellings[1]}-B12X-HND"}
    configs = [engine_config(cache_dtype=it, dtype=torch.bfloat16) for it in spellings]
    assert len({model_identity(it, of_ranks=True, of_bytes=True) for it in configs}) == 1


def test_other_kinds_of_small_numbers_are_different_models():
    def identity(cache_dtype: str, of_bytes: bool = True) -> str:
        return model_identity(
            SimpleNamespace(
                model_config=SimpleNamespace(model="a/b", revision=None, quantization=None),
                parallel_config=SimpleNamespace(tensor_parallel_size=1),
                cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            ),
            of_ranks=False,
            of_bytes=of_bytes,
        )

    assert identity("auto") == identity("bfloat16")  # What it is stands in the layout.
    assert identity("fp8") == identity("fp8_e4m3")
    others = ("auto", "fp8_e4m3", "fp8_e5m2", "turboquant_4bit_nc", "ultraquant_4bit")
    assert len({identity(it) for it in others}) == 5
    # But for who casts one into the other.
    assert identity("fp8_e5m2", of_bytes=False) == identity("auto")


def test_blocks_that_a_backend_packs_are_not_cut_beside_states_either():
    def page_format(backend: str | None) -> str:
        slabs, spec = Slabs(), B12X if backend else full_attention()
        slabs.config.kv_cache_groups[1].kv_cache_spec = spec
        context = {name: Backend(backend or "") for name in slabs.caches}
        return slabs.adopt(context).pool.layout.page_format

    assert len({page_format(None), page_format("B12X"), page_format("FLASHINFER")}) == 3


@pytest.mark.parametrize(
    "cache_dtype",
    [
        "fp8",
        "int8_per_token_head",
        "fp8_per_token_head",
        "int4_per_token_head",
        "turboquant_4bit_nc",
        "ultraquant_4bit",
    ],
)
def test_blocks_of_rows_for_each_head_and_token_can_be_cut(cache_dtype: str):
    spec = full_attention(
        kv_quant_mode=get_kv_quant_mode(cache_dtype),
        dtype=STR_DTYPE_TO_TORCH_DTYPE[cache_dtype],
    )
    cache = packed(spec, "TRITON_ATTN", cache_dtype)
    assert (cache.ranks, cache.pool.layout.dtype) == ((0, 1, 2), "uint8")
    assert not cache.knows_numbers
