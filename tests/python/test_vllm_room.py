"""Which requests get blocks, and in which order, without an engine."""

import random
from collections.abc import Callable
from itertools import chain

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
from kvferry.vllm.parts import (  # noqa: E402
    WHOLE,
    most_blocks_computing,
    most_blocks_loading,
)
from kvferry.vllm.room import Held, Room  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402
from vllm_steps import (  # noqa: E402
    ANNOUNCED,
    BLOCK,
    FETCH_TIMEOUT_MS,
    FROM,
    Blocks,
    Decode,
    Prefill,
    remote,
    request,
    window,
)

SIX_BLOCKS = 6 * BLOCK


def room_for_twelve_blocks() -> Room:
    return Room(num_blocks=22, longest=10)


def test_what_nobody_has_asked_for_leaves_room_for_the_longest_prompt():
    prefill = Prefill(room=room_for_twelve_blocks())
    first, second, third, fourth = (
        prefill.arrive(SIX_BLOCKS, ANNOUNCED | {"transfer_id": 16 * name}, name)
        for name in ("a", "b", "c", "d")
    )
    leases = prefill.step({}).unasked
    assert len(leases) == 4
    assert prefill.begin(first) and prefill.begin(second)
    assert not prefill.begin(third)
    prefill.report({leases[2]})
    assert prefill.begin(third)  # It is fetched as it is computed.
    assert not prefill.begin(fourth)
    assert prefill.step({}, {"b"}).unasked == [leases[0], leases[1], leases[3]]
    assert prefill.begin(fourth)  # In the blocks of a preempted one, which waits now.
    assert not prefill.begin(second)
    # What has been computed holds its blocks until it has gone.
    prefill.step({"a": SIX_BLOCKS})
    first.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert prefill.scheduler.request_finished(first) == (True, None)
    assert not prefill.begin(second)
    prefill.report(finished_sending={"a"})
    assert prefill.begin(second)


def test_who_takes_room_twice_has_what_it_took_last():
    held = Held()
    held.take("a", 6)
    held.take("a", 4)
    assert held.sum == 4
    held.give_back("a")
    held.give_back("a")
    assert held.sum == 0 and not held


def test_what_is_asked_for_while_it_is_computed_gives_its_room_back():
    prefill = Prefill(room=room_for_twelve_blocks())
    first, second, third = (
        prefill.arrive(SIX_BLOCKS, ANNOUNCED | {"transfer_id": 16 * name}, name) for name in "abc"
    )
    leases = prefill.step({}).unasked
    assert prefill.begin(first) and prefill.begin(second) and not prefill.begin(third)
    prefill.report({leases[0]})
    prefill.step({"a": BLOCK})
    assert prefill.begin(third)


def test_a_cache_in_which_long_prompts_wait_for_each_other_is_warned_of(caplog):
    Room(num_blocks=20, longest=10)
    assert caplog.messages == []
    Room(num_blocks=19, longest=10)
    (message,) = caplog.messages
    assert "has 19 blocks" in message and "takes 10" in message


def test_prompts_for_tickets_wait_for_nobody():
    """Where the engine loads none."""
    prefill = Prefill(room=Room(num_blocks=10, longest=10))
    for name in ("a", "b"):
        assert prefill.begin(prefill.arrive(SIX_BLOCKS, name=name))
    assert not prefill.begin(prefill.arrive(SIX_BLOCKS, ANNOUNCED))
    assert prefill.begin(prefill.arrive(SIX_BLOCKS, {}, name="plain"))


@pytest.mark.parametrize("published", [False, True])
def test_the_room_of_a_request_that_is_aborted_is_given_back(published: bool):
    room = room_for_twelve_blocks()
    prefill = Prefill(room=room)
    it = prefill.arrive(SIX_BLOCKS, ANNOUNCED)
    assert prefill.begin(it)
    prefill.step({"r": SIX_BLOCKS if published else BLOCK})
    it.status = RequestStatus.FINISHED_ABORTED
    assert prefill.scheduler.request_finished(it) == (published, None)
    assert room.empty != published
    if published:
        prefill.report(finished_sending={"r"})
    assert room.empty
    assert prefill.step({}).unasked == []


def test_a_prompt_that_nobody_asks_for_is_computed_in_the_end():
    prefill = Prefill(room=Room(num_blocks=10, longest=10))
    first, second = (
        prefill.arrive(SIX_BLOCKS, ANNOUNCED | {"transfer_id": 16 * name}, name) for name in "ab"
    )
    assert not prefill.begin(first)
    prefill.scheduler._watched["a"].arrived -= FETCH_TIMEOUT_MS / 1e3 + 1
    prefill.scheduler._watched["b"].arrived -= FETCH_TIMEOUT_MS / 1e3 + 1
    assert prefill.begin(first)
    assert not prefill.begin(second)  # One at a time.


def test_what_is_not_computed_yet_leaves_room_for_what_is():
    room = room_for_twelve_blocks()
    decode = Decode(room=room)
    blocks = list(range(6))
    loads = [request(name, SIX_BLOCKS, FROM | {"transfer_id": 16 * name}) for name in "abc"]
    for it in loads[:2]:
        assert len(decode.allocate(it, 0, blocks).loads) == 1
    assert decode.scheduler.get_num_new_matched_tokens(loads[2], 0) == (None, False)
    by_ticket = request("t", SIX_BLOCKS, remote())
    assert len(decode.allocate(by_ticket, 0, blocks).loads) == 1
    decode.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"a"}))
    assert len(decode.allocate(loads[2], 0, blocks).loads) == 1


def test_a_prompt_beyond_the_room_waits_until_nothing_else_does():
    decode = Decode(room=Room(num_blocks=10, longest=10))
    loads = [request(name, SIX_BLOCKS, FROM | {"transfer_id": 16 * name}) for name in "ab"]
    assert len(decode.allocate(loads[0], 0, list(range(6))).loads) == 1
    assert decode.scheduler.get_num_new_matched_tokens(loads[1], 0) == (None, False)
    decode.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"a"}))
    assert decode.scheduler.get_num_new_matched_tokens(loads[1], 0) == (SIX_BLOCKS, True)


def test_no_load_goes_before_one_that_waits_for_room():
    decode = Decode(room=room_for_twelve_blocks())
    ask = decode.scheduler.get_num_new_matched_tokens
    a, b, long, short = (
        request(name, blocks * BLOCK, FROM | {"transfer_id": 16 * name})
        for name, blocks in (("a", 6), ("b", 6), ("c", 11), ("d", 1))
    )
    for it in (a, b):
        assert len(decode.allocate(it, 0, list(range(6))).loads) == 1
    for finished in ("a", "b"):
        assert ask(long, 0) == (None, False)
        assert ask(short, 0) == (None, False)
        assert ask(request("t", SIX_BLOCKS, remote()), 0) == (SIX_BLOCKS, True)
        decode.step()
        decode.scheduler.update_connector_output(KVConnectorOutput(finished_recving={finished}))
    assert ask(long, 0) == (11 * BLOCK, True)
    assert ask(short, 0) == (BLOCK, True)


def test_a_load_that_the_engine_does_not_ask_for_any_more_is_in_nobodys_way():
    decode = Decode(room=room_for_twelve_blocks())
    ask = decode.scheduler.get_num_new_matched_tokens
    first, long, short = (
        request(name, blocks * BLOCK, FROM | {"transfer_id": 16 * name})
        for name, blocks in (("a", 6), ("b", 12), ("c", 1))
    )
    assert len(decode.allocate(first, 0, list(range(6))).loads) == 1
    assert ask(long, 0) == (None, False)
    assert ask(short, 0) == (None, False)
    decode.step()  # It was aborted, or waits for its adapter.
    assert ask(short, 0) == (BLOCK, True)


def test_prompts_that_nobody_has_asked_for_are_computed_in_the_order_in_which_they_came():
    prefill = Prefill(room=room_for_twelve_blocks())
    a, b, long, short, beyond = (
        prefill.arrive(blocks * BLOCK, ANNOUNCED | {"transfer_id": 16 * name}, name)
        for name, blocks in (("a", 6), ("b", 6), ("c", 12), ("d", 1), ("e", 13))
    )
    assert prefill.begin(a) and prefill.begin(b)
    prefill.report(finished_sending={"a"})
    leases = prefill.step({}).unasked
    assert not prefill.begin(long) and not prefill.begin(short)
    assert prefill.begin(prefill.arrive(SIX_BLOCKS, name="t"))
    prefill.report({leases[2]})  # The fourth: asked for, and computed whoever waits.
    assert prefill.begin(short)
    prefill.report(finished_sending={"b"})
    prefill.step({})
    # One that is longer than the room waits for being asked for, and the others not for it.
    assert not prefill.begin(beyond) and prefill.begin(long)
    # But for one whose time has come.
    last = prefill.arrive(BLOCK, ANNOUNCED | {"transfer_id": 16 * "f"}, "f")
    prefill.step({})
    prefill.scheduler._watched["e"].arrived -= FETCH_TIMEOUT_MS / 1e3 + 1
    assert not prefill.begin(beyond) and not prefill.begin(last)
    prefill.report(finished_sending={"c"})
    prefill.step({})
    assert prefill.begin(beyond) and not prefill.begin(last)


class BothWays:
    """An engine that prefills and decodes for others. It computes a prompt in a step, and is done
    in the next one with a load that has arrived. Of windows it keeps as few blocks as may be."""

    def __init__(self, num_blocks: int, longest: int, windows=(WHOLE,)):
        self._windows = windows
        room = Room(num_blocks, longest, both_ways=True)
        self.prefill = Prefill(room=room, windows=windows)
        self.decode = Decode(room=room, windows=windows)
        self.waiting: list = []  # In the order in which they came.
        self.free = num_blocks
        self.held: dict[str, int] = {}  # Blocks of requests.
        self.loading: dict[str, list[int]] = {}  # Leases of loads, by group.
        self.leases: dict[int, str] = {}  # And who has published them.

    def arrive(self, it) -> None:
        self.prefill.scheduler.on_new_request(it)
        self.waiting.append(it)

    def load(self, blocks: int, name: str) -> bool:
        """Whether it is let in."""
        it = request(name, blocks * BLOCK, FROM | {"transfer_id": 16 * name})
        if self.decode.scheduler.get_num_new_matched_tokens(it, 0) == (None, False):
            return False
        ids = Blocks(list(range(blocks)))
        self.decode.scheduler.update_state_after_alloc(it, ids, blocks * BLOCK)
        return True

    def arrived(self, name: str) -> None:
        output = KVConnectorOutput(finished_recving={name})
        self.decode.scheduler.update_connector_output(output)

    def begin(self) -> tuple[dict, list]:
        """As vLLM's scheduler does: (those that are computed, the loads)."""
        computed, loads = {}, []
        for it in list(self.waiting):
            if not self.prefill.scheduler.may_begin(it):
                continue
            missing, _ = self.decode.scheduler.get_num_new_matched_tokens(it, 0)
            if missing is None:
                continue
            blocks = self._blocks(it, most_blocks_loading if missing else most_blocks_computing)
            if blocks > self.free:
                break
            self.waiting.remove(it)
            self.held[it.request_id] = blocks
            self.free -= blocks
            self.prefill.scheduler.update_state_after_alloc(it)
            ids = Blocks(*[list(range(1, 1 + it.num_prompt_tokens // BLOCK))] * len(self._windows))
            self.decode.scheduler.update_state_after_alloc(it, ids, missing)
            loads.append(it) if missing else computed.update({it.request_id: it})
        return computed, loads

    def _blocks(self, it, most_blocks: Callable[..., int]) -> int:
        return most_blocks(self._windows, it.num_prompt_tokens, BLOCK)

    def step(self, peer: "BothWays") -> None:
        computed, _ = self.begin()
        meta = self.prefill.step({name: it.num_prompt_tokens for name, it in computed.items()})
        self.decode.scheduler.fill(meta)
        for load in meta.loads:
            tickets = [kvferry.Ticket.parse(part.tickets[0]) for part in load.parts]
            self.loading[load.request_id] = [ticket.lease_id for ticket in tickets]
        for new in meta.publications:
            self.leases[new.lease_id] = new.request_id
        for name, it in computed.items():
            self.free += self.held[name]
            self.held[name] = self._blocks(it, most_blocks_loading)
            self.free -= self.held[name]
            it.status = RequestStatus.FINISHED_LENGTH_CAPPED
            if (params := self.prefill.scheduler.request_finished(it)[1]) is not None:
                peer.arrive(request(name, it.num_prompt_tokens, params))
        self.prefill.report(set(meta.unasked).intersection(chain(*peer.loading.values())))
        for name, leases in list(self.loading.items()):
            if leases[0] in peer.leases:  # The others are published in the same step.
                peer.sent(peer.leases[leases[0]])
                del self.loading[name]
                self.arrived(name)
                self.free += self.held.pop(name)

    def sent(self, name: str) -> None:
        self.prefill.report(finished_sending={name})
        self.free += self.held.pop(name)


@pytest.mark.parametrize("windows", [(WHOLE,), (WHOLE, window(2 * BLOCK, most_blocks=5))])
@pytest.mark.parametrize("ways", [["at once"], ["tickets"], ["at once", "tickets"]])
def test_engines_that_decode_for_each_other_do_not_wait_for_each_other(ways: list[str], windows):
    """Whatever comes in whatever order, to caches of twice the longest prompt or more."""
    for seed in range(200):
        rng = random.Random(seed)
        longest = rng.randrange(1, 9)
        blocks = most_blocks_computing(windows, longest * BLOCK, BLOCK)
        both = [BothWays(rng.randrange(2 * blocks, 5 * blocks), blocks, windows) for _ in range(2)]
        arrivals: list[list] = [[], []]
        for n in range(24):
            tokens = rng.choice([longest, rng.randint(1, longest)]) * BLOCK
            there, transfer = rng.randrange(2), {"transfer_id": f"{n:016}"}
            if rng.choice(ways) == "at once":
                arrivals[there].append(request(f"p{n}", tokens, ANNOUNCED | transfer))
                arrivals[1 - there].append(request(f"d{n}", tokens, FROM | transfer))
            else:
                arrivals[there].append(request(f"p{n}", tokens, {"do_remote_decode": True}))
        for some in arrivals:
            rng.shuffle(some)
        for _ in range(400):
            here = rng.randrange(2)
            for it in arrivals[here][: rng.randrange(4)]:
                arrivals[here].remove(it)
                both[here].arrive(it)
            both[here].step(both[1 - here])
        for engine in both:
            assert (engine.waiting, engine.held, engine.prefill.step({}).unasked) == ([], {}, [])
            assert engine.prefill.scheduler._room.empty, seed


def test_what_nobody_has_asked_for_leaves_room_for_a_load():
    engine = BothWays(num_blocks=30, longest=10)
    prompts = [
        engine.prefill.arrive(SIX_BLOCKS, ANNOUNCED | {"transfer_id": 16 * name}, name)
        for name in "abc"
    ]
    assert engine.prefill.begin(prompts[0]) and not engine.prefill.begin(prompts[1])
    assert engine.load(10, "d") and not engine.load(10, "e")
    engine.decode.step()
    # One that was asked for waits for no room.
    engine.prefill.report({engine.prefill.step({}).unasked[1]})
    assert engine.prefill.begin(prompts[1]) and not engine.prefill.begin(prompts[2])


def test_a_load_alone_is_let_in_whatever_nobody_has_asked_for():
    engine = BothWays(num_blocks=20, longest=10)
    overdue = engine.prefill.arrive(10 * BLOCK, ANNOUNCED, "a")
    assert not engine.prefill.begin(overdue)
    engine.prefill.scheduler._watched["a"].arrived -= FETCH_TIMEOUT_MS / 1e3 + 1
    assert engine.prefill.begin(overdue)
    assert engine.load(10, "b") and not engine.load(1, "c")


def test_a_prompt_that_nobody_asks_for_does_not_go_before_a_load():
    """In an engine that does both: nobody depends on its being computed."""
    engine = BothWays(num_blocks=32, longest=10)
    assert engine.load(12, "a") and engine.load(4, "b") and not engine.load(10, "c")
    prompt = engine.prefill.arrive(BLOCK, ANNOUNCED, "d")
    assert not engine.prefill.begin(prompt)
    engine.decode.step()
    assert engine.prefill.begin(prompt)


def test_a_prompt_whose_time_has_come_does_not_go_before_a_load_either():
    engine = BothWays(num_blocks=20, longest=10)
    prompt = engine.prefill.arrive(10 * BLOCK, ANNOUNCED, "p")
    engine.prefill.scheduler._watched["p"].arrived -= FETCH_TIMEOUT_MS / 1e3 + 1
    assert engine.load(10, "a") and not engine.load(10, "b")
    engine.decode.step()
    engine.arrived("a")
    assert not engine.prefill.begin(prompt)  # It came before the load, and is asked for first.
    assert engine.load(10, "b")
    engine.decode.step()
    engine.arrived("b")
    assert engine.prefill.begin(prompt)


def test_prompts_for_tickets_wait_for_room_where_the_engine_loads_too():
    engine = BothWays(num_blocks=22, longest=10)
    first, second, third, short = (
        engine.prefill.arrive(blocks * BLOCK, name=name)
        for name, blocks in (("a", 6), ("b", 6), ("c", 6), ("d", 1))
    )
    assert engine.prefill.begin(first) and engine.prefill.begin(second)
    # And all of them in turn, with loads.
    assert not engine.prefill.begin(third) and not engine.prefill.begin(short)
    assert not engine.load(1, "e")
    assert engine.prefill.begin(engine.prefill.arrive(10 * BLOCK, {}, name="plain"))
    engine.prefill.step({"a": SIX_BLOCKS})
    first.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert engine.prefill.scheduler.request_finished(first)[0]
    engine.decode.step()
    assert not engine.prefill.begin(third)  # Its blocks are held until somebody has fetched them.
    engine.decode.step()
    engine.prefill.report(finished_sending={"a"})
    assert engine.prefill.begin(third)
    engine.prefill.step({}, preempted={"b"})
    assert engine.load(6, "f")
    assert not engine.prefill.begin(second)
    engine.decode.step()
    third.status = RequestStatus.FINISHED_ABORTED
    assert engine.prefill.scheduler.request_finished(third) == (False, None)
    assert engine.prefill.begin(second)


def test_a_prompt_of_which_nothing_is_handed_over_waits_for_no_room():
    """As one for tickets does where the engine loads too."""
    windows = (window(2 * BLOCK), WHOLE)
    engine = BothWays(num_blocks=30, longest=10, windows=windows)
    it = engine.prefill.arrive(40)
    assert engine.prefill.begin(it)
    engine.prefill.blocks = Blocks([0, 0, 2], [4, 9, 2])  # A block of its window is gone.
    assert engine.prefill.step({"r": 40}).publications == []
    room = engine.prefill.scheduler._room
    assert room.empty
    room.loads.take("another", 20)
    assert engine.prefill.begin(it)  # Preempted, say.
    room.loads.give_back("another")
    assert room.empty


def test_a_request_that_gets_blocks_again_in_the_step_that_preempts_it_keeps_its_room():
    """As a reset of the prefix cache preempts: between steps."""
    for params in (ANNOUNCED, None):
        engine = BothWays(num_blocks=40, longest=10)
        it = engine.prefill.arrive(SIX_BLOCKS, params)
        assert engine.prefill.begin(it)
        engine.prefill.step({"r": BLOCK})
        assert engine.prefill.begin(it)
        engine.prefill.step({"r": BLOCK}, preempted={"r"})
        assert not engine.prefill.scheduler._room.empty
        engine.prefill.step({}, preempted={"r"})
        assert engine.prefill.scheduler._room.empty


@pytest.mark.parametrize("params", [ANNOUNCED, None], ids=["unasked", "tickets"])
def test_a_prompt_that_is_asked_about_again_is_not_kept_out_by_itself(params: dict | None):
    """What another connector was to load for it has failed, and its blocks are free."""
    engine = BothWays(num_blocks=28, longest=10)
    it = engine.prefill.arrive(7 * BLOCK, params)
    assert engine.prefill.begin(it)
    engine.prefill.step({})
    engine.decode.step()
    assert engine.prefill.begin(it)
    room = engine.prefill.scheduler._room
    assert room.loads.sum + room.unasked.sum == 7
    engine.prefill.step({})
    engine.decode.step()
    assert engine.prefill.scheduler.may_begin(it)
    assert room.empty  # It has got none this time.
    assert engine.load(18, "another")


@pytest.mark.parametrize("params", [ANNOUNCED, None], ids=["unasked", "tickets"])
def test_a_preempted_request_that_another_connector_loads_again_keeps_its_room(
    params: dict | None,
):
    """In the step that says so, as after a reset of the prefix cache: it computes nothing there."""
    engine = BothWays(num_blocks=40, longest=10)
    it = engine.prefill.arrive(SIX_BLOCKS, params)
    assert engine.prefill.begin(it)
    engine.prefill.step({"r": BLOCK})
    assert engine.prefill.begin(it)
    it.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.prefill.step({}, preempted={"r"})
    assert not engine.prefill.scheduler._room.empty
    it.status = RequestStatus.PREEMPTED
    engine.prefill.step({}, preempted={"r"})
    assert engine.prefill.scheduler._room.empty


def test_two_requests_with_one_transfer_id_take_the_room_of_two():
    prefill = Prefill(room=room_for_twelve_blocks())
    first, second, third = (prefill.arrive(SIX_BLOCKS, ANNOUNCED, name) for name in "abc")
    assert prefill.begin(first) and prefill.begin(second) and not prefill.begin(third)


TWO_PARTS = 2048


def test_no_more_fetches_wait_at_a_prefill_engine_than_it_lets():
    decode = Decode(room=Room(10_000, 10), max_fetches=3)
    ask = decode.scheduler.get_num_new_matched_tokens
    blocks = list(range(1000, 1256))
    first, second, short, long = (
        request(name, tokens, FROM | {"transfer_id": 16 * name})
        for name, tokens in (("a", TWO_PARTS), ("b", TWO_PARTS), ("c", 1024), ("d", 2 * TWO_PARTS))
    )
    assert len(decode.allocate(first, 0, blocks).loads[0].parts) == 2
    assert ask(second, 0) == (None, False)
    assert ask(short, 0) == (None, False)  # It came later.
    # Of another engine, and by tickets of nobody's.
    there = FROM | {"transfer_id": 16 * "e", "remote_port": 6000}
    assert len(decode.allocate(request("e", TWO_PARTS, there), 0, blocks).loads) == 1
    assert ask(request("t", TWO_PARTS, remote()), 0) == (TWO_PARTS, True)
    # What the engine has of it already is not waited for.
    decode.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"a"}))
    assert len(decode.allocate(second, 1024, blocks).loads[0].parts) == 1
    assert len(decode.allocate(short, 0, blocks).loads) == 1
    # One that is cut into more waits until it is alone.
    assert ask(long, 0) == (None, False)
    decode.step()
    decode.scheduler.request_finished(short)
    decode.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"b"}))
    assert ask(long, 0) == (None, False)  # What is cancelled has not ended.
    decode.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"c"}))
    assert len(decode.allocate(long, 0, blocks).loads[0].parts) == 4
    decode.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"d", "e"}))
    assert decode.scheduler._peers == {}


def test_fetches_that_the_engine_does_not_ask_for_any_more_are_in_nobodys_way():
    decode = Decode(room=Room(10_000, 10), max_fetches=3)
    ask = decode.scheduler.get_num_new_matched_tokens
    first, long, short = (
        request(name, tokens, FROM | {"transfer_id": 16 * name})
        for name, tokens in (("a", TWO_PARTS), ("b", TWO_PARTS), ("c", 1024))
    )
    assert len(decode.allocate(first, 0, list(range(1000, 1128))).loads) == 1
    assert ask(long, 0) == ask(short, 0) == (None, False)
    decode.scheduler.request_finished(long)
    decode.step()
    assert ask(short, 0) == (1024, True)


def from_there(lease_id: int) -> str:
    """A ticket of the engine that FROM names."""
    ticket = kvferry.Ticket(
        address="tcp://[::1]:5000", epoch=7, lease_id=lease_id, num_pages=1, num_tokens=BLOCK
    )
    return str(ticket)


def test_loads_by_tickets_are_among_the_fetches_that_a_prefill_engine_lets_wait():
    decode = Decode(max_fetches=2)
    ask = decode.scheduler.get_num_new_matched_tokens
    at_once = request("a", TWO_PARTS, FROM | {"tp_size": 2})  # Each of whose ranks gets as many.
    by_ticket = request("b", BLOCK, remote(kvferry_tickets=[from_there(1)]))
    assert len(decode.allocate(at_once, 0, list(range(1000, 1128))).loads[0].parts) == 2
    assert ask(by_ticket, 0) == (None, False)
    decode.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"a"}))
    decode.allocate(by_ticket, 0, [5])
    assert ask(request("c", TWO_PARTS, FROM | {"transfer_id": 16 * "c"}), 0) == (None, False)
    decode.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"b"}))
    decode.step()
    # A ticket of each group of layers.
    decode = Decode(windows=(WHOLE, WHOLE), max_fetches=3)
    first, second = (
        request(name, 40, remote(kvferry_group_tickets=[[from_there(n)], [from_there(n + 1)]]))
        for n, name in ((2, "d"), (4, "e"))
    )
    for it in (first, second):
        del it.kv_transfer_params["kvferry_tickets"]
    decode.allocate(first, 0, [5, 6, 8], [1, 2, 3])
    assert decode.scheduler.get_num_new_matched_tokens(second, 0) == (None, False)


def test_fetches_from_nowhere_are_not_counted():
    decode = Decode(max_fetches=1)
    for name in "de":
        decode.allocate(request(name, 32, remote(kvferry_tickets=[name])), 0, [5, 6])
    for name, host in (("a", None), ("b", ["a"]), ("c", "a;tcp://b")):
        wrong = FROM | {"transfer_id": 16 * name, "remote_host": host}
        (load,) = decode.allocate(request(name, 1024, wrong), 0, list(range(64))).loads
        assert "remote_host" in load.error
