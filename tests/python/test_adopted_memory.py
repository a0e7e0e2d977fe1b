"""Memory of pools in arrays, and an engine's arrays as the memory of pools."""

import gc
import weakref

import kvferry
import numpy as np
import pytest
from endpoints import MODEL, NUM_PAGES, adopt, make_config, numpy_buffers, small_layout


def test_page_views_are_the_memory_and_keep_it_alive():
    pool = kvferry.KvPool.create(small_layout(), NUM_PAGES)
    infos = pool.buffer_infos()
    assert [item for _, _, item in infos] == [128, 128, 128, 64, 64, 64]
    assert all(size == NUM_PAGES * item for _, size, item in infos)
    view = pool.page(2, 1, 5)
    assert view.dtype == np.uint8 and view.shape == (64,)
    assert view.ctypes.data == infos[5][0] + 5 * 64
    view[0] = 77
    assert pool.page(2, 1, 5)[0] == 77
    del pool
    gc.collect()
    view[:] = 1  # The pool lives as long as a view of it.
    assert view.sum() == 64


def test_page_view_bounds():
    pool = kvferry.KvPool.create(small_layout(), NUM_PAGES)
    for bad in [(3, 0, 0), (-1, 0, 0), (0, 2, 0), (0, -1, 0), (0, 0, NUM_PAGES), (0, 0, -1)]:
        with pytest.raises(IndexError):
            pool.page(*bad)


def test_adopt_numpy():
    arrays = numpy_buffers()
    pool = adopt(arrays)
    assert pool.num_pages == NUM_PAGES
    arrays[4][5, 0] = 99  # V of layer 1.
    assert pool.page(1, 1, 5)[0] == 99


def test_adopt_errors_name_the_buffer():
    arrays = numpy_buffers()
    infos = [(a.ctypes.data, a.nbytes) for a in arrays]
    with pytest.raises(ValueError, match="5 buffers given"):
        kvferry.KvPool.adopt(small_layout(), infos[:-1], arrays)
    with pytest.raises(ValueError, match="7 buffers given"):
        kvferry.KvPool.adopt(small_layout(), [*infos, infos[0]], arrays)
    with pytest.raises(ValueError, match="buffer 2 has a null address"):
        kvferry.KvPool.adopt(small_layout(), [*infos[:2], (0, infos[2][1]), *infos[3:]], arrays)
    with pytest.raises(ValueError, match="buffer 5"):
        kvferry.KvPool.adopt(small_layout(), [*infos[:5], (infos[5][0], 63)], arrays)


def test_owner_lives_as_long_as_what_uses_its_memory():
    arrays = numpy_buffers()
    alive = weakref.ref(arrays)
    pool = adopt(arrays)
    endpoint = kvferry.PrefillEndpoint(pool, make_config(), MODEL)
    view = pool.page(0, 0, 0)
    del arrays, pool
    gc.collect()
    assert alive() is not None
    endpoint.close()
    del endpoint
    gc.collect()
    assert alive() is not None  # The view is left.
    del view
    gc.collect()
    assert alive() is None


def test_owner_is_dropped_when_adopting_fails():
    arrays = numpy_buffers()
    alive = weakref.ref(arrays)
    with pytest.raises(ValueError):
        kvferry.KvPool.adopt(small_layout(), [], arrays)
    del arrays
    gc.collect()
    assert alive() is None


def test_adopted_torch_memory_moves():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    layers, heads, dim = 2, 4, 8
    layout = kvferry.KvLayout.mha(layers, 4, heads, dim, "bfloat16")

    def make(seed):
        torch.manual_seed(seed)
        shape = (NUM_PAGES, 4, heads, dim)
        tensors = [torch.randn(shape).to(torch.bfloat16) for _ in range(2 * layers)]
        infos = [(t.data_ptr(), t.numel() * t.element_size()) for t in tensors]
        return tensors, kvferry.KvPool.adopt(layout, infos, tensors)

    source, source_pool = make(1)
    target, target_pool = make(2)
    before = [t.clone() for t in target]
    prefill = kvferry.PrefillEndpoint(source_pool, make_config(), MODEL)
    decode = kvferry.DecodeEndpoint(target_pool, make_config(), MODEL)
    ticket = prefill.publish([1, 9, 2], ready_layers=layers)
    decode.fetch(ticket, 0, [4, 5, 6]).wait(20000)
    for have, was, came in zip(target, before, source, strict=True):
        assert torch.equal(have[4:7], came[[1, 9, 2]])
        assert torch.equal(have[:4], was[:4]) and torch.equal(have[7:], was[7:])
    prefill.close()
    decode.close()


def test_an_engine_s_memory_that_is_shared_is_read_in_place():
    layout = kvferry.KvLayout.mha(2, 16, 1, 64, "float16")
    shared = kvferry.SharedMemory.create(8 * layout.page_bytes)
    memory = shared.array()
    assert memory.size == shared.bytes >= 8 * layout.page_bytes
    assert memory.ctypes.data == shared.address and not memory.any()
    buffer_bytes = 8 * layout.item_bytes(0)
    buffers = [(shared.address + i * buffer_bytes, buffer_bytes) for i in range(4)]
    source = kvferry.KvPool.adopt(layout, buffers, shared, shared)
    with pytest.raises(ValueError, match="buffer 3 .* does not lie in the shared memory"):
        beyond = [*buffers[:3], (shared.address + shared.bytes, buffer_bytes)]
        kvferry.KvPool.adopt(layout, beyond, shared, shared)
    memory[:] = np.arange(memory.size) % 251
    del shared  # The pool and the array keep it.
    target = kvferry.KvPool.create(layout, 8)
    config = kvferry.Config.make({"same_host_path": "in_place"})
    prefill = kvferry.PrefillEndpoint(source, config, "m")
    decode = kvferry.DecodeEndpoint(target, config, "m")
    ticket = prefill.publish([5, 1, 6], ready_layers=2)
    decode.fetch(ticket, 0, [0, 1, 2]).wait(20000)
    assert prefill.metrics()["transfers_in_place"] == 1
    for layer in range(2):
        for tensor in range(2):
            for page, local in ((5, 0), (1, 1), (6, 2)):
                moved = target.page(layer, tensor, local)
                assert (moved == source.page(layer, tensor, page)).all() and moved.any()
    decode.close()
    prefill.close()
