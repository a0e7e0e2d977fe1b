"""Store mode's two halves without an engine: what is loaded, what is saved, and what becomes of it
when the store does not do its part."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import kvferry  # noqa: E402
from kvferry.vllm import store_scheduler  # noqa: E402
from kvferry.vllm.device import Device, Host  # noqa: E402
from kvferry.vllm.layout import model_identity  # noqa: E402
from kvferry.vllm.metadata import (  # noqa: E402
    StepMetadata,
    StoreAddress,
    StoreLoad,
    StoreSave,
)
from kvferry.vllm.store_scheduler import StoreScheduler  # noqa: E402
from kvferry.vllm.store_worker import StoreWorker  # noqa: E402
from kvferry.vllm.stores import (  # noqa: E402
    StoreOptions,
    open_store,
    rank_key,
    scheduler_stores,
)
from kvferry.vllm.telemetry import Trace, TransferStats  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm_steps import Blocks, SlowDevice, step  # noqa: E402
from waiting import wait_for  # noqa: E402

BLOCK = 16
BLOCKS = 8
LAYOUT = kvferry.KvLayout.mha(2, BLOCK, 1, 8, "float32")
HOST = StoreOptions({"backend": "host", "capacity_bytes": 1 << 20})
WAIT_S = 20.0


def request(request_id: str, blocks: int, **more) -> SimpleNamespace:
    tokens = list(range(blocks * BLOCK))
    fields = {
        "request_id": request_id,
        "prompt_token_ids": tokens,
        "all_token_ids": tokens,
        "num_prompt_tokens": len(tokens),
        "num_tokens": len(tokens),
        "num_computed_tokens": 0,
        "lora_request": None,
        "cache_salt": None,
        "prompt_embeds": None,
    }
    return SimpleNamespace(**fields | more)


# Block n of a request is block n of the pool.
TABLE = Blocks(list(range(BLOCKS)))


class Scheduler:
    """The scheduler half, over a store of its own in which `put` is what others have saved."""

    def __init__(self, namespace: str = "", not_final: int = 0):
        config = kvferry.Config.make({})
        self.pool = kvferry.KvPool.create(LAYOUT, BLOCKS)
        self.opened = open_store(HOST, self.pool, config, "m", "n", 0)
        self.half = StoreScheduler(BLOCK, HOST, namespace, config, not_final)
        self.half.set_workers({0: StoreAddress.of(self.opened.address, "m", LAYOUT)})

    def use(self, stores: list) -> None:
        """Asks these, one a rank."""
        self.half.close()
        self.half._workers *= len(stores)
        self.half._stores = stores

    def put(self, keys: list[bytes]) -> None:
        stored = self.opened.store.put_pages(
            [rank_key(key, 0) for key in keys], self.pool, list(range(len(keys)))
        )
        assert stored == [None] * len(keys)

    def compute(self, it: SimpleNamespace, blocks: int) -> StepMetadata:
        """A step that computes so many blocks of the request."""
        meta = self.step({it.request_id: blocks * BLOCK})
        it.num_computed_tokens += blocks * BLOCK
        return meta

    def step(self, scheduled: dict[str, int], preempted: set[str] = frozenset()) -> StepMetadata:
        meta = StepMetadata()
        self.half.fill(meta, step(scheduled, preempted), TABLE)
        return meta

    def close(self) -> None:
        self.half.close()
        self.opened.close()


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    it = Scheduler()
    yield it
    it.close()


def fill(pool: kvferry.KvPool, block: int, value: int) -> None:
    for layer in range(LAYOUT.num_layers):
        for tensor in range(2):
            pool.page(layer, tensor, block)[:] = value


def holds(pool: kvferry.KvPool, block: int, value: int) -> bool:
    return all(
        (pool.page(layer, tensor, block) == value).all()
        for layer in range(LAYOUT.num_layers)
        for tensor in range(2)
    )


def keys_of(scheduler: Scheduler, it: SimpleNamespace) -> list[bytes]:
    """What the request's blocks are saved under."""
    scheduler.half.on_new_request(it)
    (save,) = scheduler.compute(it, len(it.all_token_ids) // BLOCK).store_saves
    scheduler.half.request_finished(it)
    return save.keys


def test_what_the_store_promised_and_did_not_give_is_computed(scheduler: Scheduler):
    scheduler.put(keys_of(scheduler, request("before", 3)))
    it = request("r", 3)
    scheduler.half.on_new_request(it)
    ask = scheduler.half.get_num_new_matched_tokens
    assert ask(it, 0) == (3 * BLOCK, True)
    scheduler.half.update_state_after_alloc(it, TABLE, 3 * BLOCK)
    # Not one of them came, so the engine asks again, and has to be told to compute.
    scheduler.half.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    assert ask(it, 0) == (0, False)
    scheduler.compute(it, 2)
    it.num_computed_tokens = 0  # Preempted.
    assert ask(it, 0) == (3 * BLOCK, True)


def test_what_the_engine_has_lost_meanwhile_is_asked_for_anew(scheduler: Scheduler):
    scheduler.put(keys_of(scheduler, request("before", 3)))
    it = request("r", 4)
    scheduler.half.on_new_request(it)
    ask = scheduler.half.get_num_new_matched_tokens
    assert ask(it, 2 * BLOCK) == (BLOCK, True)
    assert ask(it, BLOCK) == (2 * BLOCK, True)
    scheduler.half.update_state_after_alloc(it, TABLE, 2 * BLOCK)
    (load,) = scheduler.compute(it, 4).store_loads
    assert (load.block_ids, load.blocks_skipped) == ([1, 2], 1)
    # Preempted, and the store has lost it too.
    scheduler.use([SlowRank(1, delay_s=0.0)])
    it.num_computed_tokens = 0
    assert ask(it, BLOCK) == (0, False)


def test_who_does_not_read_the_prefix_cache_does_not_read_the_store(scheduler: Scheduler):
    """As a request for logprobs of its prompt, all of which has to be computed."""
    scheduler.put(keys_of(scheduler, request("before", 3)))
    it = request("r", 3, skip_reading_prefix_cache=True)
    scheduler.half.on_new_request(it)
    assert scheduler.half.get_num_new_matched_tokens(it, 0) == (0, False)


@pytest.mark.parametrize("reported", [False, True])
def test_the_load_of_an_aborted_request_is_cancelled(scheduler: Scheduler, reported: bool):
    scheduler.put(keys_of(scheduler, request("before", 2)))
    it = request("r", 2)
    scheduler.half.on_new_request(it)
    assert scheduler.half.get_num_new_matched_tokens(it, 0) == (2 * BLOCK, True)
    scheduler.half.update_state_after_alloc(it, TABLE, 2 * BLOCK)
    if reported:
        scheduler.half.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    assert scheduler.half.request_finished(it) is False
    meta = scheduler.step({})
    assert len(meta.store_loads) == 1
    assert meta.store_cancelled == ([] if reported else ["r"])
    assert scheduler.step({}).store_cancelled == []


def test_a_preempted_request_is_reported_only_for_what_it_saves_afterwards(scheduler: Scheduler):
    it = request("r", 3)
    scheduler.half.on_new_request(it)
    assert len(scheduler.compute(it, 2).store_saves) == 1
    assert scheduler.step({}, {"r"}).store_preempted == ["r"]
    assert scheduler.half.request_finished(it) is False
    scheduler.half.on_new_request(it)
    scheduler.compute(it, 1)
    assert scheduler.half.request_finished(it) is True


def test_a_request_that_is_preempted_and_ends_before_the_next_step(scheduler: Scheduler):
    it = request("r", 3)
    scheduler.half.on_new_request(it)
    scheduler.compute(it, 2)
    assert scheduler.half.request_finished(it) is True
    # Its blocks are others' from this step on, and the engine waits for the report all the same.
    meta = scheduler.step({}, {"r"})
    assert (meta.store_preempted, meta.store_preempted_ended) == ([], ["r"])
    scheduler.half.update_connector_output(KVConnectorOutput(finished_sending={"r"}))
    assert scheduler.step({}, {"r"}).store_preempted_ended == []


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_token_ids": None},
        {"mm_features": ["picture"]},
        {"prompt_embeds": torch.zeros(1)},  # A prompt of tokens and embeddings has both.
    ],
)
def test_what_is_not_all_tokens_has_no_keys(scheduler: Scheduler, more: dict):
    it = request("r", 2, **more)
    scheduler.half.on_new_request(it)
    assert scheduler.compute(it, 2).store_saves == []


def test_a_session_that_gets_a_picture_later_has_no_keys_from_then_on(scheduler: Scheduler):
    """It goes on under its id, and the connector does not hear of it anew."""
    it = request("r", 2)
    scheduler.half.on_new_request(it)
    assert saved_of(it, scheduler.compute(it, 1)) == [0]
    it.mm_features = ["picture"]
    assert scheduler.compute(it, 1).store_saves == []
    it.num_computed_tokens = 0  # Preempted.
    assert scheduler.half.get_num_new_matched_tokens(it, 0) == (0, False)


def saved_of(it: SimpleNamespace, meta: StepMetadata) -> list[int]:
    """Which blocks of the request are saved: block n is block n of the pool."""
    return [block for save in meta.store_saves for block in save.block_ids]


def begin(scheduler: Scheduler, it: SimpleNamespace, local: int) -> int:
    """A request of whose prompt the engine has so many blocks: how many more the store has."""
    scheduler.half.on_new_request(it)
    return begin_again(scheduler, it, local)


def begin_again(scheduler: Scheduler, it: SimpleNamespace, local: int) -> int:
    count = scheduler.half.get_num_new_matched_tokens(it, local * BLOCK)[0] // BLOCK
    it.num_computed_tokens = (local + count) * BLOCK
    return count


def test_what_the_engine_has_and_the_store_has_lost_is_saved_again(scheduler: Scheduler):
    keys = keys_of(scheduler, request("before", 6))
    scheduler.half._saving.clear()  # That was long ago.
    scheduler.put(keys[:2])
    it = request("r", 6)
    assert begin(scheduler, it, local=4) == 0
    assert saved_of(it, scheduler.compute(it, 2)) == [2, 3, 4, 5]
    assert saved_of(it, scheduler.compute(it, 0)) == []


def test_what_the_engine_and_the_store_have_is_not_saved_again(scheduler: Scheduler):
    scheduler.put(keys_of(scheduler, request("before", 5)))
    scheduler.half._saving.clear()
    it = request("r", 6)
    assert begin(scheduler, it, local=4) == 1
    assert saved_of(it, scheduler.compute(it, 1)) == [5]


def test_what_is_behind_a_block_that_the_store_has_lost_is_loaded(scheduler: Scheduler):
    keys = keys_of(scheduler, request("before", 6))
    scheduler.half._saving.clear()
    scheduler.put(keys[:1])
    stored = scheduler.opened.store.put_pages([rank_key(keys[4], 0)], scheduler.pool, [4])
    assert stored == [None]
    it = request("r", 6)
    assert begin(scheduler, it, local=4) == 1
    assert saved_of(it, scheduler.compute(it, 1)) == [1, 2, 3, 5]


def test_what_another_connector_has_loaded_is_not_saved(scheduler: Scheduler):
    scheduler.put(keys_of(scheduler, request("before", 1)))
    scheduler.half._saving.clear()
    it = request("r", 6)
    assert begin(scheduler, it, local=2) == 0
    it.num_computed_tokens = 5 * BLOCK
    assert saved_of(it, scheduler.compute(it, 1)) == [1, 5]


def test_what_a_request_has_saved_is_not_saved_again_when_it_was_preempted(scheduler: Scheduler):
    it = request("r", 4)
    assert begin(scheduler, it, local=0) == 0
    assert saved_of(it, scheduler.compute(it, 3)) == [0, 1, 2]
    scheduler.half._saving.clear()
    scheduler.step({}, {"r"})
    assert begin_again(scheduler, it, local=3) == 0
    assert saved_of(it, scheduler.compute(it, 1)) == [3]


def test_what_is_computed_again_after_a_preemption_is_saved_once(scheduler: Scheduler):
    it = request("r", 4)
    assert begin(scheduler, it, local=0) == 0
    assert saved_of(it, scheduler.compute(it, 3)) == [0, 1, 2]
    scheduler.step({}, {"r"})
    it.num_computed_tokens = 0
    assert [saved_of(it, scheduler.compute(it, blocks)) for blocks in (1, 1, 2)] == [[], [], [3]]


def test_drafts_are_not_saved(scheduler: Scheduler):
    """They are scheduled as tokens are, and may be wrong."""
    it = request("r", 3, num_tokens=2 * BLOCK + 8)
    it.all_token_ids = it.all_token_ids[: it.num_tokens]
    scheduler.half.on_new_request(it)
    assert saved_of(it, scheduler.compute(it, 3)) == [0, 1]


def test_a_block_has_one_key_in_however_many_steps_those_before_are_computed(
    scheduler: Scheduler,
):
    it = request("r", 3)
    scheduler.half.on_new_request(it)
    keys = [key for _ in range(3) for key in scheduler.compute(it, 1).store_saves[0].keys]
    assert keys == keys_of(scheduler, request("s", 3))


def test_a_beginning_that_many_requests_have_is_saved_again_by_one_of_them(scheduler: Scheduler):
    keys_of(scheduler, request("before", 3))
    first, second, third = (request(name, 4) for name in ("first", "second", "third"))
    assert begin(scheduler, first, local=3) == 0
    assert saved_of(first, scheduler.compute(first, 1)) == [3]  # The others are being saved.
    scheduler.half._saving.clear()
    for it in (second, third):
        assert begin(scheduler, it, local=3) == 0
    assert saved_of(second, scheduler.compute(second, 1)) == [0, 1, 2, 3]
    assert saved_of(third, scheduler.compute(third, 1)) == [3]


def test_keys_of_saves_that_must_have_ended_are_forgotten(scheduler: Scheduler):
    scheduler.half._save_s = 0.0
    for name in ("a", "b", "c"):
        keys_of(scheduler, request(name, 3, cache_salt=name))
    assert len(scheduler.half._saving) == 3


def test_nothing_is_saved_again_to_a_store_that_does_not_answer(scheduler: Scheduler):
    keys_of(scheduler, request("before", 3))
    scheduler.half._saving.clear()
    scheduler.use([SlowRank(1, delay_s=WAIT_S)])
    it = request("r", 4)
    assert begin(scheduler, it, local=3) == 0
    assert saved_of(it, scheduler.compute(it, 1)) == [3]


def test_what_the_engine_never_loads_as_it_has_it_itself_stays_in_the_store(scheduler: Scheduler):
    host = kvferry.HostStore(12 * LAYOUT.page_bytes, layout=LAYOUT)
    scheduler.use([host])
    shared = list(range(4 * BLOCK))  # What every request begins with.
    keys: list[bytes] = []
    for number in range(20):
        tokens = shared + [1000 * number + n for n in range(2 * BLOCK)]
        fields = {"prompt_token_ids": tokens, "all_token_ids": tokens}
        it = request(f"r{number}", 6, **fields)
        local = 4 if number > 0 else 0
        assert begin(scheduler, it, local) == 0
        (save,) = scheduler.compute(it, 6 - local).store_saves
        assert save.block_ids == list(range(local, 6))
        keys = [rank_key(key, 0) for key in scheduler.half._requests[it.request_id].keys]
        stored = host.put_pages(keys[local:], scheduler.pool, save.block_ids)
        assert stored == [None] * (6 - local)
        scheduler.half.request_finished(it)
        scheduler.half._saving.clear()
    assert host.exists(keys) == 6  # As an engine asks that has nothing of it.


class SlowRank:
    """What the scheduler asks: a store that takes its time for an answer."""

    def __init__(self, blocks: int, delay_s: float):
        self.blocks, self.delay_s = blocks, delay_s
        self.timeouts_ms: list[int] = []

    def exists(self, keys: list[bytes], timeout_ms: int) -> int:
        self.timeouts_ms.append(timeout_ms)
        time.sleep(min(self.delay_s, timeout_ms / 1e3))
        if self.delay_s > timeout_ms / 1e3:
            raise kvferry.DeadlineExceeded("slow")
        return min(self.blocks, len(keys))

    def close(self) -> None:
        pass


def test_the_stores_of_all_ranks_have_one_deadline(scheduler: Scheduler):
    ranks = [SlowRank(3, delay_s=0.08) for _ in range(8)]
    scheduler.use(ranks)
    it = request("r", 3)
    scheduler.half.on_new_request(it)
    begin_s = time.monotonic()
    assert scheduler.half.get_num_new_matched_tokens(it, 0) == (0, False)
    assert time.monotonic() - begin_s < 0.5  # One after the other they would take 0.64 s.
    timeouts = [ms for rank in ranks for ms in rank.timeouts_ms]
    assert timeouts == sorted(timeouts, reverse=True) and sum(timeouts) < 2 * 200
    # None is asked for a while.
    other = request("s", 3)
    scheduler.half.on_new_request(other)
    assert scheduler.half.get_num_new_matched_tokens(other, 0) == (0, False)
    assert [ms for rank in ranks for ms in rank.timeouts_ms] == timeouts


class Clock:
    """Of the scheduler's half, which stores move on by what their answers take."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class StoreByClock:
    """Has all blocks."""

    def __init__(self, clock: Clock, delay_s: float):
        self.clock, self.delay_s = clock, delay_s
        self.asked: list[float] = []  # With how many seconds to answer.

    def exists(self, keys: list[bytes], timeout_ms: int) -> int:
        self.asked.append(timeout_ms / 1e3)
        self.clock.now += min(self.delay_s, timeout_ms / 1e3)
        if self.delay_s > timeout_ms / 1e3:
            raise kvferry.DeadlineExceeded("slow")
        return len(keys)

    def close(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    it = Clock()
    monkeypatch.setattr(store_scheduler, "time", it)
    return it


def arrive(scheduler: Scheduler, names: str) -> list[SimpleNamespace]:
    its = [request(name, 3) for name in names]
    for it in its:
        scheduler.half.on_new_request(it)
    return its


def ask_all(scheduler: Scheduler, its: list[SimpleNamespace]) -> list[tuple[int | None, bool]]:
    """As the engine does in a step, of all that wait."""
    answers = [scheduler.half.get_num_new_matched_tokens(it, 0) for it in its]
    scheduler.step({})
    return answers


FOUND, LATER, NOTHING = (3 * BLOCK, True), (None, False), (0, False)


class QuickOnceWarm(StoreByClock):
    """Whose first answer takes long, as that over a connection which is still to be made."""

    def exists(self, keys: list[bytes], timeout_ms: int) -> int:
        self.delay_s = 0.001 if self.asked else 1.0
        return super().exists(keys, timeout_ms)


def start_with(monkeypatch: pytest.MonkeyPatch, stores: list) -> StoreScheduler:
    monkeypatch.setattr(store_scheduler, "scheduler_stores", lambda *_: stores)
    half = StoreScheduler(BLOCK, HOST, "", kvferry.Config.make({}))
    half.set_workers({rank: StoreAddress.of("a", "m", LAYOUT) for rank in range(len(stores))})
    return half


def test_the_first_prompt_does_not_wait_for_connections(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    half = start_with(monkeypatch, [QuickOnceWarm(clock, 0) for _ in range(2)])
    it = request("r", 3)
    half.on_new_request(it)
    assert half.get_num_new_matched_tokens(it, 0) == FOUND


def test_stores_that_do_not_answer_hold_up_the_start_for_seconds_in_all(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    stores = [StoreByClock(clock, 3600) for _ in range(4)]
    begin = clock.now
    start_with(monkeypatch, stores)
    assert clock.now - begin < 5.1
    assert [len(store.asked) for store in stores] == [1] * 4


def test_all_prompts_of_a_step_have_one_deadline(scheduler: Scheduler, clock: Clock):
    store = StoreByClock(clock, delay_s=0.15)
    scheduler.use([store])
    its = arrive(scheduler, "abcde")
    for found in range(1, len(its) + 1):
        begin = clock.now
        assert ask_all(scheduler, its) == [FOUND] * found + [LATER] * (5 - found)
        assert clock.now - begin < 0.2001
    # Who was asked about with less than all of that time has not silenced the store.
    assert len([it for it in store.asked if it > 0.19]) == 5
    # One that does not answer in all of it has.
    store.delay_s = 1.0
    assert ask_all(scheduler, arrive(scheduler, "fg")) == [NOTHING] * 2


def test_fast_answers_are_all_given_in_one_step(scheduler: Scheduler, clock: Clock):
    scheduler.use([StoreByClock(clock, delay_s=0.001)])
    its = arrive(scheduler, "abcdefghij")
    assert ask_all(scheduler, its) == [FOUND] * 10


def test_a_prompt_whose_turn_to_be_asked_about_does_not_come_is_computed(
    scheduler: Scheduler, clock: Clock
):
    store = StoreByClock(clock, delay_s=0.2)
    scheduler.use([store])
    waiting, others, steps = arrive(scheduler, "w"), 0, 0
    answer = LATER
    while answer == LATER and steps < 100:
        others += 1
        before = arrive(scheduler, f"{others % 10}")
        *_, answer = ask_all(scheduler, before + waiting)
        steps += 1
    assert answer == NOTHING
    assert 5.0 < steps * 0.2 < 5.5
    asked = len(store.asked)
    assert ask_all(scheduler, waiting) == [NOTHING] and len(store.asked) == asked


def test_a_prompt_that_was_put_off_once_is_asked_about_when_it_comes_again(
    scheduler: Scheduler, clock: Clock
):
    scheduler.use([StoreByClock(clock, delay_s=0.15)])
    first, second = arrive(scheduler, "ab")
    assert ask_all(scheduler, [first, second]) == [FOUND, LATER]
    assert ask_all(scheduler, [second]) == [FOUND]
    scheduler.half.update_state_after_alloc(second, TABLE, 3 * BLOCK)
    scheduler.compute(second, 1)
    clock.now += 60
    second.num_computed_tokens = 0  # Preempted.
    assert ask_all(scheduler, [second]) == [FOUND]


def test_what_all_ranks_have_is_loaded(scheduler: Scheduler):
    scheduler.use([SlowRank(blocks, delay_s=0.0) for blocks in (4, 2, 3)])
    assert begin(scheduler, request("r", 5), local=1) == 1


def test_namespaces_share_nothing(scheduler: Scheduler):
    keys = keys_of(scheduler, request("r", 2))
    other = Scheduler("of another customer")
    assert not set(keys) & set(keys_of(other, request("r", 2)))
    other.close()
    assert keys == keys_of(scheduler, request("s", 2))


def test_adapters_share_nothing_whatever_their_name(scheduler: Scheduler):
    def keys(salt: str | None, *adapter: str) -> bytes:
        names = ("lora_name", "lora_path")
        lora = SimpleNamespace(**dict(zip(names, adapter, strict=True))) if adapter else None
        it = request("r", 1, lora_request=lora, cache_salt=salt)
        (key,) = keys_of(scheduler, it)
        return key

    different = [
        keys(None),
        keys("a"),
        keys(None, "a", "/b"),
        keys(None, "a", "/c"),  # The name was given to another adapter.
        keys(None, "d", "/b"),
        keys("a", "a", "/b"),
        keys("a\0a\0/b"),
    ]
    assert len(set(different)) == len(different)
    assert keys("a", "a", "/b") == keys("a", "a", "/b")


def test_a_reset_of_what_cannot_be_emptied_is_no_success(scheduler: Scheduler):
    assert scheduler.half.reset_cache() is False


def test_other_kinds_of_small_numbers_are_different_models():
    def identity(cache_dtype: str, of_bytes: bool = True) -> str:
        return model_identity(
            SimpleNamespace(
                model_config=SimpleNamespace(model="a/b", revision=None, quantization=None),
                parallel_config=SimpleNamespace(tensor_parallel_size=1),
                cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            ),
            of_ranks=False,
            of_bytes=of_bytes,
        )

    assert identity("auto") == identity("bfloat16")  # What it is stands in the layout.
    assert identity("fp8") == identity("fp8_e4m3")
    others = ("auto", "fp8_e4m3", "fp8_e5m2", "turboquant_4bit_nc", "ultraquant_4bit")
    assert len({identity(it) for it in others}) == 5
    # But for who casts one into the other.
    assert identity("fp8_e5m2", of_bytes=False) == identity("auto")


def embedded(backend: str, folder: Path) -> StoreOptions:
    configs = {"host": HOST.config, "rocksdb": {"backend": "rocksdb", "path": str(folder)}}
    configs["tiered"] = {"backend": "tiered", "upper": configs["host"], "lower": configs["rocksdb"]}
    return StoreOptions(configs[backend])


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
        open_store(StoreOptions(config), pool, kvferry.Config.make({}), "m", "n", 0)


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
    options = StoreOptions({"backend": "tiered", "lower": below})
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


class HeldStore:
    """A store in which puts and gets wait until they are let go on, or for their deadline."""

    def __init__(self, store):
        self._store = store
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.puts = self.gets = 0
        self.late_s = 0.0  # What one takes beyond its deadline.

    def put_pages(self, keys, pool, pages, *, timeout_ms):
        self.puts += 1
        self._hold(timeout_ms)
        return self._store.put_pages(keys, pool, pages, timeout_ms=timeout_ms)

    def get_pages(self, keys, pool, pages, *, timeout_ms):
        self.gets += 1
        self._hold(timeout_ms)
        return self._store.get_pages(keys, pool, pages, timeout_ms=timeout_ms)

    def _hold(self, timeout_ms: int) -> None:
        self.began.set()
        if not self.go_on.wait(timeout_ms / 1e3 + self.late_s):
            raise kvferry.DeadlineExceeded("held")

    def __getattr__(self, name: str):
        return getattr(self._store, name)


class Worker:
    def __init__(self, timeout_ms: int, device: Device = Host(), rank: int = 0):  # noqa: B008
        self.pool = kvferry.KvPool.create(LAYOUT, BLOCKS)
        config = kvferry.Config.make({"fetch_timeout_ms": timeout_ms})
        cache = SimpleNamespace(pool=self.pool, device=device)
        of_rank = (rank, 0, Trace("", rank), TransferStats())
        self.half = StoreWorker(cache, HOST, config, "m", "n", *of_rank)
        self.store = self.half._opened.store = HeldStore(self.half._opened.store)

    def save(self, request_id: str, block: int) -> bytes:
        key = f"{request_id} {block}".encode()
        self.half.save([StoreSave(request_id, [key], [block])])
        return key

    def load(self, request_id: str, block: int) -> None:
        self.half.load([StoreLoad(request_id, [b"of nobody"], [block], 0)])

    def wait_loaded(self, request_ids: set[str]) -> None:
        left = set(request_ids)

        def reported() -> bool:
            left.difference_update(self.half.take_finished(set())[1])
            return not left

        wait_for(reported)

    def wait_saved(self, finished: set[str]) -> None:
        """Until the finished requests, all of them, are reported."""
        left = set(finished)

        def reported() -> bool:
            left.difference_update(self.half.take_finished(finished)[0])
            return not left

        wait_for(reported)

    def close(self) -> None:
        self.store.go_on.set()
        self.half.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    it = Worker(timeout_ms=int(WAIT_S * 1e3))
    yield it
    it.close()


def test_a_step_starts_no_thread(monkeypatch):
    """One that the system refuses would end the engine."""

    def refuses(_):
        raise RuntimeError("can't start new thread")

    it = Worker(timeout_ms=1000)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuses)
        it.store.go_on.set()
        it.save("a", 1)
        it.load("b", 2)
        it.wait_loaded({"b"})
        with pytest.raises(RuntimeError, match="new thread"):
            Worker(timeout_ms=1000)
    it.close()


def test_blocks_of_ranks_have_keys_of_their_own():
    worker = Worker(timeout_ms=int(WAIT_S * 1e3), rank=1)
    worker.store.go_on.set()
    key = worker.save("r", 1)
    worker.wait_saved({"r"})
    assert [worker.store.exists([rank_key(key, rank)]) for rank in range(2)] == [0, 1]
    worker.close()


def test_blocks_stay_until_all_saves_of_their_request_have_ended(worker: Worker):
    worker.store.go_on.set()
    worker.save("r", 1)
    (first,) = worker.half._saves["r"]
    first.result(WAIT_S)
    worker.store.go_on.clear()
    worker.save("r", 2)
    assert worker.half.take_finished({"r"}) == (set(), set())
    worker.store.go_on.set()
    worker.wait_saved({"r"})


@pytest.mark.parametrize("what", ["save", "load"])
def test_a_store_is_closed_when_what_has_begun_has_ended(worker: Worker, what: str, caplog):
    """And what was to be saved, but not what was to be loaded."""
    for block in range(3):
        getattr(worker, what)(f"r{block}", block)
    assert worker.store.began.wait(WAIT_S)
    closing = threading.Thread(target=worker.half.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    worker.store.go_on.set()
    closing.join(WAIT_S)
    assert (worker.store.puts, worker.store.gets) == ((3, 0) if what == "save" else (0, 1))
    assert "not saved" not in caplog.text


def test_saves_that_wait_are_dropped_when_their_blocks_are_taken(worker: Worker):
    worker.save("other", 0)
    assert worker.store.began.wait(WAIT_S)
    key = worker.save("preempted", 1)
    worker.half.end_saves(["preempted"], [])  # Returns at once: its save has not begun.
    fill(worker.pool, 1, 7)  # Another request's.
    worker.store.go_on.set()
    worker.save("last", 2)
    worker.wait_saved({"other", "last"})
    assert worker.store.exists([rank_key(key, 0)]) == 0
    # Nobody keeps blocks for it any more, so it must not be reported.
    assert worker.half.take_finished({"preempted"}) == (set(), set())


def test_saves_of_a_request_that_was_preempted_and_has_ended_are_dropped_and_reported(
    worker: Worker,
):
    worker.save("other", 0)
    assert worker.store.began.wait(WAIT_S)
    key = worker.save("ended", 1)
    worker.half.end_saves([], ["ended"])
    assert worker.half.take_finished({"ended"}) == ({"ended"}, set())  # At once.
    worker.store.go_on.set()
    worker.save("last", 2)
    worker.wait_saved({"other", "last"})
    assert worker.store.exists([rank_key(key, 0)]) == 0


def test_a_load_of_a_preempted_request_is_all_that_is_reported(worker: Worker):
    worker.store.go_on.set()
    key = worker.save("r", 1)
    assert worker.store.began.wait(WAIT_S)  # One that has not is dropped.
    worker.half.end_saves(["r"], [])
    worker.half.load([StoreLoad("r", [key], [2], 0)])
    reported: list[set[str]] = [set(), set()]

    def loaded() -> bool:
        for all_of_kind, kind in zip(reported, worker.half.take_finished({"r"}), strict=True):
            all_of_kind |= kind
        return reported[1] == {"r"}

    wait_for(loaded)
    assert reported[0] == set() and worker.half.take_missing_blocks() == set()


def test_blocks_of_a_save_that_does_not_end_are_not_given_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvferry.vllm.store_worker._LATE_S", 0.1)
    worker = Worker(timeout_ms=100)
    worker.store.late_s = WAIT_S
    worker.save("preempted", 1)
    assert worker.store.began.wait(WAIT_S)
    with pytest.raises(kvferry.DeadlineExceeded, match="preempted"):
        worker.half.end_saves(["preempted"], [])
    worker.close()


def test_a_store_that_hangs_holds_blocks_no_longer_than_one_save_may_take():
    worker = Worker(timeout_ms=300)
    requests = {f"r{n}" for n in range(20)}
    for name in requests:
        worker.save(name, 1)
    worker.wait_saved(requests)
    assert worker.store.puts == 1
    worker.close()


def test_loads_do_not_wait_for_a_store_that_hangs_one_behind_the_other():
    worker = Worker(timeout_ms=300)
    for block in range(BLOCKS):
        worker.load(f"r{block}", block)
    worker.wait_loaded({f"r{block}" for block in range(BLOCKS)})
    assert worker.store.gets == 1
    assert worker.half.take_missing_blocks() == set(range(BLOCKS))
    assert worker.half.take_missing_blocks() == set()
    # Nor does the next one, but what is saved may go elsewhere.
    worker.load("later", 1)
    worker.wait_loaded({"later"})
    assert worker.store.gets == 1
    worker.store.go_on.set()
    worker.save("saved", 1)
    worker.wait_saved({"saved"})
    assert worker.store.puts == 1
    worker.close()


def test_the_time_that_a_load_may_take_begins_when_it_is_asked_for():
    worker = Worker(timeout_ms=100)
    worker.store.late_s = WAIT_S
    worker.load("slow", 1)
    worker.load("behind", 2)
    asked = time.monotonic()
    assert worker.store.began.wait(WAIT_S)
    wait_for(lambda: time.monotonic() - asked > 0.2)
    worker.store.go_on.set()
    worker.wait_loaded({"slow", "behind"})
    assert worker.store.gets == 1
    assert worker.half.take_missing_blocks() == {1, 2}
    worker.close()


def test_a_load_that_nobody_waits_for_does_not_wait_for_others(worker: Worker):
    worker.load("other", 0)
    assert worker.store.began.wait(WAIT_S)
    worker.load("aborted", 1)
    worker.half.cancel(["aborted", "unknown"])
    worker.wait_loaded({"aborted"})
    assert worker.half._stats.data["failed"] == []  # It is no fault of the store.
    worker.store.go_on.set()
    worker.wait_loaded({"other"})
    assert worker.store.gets == 1 and worker.half._cancelled == set()


def test_a_block_is_saved_when_the_device_has_computed_it():
    device = SlowDevice()
    worker = Worker(timeout_ms=int(WAIT_S * 1e3), device=device)
    worker.store.go_on.set()
    key = worker.save("r", 1)
    fill(worker.pool, 1, 7)
    device.finish(1)
    worker.wait_saved({"r"})
    worker.half.load([StoreLoad("s", [key], [2], 0)])
    wait_for(lambda: "s" in worker.half.take_finished(set())[1])
    assert worker.half.take_missing_blocks() == set()
    assert holds(worker.pool, 2, 7)
    worker.close()


def test_a_block_that_the_device_failed_to_compute_is_not_saved():
    device = SlowDevice()
    device.fails = True
    worker = Worker(timeout_ms=int(WAIT_S * 1e3), device=device)
    worker.store.go_on.set()
    key = worker.save("r", 1)
    device.finish(1)
    worker.wait_saved({"r"})
    assert worker.store.puts == 0 and worker.store.exists([rank_key(key, 0)]) == 0
    worker.close()


def test_a_block_whose_last_tokens_are_drafted_from_again_is_saved_in_the_next_step():
    """By vLLM's draft layers, of several MTP modules."""
    scheduler = Scheduler(not_final=3)
    it = request("r", 4)
    scheduler.half.on_new_request(it)
    saved = [scheduler.compute(it, blocks).store_saves for blocks in (2, 1, 1)]
    assert [[save.block_ids for save in step] for step in saved] == [[[0]], [[1]], [[2, 3]]]
    scheduler.close()
