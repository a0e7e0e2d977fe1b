"""What store mode's scheduler half has loaded and saved, and under which keys."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import kvferry  # noqa: E402
from kvferry.vllm import store_scheduler  # noqa: E402
from kvferry.vllm.stores import rank_key  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm_store_scheduler import (  # noqa: E402
    BLOCK,
    LAYOUT,
    TABLE,
    Rank,
    Scheduler,
    begin,
    begin_again,
    keys_of,
    request,
    saved_of,
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a store may take to answer has tests of its own, by a clock of theirs."""
    monkeypatch.setattr(store_scheduler, "_ASK_TIMEOUT_MS", 20_000)


def promised(scheduler: Scheduler) -> SimpleNamespace:
    """A request of three blocks, all of which the store has and has said so."""
    scheduler.put(keys_of(scheduler, request("before", 3)))
    it = request("r", 3)
    scheduler.half.on_new_request(it)
    assert scheduler.half.get_num_new_matched_tokens(it, 0) == (3 * BLOCK, True)
    return it


def test_what_the_store_promised_and_did_not_give_is_computed(scheduler: Scheduler):
    it = promised(scheduler)
    ask = scheduler.half.get_num_new_matched_tokens
    scheduler.half.update_state_after_alloc(it, TABLE, 3 * BLOCK)
    # Not one of them came, so the engine asks again, and has to be told to compute.
    scheduler.half.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    assert ask(it, 0) == (0, False)
    scheduler.compute(it, 2)
    it.num_computed_tokens = 0  # Preempted.
    assert ask(it, 0) == (3 * BLOCK, True)


def test_what_another_connector_failed_to_load_is_computed(scheduler: Scheduler):
    """vLLM has room for one load of it, and would wait for more, and let nobody else begin."""
    it = promised(scheduler)
    ask = scheduler.half.get_num_new_matched_tokens
    scheduler.half.update_state_after_alloc(it, TABLE, 0)  # As MultiConnector says it.
    assert scheduler.step({}).store_loads == []
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
    scheduler.use([Rank(1)])
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
    scheduler.use([Rank(None)])
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


def test_what_all_ranks_have_is_loaded(scheduler: Scheduler):
    scheduler.use([Rank(blocks) for blocks in (4, 2, 3)])
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


def test_a_salt_that_is_no_unicode_is_one_like_any_other(scheduler: Scheduler):
    """A client's JSON may hold such text."""
    salts = ["\ud800", "\udc00", "\\ud800", "\0\ud800", "?", None]
    keys = [keys_of(scheduler, request("r", 1, cache_salt=salt))[0] for salt in salts]
    assert len(set(keys)) == len(keys)
    assert keys_of(scheduler, request("r", 1, cache_salt="\ud800")) == keys[:1]


def test_a_reset_of_what_cannot_be_emptied_is_no_success(scheduler: Scheduler):
    assert scheduler.half.reset_cache() is False


def test_a_block_whose_last_tokens_are_drafted_from_again_is_saved_in_the_next_step():
    """By vLLM's draft layers, of several MTP modules."""
    scheduler = Scheduler(not_final=3)
    it = request("r", 4)
    scheduler.half.on_new_request(it)
    saved = [scheduler.compute(it, blocks).store_saves for blocks in (2, 1, 1)]
    assert [[save.block_ids for save in step] for step in saved] == [[[0]], [[1]], [[2, 3]]]
    scheduler.close()
