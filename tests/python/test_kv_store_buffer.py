"""KVStoreBuffer: tensors in and out, configurations, asyncio."""

import asyncio
import subprocess
import sys
import threading
import time

import kvferry
import numpy as np
import pytest
from kvferry import tensor_bytes
from stores import BACKENDS, config, need, start_server

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", params=BACKENDS)
def served(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    server = start_server(request.param, folder)
    yield request.param, folder, server
    if server is not None:
        server.kill()


@pytest.fixture
def buffer(served):
    with kvferry.KVStoreBuffer(config(*served)) as made:
        yield made


@pytest.fixture
def host():
    with kvferry.KVStoreBuffer({"backend": "host", "capacity_bytes": 4 << 20}) as made:
        yield made


TENSORS = [
    torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
    torch.randn(3, 5).to(torch.bfloat16),
    torch.randn(16).to(torch.float8_e4m3fn),
    torch.tensor([True, False]),
    torch.tensor(7, dtype=torch.int64),
    torch.empty(0, 4, dtype=torch.float16),
    torch.tensor([1 + 2j]),
    np.arange(6, dtype=np.int16).reshape(3, 2),
    np.array(2.5),
    np.zeros((3, 0), np.float16),
    np.array([True, False]),
]


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        ours = isinstance(other, torch.Tensor) and one.dtype == other.dtype
        one, other = (tensor.reshape(-1).view(torch.uint8).numpy() for tensor in (one, other))
        return ours and one.tobytes() == other.tobytes()
    return one.dtype == other.dtype and one.shape == other.shape and (one == other).all()


def test_tensors_come_back_as_they_were(buffer):
    for i, tensor in enumerate(TENSORS):
        buffer.put(f"{i}", tensor)
    for i, tensor in enumerate(TENSORS):
        got = buffer.get(f"{i}")
        assert type(got) is type(tensor) and got.shape == tensor.shape and same(tensor, got)
        out = torch.empty_like(tensor) if isinstance(tensor, torch.Tensor) else tensor.copy()
        assert buffer.get(f"{i}", out=out) is out and same(tensor, out)
    buffer.put("raw", b"bytes")
    assert buffer.get("raw") == b"bytes"
    assert buffer.get("none") is None and buffer.get("none", out=torch.empty(3)) is None


def test_none_erases(buffer):
    buffer.put("a", TENSORS[0])
    assert buffer.exists("a") == 1 and buffer.exists(["a", "b"]) == 1
    buffer.put("a", None)
    buffer.put("a", None)
    assert buffer.get("a") is None and buffer.exists(b"a") == 0


def test_batches(buffer):
    tensors = {f"{i}": torch.full((10, i + 1), i, dtype=torch.bfloat16) for i in range(20)}
    buffer.put_batch(tensors)
    assert all(
        same(tensors[key], got)
        for key, got in zip(tensors, buffer.get_batch(list(tensors)), strict=True)
    )
    outs = [torch.empty_like(tensor) for tensor in tensors.values()]
    got = buffer.get_batch([*tensors, "none"], [*outs, torch.empty(1)])
    assert got[-1] is None and all(a is b for a, b in zip(got, outs, strict=False))
    assert all(same(a, b) for a, b in zip(tensors.values(), outs, strict=True))
    with pytest.raises(ValueError, match="20 keys but 1 outs"):
        buffer.get_batch(list(tensors), outs[:1])
    for one_key in ("01", b"01"):
        with pytest.raises(ValueError, match="one key, but must be a list"):
            buffer.get_batch(one_key)
    for wrong in (torch.empty(3), torch.empty(10, dtype=torch.int16)):  # And of as many bytes.
        with pytest.raises(kvferry.FailedPrecondition):
            buffer.get_batch(["0"], [wrong])
    with pytest.raises(ValueError, match="1 to 256"):
        buffer.put_batch([("", tensors["0"]), ("later", tensors["0"])])
    assert buffer.exists("later") == 1


@pytest.mark.parametrize("with_outs", [False, True])
def test_of_what_one_get_batch_gets_the_first_is_dropped_last(with_outs):
    config = {"backend": "host", "capacity_bytes": 4 * 4096, "page_bytes": 4096}
    with kvferry.KVStoreBuffer(config) as buffer:
        values = {key: np.full(100, ord(key), np.uint8) for key in "abcd"}
        for key, value in values.items():
            buffer.put(key, value)
        outs = [np.zeros(100, np.uint8) for _ in values] if with_outs else None
        got = buffer.get_batch(list(values), outs)
        assert [value[0] for value in got] == [ord(key) for key in values]
        buffer.put("more", values["a"])
        assert buffer.backend.exists_each(list("abcd")) == [True, True, True, False]


def test_asyncio(buffer):
    async def run():
        await buffer.aput("a", TENSORS[0])
        got = await asyncio.gather(*(buffer.aget(key) for key in "aba"))
        assert same(got[0], TENSORS[0]) and got[1] is None and same(got[2], TENSORS[0])
        out = torch.empty_like(TENSORS[0])
        assert await buffer.aget("a", out) is out and same(out, TENSORS[0])
        await buffer.aput_batch({"b": TENSORS[1]})
        assert await buffer.aexists(["a", "b", "c"]) == 2
        assert [got is None for got in await buffer.aget_batch(["c", "b"])] == [True, False]
        with pytest.raises(ValueError):
            await buffer.aput("", TENSORS[0])

    asyncio.run(run())


def test_the_loop_turns_while_a_store_waits():
    class Slow:
        def __init__(self):
            self.let_go = threading.Event()

        def get_bytes(self, key, timeout_ms):
            assert self.let_go.wait(20)
            raise kvferry.NotFound(key)

    slow = Slow()

    async def run():
        with kvferry.KVStoreBuffer(slow) as buffer:
            waiting = asyncio.create_task(buffer.aget("a"))
            for _ in range(10):
                await asyncio.sleep(0.001)
            assert not waiting.done()
            slow.let_go.set()
            assert await waiting is None
        with pytest.raises(kvferry.FailedPrecondition, match="closed"):
            await buffer.aget("a")

    asyncio.run(run())


class Held:
    """A store that keeps its callers for as long as it is held, whatever their timeout."""

    def __init__(self):
        self.let_go, self.timeouts = threading.Event(), []

    def get_bytes(self, _key, timeout_ms):
        self.timeouts.append(timeout_ms)
        assert self.let_go.wait(20)
        raise kvferry.NotFound("none")

    def get_into(self, key, parts, timeout_ms):
        try:
            self.get_bytes(key, timeout_ms)
        except kvferry.NotFound:
            parts[1][:] = 7


class InTime(Held):
    """One that keeps them for their timeout."""

    def get_bytes(self, _key, timeout_ms):
        self.timeouts.append(timeout_ms)
        time.sleep(timeout_ms / 1000)
        raise kvferry.DeadlineExceeded("no answer in time")


@pytest.fixture
def held():
    store = Held()
    yield store
    store.let_go.set()


async def begun(store: Held) -> None:
    while not store.timeouts:
        await asyncio.sleep(0.001)


def test_an_asyncio_call_that_gets_no_thread_does_nothing_later(monkeypatch):
    """It is in line by then, and its memory is the caller's again."""
    start = threading.Thread.start

    def refuses(thread):
        if thread.name.startswith("kvferry-store"):
            raise RuntimeError("can't start new thread")
        start(thread)

    async def run(buffer):
        out = torch.full((4,), 99)
        with pytest.raises(kvferry.ResourceExhausted, match="refused a thread"):
            await buffer.aget("k", out=out)
        with pytest.raises(kvferry.ResourceExhausted, match="pids.max"):
            await buffer.aput("x", None)
        monkeypatch.undo()
        assert await buffer.aexists(["k", "x"]) == 2
        assert (out == 99).all()

    with kvferry.KVStoreBuffer({"backend": "host", "capacity_bytes": 1 << 20}) as buffer:
        buffer.put("k", torch.full((4,), 7))
        buffer.put("x", torch.zeros(1))
        monkeypatch.setattr(threading.Thread, "start", refuses)
        asyncio.run(run(buffer))


def test_asyncio_calls_that_wait_for_their_turn_keep_their_timeout():
    store = InTime()
    began = []

    async def run(buffer):
        async def get():
            began.append(time.monotonic())
            await buffer.aget("a")

        errors = await asyncio.gather(*(get() for _ in range(6)), return_exceptions=True)
        assert all(isinstance(error, kvferry.DeadlineExceeded) for error in errors)
        assert time.monotonic() - began[-1] < 2.5  # One after the other they would take 3 s.

    with kvferry.KVStoreBuffer(store, timeout_ms=500) as buffer:
        asyncio.run(run(buffer))
    # Little or nothing was left for the others: as much as they began later, on a busy machine.
    assert sum(store.timeouts) <= 900 + (began[-1] - began[0]) * 1e3


def test_an_asyncio_call_that_waited_for_its_turn_has_what_is_left_of_its_time(held):
    async def run(buffer):
        calls = [asyncio.create_task(buffer.aget("a")) for _ in range(2)]
        await begun(held)  # Both are in line, then.
        await asyncio.sleep(0.3)
        held.let_go.set()
        assert await asyncio.gather(*calls) == [None, None]

    with kvferry.KVStoreBuffer(held, timeout_ms=5000) as buffer:
        asyncio.run(run(buffer))
    assert held.timeouts[1] <= 5000 - 300 + 1  # Whole milliseconds.


@pytest.mark.parametrize("backend", ["host", None, 1 << 30])
def test_what_is_no_backend_is_refused(backend):
    with pytest.raises(TypeError, match=f"a store or the dict .*, not {type(backend).__name__}"):
        kvferry.KVStoreBuffer(backend)


def test_the_calls_of_one_get_batch_share_its_timeout():
    class Slow(InTime):
        def get_bytes(self, key, timeout_ms):
            with pytest.raises(kvferry.DeadlineExceeded):
                super().get_bytes(key, min(timeout_ms, 100))
            if timeout_ms < 100:
                raise kvferry.DeadlineExceeded("no answer in time")
            raise kvferry.NotFound(key)

    with kvferry.KVStoreBuffer(Slow(), timeout_ms=250) as buffer:
        with pytest.raises(kvferry.DeadlineExceeded):
            buffer.get_batch(["a"] * 10)


def test_a_timeout_that_no_call_could_have_is_refused_at_once():
    most = 366 * 24 * 3600 * 1000
    for timeout_ms in (-1, most + 1, 2**63 - 1, 2**64, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"timeout_ms is {timeout_ms} but must be 0 to {most}"):
            kvferry.KVStoreBuffer(InTime(), timeout_ms=timeout_ms)
    with kvferry.KVStoreBuffer(kvferry.HostStore(1 << 20), timeout_ms=most) as buffer:
        buffer.put("a", b"value")
        assert asyncio.run(buffer.aget("a")) == b"value"


def test_an_asyncio_call_waits_for_a_store_that_hangs_a_second_longer_and_no_more(held):
    async def run(buffer):
        begin = time.monotonic()
        with pytest.raises(kvferry.DeadlineExceeded, match="may use the memory of it still"):
            await buffer.aget("a", np.zeros(4))
        assert 1.1 <= time.monotonic() - begin < 10
        held.let_go.set()

    with kvferry.KVStoreBuffer(held, timeout_ms=100) as buffer:
        asyncio.run(run(buffer))


def test_a_cancelled_asyncio_call_ends_when_its_memory_is_not_used_any_more(held):
    async def run(buffer):
        out = np.zeros(4, np.uint8)
        call = asyncio.create_task(buffer.aget("a", out))
        await begun(held)
        next_one = asyncio.create_task(buffer.aget("a", out))
        await asyncio.sleep(0.01)
        for _ in range(3):
            call.cancel()
            next_one.cancel()
            await asyncio.sleep(0.01)
        assert next_one.done() and not call.done()
        held.let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (out == 7).all()
        with pytest.raises(asyncio.CancelledError):
            await next_one

    with kvferry.KVStoreBuffer(held) as buffer:
        asyncio.run(run(buffer))
    assert len(held.timeouts) == 1


def test_close_does_not_wait_for_asyncio_calls_whose_turn_has_not_come(held):
    async def run(buffer):
        calls = [asyncio.create_task(buffer.aget("a")) for _ in range(6)]
        await begun(held)
        closing = asyncio.get_running_loop().run_in_executor(None, buffer.close)
        end = time.monotonic() + 15
        while sum(call.done() for call in calls) < 5:
            assert time.monotonic() < end
            await asyncio.sleep(0.001)
        ended, under_way = await asyncio.wait(calls, timeout=0.1)
        assert len(ended) == 5 and len(under_way) == 1
        for call in ended:
            assert isinstance(call.exception(), kvferry.FailedPrecondition)
        held.let_go.set()
        assert await under_way.pop() is None
        await closing

    asyncio.run(run(kvferry.KVStoreBuffer(held, timeout_ms=60_000)))
    assert len(held.timeouts) == 1


# ---------------------------------------------------------------- what cannot be done


def test_what_is_not_contiguous(host):
    grid = torch.arange(16, dtype=torch.float32).reshape(4, 4)
    host.put("t", grid.t())  # Copied.
    assert same(host.get("t"), grid.t().contiguous())
    host.put("n", grid.numpy()[:, ::2])
    assert same(host.get("n"), grid.numpy()[:, ::2])
    for out in (grid.t(), grid.numpy()[:, ::2], np.frombuffer(b"12345678", np.float32)):
        with pytest.raises(ValueError, match="not contiguous"):
            host.get("t", out=out)
    gradient = torch.ones(3, requires_grad=True)
    # What torch has put off computing is not in the memory.
    values = torch.tensor([1 + 2j, 3 - 4j])
    for late in (values.conj(), values.conj().imag):
        assert late.is_conj() or late.is_neg()
        host.put("c", late)
        assert torch.equal(host.get("c"), late)
    host.put("g", gradient)
    assert same(host.get("g"), torch.ones(3))


def test_bad_tensors_change_nothing(host):
    host.put("a", TENSORS[0])
    bad = [
        (torch.ones(3, device="meta"), ValueError, "on meta"),
        (torch.ones(3).to_sparse(), ValueError, "sparse"),
        (np.zeros(3, dtype="M8[s]"), ValueError, "datetime64.* is not one of"),
        (np.zeros(3, dtype=object), ValueError, "object is not one of"),
        (np.zeros(3, dtype=">f4"), ValueError, "big-endian"),
        (torch.zeros([1] * 17), ValueError, "17 dimensions"),
        ([1, 2], TypeError, "list is no torch tensor"),
        ("text", TypeError, "str is no torch tensor"),
    ]
    for value, error, text in bad:
        with pytest.raises(error, match=text):
            host.put("a", value)
    with pytest.raises(TypeError, match="out is bytes"):
        host.get("a", out=b"x")
    for out in (torch.empty(2, 3, 4, dtype=torch.int32), torch.empty(4, 3, 2), torch.empty(2, 12)):
        with pytest.raises(kvferry.FailedPrecondition, match="not what `out` is"):
            host.get("a", out=out)
    with pytest.raises(kvferry.FailedPrecondition, match="bytes"):
        host.get("a", out=torch.empty(5))
    assert same(host.get("a"), TENSORS[0]) and host.stats()["puts"] == 1


def test_foreign_bytes_are_no_tensor(host):
    whole = b"".join(bytes(part) for part in tensor_bytes.encode(np.arange(6.0)))
    host.backend.put("a", whole)
    assert same(host.get("a"), np.arange(6.0))
    for size in (1, 63, 64, len(whole) - 1):
        host.backend.put("a", whole[:size])
        with pytest.raises(kvferry.DataLoss, match="not a tensor of KVStoreBuffer"):
            host.get("a")
    long = b"".join(bytes(part) for part in tensor_bytes.encode(np.ones([1] * 8)))
    host.backend.put("a", long[:64])  # Of 128 bytes.
    with pytest.raises(kvferry.DataLoss, match="a header that is cut short"):
        host.get("a")
    header = tensor_bytes.FIRST
    of_later = header.pack(tensor_bytes.MAGIC, 3, 7, 1, 1) + whole[header.size :]
    ones = np.ones(65, np.uint64).tobytes()
    of_many_dimensions = header.pack(tensor_bytes.MAGIC, 0, 5, 65, 9) + b"uint8" + ones
    for foreign in (of_later, of_many_dimensions.ljust(9 * 64, b"\0") + b"x"):
        host.backend.put("a", foreign)
        with pytest.raises(kvferry.DataLoss, match="another header"):
            host.get("a")
    random = np.random.default_rng(1)
    for _ in range(3000):  # Whatever comes is an error of ours or a tensor; nothing is executed.
        altered = np.frombuffer(whole, np.uint8).copy()
        altered[random.integers(64, size=random.integers(1, 4))] = random.integers(256)
        try:
            assert tensor_bytes.decode(altered).nbytes <= len(whole)
        except kvferry.DataLoss:
            pass


# ---------------------------------------------------------------- configurations


def test_bad_configurations_list_the_right_names():
    cases = [
        ({}, ValueError, "backend None is not one of host, rocksdb, redis, tiered, mooncake"),
        ({"backend": "disk"}, ValueError, "backend 'disk' is not one of host"),
        ({"backend": "host"}, ValueError, "host needs 'capacity_bytes'"),
        ({"backend": "host", "size": 1}, ValueError, "knows no 'size'; it knows capacity_bytes"),
        ({"backend": "redis", "prot": 1}, ValueError, "knows no 'prot'.*port"),
        ({"backend": "redis", "port": 0}, ValueError, "port is 0"),
        ({"backend": "tiered", "upper": {}}, ValueError, "tiered needs 'lower'"),
        (
            {"backend": "tiered", "upper": {}, "lower": {"backend": "mooncake"}},
            ValueError,
            "mooncake cannot be the lower tier",
        ),
        ({"backend": "tiered", "upper": 1, "lower": {}}, ValueError, "the upper tier is 1; it has"),
        ({"backend": ["redis"]}, ValueError, "'redis'. is not one of host"),
        ({"backend": "mooncake"}, ValueError, "mooncake needs 'local_hostname'"),
        (
            {"backend": "host", "capacity_bytes": "1GiB"},
            ValueError,
            "capacity_bytes of host is '1GiB' but must be a whole number",
        ),
        ({"backend": "host", "capacity_bytes": True}, ValueError, "is True but must be a whole"),
        ({"backend": "host", "capacity_bytes": 1e9}, ValueError, "must be a whole number"),
        ({"backend": "redis", "port": "6379"}, ValueError, "port of redis is '6379' but must be"),
        ({"backend": "redis", "host": 7}, ValueError, "host of redis is of type int but must be a"),
        ({"backend": "rocksdb", "path": "p", "sync": 1}, ValueError, "sync of rocksdb is 1 but"),
        (
            {
                "backend": "tiered",
                "upper": {"backend": "host", "capacity_bytes": 1 << 20},
                "lower": {"backend": "redis", "ttl_ms": None},
            },
            ValueError,
            "ttl_ms of redis is None but must be a whole number",
        ),
        ("host", TypeError, "a configuration is a dict, not str"),
    ]
    for bad, error, text in cases:
        if (
            isinstance(bad, dict)
            and bad.get("backend") == "redis"
            and not hasattr(kvferry, "RedisStore")
        ):
            continue
        with pytest.raises(error, match=text):
            kvferry.make_store(bad)


def test_a_password_is_not_in_what_is_said_of_it():
    with pytest.raises(ValueError, match="password of redis is of type") as refused:
        kvferry.make_store({"backend": "redis", "password": ["hunter2"]})
    assert "hunter2" not in str(refused.value)


def test_numbers_of_numpy_are_numbers():
    kvferry.make_store({"backend": "host", "capacity_bytes": np.int64(1 << 20)}).close()


def test_what_was_not_built_or_installed_is_named(monkeypatch):
    monkeypatch.setattr("kvferry.store._core", object())
    with pytest.raises(ImportError, match="no RedisStore: install Debian's libhiredis-dev"):
        kvferry.make_store({"backend": "redis"})
    with pytest.raises(ImportError, match="no RocksDbStore: install Debian's librocksdb-dev"):
        kvferry.make_store({"backend": "rocksdb", "path": "/nowhere"})
    monkeypatch.setitem(sys.modules, "mooncake", None)
    mooncake = {"backend": "mooncake", "local_hostname": "127.0.0.1", "master_address": "x:1"}
    with pytest.raises(ImportError, match="pip install mooncake-transfer-engine"):
        kvferry.make_store(mooncake)


def test_a_backend_given_as_an_object_stays_open():
    store = kvferry.HostStore(capacity_bytes=1 << 20)
    with kvferry.KVStoreBuffer(store) as buffer:
        buffer.put("a", TENSORS[0])
        buffer.pin("a")
        assert buffer.stats()["pinned"] == 1
        buffer.unpin("a")
    assert store.exists(["a"]) == 1
    with kvferry.KVStoreBuffer({"backend": "host", "capacity_bytes": 1 << 20}) as buffer:
        owned = buffer.backend
    with pytest.raises(kvferry.FailedPrecondition, match="closed"):
        owned.put("a", b"x")


def test_a_server_that_is_down_is_an_error_in_time():
    need("RedisStore")
    store = {"backend": "redis", "port": 1}
    with kvferry.KVStoreBuffer(store, timeout_ms=500) as buffer:
        begin = time.monotonic()
        for call in (lambda: buffer.get("a"), lambda: buffer.put("a", b"x")):
            with pytest.raises(kvferry.Unavailable, match="127.0.0.1:1: Connection refused"):
                call()
        with pytest.raises(kvferry.Unavailable):
            asyncio.run(buffer.aget("a"))
        assert time.monotonic() - begin < 4  # They are refused at once.


def test_mooncake_and_torch_are_not_imported_before_they_are_needed():
    code = (
        "import sys, kvferry\n"
        "store = kvferry.KVStoreBuffer({'backend': 'host', 'capacity_bytes': 1 << 20})\n"
        "store.put('a', b'x')\n"
        "assert store.get('a') == b'x'\n"
        "assert not {'torch', 'mooncake', 'kvferry.mooncake'} & set(sys.modules)\n"
        "store.close()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
