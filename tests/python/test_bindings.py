"""The Python package: what it adds to the C++ core, which has tests of its own."""

import gc
import importlib.resources
import os
import subprocess
import sys
import threading
import weakref

import kvferry
import numpy as np
import pytest
from waiting import wait_for

MODEL = "test/model"
NUM_PAGES = 16


def small_layout(**changes):
    options = dict(
        num_layers=3,
        page_size=4,
        dtype="float16",
        page_format="NHD",
        tensors=[("k", 2, 8), ("v", 2, 4)],
    )
    return kvferry.KvLayout(**(options | changes))


def make_config(**options):
    return kvferry.Config.make({"chunk_bytes": 4096, "arena_bytes": 1 << 20} | options)


def fill(pool, seed):
    """Random bytes in every page; returns them as {(layer, tensor, page): bytes}."""
    random = np.random.default_rng(seed)
    content = {}
    for layer in range(pool.layout.num_layers):
        for tensor in range(len(pool.layout.tensors)):
            for page in range(pool.num_pages):
                view = pool.page(layer, tensor, page)
                view[:] = random.integers(0, 256, view.size, dtype=np.uint8)
                content[layer, tensor, page] = view.tobytes()
    return content


class Pair:
    def __init__(self, **options):
        self.source = kvferry.KvPool.create(small_layout(), NUM_PAGES)
        self.target = kvferry.KvPool.create(small_layout(), NUM_PAGES)
        self.config = make_config(**options)
        self.prefill = kvferry.PrefillEndpoint(self.source, self.config, MODEL, "p")
        self.decode = kvferry.DecodeEndpoint(self.target, self.config, MODEL, name="d")

    def close(self):
        self.prefill.close()
        self.decode.close()


@pytest.fixture
def pair():
    made = Pair(publish_grace_ms=50)
    yield made
    made.close()


# ---------------------------------------------------------------- moving


def test_round_trip(pair):
    source = fill(pair.source, 1)
    target = fill(pair.target, 2)
    from_pages, to_pages = [3, 4, 5, 9, 0], [8, 1, 15, 2, 3]
    ticket = pair.prefill.publish(from_pages, num_tokens=17, ready_layers=3)
    handle = pair.decode.fetch(ticket, 0, to_pages)
    handle.wait(20000)
    assert handle.done and handle.ok and handle.error == ""
    assert handle.missing_pages() == []
    assert handle.layers_done == 3
    report = handle.report()
    assert report["total_bytes"] == report["bytes_done"] == 5 * small_layout().page_bytes
    assert report["wait_seconds"] >= 0 and report["move_seconds"] > 0
    moved = dict(zip(to_pages, from_pages, strict=True))
    for (layer, tensor, page), before in target.items():
        want = source[layer, tensor, moved[page]] if page in moved else before
        assert pair.target.page(layer, tensor, page).tobytes() == want

    lease = kvferry.Ticket.parse(ticket).lease_id
    ended = []
    wait_for(lambda: ended.extend(pair.prefill.take_ended()) or ended)
    assert ended == [(lease, "fetched")]
    assert pair.prefill.take_ended() == []
    assert pair.prefill.metrics()["transfers_ok"] == 1
    assert pair.decode.metrics()["fetches_ok"] == 1


def test_layer_by_layer_and_first_page(pair):
    source = fill(pair.source, 1)
    lease = kvferry.random_id()
    ticket = pair.prefill.publish([1, 2, 3], lease_id=lease)
    handle = pair.decode.fetch(ticket, 2, [7])
    for layer in range(3):
        assert handle.layers_done == layer and not handle.done
        with pytest.raises(kvferry.DeadlineExceeded):
            handle.wait_layer(layer, 0)
        pair.prefill.layer_ready(lease, layer)
        handle.wait_layer(layer, 20000)
        assert pair.target.page(layer, 0, 7).tobytes() == source[layer, 0, 3]
    handle.wait(20000)


def test_ticket_made_before_the_publish(pair):
    """A scheduler chooses the lease id and writes the ticket; the worker publishes later."""
    lease = kvferry.random_id()
    ticket = kvferry.Ticket(
        address=pair.prefill.address,
        epoch=pair.prefill.epoch,
        lease_id=lease,
        num_pages=2,
        num_tokens=8,
    )
    text = pair.prefill.publish([1, 2], num_tokens=8, lease_id=lease)
    assert str(ticket) == text
    assert kvferry.Ticket.parse(text) == ticket
    pair.prefill.all_layers_ready(lease)
    pair.decode.fetch(str(ticket), 0, [5, 6]).wait(20000)


def test_fetch_of_nothing_ends_the_lease(pair):
    ticket = pair.prefill.publish([1, 2])
    pair.decode.fetch(ticket, 2, []).wait(20000)
    ended = []
    wait_for(lambda: ended.extend(pair.prefill.take_ended()) or ended)
    assert ended[0][1] == "fetched"


WITHOUT_MEMORY = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import _testcapi
import kvferry
import numpy as np
from test_bindings import Pair, make_config, MODEL
from waiting import wait_for

def without_memory(number, call, *arguments):
    _testcapi.set_nomemory(number, number + 1)
    try:
        call(*arguments)
    except MemoryError:
        _testcapi.remove_mem_hooks()
        return True
    finally:
        _testcapi.remove_mem_hooks()
"""

# Those that found memory are under way. What nanobind makes behind the last ends the process
# where it cannot.
FETCHES = """
made, under_way = Pair(publish_grace_ms=50), 0
for number in range(7):
    lease = kvferry.random_id()
    ticket = made.prefill.publish([1, 2], lease_id=lease)
    failed = without_memory(number, made.decode.fetch, ticket, 0, [3, 4])
    wait_for(lambda: made.decode.metrics()["fetches_started"] == number + 1)
    under_way += not failed
    if failed:
        print("none", made.decode.metrics()["fetches_active"] - under_way)
made.close()
"""

PUSHES = """
made, under_way = Pair(), 0
decode = kvferry.DecodeEndpoint(made.target, make_config(), MODEL, accept_pushes=True)
for number in range(8):
    ticket, _ = decode.receive(0, [3, 4])
    lease = kvferry.random_id()
    failed = without_memory(number, made.prefill.push, ticket, [1, 2], 0, lease)
    under_way += not failed
    if failed:
        print("none", made.prefill.metrics()["leases_live"] - under_way)
decode.close()
made.close()
"""

FIRST_ARRAY = """
slots = kvferry.TokenSlotAllocator(16, 1)
rows = np.array([1])
for number in range(3):
    try:
        without_memory(number, slots.free, rows)
    except (TypeError, ValueError):  # Nothing of it was allocated.
        pass
print(slots.alloc(3).tolist())
"""


def torch_pages(pages):
    return pytest.importorskip("torch").from_numpy(pages)


def told_by(program: str) -> list[str]:
    pytest.importorskip("_testcapi")
    command = [sys.executable, "-c", WITHOUT_MEMORY + program]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    return told.stdout.splitlines()


def test_a_fetch_whose_handle_finds_no_memory_has_ended():
    """Its pages are the caller's again, who could not wait for it."""
    told = told_by(FETCHES)
    assert len(told) >= 2 and set(told) == {"none 0"}


def test_a_push_whose_handle_finds_no_memory_has_ended():
    told = told_by(PUSHES)
    assert len(told) >= 2 and set(told) == {"none 0"}


def test_the_first_array_may_find_no_memory():
    assert told_by(FIRST_ARRAY) == ["[1, 2, 3]"]


def test_objects_say_what_they_are():
    assert repr(kvferry.Config.make({})) == "Config()"
    config = kvferry.Config.make({"lanes": 2, "net_device": "lo", "checksum": True})
    assert repr(config) == "Config(net_device='lo', lanes=2, checksum=True)"
    assert repr(kvferry.KvPool.create(small_layout(), 3)).startswith("KvPool(3 pages of ")


@pytest.mark.parametrize("make", [list, tuple, np.array, np.int32, torch_pages], ids=str)
def test_pages_come_as_lists_and_arrays(pair, make):
    pages, local = np.array([1, 2]), np.array([3, 4])
    source, target = fill(pair.source, 1), pair.target
    ticket = pair.prefill.publish(make(pages))
    fetch = pair.decode.fetch(ticket, 0, make(local))
    pair.prefill.all_layers_ready(kvferry.Ticket.parse(ticket).lease_id)
    fetch.wait(20000)
    assert bytes(target.page(1, 0, 4)) == source[1, 0, 2]
    with pytest.raises(ValueError, match=r"integers \(pages\) is neither int32 nor int64"):
        pair.prefill.publish(np.array([1.0]))


# ---------------------------------------------------------------- errors


def test_error_types():
    for name in (
        "Aborted AlreadyExists Cancelled DataLoss DeadlineExceeded FailedPrecondition NotFound "
        "PermissionDenied ResourceExhausted Unavailable"
    ).split():
        error = getattr(kvferry, name)
        assert issubclass(error, kvferry.Error)
        assert error.__module__ == "kvferry" and error.__name__ == name
    assert issubclass(kvferry.Error, RuntimeError)
    assert issubclass(kvferry.DeadlineExceeded, TimeoutError)


def test_errors_of_a_fetch(pair):
    ticket = kvferry.Ticket.parse(pair.prefill.publish([1, 2], ready_layers=1))

    def fetch(text, pages=(3, 4), first_page=0, timeout_ms=0):
        return pair.decode.fetch(str(text), first_page, list(pages), timeout_ms)

    with pytest.raises(kvferry.DeadlineExceeded):
        fetch(ticket, timeout_ms=100).wait(20000)
    handle = fetch(ticket)
    handle.wait_layer(0, 20000)
    handle.cancel()
    with pytest.raises(kvferry.Cancelled):
        handle.wait(20000)
    assert handle.done and not handle.ok and handle.error
    assert handle.missing_pages() == [3, 4]
    pair.prefill.release(ticket.lease_id)
    assert pair.prefill.take_ended() == [(ticket.lease_id, "released")]
    with pytest.raises(kvferry.FailedPrecondition, match="already been released"):
        fetch(ticket).wait(20000)
    with pytest.raises(kvferry.FailedPrecondition):
        pair.prefill.release(ticket.lease_id)
    unknown = kvferry.Ticket(
        address=ticket.address, epoch=ticket.epoch, lease_id=5, num_pages=2, num_tokens=0
    )
    with pytest.raises(kvferry.NotFound, match="unknown here"):
        fetch(unknown).wait(20000)
    elsewhere = str(ticket).replace("127.0.0.1", "192.0.2.1")
    with pytest.raises(kvferry.PermissionDenied, match="allowed_hosts"):
        fetch(elsewhere)
    with pytest.raises(ValueError, match="kvferry1"):
        fetch("no ticket at all")
    with pytest.raises(ValueError, match="16 pages"):
        fetch(ticket, pages=[16])
    with pytest.raises(ValueError):
        fetch(ticket, first_page=1)
    with pytest.raises(ValueError, match="timeout_ms"):
        fetch(ticket, timeout_ms=-1)


def test_errors_of_a_publish(pair):
    with pytest.raises(ValueError, match="no pages"):
        pair.prefill.publish([])
    with pytest.raises(ValueError, match="16 pages"):
        pair.prefill.publish([16])
    with pytest.raises(ValueError, match="-1"):
        pair.prefill.publish([-1])
    pair.prefill.publish([1], lease_id=7)
    with pytest.raises(kvferry.AlreadyExists):
        pair.prefill.publish([1], lease_id=7)
    with pytest.raises(ValueError, match="layer 3 of 3"):
        pair.prefill.layer_ready(7, 3)
    with pytest.raises(kvferry.NotFound):
        pair.prefill.layer_ready(8, 0)
    with pytest.raises(kvferry.NotFound):
        pair.prefill.release(8)


def test_another_model_is_refused(pair):
    other = kvferry.DecodeEndpoint(pair.target, pair.config, "other/model")
    handle = other.fetch(pair.prefill.publish([1]), 0, [1])
    with pytest.raises(kvferry.FailedPrecondition, match="model: 'test/model' here"):
        handle.wait(20000)
    other.close()


def test_an_error_keeps_the_context_it_was_raised_in(pair):
    with pytest.raises(kvferry.NotFound) as caught:
        try:
            raise KeyError("first")
        except KeyError:
            pair.prefill.release(12345)
    assert isinstance(caught.value.__context__, KeyError)
    assert "3039" in str(caught.value)


def test_port_taken(pair):
    port = int(pair.prefill.address.rsplit(":", 1)[1])
    with pytest.raises(kvferry.Unavailable, match="listen_port"):
        kvferry.PrefillEndpoint(pair.source, make_config(listen_port=port), MODEL)


# ---------------------------------------------------------------- config, layout, allocator


def test_config():
    config = kvferry.Config.make({"lease_ms": 5, "checksum": True, "net_device": "eth9"})
    assert (config.lease_ms, config.checksum, config.net_device) == (5, True, "eth9")
    assert config.listen_host == "127.0.0.1"
    assert kvferry.Config.make().lease_ms == kvferry.Config.make({}).lease_ms == 60000
    for name in kvferry.Config.field_names():
        assert hasattr(config, name), name
    with pytest.raises(AttributeError):
        config.lease_ms = 6


def test_config_errors_list_the_keys():
    with pytest.raises(ValueError) as caught:
        kvferry.Config.make({"lease_msec": 5})
    for name in ["'lease_msec'", *kvferry.Config.field_names()]:
        assert name in str(caught.value)
    for options, part in [
        ({"lease_ms": "5"}, 'lease_ms is "5" but must be an integer'),
        ({"lease_ms": 0}, "lease_ms is 0"),
        ({"lease_ms": 1 << 63}, "lease_ms"),
        ({"lease_ms": 1 << 80}, "lease_ms"),
        ({"listen_host": "10.0.0.1"}, "allow_insecure_network"),
        ({"heartbeat_timeout_ms": 1000}, "heartbeat_interval_ms"),
    ]:
        with pytest.raises(ValueError, match=part.replace("(", "\\(")):
            kvferry.Config.make(options)


def test_config_from_the_environment(monkeypatch):
    monkeypatch.setenv("KVFERRY_LEASE_MS", "1234")
    monkeypatch.setenv("KVFERRY_MAX_PEERS", "9")
    config = kvferry.Config.make({"max_peers": 10})
    assert (config.lease_ms, config.max_peers) == (1234, 10)
    monkeypatch.setenv("KVFERRY_LEASE_MS", "soon")
    with pytest.raises(ValueError, match="lease_ms"):
        kvferry.Config.make()


def test_layout():
    layout = small_layout()
    assert (layout.num_layers, layout.page_size, layout.dtype) == (3, 4, "float16")
    assert layout.page_format == "NHD"
    assert layout.tensors == [("k", 2, 8), ("v", 2, 4)]
    assert [layout.item_bytes(0), layout.item_bytes(1)] == [128, 64]
    assert (layout.layer_page_bytes, layout.page_bytes) == (192, 576)
    assert layout == small_layout() and layout != small_layout(page_size=8)
    with pytest.raises(IndexError):
        layout.item_bytes(2)
    with pytest.raises(IndexError):
        layout.item_bytes(-1)
    assert kvferry.KvLayout.mha(2, 16, 4, 64, "bfloat16").tensors == [("k", 4, 64), ("v", 4, 64)]
    assert kvferry.KvLayout.fused(2, 16, 4, 64, "torch.float32").tensors == [("kv", 4, 128)]
    assert kvferry.KvLayout.mla(2, 16, 576, "float8_e4m3fn").tensors == [("latent", 1, 576)]
    for change, part in [
        ({"dtype": "bf16"}, "bfloat16"),
        ({"num_layers": 0}, "num_layers"),
        ({"tensors": []}, "tensors"),
        ({"page_format": "x" * 65}, "page_format"),
    ]:
        with pytest.raises(ValueError, match=part):
            small_layout(**change)


def test_allocator():
    allocator = kvferry.PageAllocator(8, reserved=1)
    pages = allocator.allocate(5)
    assert pages == [1, 2, 3, 4, 5] and allocator.num_free == 2
    allocator.free([2, 4])
    assert allocator.num_free == 4
    assert allocator.free_run_histogram() == [2, 1]
    with pytest.raises(kvferry.ResourceExhausted):
        allocator.allocate(5)
    with pytest.raises(ValueError, match="page 2 is already free"):
        allocator.free([1, 2])
    with pytest.raises(ValueError, match="reserved"):
        kvferry.PageAllocator(4, 4)


def test_random_ids():
    ids = {kvferry.random_id() for _ in range(1000)}
    assert len(ids) == 1000 and 0 not in ids and max(ids) > 1 << 60


# ---------------------------------------------------------------- memory


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


class Owner(list):
    """A list that can be referred to weakly."""


def numpy_buffers():
    """Memory as an engine has it: an array of each layer, K first."""
    layout = small_layout()
    return Owner(
        np.zeros((NUM_PAGES, layout.item_bytes(tensor)), dtype=np.uint8)
        for tensor in range(2)
        for _ in range(layout.num_layers)
    )


def adopt(arrays):
    return kvferry.KvPool.adopt(small_layout(), [(a.ctypes.data, a.nbytes) for a in arrays], arrays)


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


# ---------------------------------------------------------------- threads and lifetime


@pytest.mark.parametrize("waiting", ["wait", "wait_layer"])
def test_waiting_lets_other_threads_run(pair, waiting):
    """The thread that makes the layers ready can run only while the waiting one holds no GIL."""
    ticket = pair.prefill.publish([1])
    lease = kvferry.Ticket.parse(ticket).lease_id
    handle = pair.decode.fetch(ticket, 0, [1])
    about_to_wait = threading.Event()

    def make_ready():
        about_to_wait.wait()
        pair.prefill.all_layers_ready(lease)

    thread = threading.Thread(target=make_ready)
    thread.start()
    about_to_wait.set()
    if waiting == "wait":
        handle.wait(20000)
    else:
        handle.wait_layer(2, 20000)
    thread.join()


def test_close_then_use(pair):
    ticket = pair.prefill.publish([1])
    lease = kvferry.Ticket.parse(ticket).lease_id
    pair.prefill.close()
    pair.prefill.close()
    pair.decode.close()
    pair.decode.close()
    for use in [
        lambda: pair.prefill.publish([1]),
        lambda: pair.prefill.layer_ready(lease, 0),
        lambda: pair.prefill.all_layers_ready(lease),
        lambda: pair.prefill.release(lease),
        lambda: pair.prefill.take_ended(),
        lambda: pair.prefill.metrics(),
        lambda: pair.prefill.address,
        lambda: pair.prefill.epoch,
        lambda: pair.decode.fetch(ticket, 0, [1]),
        lambda: pair.decode.metrics(),
    ]:
        with pytest.raises(kvferry.FailedPrecondition, match="closed"):
            use()


def test_close_ends_what_is_under_way(pair):
    ticket = pair.prefill.publish([1], ready_layers=1)
    handle = pair.decode.fetch(ticket, 0, [1])
    handle.wait_layer(0, 20000)
    pair.decode.close()
    assert handle.done and not handle.ok
    with pytest.raises(kvferry.Cancelled):
        handle.wait(0)
    handle.cancel()


def test_close_while_another_thread_waits(pair):
    handle = pair.decode.fetch(pair.prefill.publish([1]), 0, [1])
    errors = []

    def wait():
        try:
            handle.wait(60000)
        except kvferry.Error as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    pair.decode.close()
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(errors[0], kvferry.Cancelled)


def test_endpoints_are_closed_by_the_garbage_collector():
    made = Pair()
    handle = made.decode.fetch(made.prefill.publish([1]), 0, [1])
    del made
    gc.collect()
    assert handle.done and not handle.ok


# ---------------------------------------------------------------- the package


def test_package_is_typed():
    files = importlib.resources.files("kvferry")
    assert files.joinpath("py.typed").is_file()
    stub = files.joinpath("_core.pyi").read_text()
    for name in kvferry.__all__:
        assert getattr(kvferry, name) is not None
        if getattr(kvferry._core, name, None) is not None:
            assert name in stub, name


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


def test_values_are_cast():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    source = kvferry.KvPool.create(small_layout(dtype="float8_e5m2"), NUM_PAGES)
    target = kvferry.KvPool.create(small_layout(dtype="float32"), NUM_PAGES)
    fill(source, 1)
    theirs, ours = [1, 2, 3, 4, 5, 6], [0.5] * 6
    prefill = kvferry.PrefillEndpoint(source, make_config(), MODEL, scales=theirs)
    decode = kvferry.DecodeEndpoint(target, make_config(), MODEL, scales=ours)
    decode.fetch(prefill.publish([3, 4], ready_layers=3), 0, [8, 1]).wait(20000)
    for page, into in ((3, 8), (4, 1)):
        for layer in range(3):
            for tensor in range(2):
                stored = torch.from_numpy(source.page(layer, tensor, page))
                want = stored.view(torch.float8_e5m2).float() * theirs[3 * tensor + layer] / 0.5
                got = torch.from_numpy(target.page(layer, tensor, into)).view(torch.float32)
                assert torch.equal(got.nan_to_num(1e30), want.nan_to_num(1e30))
    assert prefill.metrics()["transfers_cast"] == 1
    with pytest.raises(ValueError, match="the scale of buffer 1 is 0"):
        kvferry.PrefillEndpoint(source, make_config(), MODEL, scales=[1, 0, 1, 1, 1, 1])
    prefill.close()
    decode.close()


def test_ranks_share_heads_out():
    assert kvferry.heads_of_rank(8, 3, 4) == (6, 2)
    shares = kvferry.shares_for(4, 0, 1, 2)
    assert [(it.rank, it.heads, it.reader) for it in shares] == [
        (0, (0, 2), (0, 1)),
        (1, (2, 2), (0, 1)),
    ]
    with pytest.raises(ValueError, match="of 3 with 8"):
        kvferry.shares_for(8, 0, 2, 3)
    pool = kvferry.KvPool.create(kvferry.KvLayout.mha(1, 4, 2, 8, "float16"), 4)
    config = kvferry.Config.make({})
    with pytest.raises(ValueError, match="heads .3, 3 . 2. are not within the model's 4"):
        kvferry.PrefillEndpoint(pool, config, "m", heads=(3, 4))
    decode = kvferry.DecodeEndpoint(pool, config, "m", heads=(2, 4))
    with pytest.raises(ValueError, match="heads .1, 1 . 2. asked"):
        decode.fetch("kvferry1|tcp://127.0.0.1:1|1|1|4|0", 0, [1], heads=(1, 2))
    decode.close()


# ---------------------------------------------------------------- closing


class Closing(Owner):
    """Buffers whose end, when what has their pool is closed, takes as long as a test wants."""

    def __init__(self, arrays):
        super().__init__(arrays)
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.close = None

    def __del__(self):
        self.begun.set()
        self.go_on.wait(20)
        self.close()  # Again, on the thread that is closing it.


def make_closable(kind, pool):
    options = {"pool": pool, "config": make_config(), "model": MODEL}
    nobody = "tcp://127.0.0.1:1"
    if kind == "LookupProducer":
        return kvferry.LookupProducer(max_bytes=1 << 20, **options)
    if kind == "LookupConsumer":
        return kvferry.LookupConsumer(producers=[nobody], **options)
    if kind == "RemoteStore":
        return kvferry.RemoteStore(nobody, **options)
    return getattr(kvferry, kind)(**options)


# Whoever closed it takes the memory for its own again, and may have been the second to ask.
@pytest.mark.parametrize(
    "kind",
    ["PrefillEndpoint", "DecodeEndpoint", "LookupProducer", "LookupConsumer", "RemoteStore"],
)
def test_a_second_thread_that_closes_waits_for_the_first(kind):
    arrays = Closing(numpy_buffers())
    begun, go_on = arrays.begun, arrays.go_on
    pool = adopt(arrays)
    closable = make_closable(kind, pool)
    arrays.close = closable.close
    del arrays, pool
    closing = [threading.Thread(target=closable.close, daemon=True) for _ in range(2)]
    closing[0].start()
    assert begun.wait(20)
    closing[1].start()
    closing[1].join(0.3)
    assert closing[1].is_alive()
    go_on.set()
    for thread in closing:
        thread.join(20)
        assert not thread.is_alive()


# ---------------------------------------------------------------- forks

# What has threads or connections, and a call of each.
MAKE_THREADED = """
import os, signal, sys
import kvferry

layout = kvferry.KvLayout.mha(1, 1, 1, 8, "uint8")
pools = [kvferry.KvPool.create(layout, 8) for _ in range(5)]
config = kvferry.Config.make()
prefill = kvferry.PrefillEndpoint(pools[0], config, "m", "p")
decode = kvferry.DecodeEndpoint(pools[1], config, "m", "d")
producer = kvferry.LookupProducer(pool=pools[2], config=config, model="m", max_bytes=8)
consumer = kvferry.LookupConsumer(
    pool=pools[3], config=config, model="m", producers=[producer.address]
)
host = kvferry.HostStore(1 << 20, layout=layout)
server = kvferry.StoreServer(host, config, "m")
remote = kvferry.RemoteStore(server.address, pools[4], config, "m")
tiered = kvferry.TieredStore(host, remote)
workers = kvferry.ThreadPool(2)

def fetch():
    handle = decode.fetch(prefill.publish([1], ready_layers=1), 0, [2])
    handle.wait(20000)

def use_all():
    fetch()
    remote.put("a", b"value")
    assert remote.get_bytes("a").tobytes() == b"value"
    assert consumer.metrics() and producer.metrics() and server.metrics()
"""


def run_script(script: str) -> None:
    """Ends well, and says nothing."""
    # Python 3.12 warns of every fork of a process with threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", MAKE_THREADED + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("before_its_exit", ["", "prefill.close(); producer.close(); del remote"])
def test_a_forked_child_exits_and_leaves_what_its_parent_has_alone(before_its_exit):
    run_script(f"""
use_all()
child = os.fork()
if child == 0:
    signal.alarm(20)
    {before_its_exit}
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
use_all()
assert decode.metrics()["fetches_ok"] == 2
""")


def test_what_has_threads_is_of_no_use_in_a_forked_child():
    run_script("""
def refusal(call):
    try:
        call()
    except kvferry.FailedPrecondition as error:
        return str(error)

parent = os.getpid()
lookup = consumer.drop_select(None, None, [1], 20000)
if os.fork() != 0:
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
signal.alarm(20)
calls = {
    "endpoints": [lambda: prefill.publish([1]), decode.metrics],
    "lookup buffers": [producer.metrics, consumer.metrics],
    "store servers": [server.metrics],
    "stores": [host.stats, remote.stats, tiered.stats],
    "lookups": [lookup.cancel, lambda: lookup.done],
}
for what, those in calls.items():
    for call in those:
        assert refusal(call) == f"made in process {parent}; {what} do not survive a fork"
""")
