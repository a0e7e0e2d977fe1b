"""How long store mode's scheduler half waits for what stores say they have."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
from kvferry.vllm import store_scheduler  # noqa: E402
from kvferry.vllm.metadata import StoreAddress  # noqa: E402
from kvferry.vllm.store_scheduler import StoreScheduler  # noqa: E402
from vllm_store_scheduler import (  # noqa: E402
    BLOCK,
    HOST,
    LAYOUT,
    TABLE,
    Scheduler,
    request,
)


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


def test_the_stores_of_all_ranks_have_one_deadline(scheduler: Scheduler, clock: Clock):
    ranks = [StoreByClock(clock, delay_s=0.08) for _ in range(8)]
    scheduler.use(ranks)
    begin = clock.now
    assert ask_all(scheduler, arrive(scheduler, "r")) == [NOTHING]
    assert clock.now - begin < 0.2001
    asked = [left for rank in ranks for left in rank.asked]
    assert asked == pytest.approx([0.2, 0.12, 0.04], abs=2e-3)
    # None is asked for a while.
    assert ask_all(scheduler, arrive(scheduler, "s")) == [NOTHING]
    assert [left for rank in ranks for left in rank.asked] == asked


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


def test_an_engine_that_is_told_to_wake_up_keeps_its_stores(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    store = StoreByClock(clock, delay_s=0.001)
    half = start_with(monkeypatch, [store])
    monkeypatch.setattr(store_scheduler, "scheduler_stores", lambda *_: pytest.fail("opened"))
    half.set_workers({0: StoreAddress.of("a", "m", LAYOUT)})
    assert len(store.asked) == 1


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
