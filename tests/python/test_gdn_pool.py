"""States of gated delta net layers from Python."""

import gc

import kvferry
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


def make_pool(dtype: str = "bfloat16", **changes) -> kvferry.GdnPool:
    sizes = {
        "max_requests": 4,
        "num_layers": 3,
        "num_v_heads": 2,
        "head_k_dim": 5,
        "head_v_dim": 6,
        "conv_dim": 7,
        "conv_kernel_size": 4,
        "max_track_slots": 2,
    }
    return kvferry.GdnPool(**(sizes | changes), dtype=dtype)


def test_torch_sees_the_memory():
    pool = make_pool("bfloat16")
    recurrent = torch.from_dlpack(pool.recurrent_state)
    conv = torch.from_dlpack(pool.conv_state)
    assert recurrent.dtype == torch.float32 and recurrent.shape == (3, 7, 2, 5, 6)
    assert conv.dtype == torch.bfloat16 and conv.shape == (3, 7, 7, 3)
    assert recurrent.is_contiguous() and conv.is_contiguous()
    assert not recurrent.any() and not conv.any()
    infos = pool.buffer_infos()
    assert [info[0] for info in infos[:3]] == [layer.data_ptr() for layer in recurrent]
    assert [info[0] for info in infos[3:]] == [layer.data_ptr() for layer in conv]
    assert [info[2] for info in infos] == [2 * 5 * 6 * 4] * 3 + [7 * 3 * 2] * 3
    assert sum(info[1] for info in infos) == pool.bytes

    conv[1, 2] = 1.5
    recurrent[2, 2] = -2.0
    assert torch.from_dlpack(pool.conv_state)[1, 2, 6, 2] == 1.5
    pool.copy_states([2], [3])
    assert (conv[1, 3] == 1.5).all() and (recurrent[2, 3] == -2.0).all()
    pool.reset_states(torch.tensor([2]))
    assert not conv[:, 2].any() and not recurrent[:, 2].any()
    assert (conv[1, 3] == 1.5).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numpy_sees_the_memory(dtype):
    pool = make_pool(dtype)
    recurrent = np.from_dlpack(pool.recurrent_state)
    conv = np.from_dlpack(pool.conv_state)
    assert recurrent.dtype == np.float32 and recurrent.shape == (3, 7, 2, 5, 6)
    assert conv.dtype == np.dtype(dtype) and conv.shape == (3, 7, 7, 3)
    assert conv.ctypes.data == pool.buffer_infos()[3][0]
    conv[2, 1] = 0.25
    assert (np.from_dlpack(pool.conv_state)[2, 1] == 0.25).all()
    assert torch.from_dlpack(pool.conv_state).dtype == getattr(torch, dtype)


def test_views_keep_the_memory():
    pool = make_pool()
    conv = torch.from_dlpack(pool.conv_state)
    recurrent = np.from_dlpack(pool.recurrent_state)
    conv[:] = 3
    recurrent[:] = 4
    del pool
    gc.collect()
    make_pool()  # Would take the memory over if it had been given back.
    assert (conv == 3).all() and (recurrent == 4).all()


def test_an_engines_tensors_are_adopted():
    recurrent = torch.randn(3, 7, 2, 5, 6)
    conv = torch.randn(3, 7, 7, 3).to(torch.bfloat16)
    was = recurrent.clone(), conv.clone()
    pool = kvferry.GdnPool.adopt_tensors(recurrent, conv, max_requests=4)
    assert (pool.max_requests, pool.max_track_slots, pool.memory) == (4, 2, "host")
    assert torch.from_dlpack(pool.conv_state).data_ptr() == conv.data_ptr()
    pool.copy_states([1, 2], [2, 3])
    pool.reset_states([1])
    for states, before in zip((recurrent, conv), was, strict=True):
        assert torch.equal(states[:, 2:4], before[:, 1:3]) and not states[:, 1].any()
        assert torch.equal(states[:, 4:], before[:, 4:])
    ours = torch.from_dlpack(pool.recurrent_state)
    del pool, recurrent, states
    gc.collect()
    assert torch.equal(ours[:, 2], was[0][:, 1])


def test_what_are_no_states_are_not_adopted():
    adopt = kvferry.GdnPool.adopt_tensors
    recurrent, conv = torch.zeros(3, 7, 2, 5, 6), torch.zeros(3, 7, 7, 3)
    with pytest.raises(ValueError, match=r"recurrent states are a tensor \[num_layers, .* float32"):
        adopt(recurrent.half(), conv, max_requests=4)
    with pytest.raises(ValueError, match="recurrent states are a tensor"):
        adopt(conv, conv, max_requests=4)
    with pytest.raises(ValueError, match=r"conv states are .* of 3 layers and 7 slots"):
        adopt(recurrent, conv[:, :6].contiguous(), max_requests=4)
    with pytest.raises(ValueError, match="conv_dtype is uint8"):
        adopt(recurrent, conv.byte(), max_requests=4)
    with pytest.raises(ValueError, match="7 slots; padding and max_requests = 7 are 8"):
        adopt(recurrent, conv, max_requests=7)
    with pytest.raises(TypeError):  # They would have to be copied.
        adopt(recurrent.transpose(3, 4), conv, max_requests=4)


def test_copies_are_what_indexing_does():
    """state[:, destinations] = state[:, sources], with all kinds of overlap."""
    pool = make_pool()
    recurrent = torch.from_dlpack(pool.recurrent_state)
    random = torch.Generator().manual_seed(1)
    for _ in range(200):
        recurrent.copy_(torch.randn(recurrent.shape, generator=random))
        count = int(torch.randint(0, 5, (1,), generator=random))
        destinations = torch.randperm(4, generator=random)[:count] + 1
        sources = torch.randint(1, 5, (count,), generator=random)
        expected = recurrent.clone()
        expected[:, destinations] = expected[:, sources]
        pool.copy_states(sources, destinations)
        assert torch.equal(recurrent, expected)


def test_slots_come_as_lists_and_arrays():
    pool = make_pool()
    recurrent = torch.from_dlpack(pool.recurrent_state)
    for slots in ([1, 2], np.array([1, 2]), torch.tensor([1, 2], dtype=torch.int32)):
        recurrent[:] = 1
        pool.reset_states(slots)
        assert recurrent[0, :, 0, 0, 0].tolist() == [1, 0, 0, 1, 1, 1, 1]
    with pytest.raises(ValueError, match="neither int32 nor int64"):
        pool.reset_states(np.array([1.5]))
    with pytest.raises(TypeError):
        pool.reset_states([1.5])


def test_track_slots():
    pool = make_pool()
    assert pool.num_slots == 7 and pool.max_track_slots == 2
    assert [pool.alloc_track_slot(), pool.alloc_track_slot()] == [5, 6]
    assert pool.alloc_track_slot() is None and pool.available_track_slots == 0
    pool.free_track_slot(6)
    with pytest.raises(ValueError, match="track slot 6 is not allocated"):
        pool.free_track_slot(6)
    with pytest.raises(ValueError, match="track slot 6 is not allocated"):
        pool.copy_states([1], [6])
    with pytest.raises(ValueError, match="slot 1 is no track slot"):
        pool.free_track_slot(1)
    pool.clear()
    assert pool.available_track_slots == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_requests": 0}, "max_requests is 0"),
        ({"head_v_dim": -1}, "head_v_dim is -1"),
        ({"conv_kernel_size": 1}, "conv_kernel_size is 1"),
        ({"dtype": "float8_e5m2"}, "conv_dtype is float8_e5m2"),
        ({"dtype": "int4"}, "dtype 'int4'"),
    ],
)
def test_bad_sizes(changes, message):
    with pytest.raises(ValueError, match=message):
        make_pool(**changes)
