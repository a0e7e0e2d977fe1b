"""Requests at random between vLLM engines that have no model, see vllm_simulation.

Without more each mode plays a few worlds, the same ones every time, if not their timing.
KVFERRY_RANDOM_SEED chooses others, and with KVFERRY_RANDOM_SECONDS each mode goes on for so long.
"""

import functools
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
from kvferry.vllm import parts  # noqa: E402
from random_models import SECONDS, SEED  # noqa: E402
from servers import free_ports  # noqa: E402
from vllm_simulation import BLOCK, VOCABULARY, Engine, Options, answer  # noqa: E402
from waiting import wait_for  # noqa: E402

WORLDS = 4
REQUESTS = 120
USERS = 16
DEADLINE_S = 30.0  # Until somebody is served.
LENGTHS = [1, 15, 16, 17, 40, 64, 100, 200, 300, 400, 400]
PREFIX = 300


class Mode(NamedTuple):
    ways: tuple[str, ...]  # Of requests, do_... of World.
    roles: tuple[str, str] = ("kv_producer", "kv_consumer")
    groups: tuple[int | str | None, ...] = (None,)
    ranks: tuple[int, int] = (1, 1)
    pulls: bool = True
    stores: bool = False
    expires: bool = False  # Some leases do.
    # Of a cache. Two of the longest prompts fit into most, and but one into the smallest.
    blocks: tuple[int, ...] = (66, 80)


TICKETS = ("by_tickets", "by_tickets", "alone", "twice")
BOTH = (*TICKETS, "at_once", "at_once")
SMALL = (36, 50)
MODES = {
    "tickets": Mode(TICKETS, blocks=SMALL),
    "at_once": Mode(("at_once", "at_once", "alone")),
    "both_ways": Mode(BOTH, roles=("kv_both", "kv_both")),
    "expired": Mode((*TICKETS, "late", "never"), expires=True, blocks=SMALL),
    "windows": Mode(BOTH, groups=(None, 40)),
    "states": Mode(BOTH, groups=(None, "align")),
    "states_alone": Mode(BOTH, groups=("none", None)),
    "two_to_one": Mode(BOTH, ranks=(2, 1)),
    "store": Mode(("alone",), pulls=False, stores=True, blocks=SMALL),
    "multi": Mode((*TICKETS, "lost", "lost"), stores=True, blocks=(36,)),
    "multi_both_ways": Mode(BOTH, roles=("kv_both", "kv_both"), stores=True),
}


class Faulty:
    """Something of ours, some calls of which raise an error, and others take a while."""

    def __init__(
        self,
        it: Any,
        rng: random.Random,
        calls: tuple[str, ...],
        error: Exception,
        while_s: float = 0.0,
    ):
        self._it, self._rng, self._calls = it, rng, calls
        self._error, self._while_s = error, while_s

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._it, name)
        return functools.partial(self._call, found) if name in self._calls else found

    def _call(self, call: Callable, *args: Any, **options: Any) -> Any:
        if self._rng.random() < 0.1:
            raise self._error
        time.sleep(self._rng.random() * self._while_s)
        return call(*args, **options)


class Asked(NamedTuple):
    """A request to an engine."""

    engine: Engine
    name: str
    expected: list[int]
    may: set[str]  # How it may end.

    def over(self) -> bool:
        return self.name in self.engine.ended

    def check(self) -> None:
        said, why = self.engine.said[self.name], self.engine.ended[self.name]
        assert why in self.may, f"{self.name} has ended with {why}"
        assert said == self.expected[: len(said)], f"{self.name} has said something else"
        assert why != "length" or len(said) == len(self.expected), (
            f"{self.name} has said too little"
        )


class World:
    """Two engines, and users who are each a generator that ends when the user is served."""

    def __init__(self, mode: Mode, folder: Path, rng: random.Random):
        self.mode, self.rng = mode, rng
        self.has_faults, self.resets = rng.random() < 0.6, rng.random() < 0.5
        self.recomputes = mode.stores or rng.random() < 0.3
        self.may_fail = mode.expires or self.has_faults or self.resets
        self.asynchronous, self.priority = rng.random() < 0.5, rng.random() < 0.3
        self.prefixes = [self._tokens(PREFIX) for _ in range(3)]
        self.has_states = "none" in mode.groups or "align" in mode.groups
        self.numbers = itertools.count()
        self.outcomes: Counter[str] = Counter()
        self.ports = free_ports(4)
        self.engines: list[Engine] = []
        try:
            for number in range(2):
                self.engines.append(self._engine(number, folder))
        except BaseException:
            self.close()
            raise
        self.prefill, self.decode = self.engines

    def close(self) -> None:
        for engine in reversed(self.engines):
            engine.close()

    # ---- Engines

    def _engine(self, number: int, folder: Path) -> Engine:
        connectors = []
        if self.mode.pulls:
            connectors.append((self.mode.roles[number], self._pull_options(number)))
        if self.mode.stores:
            connectors.append(("kv_both", self._store_options(number)))
        options = Options(
            connectors,
            groups=self.mode.groups,
            blocks=self.rng.choice(self.mode.blocks),
            ranks=self.mode.ranks[number],
            heads=max(self.mode.ranks),
            asynchronous=self.asynchronous,
            priority=self.priority,
            recomputes=self.recomputes,
        )
        engine = Engine("PD"[number], options, folder, self.rng)
        if self.has_faults:
            self._add_faults(engine)
        return engine

    def _pull_options(self, number: int) -> dict[str, Any]:
        return {
            "listen_port": self.ports + 2 * number,
            # A load that could not begin leaves leases that only end when they expire, and may be
            # waited for by who computes the prompt.
            "lease_ms": 200 if self.mode.expires or self.has_faults else 30_000,
            "fetch_timeout_ms": 1000 if self.has_faults else 10_000,
            "publish_grace_ms": 0,
        }

    def _store_options(self, number: int) -> dict[str, Any]:
        """The first engine's store has less room than is saved in it; the second one uses it."""
        store = {"backend": "host", "capacity_bytes": 150 * BLOCK * 16}
        if number == 1:
            store = {"backend": "remote", "address": self._store_address()}
        return {"mode": "store", "store": store}

    def _store_address(self) -> str:
        halves = [it._store_worker for it in self.engines[0].connectors()]
        return next(it for it in halves if it is not None).address().address

    def _add_faults(self, engine: Engine) -> None:
        for it in engine.connectors():
            for half, calls, error in (
                (it._prefill_worker, ("publish",), MemoryError("no memory")),
                (it._decode_worker, ("fetch",), kvferry.Unavailable("no way")),
            ):
                if half is not None:
                    half._endpoint = Faulty(half._endpoint, self.rng, calls, error)
            if it._store_worker is not None:
                opened = it._store_worker._opened
                calls, error = ("get_pages", "put_pages"), RuntimeError("no disk")
                opened.store = Faulty(opened.store, self.rng, calls, error, while_s=0.01)

    # ---- Users

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def _prompt(self) -> list[int]:
        """Most begin as others do."""
        length = self.rng.choice(LENGTHS)
        begin = self.rng.choice(self.prefixes)[: self.rng.randrange(length + 1)]
        return begin + self._tokens(length - len(begin))

    def _ask(
        self, engine: Engine, prompt: list[int], params: dict | None = None, may_fail: bool = False
    ) -> Asked:
        is_computed_for_other = bool(params and params.get("do_remote_decode"))
        count = self.rng.choice([1, 1, 1, 1, 5] if is_computed_for_other else [2, 5, 20, 60])
        aborts = self.rng.random() < 0.2
        name = f"{engine.name}{next(self.numbers)}"
        may = {"length"} | ({"abort"} if aborts else set())
        # What cannot be had, from an engine that has it no more, fails where it is not computed.
        if not self.recomputes and (may_fail or self.may_fail):
            may.add("error")
        expected = answer(prompt, count)
        if is_computed_for_other and self.has_states and len(prompt) > 1:
            expected = answer(prompt[:-1], 1)  # It stops before the last token of the prompt.
        engine.add(name, prompt, count, params, priority=self.rng.randrange(3))
        return Asked(engine, name, expected, may)

    def _served(self, *asked: Asked) -> Iterator[None]:
        while not all(it.over() for it in asked):
            for it in asked:
                if "abort" in it.may and not it.over() and self.rng.random() < 0.1:
                    it.engine.abort(it.name)
            yield
        for it in asked:
            it.check()
            self.outcomes[it.engine.ended[it.name]] += 1

    def _pair(self) -> list[Engine]:
        """Who computes a prompt, and who loads it."""
        pair = [self.prefill, self.decode]
        return self.rng.sample(pair, 2) if self.mode.roles[0] == "kv_both" else pair

    def do_alone(self, prompt: list[int]) -> Iterator[None]:
        yield from self._served(self._ask(self.rng.choice(self.engines), prompt))

    def do_by_tickets(self, prompt: list[int]) -> Iterator[None]:
        prefill, decode = self._pair()
        if params := (yield from self._handed_over(prefill, prompt)):
            yield from self._served(self._ask(decode, prompt, params))

    def do_twice(self, prompt: list[int]) -> Iterator[None]:
        """As of one prompt with several answers. Tickets serve once: if their load has failed, so
        has that of whoever waits for it."""
        prefill, decode = self._pair()
        if params := (yield from self._handed_over(prefill, prompt)):
            asked = [self._ask(decode, prompt, params, may_fail=True) for _ in range(2)]
            yield from self._served(*asked)

    def do_at_once(self, prompt: list[int]) -> Iterator[None]:
        prefill, decode = pair = self._pair()
        transfer = {"transfer_id": f"{self.rng.getrandbits(128):032x}"}
        source = {
            "do_remote_prefill": True,
            "remote_host": "127.0.0.1",
            "remote_port": self.ports + 2 * self.engines.index(prefill),
            "tp_size": prefill.options.ranks,
        }
        params = {prefill: transfer | {"do_remote_decode": True}, decode: transfer | source}
        self.rng.shuffle(pair)
        yield from self._served(*[self._ask(it, prompt, params[it], True) for it in pair])

    def do_lost(self, prompt: list[int]) -> Iterator[None]:
        """Its tickets are, on the way. A store may have the prompt."""
        yield from self._served(self._ask(self.prefill, prompt))
        params = {"do_remote_prefill": True, "kvferry_tickets": ["lost"]}
        yield from self._served(self._ask(self.decode, prompt, params, may_fail=True))

    def do_never(self, prompt: list[int]) -> Iterator[None]:
        yield from self._handed_over(self.prefill, prompt)

    def do_late(self, prompt: list[int]) -> Iterator[None]:
        params = yield from self._handed_over(self.prefill, prompt)
        while params and params["remote_request_id"] in self.prefill.scheduler.requests:
            yield
        if params:
            yield from self._served(self._ask(self.decode, prompt, params, may_fail=True))

    def _handed_over(self, prefill: Engine, prompt: list[int]) -> Generator[None, None, Any]:
        """Tickets, if it was not aborted, and there is something to hand over."""
        asked = self._ask(prefill, prompt, {"do_remote_decode": True})
        yield from self._served(asked)
        return prefill.params.get(asked.name)

    # ---- Time

    def play(self, requests: int) -> None:
        users: list[Iterator[None]] = []
        last = time.monotonic()
        while requests > 0 or users:
            while requests > 0 and len(users) < USERS and self.rng.random() < 0.7:
                way = getattr(self, f"do_{self.rng.choice(self.mode.ways)}")
                users.append(way(self._prompt()))
                requests -= 1
            left = [it for it in users if next(it, "served") is None]
            if len(left) < len(users):
                last = time.monotonic()
            users = left
            assert time.monotonic() - last < DEADLINE_S, "nobody is served any more"
            self._step()
        wait_for(self._is_idle, DEADLINE_S)

    def _step(self) -> None:
        """Of both engines, which are as fast as chance has it."""
        if self.resets and self.rng.random() < 0.01:
            self.rng.choice(self.engines).reset(running=self.rng.random() < 0.8)
        steps = [it for it in self.engines for _ in range(self.rng.randrange(4))]
        for engine in self.rng.sample(steps, len(steps)):
            if engine.busy():
                engine.step()

    def _is_idle(self) -> bool:
        self._step()
        return not any(it.busy() for it in self.engines)

    def check_nothing_is_left(self) -> None:
        for engine in self.engines:
            assert engine.left() == {}, f"{engine.name} keeps something of requests that have ended"

    def __str__(self) -> str:
        of_all = f"faults {self.has_faults}, resets {self.resets}, recomputes {self.recomputes}, "
        of_all += f"asynchronous {self.asynchronous}, priority {self.priority}, {self.outcomes}"
        return "\n".join([of_all, *map(str, self.engines)])


def play(mode: Mode, folder: Path, rng: random.Random) -> Counter[str]:
    world = World(mode, folder, rng)
    try:
        world.play(REQUESTS)
        world.check_nothing_is_left()
    except BaseException:
        print(world)
        raise
    finally:
        world.close()
    return sum((it.counts for it in world.engines), world.outcomes)


@pytest.mark.parametrize("name", MODES)
def test_requests_at_random(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every request ends, says what one engine says alone, and leaves nothing behind."""
    monkeypatch.setattr(parts, "_PART_TOKENS", 4 * BLOCK)  # Prompts of several parts are short.
    end = time.monotonic() + SECONDS
    counts: Counter[str] = Counter()
    for number in itertools.count():
        try:
            counts += play(MODES[name], tmp_path, random.Random(f"{SEED} {name} {number}"))
        except BaseException:
            print(f"KVFERRY_RANDOM_SEED={SEED}, {name}, world {number}")
            raise
        if number + 1 >= WORLDS and time.monotonic() >= end:
            break
    print(counts)  # Shown by -s, or when what follows does not hold.
    # So that there was something to see.
    assert counts["loaded"] > 10 and counts["preempted"] > 0 and counts["abort"] > 0
