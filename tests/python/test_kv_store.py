"""Store backends from Python: one suite for all of them, then what each has of its own."""

import ctypes
import subprocess
import sys
import threading
import time
import types

import kvferry
import numpy as np
import pytest
from kvferry.mooncake import HEADER_BYTES
from servers import silent_server
from stores import BACKENDS, MAX_VALUE_BYTES, config, need, redis_server, start_server


def bytes_of(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


@pytest.fixture(scope="module", params=BACKENDS)
def served(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    server = start_server(request.param, folder)
    yield request.param, folder, server
    if server is not None:
        server.kill()


@pytest.fixture
def store(served):
    made = kvferry.make_store(config(*served))
    yield made
    made.close()


class TestEveryBackend:
    def test_put_get_erase(self, store):
        value = bytes_of(1, 5000)
        with pytest.raises(kvferry.NotFound):
            store.get_bytes("a")
        store.put("a", value)
        assert store.get_bytes("a").tobytes() == value.tobytes()
        out = np.zeros_like(value)
        store.get_into(b"a", out)  # str is UTF-8.
        assert (out == value).all()
        store.put("a", b"other")
        assert store.get_bytes("a").tobytes() == b"other"
        store.erase("a")
        store.erase("a")
        with pytest.raises(kvferry.NotFound):
            store.get_into("a", out)

    def test_values_in_parts(self, store):
        value = bytes_of(2, 1000)
        store.put("a", [value[:1], value[1:1], value[1:700], memoryview(value)[700:]])
        outs = [np.zeros(300, np.uint8), bytearray(650), np.zeros((5, 10), np.uint8)]
        store.get_into("a", outs)
        assert b"".join(bytes(out) for out in outs) == value.tobytes()

    def test_what_has_a_buffer(self, store):
        torch = pytest.importorskip("torch")
        for value in [
            b"bytes",
            bytearray(b"bytearray"),
            memoryview(b"view"),
            np.arange(12.0).reshape(3, 4),
            np.float16(3),
            (ctypes.c_uint8 * 100)(*range(100)),  # Its buffer has no strides.
            torch.arange(7, dtype=torch.bfloat16),
            torch.ones(2, 3),
        ]:
            raw = value.view(torch.uint8) if isinstance(value, torch.Tensor) else value
            store.put("a", value)
            want = raw.numpy().tobytes() if isinstance(raw, torch.Tensor) else bytes(raw)
            assert store.get_bytes("a").tobytes() == want
        out = torch.zeros(2, 3)
        store.get_into("a", out)
        assert (out == 1).all()

    def test_bad_memory_is_named_and_changes_nothing(self, store):
        store.put("a", b"value")
        grid = np.zeros((4, 4), np.uint8)
        for bad in ("text", 7, [b"x", 3], object()):
            with pytest.raises(TypeError, match="is no buffer"):
                store.put("a", bad)
        torch = pytest.importorskip("torch")
        for of in (grid, torch.from_numpy(grid)):
            with pytest.raises(ValueError, match="not contiguous"):
                store.put("a", of[:, :2])
            with pytest.raises(ValueError, match="not contiguous"):
                store.get_into("a", of[::2, :1])
        with pytest.raises(TypeError, match="can be written"):
            store.get_into("a", b"12345")
        with pytest.raises(ValueError, match=f"{MAX_VALUE_BYTES + 1} bytes.*{MAX_VALUE_BYTES}"):
            store.put("a", np.zeros(MAX_VALUE_BYTES + 1, np.uint8))
        with pytest.raises(ValueError, match="0 bytes"):
            store.put("a", b"")
        with pytest.raises(kvferry.FailedPrecondition, match="5 bytes.*16"):
            store.get_into("a", grid)
        assert store.get_bytes("a").tobytes() == b"value"
        assert store.stats()["puts"] == 1

    def test_bad_keys_and_timeouts(self, store):
        for key in ("", b"x" * 257, "ä" * 129):
            for call in (
                store.get_bytes,
                store.erase,
                lambda key: store.exists([key]),
                lambda key: store.exists_each([key]),
            ):
                with pytest.raises(ValueError, match="bytes; it must have 1 to 256"):
                    call(key)
            with pytest.raises(ValueError, match="1 to 256"):
                store.put(key, b"x")
        for key in (7, bytearray(b"a")):
            with pytest.raises(TypeError, match="a key is bytes or str"):
                store.put(key, b"x")
        with pytest.raises(ValueError, match="timeout_ms is -1"):
            store.get_bytes("a", timeout_ms=-1)
        for key in (b"\0", b"\xff\0\n", "ä"):
            store.put(key, b"x")
        assert store.exists([b"\0", b"\xff\0\n", "ä".encode(), "none"]) == 3

    def test_exists_counts_to_the_first_gap(self, store):
        assert store.exists([]) == 0
        for key in "abd":
            store.put(key, b"x")
        assert store.exists(list("abcd")) == 2
        assert store.exists(list("dcab")) == 1
        assert store.exists(["c"]) == 0

    def test_exists_each_answers_key_by_key(self, store):
        assert store.exists_each([]) == []
        store.put_batch([(key, b"x") for key in "abd"])
        assert store.exists_each(list("cabda")) == [False, True, True, True, True]
        assert store.exists_each((b"c", "b")) == [False, True]

    def test_batches(self, store):
        values = {f"key {i}": bytes_of(i, 1 + 37 * i) for i in range(100)}
        assert store.put_batch(list(values.items())) == [None] * 100
        outs = [np.zeros_like(value) for value in values.values()]
        assert store.get_batch(list(zip(values, outs, strict=True))) == [None] * 100
        assert all((out == values[key]).all() for key, out in zip(values, outs, strict=True))
        errors = store.get_batch([("key 3", outs[3]), ("none", outs[3]), ("key 4", outs[3])])
        assert errors[0] is None
        assert isinstance(errors[1], kvferry.NotFound)
        assert isinstance(errors[2], kvferry.FailedPrecondition)
        errors = store.put_batch([("", b"x"), ("good", b"x"), ("empty", b"")])
        assert [type(error) for error in errors] == [ValueError, type(None), ValueError]
        with pytest.raises(TypeError, match="tuple"):
            store.put_batch(["ab"])

    def test_pages_of_another_number_than_keys_are_refused(self, store):
        layout = kvferry.KvLayout.mha(1, 4, 1, 8, "float32")
        pool = kvferry.KvPool.create(layout, 4)
        for keys, pages in (["a"], [0, 1]), (["a", "b"], [0]), ([], [0]):
            for move in store.put_pages, store.get_pages:
                with pytest.raises(ValueError, match=f"{len(keys)} keys for {len(pages)} pages"):
                    move(keys, pool, pages)
        assert store.exists(["a"]) == 0

    def test_a_page_that_the_pool_does_not_have_is_the_error_of_each_key(self, store):
        pool = kvferry.KvPool.create(kvferry.KvLayout.mha(1, 4, 1, 8, "float32"), 4)
        for page in (4, -1):
            for move in store.put_pages, store.get_pages:
                errors = move(["a", "b"], pool, [0, page])
                assert [type(error) for error in errors] == [kvferry.OutOfRange] * 2
                assert f"page {page} of a pool of 4" in str(errors[0])
        assert store.exists(["a"]) == 0

    def test_pins_where_there_are_any(self, store):
        store.put("a", b"x")
        try:
            store.pin("a")
        except kvferry.Unimplemented:
            with pytest.raises(kvferry.Unimplemented):
                store.unpin("a")
            return
        store.unpin("a")
        with pytest.raises(kvferry.FailedPrecondition):
            store.unpin("a")
        with pytest.raises(kvferry.NotFound):
            store.pin("none")

    def test_stats(self, store):
        store.put("a", b"x")
        store.get_bytes("a")
        with pytest.raises(kvferry.NotFound):
            store.get_bytes("b")
        stats = store.stats()
        assert (stats["puts"], stats["hits"], stats["misses"], stats["errors"]) == (1, 1, 1, 0)
        assert set(stats) >= {"entries", "bytes", "capacity_bytes", "pinned", "evictions"}
        assert store.max_value_bytes == MAX_VALUE_BYTES and store.name

    def test_random_calls_agree_with_a_dict(self, store):
        random, model = np.random.default_rng(5), {}
        for step in range(600):
            key = f"k{random.integers(20)}"
            match random.integers(4):
                case 0 | 1:
                    model[key] = bytes_of(step, int(random.integers(1, 3000)))
                    store.put(key, model[key])
                case 2:
                    store.erase(key)
                    model.pop(key, None)
            if key in model:
                assert store.get_bytes(key).tobytes() == model[key].tobytes()
            assert store.exists([key]) == int(key in model)

    def test_threads_see_whole_values(self, store):
        wrong = []

        def work(thread: int) -> None:
            for i in range(60):
                key, fill = f"k{i % 5}", (thread * 60 + i) % 251
                try:
                    if i % 2:
                        store.put(key, np.full(2000 + fill, fill, np.uint8))
                    else:
                        got = store.get_bytes(key)
                        if len(got) != 2000 + int(got[0]) or (got != got[0]).any():
                            wrong.append(got)
                except kvferry.NotFound:
                    pass
                except Exception as error:  # noqa: BLE001
                    wrong.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_closed(self, served):
        store = kvferry.make_store(config(*served))
        store.close()
        store.close()
        with pytest.raises(kvferry.FailedPrecondition, match="closed"):
            store.put("a", b"x")
        with pytest.raises(kvferry.FailedPrecondition, match="closed"):
            store.get_bytes("a")


# ---------------------------------------------------------------- backends that are down


@pytest.mark.parametrize("backend", ["redis", "mooncake"])
def test_a_server_that_dies_is_named_in_time(backend, tmp_path):
    server = start_server(backend, tmp_path)
    store = kvferry.make_store(config(backend, tmp_path, server))
    store.put("a", b"x")
    server.kill()
    for call in (
        lambda: store.get_bytes("a", timeout_ms=500),
        lambda: store.put("a", b"y", timeout_ms=500),
        lambda: store.exists(["a"], timeout_ms=500),
        lambda: store.exists_each(["a"], timeout_ms=500),
        lambda: store.erase("a", timeout_ms=500),
    ):
        begin = time.monotonic()
        with pytest.raises((kvferry.Unavailable, TimeoutError), match=str(server.port)):
            call()
        assert time.monotonic() - begin < 4  # Not after the 5 s that calls have otherwise.
    assert store.stats()["errors"] >= 4
    if backend == "redis":
        server.start()
        store.put("a", b"again")
        assert store.get_bytes("a").tobytes() == b"again"
        server.kill()
    store.close()


def test_mooncake_values_behind_our_back_are_misses(tmp_path):
    server = start_server("mooncake", tmp_path)
    store = kvferry.make_store(config("mooncake", tmp_path, server))
    value = bytes_of(1, 1000).tobytes()
    whole = kvferry._core.value_header("a", value) + value
    try:
        store.put("a", value)
        name = store._name(b"a")
        assert store._store.get(name) == whole
        for foreign in (whole[:-1] + b"?", whole[:500], whole + b"?", b"x", bytes(1024)):
            assert store._store.upsert(name, foreign) == 0
            with pytest.raises(kvferry.NotFound, match="damaged or not kvferry's"):
                store.get_bytes("a")
        assert store._store.upsert(name, bytes(MAX_VALUE_BYTES + 25)) == 0
        with pytest.raises(kvferry.NotFound, match="damaged or not kvferry's"):
            store.get_bytes("a")
        assert store.stats()["errors"] == 6 and store.stats()["misses"] == 6
        store.put("a", value)
        assert store.get_bytes("a").tobytes() == value
    finally:
        server.kill()
        store.close()


# Of calls that Mooncake has begun by then, also on a machine that has much to do.
GIVEN_UP_MS = 1000


class FakeMooncake:
    """The calls that every Mooncake has to take."""

    closed = False

    def setup(self, *_):
        return 0

    def register_buffer(self, *_):
        return 0

    def close(self):
        self.closed = True
        return 0


def store_on(fake: FakeMooncake, monkeypatch, **options):
    module = types.ModuleType("mooncake")
    module.store = types.SimpleNamespace(MooncakeDistributedStore=lambda: fake)
    monkeypatch.setitem(sys.modules, "mooncake", module)
    needed = {"backend": "mooncake", "local_hostname": "h", "master_address": "h:1"}
    return kvferry.make_store(needed | options)


class ReplacedMeanwhile(FakeMooncake):
    """An entry that is replaced between the question for its size and the read."""

    def __init__(self, bytes_before: int, entry: bytes):
        self.size, self.entry = HEADER_BYTES + bytes_before, entry

    def get_size(self, _name):
        return self.size

    def get_into(self, _name, address, _size):
        ctypes.memmove(address, self.entry, len(self.entry))
        return len(self.entry)


def test_mooncake_value_that_is_shorter_by_the_time_it_is_read(monkeypatch):
    entry = kvferry._core.value_header("a", b"x") + b"x"
    store = store_on(ReplacedMeanwhile(1000, entry), monkeypatch)
    out = np.zeros(1000, np.uint8)
    with pytest.raises(kvferry.FailedPrecondition, match="has 1 bytes but there is room for 1000"):
        store.get_into("a", out)
    assert not out.any()
    assert store.get_bytes("a").tobytes() == b"x"
    store.close()


class MooncakeOfOne(FakeMooncake):
    """A cluster of one dict."""

    def __init__(self):
        self.values: dict[str, bytes] = {}

    def upsert_from(self, name, address, size):
        self.values[name] = ctypes.string_at(address, size)
        return 0

    def batch_is_exist(self, names):
        return [int(name in self.values) for name in names]

    def get_size(self, name):
        return len(self.values[name]) if name in self.values else -704

    def get_into(self, name, address, size):
        if self.get_size(name) > 0:
            ctypes.memmove(address, self.values[name], size)
        return self.get_size(name)

    def batch_upsert_from(self, *lists):
        return [self.upsert_from(*each) for each in zip(*lists, strict=True)]

    def batch_get_into(self, *lists):
        return [self.get_into(*each) for each in zip(*lists, strict=True)]


@pytest.mark.parametrize("pages_a_value", [1, 100])
def test_mooncake_takes_pages_of_a_device_through_host_memory(monkeypatch, pages_a_value):
    layout = kvferry.KvLayout.mha(3, 4, 1, 8, "float32")
    pool, page = kvferry.KvPool.create(layout, 20), kvferry.KvPool.page
    places = [(layer, tensor) for layer in range(3) for tensor in range(2)]

    def bytes_in(number: int) -> np.ndarray:
        return np.concatenate([page(pool, *place, number) for place in places])

    for number in range(10):
        for place in places:
            page(pool, *place, number)[:] = bytes_of(100 * number + sum(place), 128)
    store = store_on(
        MooncakeOfOne(), monkeypatch, max_value_bytes=pages_a_value * layout.page_bytes
    )
    assert store.put_pages(["host"], pool, [9]) == [None]

    # As a pool on a device is to Python: there is no such device here.
    def unreachable(*_):
        raise kvferry.FailedPrecondition("kv pool: the page lies in device memory")

    monkeypatch.setattr(kvferry.KvPool, "memory", property(lambda _: "cuda:0"))
    monkeypatch.setattr(kvferry.KvPool, "page", unreachable)
    monkeypatch.setattr("kvferry.mooncake.STAGED_BYTES", 2 * layout.page_bytes)
    keys, pages = [f"{at}" for at in range(5)], [7, 2, 0, 5, 4]
    assert store.put_pages(keys, pool, pages) == [None] * 5
    asked = [*keys[:2], "none", *keys[2:], "host"]
    errors = store.get_pages(asked, pool, [11, 19, 10, 14, 12, 17, 18])
    assert [type(error) for error in errors] == [type(None)] * 2 + [kvferry.NotFound] + [
        type(None)
    ] * 4
    for source, copy in zip([*pages, 9], [11, 19, 14, 12, 17, 18], strict=True):
        assert (bytes_in(source) == bytes_in(copy)).all()
    for call in (store.put_pages, store.get_pages):
        assert isinstance(call(["0"], pool, [20])[0], ValueError)
        with pytest.raises(ValueError, match="1 keys for 2 pages"):
            call(["0"], pool, [1, 2])
    store.close()


def test_mooncake_is_not_asked_for_pages_that_the_pool_does_not_have(monkeypatch):
    store = store_on(MooncakeOfOne(), monkeypatch)
    TestEveryBackend().test_a_page_that_the_pool_does_not_have_is_the_error_of_each_key(store)
    store.close()


class GatedPuts(MooncakeOfOne):
    """Puts of these bytes have begun when they say so, and wait until they may go on."""

    def __init__(self, *values: bytes):
        super().__init__()
        self.begun = {value: threading.Event() for value in values}
        self.go_on = {value: threading.Event() for value in values}

    def upsert_from(self, name, address, size):
        entry = ctypes.string_at(address, size)
        if (value := entry[HEADER_BYTES:]) in self.begun:
            self.begun[value].set()
            assert self.go_on[value].wait(60)
        self.values[name] = entry
        return 0


def test_mooncake_put_that_was_given_up_does_not_undo_one_that_waited_for_memory(monkeypatch):
    fake = GatedPuts(b"given up", b"of another key")
    store = store_on(fake, monkeypatch, staging_buffers=2)
    given_up = threading.Thread(
        target=lambda: pytest.raises(
            kvferry.DeadlineExceeded, store.put, "key", b"given up", timeout_ms=GIVEN_UP_MS
        )
    )
    other = threading.Thread(target=store.put, args=("other", b"of another key", 60000))
    later = threading.Thread(target=store.put, args=("key", b"later", 60000))
    for thread, value in ((given_up, b"given up"), (other, b"of another key")):
        thread.start()
        assert fake.begun[value].wait(10)
    later.start()  # Both buffers are taken.
    given_up.join()
    assert later.is_alive()
    fake.go_on[b"of another key"].set()
    other.join()
    later.join(0.2)
    assert later.is_alive()  # Until what came before has ended.
    fake.go_on[b"given up"].set()
    later.join()
    assert store.get_bytes("key").tobytes() == b"later"
    # Nor does one wait for ever.
    fake.go_on[b"given up"].clear()
    for value, timeout_ms in ((b"given up", GIVEN_UP_MS), (b"later", 50)):
        with pytest.raises(kvferry.DeadlineExceeded):
            store.put("key", value, timeout_ms)
    store.put("other", b"1")  # Which has a buffer.
    fake.go_on[b"given up"].set()
    store.close()


class Hanging(FakeMooncake):
    """Does not answer, nor, if so told, leave."""

    def __init__(self, *, hangs_in_close: bool = False):
        self.let_go, self.hangs_in_close = threading.Event(), hangs_in_close

    def batch_is_exist(self, names):
        self.let_go.wait(60)
        return [0] * len(names)

    def close(self):
        if self.hangs_in_close:
            self.let_go.wait(60)
        return super().close()


@pytest.mark.parametrize("hangs_in_close", [False, True], ids=["in a call", "in close"])
def test_mooncake_that_hangs_does_not_keep_who_closes_it(monkeypatch, caplog, hangs_in_close):
    monkeypatch.setattr("kvferry.mooncake.CLOSE_S", 0.3)
    fake = Hanging(hangs_in_close=hangs_in_close)
    store = store_on(fake, monkeypatch)
    if not hangs_in_close:
        with pytest.raises(kvferry.DeadlineExceeded):
            store.exists(["a"], timeout_ms=GIVEN_UP_MS)
    begin = time.monotonic()
    store.close()
    assert time.monotonic() - begin < 20 and not fake.closed
    assert "h:1: it does not end a call" in caplog.text
    fake.let_go.set()


def test_mooncake_calls_that_are_under_way_end_before_it_is_left(monkeypatch):
    fake = Hanging()
    store = store_on(fake, monkeypatch)
    with pytest.raises(kvferry.DeadlineExceeded):
        store.exists(["a"], timeout_ms=GIVEN_UP_MS)
    closing = [threading.Thread(target=store.close) for _ in range(2)]
    for thread in closing:
        thread.start()
    for thread in closing:  # Neither returns before.
        thread.join(0.1)
        assert thread.is_alive()
    assert not fake.closed
    fake.let_go.set()
    for thread in closing:
        thread.join()
    assert fake.closed


def test_the_threads_of_a_mooncake_store_end_with_it(monkeypatch):
    store = store_on(FakeMooncake(), monkeypatch)
    (*threads,) = store._threads._threads
    del store
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_mooncake_that_hangs_does_not_keep_the_interpreter():
    code = (
        "import sys, threading, types, kvferry\n"
        "class Hanging:\n"
        "    setup = register_buffer = lambda *_: 0\n"
        "    def batch_is_exist(self, names): threading.Event().wait()\n"
        "store = types.SimpleNamespace(MooncakeDistributedStore=Hanging)\n"
        "sys.modules['mooncake'] = types.SimpleNamespace(store=store)\n"
        "needed = {'local_hostname': 'h', 'master_address': 'h:1'}\n"
        "store = kvferry.make_store({'backend': 'mooncake', **needed})\n"
        "try:\n"
        f"    store.exists(['a'], timeout_ms={GIVEN_UP_MS})\n"
        "except kvferry.DeadlineExceeded:\n"
        "    print('late')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, b"late\n"), done.stderr


def test_mooncake_batches_answer_value_by_value(tmp_path):
    server = start_server("mooncake", tmp_path)
    store = kvferry.make_store(config("mooncake", tmp_path, server))
    sizes = [1, 1000, MAX_VALUE_BYTES, MAX_VALUE_BYTES // 2, MAX_VALUE_BYTES // 2 - 24, 7, 0]
    values = [bytes_of(at + 1, size) for at, size in enumerate(sizes)]
    keys = [f"key {at}" for at in range(len(sizes))]
    try:
        errors = store.put_batch(list(zip(keys, values, strict=True)))
        assert errors[:6] == [None] * 6 and isinstance(errors[6], ValueError)
        # The later of two values of a key stays; a value may be in parts.
        twice = [("twice", values[1]), ("b", values[5]), ("twice", [values[5][:3], values[5][3:]])]
        assert store.put_batch(twice) == [None] * 3
        whole = store._store.get(store._name(b"key 1"))
        assert store._store.upsert(store._name(b"key 1"), whole[:-1] + b"?") == 0

        outs = [np.zeros(size, np.uint8) for size in sizes[:6]]
        wrong, missing = np.zeros(6, np.uint8), np.zeros(9, np.uint8)
        last = [np.zeros(2, np.uint8), np.zeros(5, np.uint8)]
        asked = [*zip(keys, outs, strict=False), ("key 5", wrong), ("no", missing), ("twice", last)]
        errors = store.get_batch(asked)
        for at in (0, 2, 3, 4, 5):
            assert errors[at] is None and np.array_equal(outs[at], values[at])
        assert isinstance(errors[1], kvferry.NotFound) and "damaged" in str(errors[1])
        assert isinstance(errors[6], kvferry.FailedPrecondition) and "7 bytes" in str(errors[6])
        assert isinstance(errors[7], kvferry.NotFound)
        assert errors[8] is None and np.array_equal(np.concatenate(last), values[5])
        stats = store.stats()
        assert (stats["puts"], stats["hits"], stats["misses"], stats["errors"]) == (9, 6, 2, 1)
    finally:
        server.kill()
        store.close()


def test_redis_that_never_answers_keeps_the_deadline():
    need("RedisStore")
    with silent_server() as silent:
        store = kvferry.RedisStore(port=silent.getsockname()[1])
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="no answer in time"):
            store.get_bytes("a", timeout_ms=100)
        assert time.monotonic() - begin < 4  # Not after the 5 s that calls have otherwise.


def test_redis_passwords(tmp_path):
    need("RedisStore")
    server = redis_server(tmp_path, "--requirepass", "secret")
    try:
        with pytest.raises(kvferry.PermissionDenied, match="NOAUTH"):
            kvferry.RedisStore(port=server.port).put("a", b"x")
        with pytest.raises(kvferry.PermissionDenied, match="WRONGPASS"):
            kvferry.RedisStore(port=server.port, password="guess").put("a", b"x")
        store = kvferry.RedisStore(port=server.port, password="secret", database=2)
        store.put("a", b"x")
        assert store.exists(["a"]) == 1
        (tmp_path / "password").write_text("secret\n")
        config = {"backend": "redis", "port": server.port, "database": 2}
        same = kvferry.make_store(config | {"password_file": str(tmp_path / "password")})
        assert same.exists(["a"]) == 1
        with pytest.raises(ValueError, match="password_file '/nowhere' cannot be read"):
            kvferry.make_store(config | {"password_file": "/nowhere"})
    finally:
        server.kill()


def test_other_python_threads_run_while_a_call_waits():
    need("RedisStore")
    with silent_server() as silent:
        store = kvferry.RedisStore(port=silent.getsockname()[1])
        errors = []

        def wait() -> None:
            try:
                store.get_bytes("a", timeout_ms=20_000)
            except kvferry.Error as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        client, _ = silent.accept()
        assert client.recv(1)  # It waits for the answer, and this thread goes on.
        client.close()
        thread.join()
        assert [type(error) for error in errors] == [kvferry.Unavailable]


# ---------------------------------------------------------------- host memory, keys, headers


def test_host_store_evicts_and_refuses():
    store = kvferry.HostStore(capacity_bytes=64 << 10, page_bytes=4096)
    for i in range(32):
        store.put(f"{i}", bytes_of(i, 4096))
    assert store.stats()["evictions"] == 16 and store.exists(["31"]) == 1
    for i in range(16, 32):
        store.pin(f"{i}")
    with pytest.raises(kvferry.ResourceExhausted, match="pinned"):
        store.put("more", b"x")
    with pytest.raises(ValueError, match="capacity_bytes"):
        kvferry.HostStore(capacity_bytes=0)
    with pytest.raises(ValueError):
        kvferry.HostStore(capacity_bytes=1 << 20, page_bytes=0)


LAYOUT = kvferry.KvLayout(
    num_layers=2, page_size=4, dtype="float16", page_format="NHD", tensors=[("k", 2, 8)]
)


def test_block_keys():
    scope = {"model": "m", "layout": LAYOUT}
    keys = kvferry.block_keys(list(range(10)), 4, **scope)
    assert len(keys) == 2 and all(isinstance(key, bytes) and len(key) == 32 for key in keys)
    for tokens in (np.arange(10, dtype=np.int32), np.arange(10), tuple(range(10))):
        assert kvferry.block_keys(tokens, 4, **scope) == keys
    assert kvferry.block_keys(list(range(4)), 4, **scope) == keys[:1]
    assert kvferry.block_keys(list(range(4, 8)), 4, parent=keys[0], **scope) == keys[1:]
    others = [{"model": "n"}, {"partition": 1}, {"salt": "s"}]
    for other in others:
        assert not set(kvferry.block_keys(list(range(10)), 4, **{**scope, **other})) & set(keys)
    for bad in ({"page_size": 0}, {"model": ""}, {"partition": -1}, {"parent": b"short"}):
        with pytest.raises(ValueError):
            kvferry.block_keys(**{"tokens": [1, 2, 3, 4], "page_size": 4, **scope, **bad})
    with pytest.raises(ValueError, match="4294967296 does not fit in 32 bits"):
        kvferry.block_keys([1 << 32], 1, **scope)
    with pytest.raises(ValueError, match="neither int32 nor int64"):
        kvferry.block_keys(np.arange(4, dtype=np.float32), 4, **scope)


def test_value_headers():
    header = kvferry._core.value_header("key", [b"val", b"ue"])
    assert len(header) == 24
    assert kvferry._core.value_is_whole("key", header + b"value")
    assert not kvferry._core.value_is_whole("key", header + b"valuE")
    assert not kvferry._core.value_is_whole("kez", header + b"value")
    assert not kvferry._core.value_is_whole("key", header)
