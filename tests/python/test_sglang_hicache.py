"""kvferry.sglang against SGLang's own classes: its factory, host pools and cache controller."""

import logging
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import kvferry
import pytest
from stores import config, need, redis_server, start_server, tiered

torch = pytest.importorskip("torch")
try:
    import sglang_pools as sg
    from kvferry.sglang.pages import Pages
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller as hybrid
    from sglang.srt.mem_cache.storage import StorageBackendFactory
    from sglang.srt.mem_cache.utils import get_hash_str, get_storage_hash_str

    missing = None
except ImportError as error:
    missing = f"SGLang 0.5.23 is not installed with what it needs: {error}"
with_sglang = pytest.mark.skipif(missing is not None, reason=str(missing))

HOST = {"backend": "host", "capacity_bytes": 16 << 20}
HASHES = [f"{i:064x}" for i in range(8)]
POOLS = [
    *(
        ("mha", layout)
        for layout in ("layer_first", "page_first", "page_first_direct", "page_head")
    ),
    *(("mla", layout) for layout in ("layer_first", "page_first", "page_first_direct")),
]


def extra(store: dict, **more) -> dict:
    names = {
        "backend_name": "kvferry",
        "module_path": "kvferry.sglang",
        "class_name": "HiCacheStore",
    }
    return names | {"interface_v1": 1, "store": store} | more


def create(store: dict, pool, *, options: dict | None = None, **rank):
    """As SGLang does it."""
    of_rank = sg.rank(extra(store, **(options or {})), **rank)
    made = StorageBackendFactory.create_backend("dynamic", of_rank, pool)
    made.register_mem_pool_host(pool)
    made.register_mem_host_pool_v2(pool, PoolName.KV)
    made.on_host_pools_registered()
    return made


@pytest.fixture
def redis(tmp_path):
    need("RedisStore")
    server = redis_server(tmp_path)
    yield server, {"backend": "redis", "port": server.port}
    server.kill()


@pytest.fixture(params=["host", "rocksdb", "redis", "tiered_redis"])
def store_config(request, tmp_path):
    server = start_server(request.param, tmp_path)
    yield config(request.param, tmp_path, server)
    if server is not None:
        server.kill()


def test_without_sglang_the_import_says_what_is_missing():
    for hidden in ("sglang", "sglang.srt.mem_cache.hicache_storage"):
        code = f"import sys; sys.modules[{hidden!r}] = None; import kvferry.sglang"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 1 and "ImportError: kvferry.sglang is a part" in done.stderr


# ---------------------------------------------------------------- pages


@with_sglang
@pytest.mark.parametrize("kind,layout", POOLS)
def test_pages_in_place_come_back_byte_for_byte(store_config, kind, layout):
    source, target = getattr(sg, kind)(layout), getattr(sg, kind)(layout)
    sg.fill(source, 1), sg.fill(target, 2)
    untouched = target.kv_buffer.clone()
    backend = create(store_config, source, is_mla_model=kind == "mla")
    assert backend.batch_set_v1(HASHES, sg.slots([7, 0, 15, 3, 4, 5, 6, 1])) == [True] * 8
    assert backend.batch_exists([*HASHES, "ff" * 32]) == 8 and backend.exists(HASHES[3])
    assert backend.batch_exists(["ff" * 32, *HASHES]) == 0 and not backend.exists("ff" * 32)
    backend.register_mem_pool_host(target)
    got = backend.batch_get_v1([HASHES[2], "ff" * 32, HASHES[0]], sg.slots([9, 10, 2]))
    assert got == [True, False, True]
    for there, here in ((15, 9), (7, 2)):
        assert sg.page_bytes(source, there * sg.PAGE) == sg.page_bytes(target, here * sg.PAGE)
    target.set_from_flat_data_page(9 * sg.PAGE, _page(untouched, target, 9))
    target.set_from_flat_data_page(2 * sg.PAGE, _page(untouched, target, 2))
    assert torch.equal(target.kv_buffer.view(torch.int16), untouched.view(torch.int16))
    backend.close()


def _page(buffer, pool, page):
    present, pool.kv_buffer = pool.kv_buffer, buffer
    flat = pool.get_data_page(page * sg.PAGE).clone()
    pool.kv_buffer = present
    return flat


@with_sglang
@pytest.mark.parametrize("kind,layout", POOLS)
@pytest.mark.parametrize("interface", [0, 1])
def test_through_the_threads_of_the_cache_controller(monkeypatch, kind, layout, interface):
    source, target = getattr(sg, kind)(layout), getattr(sg, kind)(layout)
    sg.fill(source, 3)
    made = sg.controller(monkeypatch, source, extra(HOST) | {"interface_v1": interface})
    tokens = list(range(5 * sg.PAGE))
    hashes, last = [], None
    for i in range(0, len(tokens), sg.PAGE):
        hashes.append(last := get_hash_str(tokens[i : i + sg.PAGE], last))
    assert sg.write(made, [2, 3, 9, 4], hashes[:4]) == 4 * sg.PAGE
    made.storage_host_pool = made.mem_pool_host = target
    assert sg.prefetch(made, tokens, [1, 6, 5, 11, 12]) == (4 * sg.PAGE, 4 * sg.PAGE)
    if interface == 1:  # Into the pool that was registered.
        target = source
    for there, here in ((2, 1), (3, 6), (9, 5), (4, 11)):
        assert sg.page_bytes(source, there * sg.PAGE) == sg.page_bytes(target, here * sg.PAGE)
    made.detach_storage_backend()


@with_sglang
def test_pages_as_tensors():
    pool = sg.mha("layer_first")
    sg.fill(pool, 4)
    backend = create(HOST, pool, options={"interface_v1": 0})
    pages = [pool.get_data_page(page * sg.PAGE) for page in range(3)]
    assert backend.set("a", pages[0]) and backend.batch_set(["b", "c"], pages[1:])
    outs = [pool.get_dummy_flat_data_page() for _ in range(4)]
    got = backend.batch_get(["c", "none", "a", "b"], outs)
    assert got[1] is None and [got[0] is outs[0], got[2] is outs[2]] == [True, True]
    for tensor, page in ((got[0], pages[2]), (got[2], pages[0]), (got[3], pages[1])):
        assert torch.equal(tensor.view(torch.int16), page.view(torch.int16))
    assert backend.batch_exists(["a", "b", "none", "c"]) == 2
    # Wrong sizes, and the other interface.
    assert not backend.set("d", pages[0][:-1]) and not backend.exists("d")
    assert backend.get("a", outs[0][:-1]) is None and backend.get("a") is None
    # What is read into is no copy.
    assert backend.get("a", outs[0].reshape(8, -1).T) is None
    assert not backend.batch_set(["e", "f"], pages[:1]) and not backend.exists("e")
    # Not contiguous: what is stored is a copy.
    apart = torch.stack([pages[1], pages[2]], -1)[..., 0]
    assert backend.set("h", apart) and backend.get("h", outs[1]) is outs[1]
    assert torch.equal(outs[1].view(torch.int16), pages[1].view(torch.int16))
    assert backend.batch_set_v1(["g"], sg.slots([0])) == [False] and not backend.exists("g")


@with_sglang
def test_what_is_not_whole_pages_is_never_turned_into_addresses():
    pool = sg.mha("page_first")
    backend = create(HOST, pool)
    last = sg.PAGES * sg.PAGE
    for bad in (
        torch.arange(3),
        torch.arange(5),
        torch.arange(1, 5),
        torch.arange(last, last + 4),
        torch.arange(-4, 0),
        torch.tensor([0, 1, 3, 2]),
        torch.tensor([0, 1, 2, 2**40]),
    ):
        assert backend.batch_set_v1(HASHES[:1], bad) == [False]
        assert backend.batch_get_v1(HASHES[:1], bad) == [False]
    assert backend.batch_set_v1([], torch.arange(0)) == [] and backend.batch_exists([]) == 0
    assert not backend.exists(HASHES[0])


# ---------------------------------------------------------------- keys


@with_sglang
def test_what_differs_in_anything_shares_nothing(redis):
    _, store = redis
    pool = sg.mha("page_first")
    sg.fill(pool, 5)
    first = create(store, pool, tp_size=2)
    assert first.batch_set_v1(HASHES, sg.slots(range(8))) == [True] * 8
    assert create(store, pool, tp_size=2, dp_rank=1).batch_exists(HASHES) == 8  # A replica.
    for other in (
        create(store, pool, tp_size=2, tp_rank=1),
        create(store, pool, tp_size=4),
        create(store, pool, tp_size=2, pp_size=2),
        create(store, pool, tp_size=2, attn_cp_size=2),
        create(store, pool, tp_size=2, model_name="org/other"),
        create(store, pool, tp_size=2, options={"namespace": "b"}),
        create(store, pool, tp_size=2, options={"interface_v1": 0}),
        create(store, sg.mha("page_first", heads=4), tp_size=2),
        create(store, sg.mha("layer_first"), tp_size=2),
        create(store, sg.mla("page_first"), tp_size=2, is_mla_model=True),
    ):
        assert other.batch_exists(HASHES) == 0


@with_sglang
def test_ranks_of_mla_share_what_one_of_them_writes(redis):
    _, store = redis
    pools = [sg.mla("page_first") for _ in range(2)]
    sg.fill(pools[0], 6)
    ranks = [
        create(store, pool, is_mla_model=True, tp_size=2, tp_rank=rank)
        for rank, pool in enumerate(pools)
    ]
    assert ranks[0].batch_set_v1(HASHES[:2], sg.slots([0, 1])) == [True, True]
    assert ranks[1].batch_get_v1(HASHES[:2], sg.slots([0, 1])) == [True, True]
    assert sg.page_bytes(pools[0], 4) == sg.page_bytes(pools[1], 4)
    with pytest.raises(ValueError, match="'host', which one process has for itself"):
        create(HOST, pools[0], is_mla_model=True, tp_size=2)
    create(tiered(HOST, store), pools[0], is_mla_model=True, tp_size=2).close()


@with_sglang
def test_keys_are_bounded():
    backend = create(HOST, sg.mha("page_first"), model_name="m" * 1000)
    for long in ("x" * 5000, "é" * 200, "é" * 100, ""):
        assert backend.batch_set_v1([long], sg.slots([1])) == [True]
        assert backend.exists(long) and not backend.exists(long + "x")


class StoresTheFirst:
    """A store that has room for one value of a batch."""

    def __init__(self, store):
        self._store = store

    def put_batch(self, items, timeout_ms):
        no_room = kvferry.ResourceExhausted("no room")
        return self._store.put_batch(items[:1], timeout_ms=timeout_ms) + [no_room] * len(items[1:])

    def __getattr__(self, name):
        return getattr(self._store, name)


@with_sglang
def test_a_batch_of_which_some_is_not_stored_is_not_stored(monkeypatch):
    pool = sg.mha("layer_first")
    backend = create(HOST, pool, options={"interface_v1": 0})
    monkeypatch.setattr(backend, "_store", StoresTheFirst(backend._store))
    pages = [pool.get_data_page(page * sg.PAGE) for page in range(2)]
    assert not backend.batch_set(["a", "b"], pages)
    assert backend.exists("a") and not backend.exists("b")


class Says:
    """A pool that says something else of itself."""

    def __init__(self, pool, **of_itself):
        self._pool = pool
        vars(self).update(of_itself)

    def __getattr__(self, name):
        return getattr(self._pool, name)


@with_sglang
def test_pages_of_as_many_bytes_that_hold_something_else_have_other_keys():
    pool = sg.mha("page_first")

    def key(pool, name=PoolName.KV, **of_rank) -> str:
        config = SimpleNamespace(**vars(sg.rank({})) | of_rank)
        (of_page,) = Pages(pool, name, config, "", zero_copy=True).keys(HASHES[:1])
        return of_page

    assert key(Says(pool)) == key(Says(sg.mha("page_first")))
    twice = {"page_size": 2 * sg.PAGE, "logical_page_size": 2 * sg.PAGE}
    keys = [
        key(pool),
        key(Says(pool)),  # Of another class.
        key(Says(pool), PoolName.SWA),
        key(Says(pool, dtype=torch.float16)),
        key(Says(pool, layout="page_head")),
        key(Says(pool, start_layer=1, end_layer=1 + sg.LAYERS)),
        key(
            Says(
                pool,
                **twice,
                get_page_buffer_meta=lambda slots: pool.get_page_buffer_meta(slots[: sg.PAGE]),
            )
        ),
        key(Says(pool), dcp_size=2, dcp_rank=0),
        key(Says(pool), dcp_size=2, dcp_rank=1),
        # With MLA what has heads, such as a draft model's KV, is each rank's own, and states are.
        *(
            key(Says(pool), name, is_mla_model=True, tp_size=2, tp_rank=rank)
            for name in (PoolName.SWA, PoolName.MAMBA)
            for rank in range(2)
        ),
    ]
    assert len(set(keys)) == len(keys)


@with_sglang
def test_pages_of_a_pool_whose_slots_are_no_tokens_are_counted_in_tokens():
    pool = sg.mha("page_first")
    tokens = {"logical_page_size": sg.PAGE, "logical_size": sg.PAGES * sg.PAGE}
    says = Says(pool, page_size=1, size=sg.PAGES, **tokens)
    pages = Pages(says, PoolName.KV, sg.rank({}), "", zero_copy=True)
    assert len(pages.memory(sg.slots([0, sg.PAGES - 1]), 2)) == 2


class CountsExists:
    def __init__(self, store):
        self._store = store
        self.calls = 0

    def __getattr__(self, name):
        self.calls += name in ("exists", "exists_each")
        return getattr(self._store, name)


@with_sglang
def test_pools_beside_the_kv(monkeypatch):
    kv, swa, states = sg.mha("page_first"), sg.mha("page_first", heads=1), sg.mha("page_first")
    backend = create(HOST, kv)
    backend.register_mem_host_pool_v2(swa, PoolName.SWA)
    backend.register_mem_host_pool_v2(states, PoolName.INDEXER)
    sg.fill(swa, 7)
    assert backend.batch_set_v1(HASHES[:6], sg.slots(range(6))) == [True] * 6

    def transfer(name, policy, keys, pages):
        return PoolTransfer(name=name, host_indices=sg.slots(pages), keys=keys, hit_policy=policy)

    trailing, every = PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.ALL_PAGES
    for first in (0, 3):  # Windows that end after 2 and after 5 pages.
        put = transfer(PoolName.SWA, trailing, HASHES[first : first + 2], [first, first + 1])
        assert backend.batch_set_v2([put]) == {PoolName.SWA: [True, True]}
    asked = transfer(PoolName.SWA, trailing, HASHES[:2], [8, 9])
    store = CountsExists(backend._store)
    monkeypatch.setattr(backend, "_store", store)
    result = backend.batch_exists_v2(HASHES, [asked])
    assert store.calls == 2  # Whatever gaps there are: one a pool.
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (5, [1, 2, 5])
    assert result.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 5}
    indexer = transfer(PoolName.INDEXER, every, HASHES[:3], [0, 1, 2])
    assert backend.batch_exists_v2(HASHES, [asked, indexer]).kv_hit_pages == 0
    backend.batch_set_v2([indexer])
    result = backend.batch_exists_v2(HASHES, [asked, indexer])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (2, [1, 2])
    got = backend.batch_get_v2([transfer(PoolName.SWA, trailing, HASHES[3:6], [8, 9, 10])])
    assert got == {PoolName.SWA: [True, True, False]}
    assert sg.page_bytes(swa, 3 * sg.PAGE) == sg.page_bytes(swa, 8 * sg.PAGE)
    # What is there of a window that nobody has named, and no more than there is of the KV.
    unnamed = replace(asked, keys=None, host_indices=None)
    assert backend.batch_exists_v2(HASHES, [unnamed]).restorable_prefix_pages == [1, 2, 4, 5]
    backend.batch_set_v2([transfer(PoolName.INDEXER, every, HASHES, range(8))])
    result = backend.batch_exists_v2(HASHES, [indexer])
    assert result.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.INDEXER: 6}
    # Blocks of another granularity decide nothing.
    blocks = transfer(PoolName.MAMBA, PoolHitPolicy.BLOCK_GROUPS, HASHES[7:], [7])
    assert backend.batch_exists_v2(HASHES, [blocks]).kv_hit_pages == 6
    unknown = transfer(PoolName.MAMBA, every, HASHES[:1], [0])
    assert backend.batch_set_v2([unknown]) == {PoolName.MAMBA: [False]}
    assert backend.batch_exists_v2(HASHES).kv_hit_pages == 6


@with_sglang
def test_through_the_controller_of_a_hybrid_model(monkeypatch):
    pools = {PoolName.KV: sg.mha("page_first"), PoolName.SWA: sg.mha("page_first", heads=1)}
    for seed, pool in enumerate(pools.values()):
        sg.fill(pool, seed)
    made = sg.hybrid_controller(monkeypatch, pools, extra(HOST))
    tokens = list(range(5 * sg.PAGE))
    hashes = get_storage_hash_str(tokens, None, page_size=sg.PAGE)
    window = PoolTransfer(
        name=PoolName.SWA,
        host_indices=sg.slots([5, 6]),
        keys=hashes[2:4],
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )
    made.write_storage(sg.slots([2, 3, 9, 4]), tokens, hashes[:4], extra_pools=[window])
    written = made.ack_backup_queue.get(timeout=20)
    assert written.completed_tokens == 4 * sg.PAGE
    assert written.pool_storage_result.extra_pool_hit_pages == {PoolName.SWA: 2}
    window = replace(window, host_indices=None)
    handle = SimpleNamespace(rid="request")
    operation = hybrid.PrefetchOperation(handle, tokens, pool_transfers=[window])
    made.prefetch_queue.put(operation)
    assert made.prefetch_hit_queue.get(timeout=20) is operation
    assert operation.storage_hit_count == 4 * sg.PAGE
    operation.host_indices, window.host_indices = sg.slots([10, 11, 12, 13]), sg.slots([10, 11])
    made.prefetch_buffer.put(operation)
    acks = []
    while not acks or not acks[-1].completed_req:
        acks.append(made.ack_prefetch_queue.get(timeout=20))
    assert acks[0].completed_tokens == 4 * sg.PAGE
    assert acks[1].pool_hits[PoolName.SWA] == 2
    pairs = {PoolName.KV: [(2, 10), (3, 11), (9, 12), (4, 13)], PoolName.SWA: [(5, 10), (6, 11)]}
    for name, pool in pools.items():
        for one, other in pairs[name]:
            assert sg.page_bytes(pool, one * sg.PAGE) == sg.page_bytes(pool, other * sg.PAGE)
    made.detach_storage_backend()


# ---------------------------------------------------------------- failures


@with_sglang
def test_a_server_that_is_down_is_a_miss_in_time_said_once(redis, monkeypatch, caplog):
    server, store = redis
    pool = sg.mha("page_first")
    sg.fill(pool, 8)
    made = sg.controller(monkeypatch, pool, extra(store, timeout_ms=5000))
    tokens = list(range(2 * sg.PAGE))
    first = get_hash_str(tokens[: sg.PAGE], None)
    hashes = [first, get_hash_str(tokens[sg.PAGE :], first)]
    assert sg.write(made, [0, 1], hashes) == 2 * sg.PAGE
    server.kill()
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="kvferry.sglang"):
        assert sg.write(made, [0, 1], hashes) == 0
        assert sg.prefetch(made, tokens, [2, 3]) == (0, 0)
        backend = made.storage_backend
        assert backend.batch_get_v1(hashes, sg.slots([2, 3])) == [False, False]
        assert backend.batch_exists_v2(hashes).kv_hit_pages == 0
    assert time.monotonic() - begin < 15  # Four times the timeout is more.
    said = [r for r in caplog.records if r.name.startswith("kvferry")]
    assert len(said) == 1 and f":{server.port}: " in said[0].getMessage()
    server.start()  # Empty.
    deadline = time.monotonic() + 20
    while sg.write(made, [0, 1], hashes) != 2 * sg.PAGE:
        assert time.monotonic() < deadline
    assert sg.prefetch(made, tokens, [2, 3]) == (2 * sg.PAGE, 2 * sg.PAGE)
    made.detach_storage_backend()
    assert backend.batch_exists(hashes) == 0  # Closed.


@with_sglang
def test_a_miss_is_no_failure(caplog):
    """Of which it is said once in a while that there are some."""
    backend = create(HOST, sg.mha("page_first"))
    with caplog.at_level(logging.WARNING, logger="kvferry.sglang"):
        assert backend.batch_get_v1(HASHES[:1], sg.slots([1])) == [False]
    assert caplog.text == ""


@with_sglang
def test_a_server_that_does_not_answer_costs_no_more_than_the_timeout(redis):
    server, store = redis
    pool = sg.mha("page_first")
    backend = create(store, pool, options={"timeout_ms": 1000})
    assert backend.batch_set_v1(HASHES, sg.slots(range(8))) == [True] * 8
    server.send(signal.SIGSTOP)
    for call, answer in (
        (lambda: backend.batch_exists(HASHES), 0),
        (lambda: backend.batch_get_v1(HASHES, sg.slots(range(8))), [False] * 8),
        (lambda: backend.batch_set_v1(HASHES, sg.slots(range(8))), [False] * 8),
    ):
        begin = time.monotonic()
        assert call() == answer and time.monotonic() - begin < 4
    server.send(signal.SIGCONT)


@with_sglang
def test_files_outlast_the_server(tmp_path):
    need("RocksDbStore")
    store = {"backend": "rocksdb", "path": str(tmp_path / "kv")}
    pools = [sg.mha("page_first") for _ in range(2)]
    for rank, pool in enumerate(pools):
        sg.fill(pool, rank)
    for again in (False, True):
        ranks = [create(store, pool, tp_size=2, tp_rank=i) for i, pool in enumerate(pools)]
        create(store, pools[0], tp_size=2, dp_rank=1).close()  # A replica has files of its own.
        for backend, pool in zip(ranks, pools, strict=True):
            if again:
                assert backend.batch_get_v1(HASHES, sg.slots(range(8, 16))) == [True] * 8
                assert sg.page_bytes(pool, 0) == sg.page_bytes(pool, 8 * sg.PAGE)
            else:
                assert backend.batch_set_v1(HASHES, sg.slots(range(8))) == [True] * 8
            backend.close()


@with_sglang
def test_what_is_wrong_is_said_when_the_backend_is_attached():
    pool = sg.mha("page_first")
    for store, options, text in [
        (HOST, {"stroe": 1}, "no 'stroe'; kvferry knows store, namespace, timeout_ms, and SGLang"),
        (None, {}, "store is None; it has to be an object"),
        ({"backend": "disk"}, {}, "'disk' is not one of host, rocksdb, redis, tiered, mooncake"),
        ({"backend": "tiered", "upper": HOST, "lower": "redis"}, {}, "the lower tier is 'redis'"),
        (HOST, {"timeout_ms": 0}, "timeout_ms is 0; it has to be 1 to"),
        (HOST, {"namespace": 1}, "namespace is 1; it has to be a string"),
        (HOST | {"max_value_bytes": 100}, {}, "more than max_value_bytes of the store, 100"),
    ]:
        with pytest.raises(ValueError, match=text):
            create(store, pool, options=options)
    with pytest.raises(ValueError, match="does not split heads"):
        create(HOST, sg.mha("page_head"), should_split_heads=True, tp_lcm_size=4)
    with pytest.raises(NotImplementedError, match="no way to list"):
        create(HOST, pool).clear()
