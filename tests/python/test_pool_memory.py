"""Where pools lie: host memory, or a GPU's where there is one."""

import kvferry
import numpy as np
import pytest
from quantized_pools import mxfp4_layout

torch = pytest.importorskip("torch")

LAYOUT = kvferry.KvLayout.mha(2, 4, 2, 8, "bfloat16")
MODEL = """{"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
             "num_hidden_layers": 2, "max_position_embeddings": 128, "torch_dtype": "bfloat16"}"""
K_DL_CPU, K_DL_CUDA = 1, 2


def token_pool(memory: str) -> kvferry.TokenKvPool:
    return kvferry.TokenKvPool.create(LAYOUT, 32, memory=memory)


def state_pool(memory: str) -> kvferry.GdnPool:
    return kvferry.GdnPool(
        max_requests=4,
        num_layers=3,
        num_v_heads=2,
        head_k_dim=5,
        head_v_dim=6,
        conv_dim=7,
        conv_kernel_size=4,
        memory=memory,
    )


def model_pools(memory: str, kv_cache_dtype: str = "auto") -> kvferry.ModelPools:
    model = kvferry.ModelConfig.from_json(MODEL)
    return kvferry.ModelPools.create(
        model, page_size=4, num_tokens=32, kv_cache_dtype=kv_cache_dtype, memory=memory
    )


def kv_pool(memory: str) -> kvferry.KvPool:
    return kvferry.KvPool.create(LAYOUT, 8, memory=memory)


def block_cache(memory: str, num_blocks: int = 6) -> kvferry.BlockCache:
    return kvferry.BlockCache.create(
        num_blocks=num_blocks, num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, memory=memory
    )


def request_pool(memory: str) -> kvferry.ReqToTokenPool:
    return kvferry.ReqToTokenPool(num_requests=3, max_context_tokens=8, memory=memory)


MAKERS = [token_pool, state_pool, model_pools, kv_pool, block_cache, request_pool]


def why_no_cuda() -> str:
    """Why tests on a GPU's memory cannot run here; empty when they can."""
    try:
        token_pool("cuda:0")
    except kvferry.Unavailable as error:
        return str(error)
    return "" if torch.cuda.is_available() else "torch has no CUDA here"


needs_cuda = pytest.mark.skipif(bool(why_no_cuda()), reason=why_no_cuda() or "there is a GPU")


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "name", ["", "cpu", "Host", "cuda", "cuda:", "cuda:-1", "cuda:+1", "cuda: 1", "cuda:1x",
             "cuda:99999999999", "rocm:0"]
)  # fmt: skip
def test_other_names_are_refused(make, name):
    with pytest.raises(
        ValueError, match=f"memory is '{name}' but must be 'host'".replace("+", r"\+")
    ):
        make(name)


@pytest.mark.parametrize("make", MAKERS)
def test_a_device_that_is_not_there_is_named(make):
    with pytest.raises(kvferry.Unavailable, match=r"built without CUDA|no device 1000: ") as raised:
        make("cuda:1000")
    if "without CUDA" in str(raised.value):
        assert "memory is 'cuda:1000'" in str(raised.value)
        assert "KVFERRY_CUDA=ON" in str(raised.value)


def test_memory_of_the_host():
    pool, states, pools = token_pool("host"), state_pool("host"), model_pools("host")
    assert pool.memory == states.memory == pools.kv.memory == "host"
    arrays = [pool.buffer(0, 0), states.recurrent_state, states.conv_state, pools.kv.key_buffer(0)]
    assert [array.__dlpack_device__() for array in arrays] == [(K_DL_CPU, 0)] * 4
    assert kvferry.TokenKvPool.create(LAYOUT, 32).memory == "host"
    assert kvferry.KvPool.create(LAYOUT, 8).memory == kv_pool("host").memory == "host"
    assert block_cache("host").memory == "host"
    assert block_cache("host").view(0, 1).__dlpack_device__() == (K_DL_CPU, 0)
    assert request_pool("host").memory == pools.requests.memory == "host"


def adopted(memory: str, shared=None) -> kvferry.KvPool:
    buffers = [np.zeros(8 * LAYOUT.item_bytes(i // 2), dtype=np.uint8) for i in range(4)]
    infos = [(buffer.ctypes.data, buffer.nbytes) for buffer in buffers]
    return kvferry.KvPool.adopt(LAYOUT, infos, buffers, shared, memory)


def test_adopted_memory():
    assert adopted("host").memory == "host"
    with pytest.raises(ValueError, match="memory is 'gpu' but must be"):
        adopted("gpu")
    if "without CUDA" not in why_no_cuda():
        with pytest.raises((ValueError, kvferry.Unavailable), match="host's memory|no device 0"):
            adopted("cuda:0")
        with pytest.raises(ValueError, match="but shared memory is the host's"):
            adopted("cuda:0", kvferry.SharedMemory.create(4096))


class OnAnotherDevice:
    """Rows that say that they lie on a GPU; nobody may look at them."""

    def __init__(self, rows: np.ndarray, device: tuple[int, int]) -> None:
        self.rows, self.device = rows, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **_):
        # The capsule of a DLManagedTensor begins with the data's address and the device.
        import ctypes

        capsule = self.rows.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        tensor = get(capsule, b"dltensor")
        (ctypes.c_int32 * 2).from_address(tensor + 8)[:] = self.device
        return capsule


@pytest.mark.parametrize("device", [(K_DL_CUDA, 0), (K_DL_CUDA, 3), (10, 0)])
def test_rows_of_a_device_do_not_fit_the_host(device):
    pool, pools = token_pool("host"), model_pools("host")
    rows = OnAnotherDevice(np.zeros((1, 2, 8), dtype=np.float32), device)
    slots = np.array([4])
    match = rf"rows lie on a device \(DLPack type {device[0]}, number {device[1]}\).* host memory"
    with pytest.raises(ValueError, match=match):
        pool.set_kv_buffer(0, slots, [rows, rows])
    with pytest.raises(ValueError, match=match):
        pools.set_kv_buffer(0, slots, [rows, rows])
    four_bits = mxfp4_layout(2, 8, page_size=4)
    quantised = kvferry.TokenKvPool.create(four_bits, 32)
    with pytest.raises(ValueError, match=match):
        quantised.set_quantized("mxfp4", 0, 0, slots, rows)


def adopt_all(places: list[tuple[int, int]]) -> tuple:
    """By each pool that adopts tensors: as many as there are places, which are on those devices."""

    def tensors(*shape: int):
        zeros = np.zeros(shape, dtype=np.float32)
        return [zeros if at[0] == K_DL_CPU else OnAnotherDevice(zeros, at) for at in places]

    layout = kvferry.KvLayout.mha(len(places) // 2, 4, 2, 8, "float32")
    return (
        lambda: kvferry.KvPool.adopt_tensors(layout, tensors(3, 4, 2, 8)),
        lambda: kvferry.BlockCache.adopt_tensors(tensors(2, 3, 4, 2, 8)),
        lambda: kvferry.GdnPool.adopt_tensors(
            tensors(2, 5, 2, 4, 6)[0], tensors(2, 5, 7, 3)[-1], max_requests=4
        ),
    )


def test_tensors_of_a_device_are_adopted_there_or_not_at_all():
    """The addresses are the host's: no device takes them for its own."""
    cpu, gpu = (K_DL_CPU, 0), (K_DL_CUDA, 0)
    for adopt in adopt_all([cpu, cpu]):
        assert adopt().memory == "host"
    for adopt in adopt_all([gpu, gpu]):
        with pytest.raises((ValueError, kvferry.Unavailable), match="CUDA|host's memory|device 0"):
            adopt()
    for adopt in adopt_all([(10, 0), (10, 0)]):
        with pytest.raises(ValueError, match=r"on a device \(DLPack type 10, .* CUDA device"):
            adopt()
    for adopt in adopt_all([cpu, gpu]):
        with pytest.raises(ValueError, match="lies on another device .* is in host memory"):
            adopt()


@needs_cuda
def test_torchs_tensors_on_a_gpu_are_adopted():
    theirs = [torch.zeros(8, 4, 2, 8, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    pool = kvferry.TokenKvPool.over(kvferry.KvPool.adopt_tensors(LAYOUT, theirs))
    rows = torch.randn(1, 2, 8, device="cuda").bfloat16()
    recurrent = torch.randn(3, 7, 2, 5, 6, device="cuda")
    conv = torch.randn(3, 7, 7, 3, device="cuda").bfloat16()
    torch.cuda.synchronize()
    pool.set_kv_buffer(1, np.array([6]), [rows, rows])
    assert torch.equal(theirs[1][1, 2], rows[0]) and torch.equal(theirs[3][1, 2], rows[0])
    states = kvferry.GdnPool.adopt_tensors(recurrent, conv, max_requests=4)
    before = recurrent.clone()
    torch.cuda.synchronize()
    states.copy_states([1], [2])
    assert states.memory == "cuda:0" and torch.equal(recurrent[:, 2], before[:, 1])


class OfTorch(OnAnotherDevice):
    """What nanobind takes for a tensor of torch's."""

    __module__ = "torch"
    copies = 0

    def to(self, dtype) -> "OfTorch":
        return self

    def contiguous(self) -> "OfTorch":
        self.copies += 1
        return OfTorch(np.ascontiguousarray(self.rows), self.device)


def test_no_gpu_copies_rows_behind_our_back():
    rows = OfTorch(np.zeros((2, 2, 16), dtype=np.float32)[..., :8], (K_DL_CUDA, 0))
    with pytest.raises(ValueError, match="rows lie on a device"):
        token_pool("host").set_kv_buffer(0, np.array([4, 5]), [rows, rows])
    assert rows.copies == 0


@needs_cuda
def test_views_of_a_gpus_fused_qkv_are_stored():
    pool = token_pool("cuda:0")
    qkv = torch.randn(2, 3, (4 + 2 + 2) * 8, device="cuda")
    _, k, v = qkv.split([32, 16, 16], dim=-1)
    torch.cuda.synchronize()
    slots = np.array([4, 6, 9, 30, 31, 20])
    pool.set_kv_buffer(0, slots, [k, v.unflatten(-1, (2, 8))])
    for rows, buffer in ((k, pool.key_buffer(0)), (v, pool.value_buffer(0))):
        stored = torch.from_dlpack(buffer)[slots]
        assert torch.equal(stored.cpu(), rows.reshape(6, 2, 8).bfloat16().cpu())
    # Three steps from token to token, and each of another stride.
    nested = torch.randn(8, 5, 2, 2, 2, device="cuda").permute(4, 2, 3, 1, 0)[:, :, :, :2]
    with pytest.raises(ValueError, match="make them contiguous first"):
        pool.set_kv_buffer(0, np.arange(4, 12), [nested, nested])


@needs_cuda
def test_torch_sees_a_gpus_memory():
    pool, states = token_pool("cuda:0"), state_pool("cuda:0")
    assert pool.memory == states.memory == "cuda:0"
    keys = torch.from_dlpack(pool.key_buffer(1))
    assert keys.device == torch.device("cuda:0") and not keys.any()
    k, v = torch.randn(2, 3, 2, 8)
    pool.set_kv_buffer(1, np.array([4, 6, 9]), [k, v.cuda()])
    assert torch.equal(keys[[4, 6, 9]].cpu(), k.bfloat16())
    values = torch.from_dlpack(pool.value_buffer(1))
    assert torch.equal(values[[4, 6, 9]].cpu(), v.bfloat16())
    with pytest.raises(kvferry.FailedPrecondition, match="lies in memory of cuda:0"):
        pool.pages.page(0, 0, 1)

    recurrent = torch.from_dlpack(states.recurrent_state)
    assert recurrent.is_cuda and not recurrent.any()
    recurrent[2, 1] = 1.5
    torch.cuda.synchronize()
    states.copy_states([1, 3], [3, 1])
    assert (recurrent[2, 3] == 1.5).all() and not recurrent[2, 1].any()
    states.reset_states([3])
    assert not recurrent.any()


@pytest.mark.parametrize("memory", ["host", pytest.param("cuda:0", marks=needs_cuda)])
def test_request_tables(memory):
    pool = request_pool(memory)
    assert pool.alloc(3) == [0, 1, 2]
    pool.write(2, 7, np.array([5]))
    pool.write_batch(np.array([2, 0]), np.array([1, 0]), np.array([2, 1]), np.array([7, 8, 9]))
    table = torch.from_dlpack(pool.req_to_token)
    assert table.dtype == torch.int32 and table.is_cuda == (memory != "host")
    assert table.tolist() == [[9] + [0] * 7, [0] * 8, [0, 7, 8, 0, 0, 0, 0, 5]]
    with pytest.raises(ValueError, match="counts add up to 1 but there are 2 token slots"):
        pool.write_batch(np.array([2]), np.array([1]), np.array([1]), np.array([7, 8]))


@needs_cuda
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp4"])
def test_pools_of_a_model_on_a_gpu(kv_cache_dtype):
    host, device = model_pools("host", kv_cache_dtype), model_pools("cuda:0", kv_cache_dtype)
    assert device.requests.memory == "cuda:0"
    rows = list(torch.randn(2, 4, 2, 8))
    slots = host.slots.alloc(4)
    assert np.array_equal(slots, device.slots.alloc(4))
    host.set_kv_buffer(1, slots, rows)
    device.set_kv_buffer(1, slots, [rows[0].cuda(), rows[1]])
    assert np.array_equal(host.kv.get_flat_data(slots), device.kv.get_flat_data(slots))
    tier = kvferry.HostKvPool.create(device.kv, ratio=1.0)
    away = tier.alloc(4)
    tier.back_up(slots, away)
    assert np.array_equal(tier.host.get_flat_data(away), host.kv.get_flat_data(slots))


@pytest.mark.parametrize("memory", ["host", pytest.param("cuda:0", marks=needs_cuda)])
def test_blocks_are_swapped_and_copied(memory):
    cpu, device = block_cache("host", num_blocks=9), block_cache(memory)
    cpu.pin_for(device)
    assert device.memory == memory and len(device.buffer_infos) == 4
    on_cpu, on_device = (
        [torch.from_dlpack(cache.view(layer, kv)).unflatten(0, (-1, 4))
         for layer in range(2) for kv in range(2)]
        for cache in (cpu, device)
    )  # fmt: skip
    assert all(values.device.type == memory.split(":")[0].replace("host", "cpu")
               for values in on_device)  # fmt: skip
    for values in on_cpu:
        values.copy_(torch.randn(values.shape))
    before = [values.clone() for values in on_cpu]
    kvferry.copy_blocks(cpu, device, np.array([[8, 2], [7, 1], [0, 5]]))
    kvferry.copy_blocks(device, device, np.array([[2, 0], [5, 3]]), kvferry.ThreadPool(1))
    kvferry.copy_blocks(device, cpu, np.array([[0, 1], [3, 2], [4, 3]]))
    for was, there, here in zip(before, on_device, on_cpu, strict=True):
        assert torch.equal(there[[0, 1, 2, 3, 5]].cpu(), was[[8, 7, 8, 0, 0]])
        assert torch.equal(here[[1, 2]], was[[8, 0]]) and not here[3].any()
        assert torch.equal(here[4:], was[4:])
    with pytest.raises(ValueError, match="destination block 6"):
        kvferry.copy_blocks(cpu, device, np.array([[0, 6]]))
    with pytest.raises(ValueError, match="block 2 is written twice"):
        kvferry.copy_blocks(device, cpu, np.array([[0, 2], [1, 2]]))


@pytest.mark.parametrize("memory", ["host", pytest.param("cuda:0", marks=needs_cuda)])
def test_pages_move_between_token_pools(memory):
    source = kvferry.TokenKvPool.create(LAYOUT, 32, memory=memory)
    target = kvferry.TokenKvPool.create(LAYOUT, 32, memory=memory)
    slots = np.arange(36)  # With those of page 0.
    sent = np.random.default_rng(1).integers(0, 256, source.get_flat_data(slots).size, np.uint8)
    source.set_flat_data(slots, sent)
    config = kvferry.Config.make({})
    prefill = kvferry.PrefillEndpoint(source.pages, config, "model", "p")
    decode = kvferry.DecodeEndpoint(target.pages, config, "model", name="d")
    try:
        ticket = prefill.publish([3, 7, 8], num_tokens=12, ready_layers=2)
        decode.fetch(ticket, 0, [1, 6, 2]).wait(20000)
    finally:
        decode.close()
        prefill.close()
    there, here = np.r_[12:16, 28:36], np.r_[4:8, 24:28, 8:12]
    assert np.array_equal(target.get_flat_data(here), source.get_flat_data(there))
    untouched = np.setdiff1d(slots, here)
    assert not target.get_flat_data(untouched).any()
