"""The stores that store mode opens, and what it says of those that cannot be."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
from kvferry.vllm.metadata import StoreAddress  # noqa: E402
from kvferry.vllm.stores import StoreOptions, open_store, rank_key, scheduler_stores  # noqa: E402
from vllm_store_scheduler import BLOCKS, HOST, LAYOUT, fill, holds  # noqa: E402


def embedded(backend: str, folder: Path) -> StoreOptions:
    configs = {"host": HOST.config, "rocksdb": {"backend": "rocksdb", "path": str(folder)}}
    configs["tiered"] = {"backend": "tiered", "upper": configs["host"], "lower": configs["rocksdb"]}
    return StoreOptions.parse(configs[backend])


REDIS = {"backend": "redis"}
MOONCAKE = {"backend": "mooncake", "local_hostname": "h", "master_address": "h:1"}


@pytest.mark.parametrize(
    "config, words",
    [
        ({"backend": "host", "capacity": 1}, "host knows no .'capacity'."),
        ({"backend": "host", "capacity_bytes": "1GiB"}, "capacity_bytes of host is '1GiB' but"),
        ({"backend": "host", "capacity_bytes": 0}, "capacity_bytes"),
        ({"backend": "tiered", "upper": {"backend": "redis"}, "lower": {}}, "upper tier"),
        ({"backend": "tiered", "lower": {"backend": "nothing"}}, "nothing"),
        ({"backend": "remote"}, "takes an address"),
        ({"backend": "remote", "address": []}, "none for rank 0"),
        ({"backend": "rocksdb"}, "needs 'path'"),
        ({"backend": "tiered", "lower": {"backend": "rocksdb"}}, "needs 'path'"),
        ({"backend": "tiered", "uper": HOST.config, "lower": REDIS}, "tiered knows no 'uper'"),
        ({"backend": "tiered", "upper": {"backend": "host", "size": 1}, "lower": REDIS}, "'size'"),
        ({"backend": "tiered", "lower": MOONCAKE}, "mooncake cannot be the lower tier"),
        ({"backend": "tiered", "lower": "redis"}, "the lower tier is 'redis'; it has to be an obj"),
        (
            {"backend": "tiered", "lower": {"backend": "tiered", "upper": REDIS}},
            "tiered needs 'lower'",
        ),
    ],
)
def test_stores_that_cannot_be_opened_say_why(config, words):
    layout = kvferry.KvLayout.mha(2, 4, 1, 8, "float32")
    pool = kvferry.KvPool.create(layout, 4)
    with pytest.raises((ValueError, kvferry.Error), match=words):
        open_store(StoreOptions.parse(config), pool, kvferry.Config.make({}), "m", "n", 0)


@pytest.mark.parametrize("backend", ["host", "rocksdb", "tiered"])
def test_embedded_stores_are_reached_from_the_scheduler(backend, tmp_path):
    options, config = embedded(backend, tmp_path), kvferry.Config.make({})
    pool = kvferry.KvPool.create(kvferry.KvLayout.mha(2, 4, 1, 8, "float32"), 4)
    opened = open_store(options, pool, config, "m", "n", rank=1)
    address = StoreAddress.of(opened.address, "m", pool.layout)
    assert address.kv_layout() == pool.layout
    (store,) = scheduler_stores(options, [address], config)
    keys = [rank_key(bytes([n]) * 32, 1) for n in range(3)]
    assert opened.store.put_pages(keys[:2], pool, [1, 3]) == [None, None]
    assert store.exists(keys) == 2
    assert store.exists([rank_key(bytes([0]) * 32, 0)]) == 0  # Another rank's.
    loaded = opened.store.get_pages(keys, pool, [0, 2, 1])
    assert loaded[:2] == [None, None] and isinstance(loaded[2], kvferry.NotFound)
    store.close()
    opened.close()


def test_mooncake_has_room_for_a_block_and_gives_memory_once(monkeypatch: pytest.MonkeyPatch):
    """The scheduler only asks."""
    made: list[dict] = []
    monkeypatch.setattr(
        kvferry, "make_store", lambda it: made.append(it) or SimpleNamespace(close=None)
    )
    options = StoreOptions(MOONCAKE | {"global_segment_bytes": 1 << 30})
    config, pool = kvferry.Config.make({}), kvferry.KvPool.create(LAYOUT, BLOCKS)
    opened = open_store(options, pool, config, "m", "n", 0)
    assert opened.address == ""  # Everybody goes to the backend.
    assert len(scheduler_stores(options, [StoreAddress.of("", "m", LAYOUT)] * 2, config)) == 1
    assert [it["max_value_bytes"] for it in made] == [LAYOUT.page_bytes] * 2
    assert [it["global_segment_bytes"] for it in made] == [1 << 30, 0]


def test_each_engine_of_a_host_has_folders_of_its_own(tmp_path: Path):
    config, pool = kvferry.Config.make({}), kvferry.KvPool.create(LAYOUT, BLOCKS)
    for rank, dp_rank in ((0, 0), (1, 0), (0, 1), (1, 1)):
        opened = open_store(embedded("rocksdb", tmp_path), pool, config, "m", "n", rank, dp_rank)
        opened.close()
    folders = {it.name for it in tmp_path.iterdir()}
    assert folders == {"rank0", "rank1", "dp1-rank0", "dp1-rank1"}


def test_each_engine_has_a_folder_of_its_own_in_every_tier(tmp_path: Path):
    config, pool = kvferry.Config.make({}), kvferry.KvPool.create(LAYOUT, BLOCKS)
    disks = [{"backend": "rocksdb", "path": str(tmp_path / disk)} for disk in ("fast", "slow")]
    below = {"backend": "tiered", "upper": disks[0], "lower": disks[1]}
    options = StoreOptions.parse({"backend": "tiered", "lower": below})
    opened = [open_store(options, pool, config, "m", "n", rank) for rank in (0, 1)]
    for one in opened:  # Both were open together.
        one.close()
    for disk in ("fast", "slow"):
        assert {it.name for it in (tmp_path / disk).iterdir()} == {"rank0", "rank1"}


@pytest.mark.parametrize("backend", ["host", "rocksdb", "tiered"])
def test_embedded_stores_serve_their_pages(backend: str, tmp_path):
    config = kvferry.Config.make({})
    pool, other = (kvferry.KvPool.create(LAYOUT, BLOCKS) for _ in range(2))
    fill(pool, 1, 7)
    fill(pool, 3, 9)
    opened = open_store(embedded(backend, tmp_path), pool, config, "m", "n", 0)
    remote = kvferry.RemoteStore(opened.address, other, config, "m", "other")
    assert opened.store.put_pages([b"a", b"b"], pool, [1, 3]) == [None, None]
    assert remote.get_pages([b"a", b"b"], other, [2, 4]) == [None, None]
    assert holds(other, 2, 7) and holds(other, 4, 9)
    assert remote.put_pages([b"c", b"d"], other, [2, 4]) == [None, None]
    assert opened.store.get_pages([b"d", b"c"], pool, [1, 3]) == [None, None]
    assert holds(pool, 1, 9) and holds(pool, 3, 7)
    remote.close()
    opened.close()
    with pytest.raises(kvferry.FailedPrecondition):  # Nobody is served any more.
        opened.metrics()
