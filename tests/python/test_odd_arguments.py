"""Arguments that are plausible and wrong, or change under the call: an error or a result, and the
process goes on."""

import contextlib
import ctypes
import mmap

import kvferry
import numpy as np
import pytest

LAYOUT = kvferry.KvLayout.mha(1, 4, 1, 8, "float32")


def token_pool() -> kvferry.TokenKvPool:
    return kvferry.TokenKvPool.create(LAYOUT, 32)


def test_buffers_without_strides_are_arrays():
    slots = kvferry.TokenSlotAllocator(64, 4)
    assert slots.alloc(4).tolist() == [4, 5, 6, 7]
    slots.free((ctypes.c_int32 * 4)(4, 5, 6, 7))
    assert slots.available_size == 64
    keys = (ctypes.c_float * 64)()
    pages = kvferry.KvPool.adopt_tensors(LAYOUT, [keys, (ctypes.c_float * 64)()])
    kvferry.TokenKvPool.over(pages).set_kv_buffer(
        0, np.array([5]), [(ctypes.c_float * 8)(*range(8)), (ctypes.c_float * 8)()]
    )
    assert list(keys[40:48]) == list(range(8))


def test_scalars_that_are_buffers_are_no_arrays():
    with pytest.raises((TypeError, ValueError)):
        kvferry.TokenSlotAllocator(64, 4).free(np.datetime64(1, "s"))
    with pytest.raises((TypeError, ValueError)):
        token_pool().set_kv_buffer(0, np.array([4]), np.array(["2020", "2021"], "M8[s]"))


def test_buffers_that_are_gone_are_refused():
    store = kvferry.HostStore(1 << 20)
    released = memoryview(bytearray(10))
    released.release()
    closed = mmap.mmap(-1, 16)
    closed.close()
    for gone in (released, closed):
        with pytest.raises((TypeError, ValueError)):
            store.put("k", gone)
        with pytest.raises((TypeError, ValueError)):
            store.get_into("k", gone)
        with pytest.raises((TypeError, ValueError)):
            store.put("k", [b"a", gone])
        with pytest.raises((TypeError, ValueError)):
            token_pool().set_kv_buffer(0, gone, [np.zeros((1, 1, 8), np.float32)] * 2)
    store.put("k", b"value")
    assert store.get_bytes("k").tobytes() == b"value"


def test_slots_of_a_huge_empty_shape_are_none():
    rows = np.empty((0, 1, 8), np.float32)
    token_pool().set_kv_buffer(0, np.empty((2**40, 0), np.int32), [rows, rows])


class Rows:
    """As torch's tensors: what makes a capsule of them is Python code."""

    def __init__(self, before=lambda: None):
        self.rows, self.before = np.zeros((1, 1, 8), np.float32), before

    def __dlpack__(self, **options):
        self.before()
        return self.rows.__dlpack__(**options)


def test_a_list_may_change_while_it_is_read():
    rows = [Rows(lambda: rows.clear()), Rows()]
    rows += [Rows() for _ in range(1000)]
    with pytest.raises(ValueError):  # As many as there were.
        token_pool().set_kv_buffer(0, np.array([4]), rows)
    assert not rows


def test_what_a_signals_handler_raises_in_there_is_not_lost():
    def interrupt():
        raise KeyboardInterrupt

    pool = token_pool()
    with pytest.raises(KeyboardInterrupt):
        with contextlib.suppress(TypeError):
            pool.set_kv_buffer(0, np.array([4]), [Rows(interrupt), Rows()])
        for _ in range(1000):  # Where Python looks whether there is anything.
            pass


def values() -> dict:
    """Makers of values that are alike."""
    model = (
        '{"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, '
        '"head_dim": 8, "hidden_size": 8, "torch_dtype": "float16"}'
    )
    ticket, push = "kvferry1|tcp://h:1|1|2|3|4", "kvferrypush1|tcp://h:1|1|2|3|4"
    return {
        "layout": lambda: kvferry.KvLayout.mha(1, 4, 1, 8, "float32"),
        "model": lambda: kvferry.ModelConfig.from_json(model),
        "ticket": lambda: kvferry.Ticket.parse(ticket),
        "receive ticket": lambda: kvferry.ReceiveTicket.parse(push),
    }


@pytest.mark.parametrize("name", values())
def test_values_may_be_compared_with_anything_and_looked_up(name):
    value, same = values()[name](), values()[name]()
    assert value == same and not value != same
    assert {value: 1}[same] == 1 and len({value, same}) == 1
    others = [make() for key, make in values().items() if key != name]
    for other in [*others, None, 1, "text", object()]:
        assert value != other and not value == other
        assert value in [other, same]


def test_errors_of_an_array_refuse_it():
    def fail():
        raise RuntimeError("requires grad")

    with pytest.raises(TypeError):
        token_pool().set_kv_buffer(0, np.array([4]), [Rows(fail), Rows()])
