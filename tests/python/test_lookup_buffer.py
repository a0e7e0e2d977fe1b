"""KVLookupBuffer: tensors and pages between producers and consumers, asyncio."""

import asyncio
import gc
import importlib.util
import os
import resource
import signal
import sys
import threading
import time
from types import SimpleNamespace

import kvferry
import numpy as np
import pytest
from kvferry import KVLookupBuffer
from kvferry.lookup import _Loop
from waiting import wait_for

torch = pytest.importorskip("torch")

LAYERS, PAGE, HEADS, DIM = 3, 4, 2, 8


def layout(dtype="bfloat16"):
    return kvferry.KvLayout.mha(LAYERS, PAGE, HEADS, DIM, dtype)


def producer(**options):
    options = {"model": "m", "layout": layout(), "max_bytes": 64 << 10, **options}
    if "pool" in options:
        del options["layout"]
    return KVLookupBuffer("producer", **options)


def consumer(*producers, **options):
    options = {"model": "m", "layout": layout(), "max_bytes": 64 << 10, **options}
    if "pool" in options:
        del options["layout"]
    return KVLookupBuffer("consumer", producers=[p.address for p in producers], **options)


@pytest.fixture
def pair():
    with producer() as one, consumer(one) as other:
        yield one, other


def kv(num_tokens, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, LAYERS, num_tokens, HEADS, DIM, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_tensors_come_as_they_went(dtype):
    kind = getattr(torch, dtype)
    key, value = kv(10, dtype=kind)
    tokens = torch.arange(100, 110)
    hidden = torch.randn(10, 16)
    with producer(layout=layout(dtype)) as one, consumer(one, layout=layout(dtype)) as other:
        bits = [t.view(torch.uint8) if dtype.startswith("float8") else t for t in (key, value)]
        one.insert(tokens, torch.ones(10, dtype=torch.bool), *bits, hidden)
        found = other.drop_select(tokens, None)
    assert found.key.dtype == found.value.dtype == kind
    assert torch.equal(found.key.view(torch.uint8), key.view(torch.uint8))
    assert torch.equal(found.value.view(torch.uint8), value.view(torch.uint8))
    assert torch.equal(found.hidden, hidden)
    assert found.input_tokens.tolist() == tokens.tolist() and found.roi.all()
    assert found.num_matched == 10


def test_numpy_and_parts_of_an_entry():
    with (
        producer(layout=layout("float32")) as one,
        consumer(one, layout=layout("float32"), framework="numpy") as other,
    ):
        key, value = kv(9, dtype=torch.float32).numpy()
        one.insert(np.arange(9), None, key, value)
        found = other.drop_select(list(range(5)))
        assert isinstance(found.key, np.ndarray) and found.hidden is None
        assert np.array_equal(found.key, key[:, :5]) and np.array_equal(found.value, value[:, :5])
        assert found.input_tokens.tolist() == list(range(9))
        assert found.roi.tolist() == [True] * 5 + [False] * 4


def test_hidden_states_of_torch_where_there_is_none(monkeypatch):
    states = [torch.randn(3, 2), torch.randn(3, 2).bfloat16(), torch.randn(3).to(torch.float8_e5m2)]
    bits = [states[0], states[1].view(torch.uint16), states[2].view(torch.uint8)]
    with (
        producer(layout=layout("float32")) as one,
        consumer(one, layout=layout("float32"), framework="numpy") as other,
    ):
        for token, state in enumerate(states):
            one.insert([token], None, *kv(1, dtype=torch.float32), state)
        expected = [b.numpy() for b in bits]
        monkeypatch.setitem(sys.modules, "torch", None)
        for token, want in enumerate(expected):
            got = other.drop_select([token]).hidden
            assert got.dtype == want.dtype and np.array_equal(got, want)


def test_numpy_and_dtypes_that_it_lacks():
    with producer() as one:
        one.insert([1], None, *kv(1))
        with pytest.raises(ValueError, match="'numpy' has no bfloat16"):
            consumer(one, framework="numpy")
        pool = kvferry.KvPool.create(layout(), 8)
        with pytest.raises(ValueError, match="'numpy' has no bfloat16"):
            consumer(one, pool=pool, tensor_pages=1, framework="numpy")
        with consumer(one, pool=pool, framework="numpy") as other:  # It has no tensors.
            assert other.drop_select_pages([1], None, [3]).pages == [3]
    fp8 = layout("float8_e5m2")
    with producer(layout=fp8) as one, consumer(one, layout=fp8, framework="numpy") as other:
        bits = kv(1, dtype=torch.float8_e5m2).view(torch.uint8)
        one.insert([1], None, *bits)
        found = other.drop_select([1])
        assert found.key.dtype == np.uint8
        assert np.array_equal(np.stack([found.key, found.value]), bits.numpy())


def latent():
    return kvferry.KvLayout.mla(LAYERS, PAGE, 16, "bfloat16")


def with_dtypes_of_their_own():
    return kvferry.KvLayout(
        num_layers=LAYERS,
        page_size=PAGE,
        dtype="bfloat16",
        page_format="NHD",
        tensors=[("k", HEADS, DIM, "float8_e4m3fn"), ("v", HEADS, DIM, "float8_e4m3fn")],
    )


@pytest.mark.parametrize("make", [latent, with_dtypes_of_their_own])
def test_what_comes_in_pages_only_is_not_taken_as_tensors(make):
    """The entry would be gone, or its tensors lie over other memory."""
    with (
        producer(pool=kvferry.KvPool.create(make(), 8)) as one,
        consumer(one, pool=kvferry.KvPool.create(make(), 8), tensor_pages=4) as other,
    ):
        one.insert_pages([1, 2], None, [3])
        with pytest.raises(ValueError, match="key and value as tensors need"):
            other.drop_select([1, 2], None, timeout_ms=5000)
        assert other.drop_select_pages([1, 2], None, [5], timeout_ms=5000).num_matched == 2


def test_torch_where_it_is_not_installed(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else found(name)
    )
    with producer() as one:
        with pytest.raises(ValueError, match="'torch' is not installed"):
            consumer(one)
        with consumer(one, pool=kvferry.KvPool.create(layout(), 8)) as other:
            assert other.metrics()["peers"] == 0


def test_roi_on_both_sides(pair):
    one, other = pair
    key, value = kv(2)
    one.insert([1, 2, 3], torch.tensor([True, False, True]), key, value)
    found = other.drop_select([9, 1, 3], torch.tensor([False, True, True]))
    assert found.input_tokens.tolist() == [1, 3] and torch.equal(found.key, key)


def test_any_entry_the_oldest_first_and_then_none(pair):
    one, other = pair
    for seed in range(3):
        one.insert([seed, 7], None, *kv(2, seed))
    for seed in range(3):
        assert torch.equal(other.drop_select().value, kv(2, seed)[1])
    with pytest.raises(kvferry.DeadlineExceeded, match="no matching entry came in time"):
        other.drop_select(timeout_ms=20)
    with pytest.raises(TimeoutError):
        other.drop_select([1], timeout_ms=0)


def test_pages_stay_where_they_are():
    ours, theirs = kvferry.KvPool.create(layout(), 8), kvferry.KvPool.create(layout(), 8)
    for page in range(8):
        for layer in range(LAYERS):
            theirs.page(layer, 1, page)[:] = 10 * layer + page
    with producer(pool=theirs) as one, consumer(one, pool=ours) as other:
        entry = one.insert_pages(range(6), None, [5, 2], b"hidden")
        found = other.drop_select_pages(list(range(6)), None, [3, 4, 7])
        assert (found.pages, found.num_matched, found.hidden) == ([3, 4], 6, b"hidden")
        for layer in range(LAYERS):
            assert (ours.page(layer, 1, 3) == 10 * layer + 5).all()
            assert (ours.page(layer, 1, 4) == 10 * layer + 2).all()
        gone = []
        wait_for(lambda: gone.extend(one.take_gone()) or gone)
        assert gone == [(entry, "fetched")]
        one.insert_pages([1] * 5, None, [0, 1])
        with pytest.raises(kvferry.ResourceExhausted, match="needs 2 pages but 1"):
            other.drop_select_pages([1] * 5, None, [3])
        assert other.drop_select_pages([1], None, [3]).num_matched == 1
        with pytest.raises(
            kvferry.ResourceExhausted, match=r"copy_pages is 0 \(tensor_pages in Python\)"
        ):
            one.insert([1], None, *kv(1))


def test_inserts_wait_for_room_and_can_be_found():
    page_bytes = layout().page_bytes
    with producer(max_bytes=page_bytes) as one, consumer(one) as other:
        one.insert([1], None, *kv(1, 1))
        with pytest.raises(kvferry.DeadlineExceeded, match="no room"):
            one.insert([2], None, *kv(1, 2), timeout_ms=10)
        with pytest.raises(kvferry.ResourceExhausted, match="can never fit"):
            one.insert(range(5), None, *kv(5))
        thread = threading.Thread(target=one.insert, args=([2], None, *kv(1, 2)))
        thread.start()
        assert torch.equal(other.drop_select([2]).key, kv(1, 2)[0])
        thread.join()


def test_bad_input_says_what_is_wrong(pair):
    one, other = pair
    key, value = kv(3)
    for bad, message in [
        (([], None, key, value), "0 tokens"),
        (([1.5], None, key, value), "integers"),
        (([[1]], None, key, value), "one row"),
        (([2**31], None, key, value), "32 bits"),
        (([-(2**31) - 1], None, key, value), "32 bits"),
        (([1, 2, 3], [True], key, value), "roi has 1 values but there are 3"),
        (([1, 2, 3], [1.0, 0.0, 1.0], key, value), "row of bools"),
        (([1, 2, 3], [[True, True, True]], key, value), "row of bools"),
        (([1, 2], None, key, value), r"key has shape \[3, 3, 2, 8\].*\[3, 2, 2, 8\]"),
        (([1, 2, 3], None, key, value[:2]), r"value has shape \[2, 3, 2, 8\]"),
        (([1, 2, 3], None, key.float(), value), "key is float32 .* bfloat16"),
    ]:
        with pytest.raises(ValueError, match=message):
            one.insert(*bad)
        if message.startswith(("0", "32", "roi", "row", "int", "one")):
            with pytest.raises(ValueError, match=message):
                other.drop_select(bad[0], bad[1])
    assert one.metrics()["lookup_entries"] == 0
    with pytest.raises(ValueError, match="timeout_ms is -1"):
        other.drop_select([1], timeout_ms=-1)
    with pytest.raises(ValueError, match="max_fetch_timeout_ms"):
        other.drop_select([1], timeout_ms=10**8)
    with pytest.raises(kvferry.FailedPrecondition, match="a producer does not look up"):
        one.drop_select([1])
    with pytest.raises(kvferry.FailedPrecondition, match="a consumer does not insert"):
        other.insert([1], None, key, value)
    with pytest.raises(ValueError, match="role is 'both'"):
        KVLookupBuffer("both", model="m", layout=layout())
    with pytest.raises(ValueError, match="either a layout or a pool"):
        KVLookupBuffer("producer", model="m")
    with pytest.raises(ValueError, match="no producers"):
        consumer()
    with pytest.raises(ValueError, match="producers are for a consumer"):
        producer(producers=[one.address])
    with pytest.raises(ValueError, match="'tcp://127.0.0.1:1', one address, but must be a list"):
        KVLookupBuffer("consumer", model="m", layout=layout(), producers="tcp://127.0.0.1:1")


def test_tensor_pages_that_are_all_in_use(pair):
    one, _ = pair
    one.insert(range(9), None, *kv(9))
    with consumer(one, tensor_pages=2) as other:
        with pytest.raises(kvferry.ResourceExhausted, match="3 pages can never fit"):
            other.drop_select()
        for _ in range(3):  # Given back each time.
            one.insert([7, 7, 7], None, *kv(3))
            assert other.drop_select([7]).num_matched == 1
        assert other.drop_select(list(range(8))).num_matched == 8


def test_a_buffer_of_less_than_a_page_has_one(pair):
    one, _ = pair
    one.insert([1], None, *kv(1))
    with consumer(one, max_bytes=1) as other:
        assert other.drop_select([1]).num_matched == 1


def test_refusals_are_errors_at_once(pair):
    one, _ = pair
    with consumer(one, partition=2) as other:
        with pytest.raises(kvferry.FailedPrecondition, match="partition: 0 here, 2 there"):
            other.drop_select([1])
    with consumer(one, model="n") as other:
        with pytest.raises(kvferry.FailedPrecondition, match="'m' here, 'n' there"):
            other.drop_select([1])
    with consumer(one, layout=layout("float32")) as other:
        with pytest.raises(kvferry.FailedPrecondition, match="dtype"):
            other.drop_select([1])


def test_closed_buffers(pair):
    one, other = pair
    thread = threading.Thread(
        target=lambda: pytest.raises(kvferry.Cancelled, other.drop_select, [1])
    )
    thread.start()
    wait_for(lambda: one.metrics()["lookup_waiting"] > 0)
    other.close()
    thread.join()
    one.close()
    with pytest.raises(kvferry.FailedPrecondition, match="closed"):
        one.insert([1], None, *kv(1))
    with pytest.raises(kvferry.FailedPrecondition, match="closed"):
        other.drop_select([1])


def test_asyncio_holds_no_thread_a_lookup(pair):
    one, _ = pair
    with consumer(one, max_bytes=1 << 20) as other:
        check_asyncio(one, other)


def check_asyncio(one, other):
    async def run():
        lookups = [asyncio.create_task(other.drop_select_async([n, n])) for n in range(200)]
        cancelled = asyncio.create_task(other.drop_select_async([501]))
        end = time.monotonic() + 20
        while one.metrics()["lookup_waiting"] < 201:
            assert time.monotonic() < end
            await asyncio.sleep(0)
        threads = threading.active_count()
        late = asyncio.create_task(other.drop_select_async([500], timeout_ms=300))
        cancelled.cancel()
        for n in range(200):
            one.insert([n, n], None, *kv(2, n))
            await asyncio.sleep(0)
        for n, found in enumerate(await asyncio.gather(*lookups)):
            assert torch.equal(found.key, kv(2, n)[0])
        with pytest.raises(kvferry.DeadlineExceeded):
            await late
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(ValueError, match="0 tokens"):
            await other.drop_select_async([])
        return threads

    before = threading.active_count()
    assert asyncio.run(run()) == before
    wait_for(lambda: one.metrics()["lookup_waiting"] == 0)
    one.insert([501], None, *kv(1))
    assert one.metrics()["lookup_entries"] == 1
    assert asyncio.run(other.drop_select_async([501])).num_matched == 1  # Another loop.


def test_event_loops_keep_nothing_of_lookups_that_have_ended(pair):
    one, other = pair

    async def look_up():
        one.insert([1], None, *kv(1))
        await other.drop_select_async([1])
        (mine,) = other._loops.values()  # Those of before are closed.
        assert mine.waiting == {} and not mine.loop.remove_reader(mine.events.fileno())

    for _ in range(2):
        asyncio.run(look_up())


def test_the_end_of_a_lookup_that_nobody_awaits_any_more_keeps_none_from_others():
    """Both may be said to have ended at once."""

    async def run():
        loop = _Loop(asyncio.get_running_loop())
        (cancelled, first), (awaited, second) = loop.add(), loop.add()
        first.cancel()
        said = [cancelled, awaited]
        loop.events = SimpleNamespace(take=lambda: said, fileno=loop.events.fileno)
        loop._take()
        assert second.done()
        for number in said:
            loop.remove(number)

    asyncio.run(run())


def test_asyncio_pages(pair):
    one, _ = pair
    pool = kvferry.KvPool.create(layout(), 8)
    with consumer(one, pool=pool) as other:

        async def run():
            one.insert(range(6), None, *kv(6))
            return await other.drop_select_pages_async(list(range(6)), None, [4, 1])

        assert asyncio.run(run()).pages == [4, 1]


def test_event_loops_of_several_threads(pair, monkeypatch):
    """A thread adds its own to those at which another one is looking."""
    one, other = pair
    for n in range(2):
        one.insert([n], None, *kv(1, n))
    found, looks, has_added = {}, threading.Event(), threading.Event()

    def look_up(n):
        found[n] = asyncio.run(other.drop_select_async([n])).num_matched

    thread = threading.Thread(target=look_up, args=[1])

    class Open:
        def is_closed(self):
            if threading.current_thread() is thread:
                looks.set()
                assert has_added.wait(20)
            return False

    def make(loop):
        if threading.current_thread() is not thread:
            thread.start()
            looks.wait(0.3)  # In vain if it has to wait for us.
        return _Loop(loop)

    other._loops[Open()] = None
    monkeypatch.setattr("kvferry.lookup._Loop", make)
    look_up(0)
    has_added.set()
    thread.join()
    assert found == {0: 1, 1: 1}


class LateToEnd:
    """A lookup that takes a while to end when it is cancelled, as one whose pages are written."""

    ends_by_itself = True  # Or when the test says so.

    def __init__(self, lookup):
        self.lookup = lookup
        self.waits = self.cancels = 0

    def wait(self, timeout_ms):
        self.waits += 1
        self.lookup.wait(timeout_ms)

    def cancel(self):
        self.cancels += 1
        if self.ends_by_itself:
            threading.Timer(0.3, self.end).start()

    def end(self):
        self.lookup.cancel()

    def __getattr__(self, name):
        return getattr(self.lookup, name)


@pytest.fixture
def late(pair, monkeypatch):
    """A consumer with pages of its own, and the lookups that it has started."""
    with consumer(pair[0], pool=kvferry.KvPool.create(layout(), 8)) as made:
        start, started = made._start, []

        def start_late(*arguments):
            started.append(LateToEnd(start(*arguments)))
            return started[-1]

        monkeypatch.setattr(made, "_start", start_late)
        yield made, started


@pytest.fixture
def held_late(late, monkeypatch):
    """As late(), of lookups that end when the test says so."""
    monkeypatch.setattr(LateToEnd, "ends_by_itself", False)
    return late


def test_a_lookup_that_is_cancelled_again_and_again_ends_when_no_page_is_written_to(held_late):
    other, started = held_late

    async def run():
        begin = time.monotonic()
        lookup = asyncio.create_task(other.drop_select_pages_async([1], None, [0]))
        await asyncio.sleep(0.01)
        for _ in range(5):
            lookup.cancel()
            await asyncio.sleep(0.001)
        # And others of the loop have their turn meanwhile.
        assert not lookup.done() and not started[0].done
        started[0].end()
        with pytest.raises(asyncio.CancelledError):
            await lookup
        assert started[0].done
        assert time.monotonic() - begin < 20  # Not at its deadline.

    asyncio.run(run())


def test_a_lookup_whose_loop_is_gone_ends_when_no_page_is_written_to(late):
    other, started = late

    async def run():
        lookup = other.drop_select_pages_async([1], None, [0])
        lookup.send(None)
        assert not started[0].done
        lookup.close()
        assert started[0].done

    asyncio.run(run())


def test_a_lookup_whose_loop_is_closed_ends_too(late):
    other, started = late

    async def begin():
        lookup = other.drop_select_pages_async([1], None, [0])
        lookup.send(None)
        return lookup

    asyncio.run(begin()).close()
    assert started[0].done


@pytest.fixture
def ctrl_c():
    """Who runs in the background of a shell is told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_lookup_soon_and_when_no_page_is_written_to(held_late):
    other, started = held_late

    def press():
        wait_for(lambda: started and started[0].waits > 0)
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: started[0].cancels == 1)
        os.kill(os.getpid(), signal.SIGINT)  # While it is ending.
        wait_for(lambda: started[0].cancels == 2)
        assert not started[0].done
        started[0].end()

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        other.drop_select_pages([1], None, [0], timeout_ms=60000)
    assert started[0].done and started[0].cancels == 2
    thread.join()


def test_a_lookup_that_nobody_has_any_more_has_ended():
    """As one that Ctrl-C came behind before anybody had it: its pages are the caller's again."""
    pool = kvferry.KvPool.create(layout(), 4)
    key, value = kv(4)
    with producer() as one, consumer(one, pool=pool) as other:
        lookup = other._start([1, 2, 3, 4], None, [0], 30000)
        assert not lookup.done
        del lookup
        one.insert([1, 2, 3, 4], None, key, value)
        found = other.drop_select_pages([1, 2, 3, 4], None, [1])
        assert found.num_matched == 4 and not pool.page(0, 0, 0).any()
        assert pool.page(0, 0, 1).any()


def test_an_event_loop_without_file_descriptors_can_look_up_when_there_are_some(pair):
    one, other = pair
    one.insert([1], None, *kv(1))

    async def look_up():
        # The lowest that is free is the first that there is none of; the loop has its own by now,
        # and what tests before this one left is closed.
        gc.collect()
        lowest = os.dup(0)
        os.close(lowest)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            with pytest.raises(kvferry.ResourceExhausted, match="eventfd"):
                await other.drop_select_async([1])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return await other.drop_select_async([1])

    assert asyncio.run(look_up()).num_matched == 1
