"""Token pools, host tier, block caches and sliding windows from Python, beside torch."""

import gc
import itertools
import subprocess
import sys
import threading

import kvferry
import numpy as np
import pytest
from quantized_pools import mxfp4_layout

torch = pytest.importorskip("torch")
TorchDispatchMode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def slots(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def seen(array, dtype: str) -> torch.Tensor:
    """A buffer of ours as a torch tensor, fp8 included."""
    tensor = torch.from_dlpack(array)
    return tensor.view(TORCH_DTYPES[dtype]) if dtype.startswith("float8") else tensor


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_set_and_get_agree_with_torch_indexing(dtype, page_size):
    layout = kvferry.KvLayout.mha(2, page_size, 3, 8, dtype)
    pool = kvferry.TokenKvPool.create(layout, 32)
    expected = torch.zeros(2, pool.num_slots, 3, 8, dtype=TORCH_DTYPES[dtype])
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        where = torch.randperm(pool.num_slots, generator=generator)[:9]
        k, v = torch.randn(2, 9, 3, 8, generator=generator) * 40
        pool.set_kv_buffer(1, where.int(), [k, v])
        expected[0].view(torch.uint8)[where] = k.to(TORCH_DTYPES[dtype]).view(torch.uint8)
        expected[1].view(torch.uint8)[where] = v.to(TORCH_DTYPES[dtype]).view(torch.uint8)
    for ours, theirs in zip((pool.key_buffer(1), pool.value_buffer(1)), expected, strict=True):
        assert torch.equal(seen(ours, dtype).view(torch.uint8), theirs.view(torch.uint8))
    assert not torch.from_dlpack(pool.buffer(0, 0)).any()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_scales_are_divided_by_as_engines_do(dtype):
    pool = kvferry.TokenKvPool.create(kvferry.KvLayout.mha(1, 1, 2, 64, dtype), 16)
    k, v = torch.randn(2, 5, 2, 64) * 300
    pool.set_kv_buffer(0, slots(1, 2, 3, 4, 5), [k, v], scales=[0.37, 2.5])
    limit = torch.finfo(TORCH_DTYPES[dtype]).max
    for rows, scale, ours in ((k, 0.37, pool.key_buffer(0)), (v, 2.5, pool.value_buffer(0))):
        theirs = (rows / scale).clamp(-limit, limit).to(TORCH_DTYPES[dtype])
        assert torch.equal(seen(ours, dtype)[1:6].float(), theirs.float())


def test_tensors_of_torch_go_in_as_they_are():
    pool = kvferry.TokenKvPool.create(kvferry.KvLayout.mha(1, 1, 2, 4, "bfloat16"), 8)
    k = torch.randn(1, 3, 2, 4).bfloat16()
    pool.set_kv_buffer(0, torch.tensor([1, 5, 8], dtype=torch.int32), [k, k.flatten(2)])
    keys = torch.from_dlpack(pool.key_buffer(0))
    assert keys.dtype == torch.bfloat16 and torch.equal(keys[[1, 5, 8]], k[0])
    assert torch.equal(torch.from_dlpack(pool.value_buffer(0))[[1, 5, 8]], k[0])


class Operators(TorchDispatchMode):
    """What torch is asked to do meanwhile."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [(), (3,)])
def test_views_of_a_fused_qkv_are_read_where_they_lie(batch):
    pool = kvferry.TokenKvPool.create(kvferry.KvLayout.mha(1, 1, 2, 8, "bfloat16"), 32)
    qkv = torch.randn(*batch, 5, (6 + 2 + 2) * 8)
    _, k, v = qkv.split([6 * 8, 2 * 8, 2 * 8], dim=-1)
    where = torch.randperm(32)[: qkv.shape[:-1].numel()] + 1
    with Operators() as operators:
        pool.set_kv_buffer(0, where, [k.unflatten(-1, (2, 8)), v])
    assert not [name for name in operators.names if "clone" in name or "copy" in name]
    for rows, ours in ((k, pool.key_buffer(0)), (v, pool.value_buffer(0))):
        assert torch.equal(torch.from_dlpack(ours)[where], rows.reshape(-1, 2, 8).bfloat16())


def test_slots_may_have_the_leading_dimensions_of_the_rows():
    pool = kvferry.TokenKvPool.create(kvferry.KvLayout.mha(1, 1, 2, 8, "float32"), 32)
    where = torch.randperm(32).view(4, 8)[:, :3] + 1  # [batch, tokens], and no copy of it.
    k, v = torch.randn(2, 4, 3, 2, 8)
    pool.set_kv_buffer(0, where, [k, v])
    assert torch.equal(torch.from_dlpack(pool.key_buffer(0))[where], k)
    assert torch.equal(torch.from_dlpack(pool.value_buffer(0))[where], v)
    pool.set_kv_buffer(
        0, where.numpy().T[::-1], [v.transpose(0, 1).flip(0), k.transpose(0, 1).flip(0)]
    )
    assert torch.equal(torch.from_dlpack(pool.key_buffer(0))[where], v)


def test_rows_in_any_order_of_dimensions_are_stored():
    pool = kvferry.TokenKvPool.create(kvferry.KvLayout.mha(1, 1, 3, 4, "float32"), 32)
    where = torch.arange(1, 17)
    values = torch.randn(2, 2, 4, 3, 4)  # [a, b, tokens, heads, dim]
    for order in itertools.permutations(range(5)):  # As they lie in memory.
        inverse = [order.index(dim) for dim in range(5)]
        rows = values.permute(order).contiguous().permute(inverse)
        pool.set_kv_buffer(0, where, [rows, rows.numpy()[:, ::-1]])
        assert torch.equal(torch.from_dlpack(pool.key_buffer(0))[1:17], values.flatten(0, 2))
        assert torch.equal(
            torch.from_dlpack(pool.value_buffer(0))[1:17], values.flip(1).flatten(0, 2)
        )
    with pytest.raises(ValueError, match="rows have 144 values, but 16 slots of 3 heads x 4"):
        pool.set_kv_buffer(0, where, [rows[..., :3], rows])


def test_an_engines_tensors_are_adopted_and_ours_are_seen():
    theirs = [torch.zeros(5, 4, 2, 8) for _ in range(2)]  # K and V of a layer: 5 pages of 4.
    layout = kvferry.KvLayout.mha(1, 4, 2, 8, "float32")
    buffers = [(tensor.data_ptr(), tensor.nbytes) for tensor in theirs]
    pool = kvferry.TokenKvPool.over(kvferry.KvPool.adopt(layout, buffers, theirs))
    pool.set_kv_buffer(0, slots(6), [torch.ones(1, 2, 8), torch.full((1, 2, 8), 2.0)])
    assert theirs[0][1, 2].eq(1).all() and theirs[1][1, 2].eq(2).all()
    theirs[0][3, 3] = 7
    ours = torch.from_dlpack(pool.key_buffer(0))
    assert ours.data_ptr() == theirs[0].data_ptr() and ours[15].eq(7).all()


def test_tensors_are_adopted_by_dlpack():
    layout = kvferry.KvLayout.mha(1, 4, 2, 8, "bfloat16")
    theirs = [torch.zeros(5, 4, 2, 8, dtype=torch.bfloat16) for _ in range(2)]
    pages = kvferry.KvPool.adopt_tensors(layout, theirs)
    assert pages.num_pages == 5
    assert [info[0] for info in pages.buffer_infos()] == [tensor.data_ptr() for tensor in theirs]
    pool = kvferry.TokenKvPool.over(pages)
    keys, del_theirs = theirs[0], theirs
    del pages, theirs, del_theirs
    gc.collect()
    pool.set_kv_buffer(0, slots(6), [torch.ones(1, 2, 8)] * 2)
    assert keys[1, 2].eq(1).all()
    with pytest.raises(ValueError, match="buffer 0 has 640 bytes"):
        kvferry.KvPool.adopt_tensors(kvferry.KvLayout.mha(1, 4, 3, 8, "bfloat16"), [keys, keys])
    with pytest.raises(TypeError):  # A transposed tensor would have to be copied.
        kvferry.KvPool.adopt_tensors(layout, [keys.transpose(1, 2), keys])
    halves = torch.zeros(5, 4, 2, 8, dtype=torch.float16)
    with pytest.raises(ValueError, match="buffer 1 is .* 16-bit float .* 'v' .* is bfloat16"):
        kvferry.KvPool.adopt_tensors(layout, [keys, halves])
    with pytest.raises(ValueError, match="3 buffers"):
        kvferry.KvPool.adopt_tensors(layout, [keys, keys, halves])
    assert kvferry.KvPool.adopt_tensors(layout, [keys.view(torch.uint8)] * 2).num_pages == 5


def test_views_outlive_the_pool():
    pool = kvferry.TokenKvPool.create(kvferry.KvLayout.mla(1, 4, 8, "float32"), 8, 6)
    value = torch.from_dlpack(pool.value_buffer(0))
    pool.set_kv_buffer(0, slots(4), [torch.arange(8.0)])
    del pool
    gc.collect()
    assert value.shape == (12, 1, 6) and value[4, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_hnd_pages_are_seen_by_their_strides():
    layout = kvferry.KvLayout(
        num_layers=1, page_size=4, dtype="float32", page_format="HND", tensors=[("kv", 2, 6)]
    )
    pool = kvferry.TokenKvPool.create(layout, 8)
    k, v = torch.randn(2, 3, 2, 3)
    pool.set_kv_buffer(0, slots(2, 5, 11), [k, v])
    keys = torch.from_dlpack(pool.key_buffer(0))
    assert keys.shape == (3, 4, 2, 3) and keys.stride() == (48, 6, 24, 1)
    assert torch.equal(keys.flatten(0, 1)[[2, 5, 11]], k)
    assert torch.equal(torch.from_dlpack(pool.value_buffer(0)).flatten(0, 1)[[2, 5, 11]], v)


def test_flat_data():
    layout = kvferry.KvLayout.mha(3, 2, 2, 4, "float32")
    pool, other = (kvferry.TokenKvPool.create(layout, 8) for _ in range(2))
    for layer in range(3):
        pool.set_kv_buffer(layer, slots(3, 7), list(torch.randn(2, 2, 2, 4)))
    flat = pool.get_flat_data(slots(3, 7))
    rows = flat.view(np.float32).reshape(2, 3, 2, 2, 4)  # [tensors, layers, slots, heads, dim]
    assert np.array_equal(rows[1, 2], torch.from_dlpack(pool.value_buffer(2))[[3, 7]])
    other.set_flat_data(slots(4, 2), flat)
    assert np.array_equal(other.get_flat_data(slots(4, 2)), flat)
    other.set_flat_data(slots(8, 9), pool.get_flat_data(slots(3, 7), layer=1), layer=1)
    assert np.array_equal(other.get_flat_data(slots(8, 9), layer=1), rows[:, 1].tobytes()) or (
        other.get_flat_data(slots(8, 9), layer=1).tobytes() == rows[:, 1].tobytes()
    )
    other.copy_from(pool, slots(3), slots(1), layer=0)
    assert other.get_flat_data(slots(1), layer=0).tobytes() == rows[:, 0, :1].tobytes()
    with pytest.raises(ValueError, match="flat data of 5 bytes"):
        pool.set_flat_data(slots(3), np.zeros(5, np.uint8))


@pytest.mark.parametrize("layer", [None, 1])
def test_rows_move_within_a_pool_as_torch_indexing_does(layer):
    """buffer[target] = buffer[source], as SGLang does: all rows are read before one is written."""
    pool = kvferry.TokenKvPool.create(kvferry.KvLayout.mha(2, 4, 2, 8, "bfloat16"), 60)
    twin = kvferry.TokenKvPool.over(pool.pages)
    buffers = [torch.from_dlpack(pool.buffer(at, kv)) for at in range(2) for kv in range(2)]
    generator = torch.Generator().manual_seed(1)
    for round_ in range(100):
        for buffer in buffers:
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        source = torch.randint(0, 64, (20,), generator=generator)
        target = torch.randperm(64, generator=generator)[:20]
        expected = [buffer.clone() for buffer in buffers]
        for buffer in expected if layer is None else expected[2 * layer : 2 * layer + 2]:
            buffer[target] = buffer[source]
        pool.copy_from(twin if round_ % 2 else pool, source, target, layer=layer)
        for got, want in zip(buffers, expected, strict=True):
            assert torch.equal(got, want)


def test_threads_change_nothing_but_the_speed():
    layout = kvferry.KvLayout.mha(2, 1, 8, 128, "float32")
    pool = kvferry.TokenKvPool.create(layout, 2048)
    pool.use_threads(kvferry.ThreadPool(2))
    where = np.random.default_rng(3).permutation(2048).astype(np.int32)
    k, v = torch.randn(2, 2048, 8, 128)
    pool.set_kv_buffer(0, where, [k, v])
    assert torch.equal(torch.from_dlpack(pool.key_buffer(0))[torch.from_numpy(where).long()], k)
    pool.use_threads(None)
    assert torch.equal(torch.from_dlpack(pool.value_buffer(0))[torch.from_numpy(where).long()], v)


def test_threads_quantise_the_same_rows():
    layout = mxfp4_layout(8, 128)
    where = np.random.default_rng(3).permutation(2048).astype(np.int32)
    rows = torch.randn(2048, 8, 128)
    alone, helped = (kvferry.TokenKvPool.create(layout, 2048) for _ in range(2))
    helped.use_threads(kvferry.ThreadPool(2))
    for pool in (alone, helped):
        pool.set_quantized("mxfp4", 0, 0, where, rows)
    assert np.array_equal(alone.get_flat_data(where), helped.get_flat_data(where))
    loaded = [pool.get_quantized("mxfp4", 0, 0, where) for pool in (alone, helped)]
    assert np.array_equal(*loaded)


def test_rows_of_another_size_are_refused_before_they_are_copied():
    """As those of a view of few values that stands for many."""
    pool = kvferry.TokenKvPool.create(kvferry.KvLayout.mha(1, 1, 2, 4, "float32"), 8)
    many = np.broadcast_to(np.float32(1), (2**18, 2**18))
    with pytest.raises(ValueError, match="rows have 68719476736 values, but 1 slots of 2 heads"):
        pool.set_kv_buffer(0, slots(4), [many, many])


def test_bad_calls_say_what_is_wrong():
    pool = kvferry.TokenKvPool.create(kvferry.KvLayout.mha(1, 1, 2, 4, "float32"), 8)
    rows = [torch.zeros(2, 2, 4)] * 2
    with pytest.raises(ValueError, match="slot 9 at position 1"):
        pool.set_kv_buffer(0, slots(1, 9), rows)
    with pytest.raises(ValueError, match="16 values, but 1 slots of 2 heads x 4 have 8"):
        pool.set_kv_buffer(0, slots(1), rows)
    with pytest.raises(ValueError, match="1 tensors and 0 scales"):
        pool.set_kv_buffer(0, slots(1, 2), rows[:1])
    with pytest.raises(ValueError, match="none of float32"):
        pool.set_kv_buffer(0, slots(1, 2), [row.long() for row in rows])
    with pytest.raises(IndexError):
        pool.set_kv_buffer(1, slots(1, 2), rows)
    with pytest.raises(ValueError, match="neither int32 nor int64"):
        pool.set_kv_buffer(0, np.array([1.0, 2.0]), rows)
    with pytest.raises(ValueError, match="slot 4294967297 does not fit"):
        pool.set_kv_buffer(0, np.array([1, 2**32 + 1]), rows)
    with pytest.raises(ValueError, match="num_tokens is 9"):
        kvferry.TokenKvPool.create(kvferry.KvLayout.mha(1, 2, 2, 4, "float32"), 9)


def test_an_index_that_is_outside_is_named_with_its_limit():
    layout = kvferry.KvLayout.mha(2, 4, 1, 8, "float32")
    pool = kvferry.TokenKvPool.create(layout, 32)
    codes = kvferry.TokenKvPool.create(mxfp4_layout(1, 16, num_layers=2), 32)
    cache = kvferry.BlockCache.create(
        num_blocks=2, num_layers=3, block_size=4, num_kv_heads=1, head_dim=8
    )
    rows = [np.zeros((1, 1, 8), np.float32)] * 2
    for call, name, end in (
        (lambda at: pool.set_kv_buffer(at, slots(4), rows), "layer", 2),
        (lambda at: pool.buffer(at, 0), "layer", 2),
        (lambda at: pool.buffer(0, at), "tensor", 2),
        (pool.tensor_bytes, "tensor", 2),
        (layout.item_bytes, "tensor", 2),
        (lambda at: pool.pages.page(at, 0, 0), "layer", 2),
        (lambda at: pool.pages.page(0, at, 0), "tensor", 2),
        (lambda at: pool.pages.page(0, 0, at), "page", 9),
        (cache.layer, "layer", 3),
        (lambda at: codes.get_quantized("mxfp4", at, 0, slots(4)), "layer", 2),
        (
            lambda at: codes.get_quantized("mxfp4", 0, at, slots(4)),
            "tensor",
            len(codes.layout.tensors) - 1,
        ),
    ):
        for at in (-1, end, 2**63 - 1):
            with pytest.raises(IndexError, match=rf"^{name} is {at} but must lie in \[0, {end}\)$"):
                call(at)


def test_what_is_given_is_taken_as_it_is_or_refused():
    """Fractions are not cut off, values of other widths are no bytes, and no index wraps around."""
    pool = kvferry.TokenKvPool.create(kvferry.KvLayout.mha(2, 1, 1, 4, "uint8"), 8)
    before = pool.get_flat_data(np.arange(9))
    for values in (np.ones(2, np.float32), np.ones(2, np.int64), np.full(8, -1, np.int8)):
        with pytest.raises(TypeError):
            pool.set_flat_data(np.array([1]), values)
    assert (pool.get_flat_data(np.arange(9)) == before).all()
    cache = kvferry.BlockCache.create(
        num_blocks=4, num_layers=1, block_size=2, num_kv_heads=1, head_dim=4
    )
    allocator = kvferry.TokenSlotAllocator(16)
    for dtype in (np.float64, bool, np.uint64):
        one = np.array([1], dtype)
        with pytest.raises(ValueError, match=r"\(blocks\) is neither int32 nor int64"):
            kvferry.copy_blocks(cache, cache, np.array([[0, 1]], dtype))
        with pytest.raises(ValueError, match=r"\(numbers\) is neither int32 nor int64"):
            allocator.alloc_extend(one, one, np.array([1]))
        with pytest.raises(ValueError, match="neither int32 nor int64"):
            allocator.alloc_decode(one, np.array([1]))
    assert allocator.available_size == 16
    layout = mxfp4_layout(2, 32, num_layers=2)
    quantised = kvferry.TokenKvPool.create(layout, 8)
    slots = np.zeros(1, np.int32)
    for tensor in (-1, 1, 2, 2**62, 2**63 - 2, 2**63 - 1):
        with pytest.raises(IndexError, match="tensor"):
            quantised.get_quantized("mxfp4", 0, tensor, slots)
        with pytest.raises(IndexError, match="tensor"):
            quantised.set_quantized("mxfp4", 0, tensor, slots, np.zeros((1, 2, 32), np.float32))


def test_slots_may_change_while_they_are_used():
    """Engines keep one buffer for them, and write the next step's into it."""
    script = """
import threading, time, numpy as np, kvferry
pool = kvferry.TokenKvPool.create(kvferry.KvLayout.mha(1, 1, 1, 8, "uint8"), 64)
slots = np.ones(20000, np.int32)
stop = threading.Event()
def change():
    while not stop.is_set():
        for slot in (1 << 30, 1):  # Either of them may be there while the other thread runs.
            slots[:] = slot
            time.sleep(0)
other = threading.Thread(target=change)
other.start()
seen = {"taken": 0, "refused": 0}
end = time.monotonic() + 30
while sum(seen.values()) < 2000 or (0 in seen.values() and time.monotonic() < end):
    try:
        pool.get_flat_data(slots)
        seen["taken"] += 1
    except (ValueError, IndexError):
        seen["refused"] += 1
stop.set()
other.join()
print(*seen.values())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert all(int(count) > 0 for count in done.stdout.split())


def test_readers_wait_for_their_layer():
    pool = kvferry.TokenKvPool.create(kvferry.KvLayout.mha(2, 1, 1, 4, "float32"), 8)
    load = pool.layers.begin()
    with pytest.raises(kvferry.DeadlineExceeded, match="layer 0"):
        pool.key_buffer(0, timeout_ms=0)
    loader = threading.Timer(0.05, pool.layers.ready, [load, 2])
    loader.start()
    pool.value_buffer(1, timeout_ms=20000)
    loader.join()
    assert pool.layers.num_ready == 2
    load = pool.layers.begin()
    pool.layers.fail(load, "the disk is gone")
    with pytest.raises(kvferry.Aborted, match="the disk is gone"):
        pool.key_buffer(1)
    with pytest.raises(kvferry.FailedPrecondition, match="the disk is gone"):
        pool.layers.ready(load, 2)


def test_a_load_whose_loader_is_gone_is_given_up():
    pool = kvferry.TokenKvPool.create(kvferry.KvLayout.mha(2, 1, 1, 4, "float32"), 8)
    assert pool.layers.last_load == 0
    pool.layers.begin()  # And the number is lost.
    with pytest.raises(kvferry.FailedPrecondition, match="load 1 is under way"):
        pool.layers.begin()
    pool.layers.fail(pool.layers.last_load, "given up")
    with pytest.raises(kvferry.Aborted, match="given up"):
        pool.key_buffer(0)
    pool.layers.ready(pool.layers.begin(), 2)
    pool.key_buffer(0)


def test_who_has_no_option_does_not_hear_of_it():
    layout = kvferry.KvLayout.mha(1, 1, 256, 65536, "float32")  # 128 MiB a token.
    with pytest.raises(kvferry.ResourceExhausted, match="make it smaller$"):
        kvferry.TokenKvPool.create(layout, 100_000)
    with pytest.raises(kvferry.ResourceExhausted, match="at_once=False in Python"):
        kvferry.KvPool.create(layout, 100_000)


def test_quantised_rows():
    tensors = kvferry.quantized_tensors("mxfp4", "k", 2, 32)
    assert tensors == [("k", 2, 16, "uint8"), ("k_scale", 1, 4, "uint8")]
    tensors += kvferry.quantized_tensors("fp8_block128", "index_k", 1, 128)
    layout = kvferry.KvLayout(
        num_layers=1, page_size=4, dtype="uint8", page_format="NHD", tensors=tensors
    )
    assert (
        kvferry.KvLayout(
            num_layers=1, page_size=4, dtype="uint8", page_format="NHD", tensors=layout.tensors
        )
        == layout
    )
    pool = kvferry.TokenKvPool.create(layout, 16)
    k, index = torch.randn(3, 2, 32), torch.randn(3, 1, 128).bfloat16()
    pool.set_quantized("mxfp4", 0, 0, slots(4, 9, 10), k)
    pool.set_quantized("fp8_block128", 0, 2, slots(4, 9, 10), index)
    blocks = k.view(3, 4, 16)
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 6)))
    got = torch.from_numpy(pool.get_quantized("mxfp4", 0, 0, slots(4, 9, 10)))
    assert (got.view(3, 4, 16) - blocks).abs().le(scale).all()
    assert torch.equal(
        torch.from_dlpack(pool.buffer(0, 1))[[4, 9, 10], 0], (scale.log2() + 127).byte()[..., 0]
    )
    got = torch.from_numpy(pool.get_quantized("fp8_block128", 0, 2, slots(4, 9, 10)))
    block_scale = index.float().abs().amax(-1, keepdim=True) / 448
    assert torch.equal(
        got, (index.float() / block_scale).to(torch.float8_e4m3fn).float() * block_scale
    )
    with pytest.raises(ValueError, match="mxfp4, fp8_block128"):
        pool.set_quantized("int4", 0, 0, slots(4), k[:1])
    with pytest.raises(IndexError):
        pool.get_quantized("mxfp4", 0, 3, slots(4))


def test_host_tier():
    device = kvferry.TokenKvPool.create(kvferry.KvLayout.mha(2, 4, 1, 8, "float32"), 32)
    host = kvferry.HostKvPool.create(device, ratio=2, keep_free_bytes=0)
    assert host.num_tokens == host.available_size == 64 and host.bytes_per_token == 128
    flat = np.arange(8 * 128, dtype=np.uint32).astype(np.uint8)
    device.set_flat_data(np.arange(4, 12, dtype=np.int32), flat)
    where = host.alloc(8)
    assert host.state_of(where) == "reserved"
    host.back_up(np.arange(4, 12, dtype=np.int32), where)
    assert host.state_of(where) == "synced"
    host.mark_backup(where)
    host.load(where, np.arange(20, 28, dtype=np.int32))
    assert np.array_equal(device.get_flat_data(np.arange(20, 28, dtype=np.int32)), flat)
    with pytest.raises(kvferry.FailedPrecondition, match="is synced but must be reserved"):
        host.protect_write(where)
    host.free(where)
    assert host.available_size == 64 and host.alloc(68) is None
    with pytest.raises(kvferry.ResourceExhausted, match=r"\(keep_free_bytes\) are left"):
        kvferry.HostKvPool.create(device, ratio=1, keep_free_bytes=1 << 60)


@pytest.mark.parametrize("order", ["kv block token head value", "block kv head token value"])
def test_block_caches_swap(order):
    def cache(blocks: int) -> kvferry.BlockCache:
        return kvferry.BlockCache.create(
            num_blocks=blocks,
            num_layers=2,
            block_size=4,
            num_kv_heads=2,
            head_dim=8,
            dtype="float16",
            order=order.split(),
        )

    gpu, cpu = cache(6), cache(10)
    assert gpu.block_bytes == 2 * 2 * 4 * 2 * 8 * 2 and gpu.bytes == 6 * gpu.block_bytes
    assert gpu.dtype == "float16" and gpu.memory == "host"
    infos = gpu.buffer_infos
    assert len(infos) == (4 if order.startswith("kv") else 2)
    assert sum(item_bytes for _, _, item_bytes in infos) == gpu.block_bytes
    assert infos[0][0] == torch.from_dlpack(gpu.view(0, 0)).data_ptr()

    def blocks(which: kvferry.BlockCache, layer: int, kv: int) -> torch.Tensor:
        return torch.from_dlpack(which.view(layer, kv)).reshape(which.num_blocks, 4, 2, 8)

    expected = []
    for layer in range(2):
        for kv in range(2):
            values = torch.from_dlpack(gpu.view(layer, kv))
            values.copy_(torch.randn(values.shape))
            expected.append(blocks(gpu, layer, kv).clone())
    out = np.array([[0, 3], [1, 4], [5, 9]])
    kvferry.copy_blocks(gpu, cpu, out)
    kvferry.copy_blocks(cpu, gpu, np.array([[9, 2]]), kvferry.ThreadPool(1))
    for index, want in enumerate(expected):
        layer, kv = divmod(index, 2)
        assert torch.equal(blocks(cpu, layer, kv)[out[:, 1]], want[out[:, 0]])
        assert torch.equal(blocks(gpu, layer, kv)[2], want[5])
    with pytest.raises(ValueError, match="block 3 is written twice"):
        kvferry.copy_blocks(gpu, cpu, np.array([[0, 3], [1, 3]]))
    with pytest.raises(ValueError, match="once"):
        kvferry.BlockCache.create(
            num_blocks=1, num_layers=1, block_size=1, num_kv_heads=1, head_dim=1, order=["kv"] * 5
        )


def test_bytes_of_a_block_without_a_cache():
    shape = {"num_layers": 32, "block_size": 16, "num_kv_heads": 8, "head_dim": 128}
    block_bytes = kvferry.BlockCache.block_bytes_of
    assert block_bytes(**shape) == 2 * 32 * 16 * 8 * 128 * 2
    assert block_bytes(**shape, dtype="float8_e4m3fn") == 2 * 32 * 16 * 8 * 128
    assert block_bytes(**shape, mla=True) == 32 * 16 * 8 * 128 * 2
    with pytest.raises(ValueError, match="num_layers is 0"):
        block_bytes(**shape | {"num_layers": 0})
    with pytest.raises(ValueError, match="dtype"):
        block_bytes(**shape, dtype="int3")


def test_sliding_windows():
    allocator = kvferry.SlidingWindowAllocator(64, 16, 4)
    assert allocator.available_size == 16
    mine = allocator.alloc(12)
    assert allocator.alloc(8) is None
    assert (allocator.to_window(mine) % 4).tolist() == [0, 1, 2, 3] * 3
    allocator.free_window(mine[:8])
    assert allocator.to_window(mine[6:9]).tolist()[:2] == [0, 0]
    assert allocator.window_available_size == 12 and allocator.full_available_size == 52
    more = allocator.alloc_decode(np.array([13]), mine[-1:])
    assert allocator.to_window(more)[0] != 0
    assert np.count_nonzero(allocator.window_pages) == 2
    allocator.free(np.append(mine, more))
    assert allocator.available_size == 16


ORDERS = {
    "NHD": ("kv", "block", "token", "head", "value"),
    "HND": ("kv", "block", "head", "token", "value"),
    "block first": ("block", "kv", "token", "head", "value"),
    "block first, HND": ("block", "kv", "head", "token", "value"),
}
GENERIC = ORDERS["NHD"]


def engines_layer(order: tuple[str, ...], blocks: int = 5) -> torch.Tensor:
    """As vLLM's CacheEngine has it: [2, blocks, block_size, heads, dim] over that order."""
    sizes = dict(zip(GENERIC, (2, blocks, 4, 3, 8), strict=True))
    memory = torch.randn([sizes[name] for name in order]).bfloat16()
    return memory.permute([order.index(name) for name in GENERIC])


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_layer_is_one_tensor_in_every_order(order):
    cache = kvferry.BlockCache.create(
        num_blocks=5, num_layers=2, block_size=4, num_kv_heads=3, head_dim=8, order=order
    )
    layer = torch.from_dlpack(cache.layer(1))
    assert layer.shape == (2, 5, 4, 3, 8) and layer.stride() == engines_layer(order).stride()
    layer.copy_(torch.randn(layer.shape))
    for kv in range(2):
        assert torch.equal(torch.from_dlpack(cache.view(1, kv)).view(5, 4, 3, 8), layer[kv])
    assert not torch.from_dlpack(cache.layer(0)).any()
    with pytest.raises(IndexError):
        cache.layer(2)
    del cache
    gc.collect()
    assert layer.any()


def test_a_layer_of_latents_has_no_first_dimension():
    cache = kvferry.BlockCache.create(
        num_blocks=5, num_layers=1, block_size=4, num_kv_heads=1, head_dim=8, mla=True
    )
    assert torch.from_dlpack(cache.layer(0)).shape == (5, 4, 1, 8)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_an_engines_block_cache_is_adopted(order):
    layers = [engines_layer(order) for _ in range(3)]
    cache = kvferry.BlockCache.adopt_tensors(layers, order=order)
    assert (cache.num_blocks, cache.dtype, cache.memory) == (5, "bfloat16", "host")
    assert [torch.from_dlpack(cache.layer(i)).data_ptr() for i in range(3)] == [
        layer.data_ptr() for layer in layers
    ]
    ours = kvferry.BlockCache.create(
        num_blocks=9, num_layers=3, block_size=4, num_kv_heads=3, head_dim=8, order=order
    )
    kvferry.copy_blocks(cache, ours, np.array([[4, 8], [1, 0]]))  # Swapped out,
    before = [layer.clone() for layer in layers]
    for layer in layers:
        layer.zero_()
    kvferry.copy_blocks(ours, cache, np.array([[8, 2], [0, 3]]))  # and in again.
    for i, (was, layer) in enumerate(zip(before, layers, strict=True)):
        assert torch.equal(layer[:, [2, 3]], was[:, [4, 1]]) and not layer[:, [0, 1, 4]].any()
        assert torch.equal(torch.from_dlpack(ours.layer(i))[:, 8], was[:, 4])
    del layers, layer  # The cache keeps them.
    gc.collect()
    assert torch.equal(torch.from_dlpack(cache.layer(2))[:, 2], before[2][:, 4])


def test_what_is_no_block_cache_is_not_adopted():
    adopt = kvferry.BlockCache.adopt_tensors
    layer = engines_layer(GENERIC)
    with pytest.raises(ValueError, match=r"tensors \[2, blocks, block_size, heads, dim\]"):
        adopt([layer[0]])
    with pytest.raises(ValueError, match=r"tensors \[blocks, block_size, heads, dim\]"):
        adopt([], mla=True)
    with pytest.raises(ValueError, match="layer 1 is no tensor of bfloat16 .* 5 x 192"):
        adopt([layer, engines_layer(ORDERS["HND"])])
    with pytest.raises(ValueError, match="layer 1 is no tensor of bfloat16"):
        adopt([layer, engines_layer(GENERIC, blocks=6)])
    with pytest.raises(ValueError, match="layer 1 is no tensor of bfloat16"):
        adopt([layer, layer.half()])
    with pytest.raises(ValueError, match="layer 0 is no tensor of float8_e4m3fn"):
        adopt([layer], dtype="float8_e4m3fn")
    assert adopt([layer.byte()], dtype="float8_e4m3fn").dtype == "float8_e4m3fn"
    frozen = np.zeros((2, 5, 4, 3, 8), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(TypeError):
        adopt([frozen])
