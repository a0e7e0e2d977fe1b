"""Users and faults at random: every request ends, and what it says is what one engine says alone.

KVFERRY_RANDOM_SECONDS says how long (default 10), KVFERRY_RANDOM_SEED repeats the choices, if not
their timing.
"""

import os
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from demo import QUESTIONS
from engines import BLOCK_TOKENS, Engines
from pair import REMOTE_DECODE, Answer, Engine, Request

SECONDS = float(os.environ.get("KVFERRY_RANDOM_SECONDS", "10"))
SEED = int(os.environ.get("KVFERRY_RANDOM_SEED", str(time.time_ns() % 10**9)))
USERS = 8
TOKENS = 16
# Some of a block, some of several, and some of two parts.
LENGTHS = [1, 32, 33, 96, 200, 450, 1030, 1200]
PAUSE_S = 1.0  # No deadline is shorter.


class Question(NamedTuple):
    prompt: list[int]
    tokens: list[int]  # One engine's answer.


class Asked(NamedTuple):
    what: str
    request: Request
    question: Question
    aborted: bool  # Or it will be.


class Users:
    """Threads that ask until the time is over, and what was wrong."""

    def __init__(self, engines: Engines, questions: list[Question], ends: float):
        self._engines = engines
        self._questions = questions
        self.ends = ends
        self.faults: list[str] = []
        self.done: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(USERS)]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _ask(self, user: int) -> None:
        choice = random.Random(SEED * 100 + user)
        ways = [self._by_tickets, self._by_tickets, self._at_once, self._at_once]
        ways += [self._short_lease, self._never_fetched, self._twice, *[self._alone] * 4]
        while time.monotonic() < self.ends and not self.faults:
            question = choice.choice(self._questions)
            way = choice.choice(ways)
            try:
                way(choice, question)
            except Exception:
                self.faults.append(f"{way.__name__}: {traceback.format_exc()}")

    def _check(self, asked: Asked, may: str = "") -> Answer:
        """Waits for the answer. may: what else it may end with than length and stop."""
        answer, question = asked.request.answer(), asked.question
        self.done[f"{asked.what}: {answer.finish_reason}"] += 1
        may = f"length stop {may} {'abort' if asked.aborted else ''}"
        if (
            answer.finish_reason not in may.split()
            or answer.tokens[: len(question.tokens)] != question.tokens[: len(answer.tokens)]
        ):
            self.faults.append(
                f"{asked.what}, prompt of {len(question.prompt)}: {answer}, but expected "
                f"{question.tokens} and one of {may}"
            )
        return answer

    def _start(
        self,
        choice: random.Random,
        what: str,
        engine: Engine,
        question: Question,
        tokens: int = TOKENS,
        params: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> Asked:
        """Some are aborted, sooner or later."""
        request = engine.start(question.prompt, tokens, params, **sampling)
        aborted = choice.random() < 0.25
        if aborted:
            timer = threading.Timer(choice.choice([0.0, 0.1, 0.5]) * choice.random(), request.abort)
            timer.start()
        return Asked(f"{engine.name} {what}", request, question, aborted)

    def _handed_over(
        self, choice: random.Random, engine: Engine, question: Question
    ) -> dict[str, Any] | None:
        """Tickets, if it was not aborted. Some are of a request that decodes as well."""
        tokens = choice.choice([1, 1, 1, TOKENS])
        asked = self._start(choice, "hands over", engine, question, tokens, dict(REMOTE_DECODE))
        return self._check(asked).params

    def _by_tickets(self, choice: random.Random, question: Question) -> None:
        if params := self._handed_over(choice, self._engines.prefill, question):
            engine = choice.choice([self._engines.decode, self._engines.spare])
            tokens = choice.randint(1, TOKENS)
            self._check(self._start(choice, "by tickets", engine, question, tokens, params))

    def _at_once(self, choice: random.Random, question: Question) -> None:
        announced, awaited = self._engines.params_at_once()
        engine = choice.choice([self._engines.decode, self._engines.spare])
        sides = [("announces", self._engines.prefill, announced), ("at once", engine, awaited)]
        if choice.random() < 0.5:
            sides.reverse()
        asked = {}
        for what, side, params in sides:
            tokens = 1 if params is announced else choice.randint(1, TOKENS)
            asked[what] = self._start(choice, what, side, question, tokens, params)
            time.sleep(choice.choice([0.0, 0.3]) * choice.random())
        gone = self._check(asked["announces"]).finish_reason == "abort"
        # The spare engine computes the prompt itself then.
        self._check(asked["at once"], "error" if gone and engine is self._engines.decode else "")

    def _short_lease(self, choice: random.Random, question: Question) -> None:
        if params := self._handed_over(choice, self._engines.spare, question):
            asked = self._start(
                choice, "of a short lease", self._engines.decode, question, params=params
            )
            self._check(asked, "error")

    def _never_fetched(self, choice: random.Random, question: Question) -> None:
        if choice.random() < 0.5:
            self._handed_over(choice, self._engines.spare, question)
        elif params := self._handed_over(choice, self._engines.prefill, question):
            self._engines.decode.reject(params)

    def _twice(self, choice: random.Random, question: Question) -> None:
        if params := self._handed_over(choice, self._engines.prefill, question):
            decode = self._engines.decode
            requests = [decode.start(question.prompt, TOKENS, dict(params)) for _ in range(2)]
            for request in requests:
                self._check(Asked("decode twice", request, question, False))

    def _alone(self, choice: random.Random, question: Question) -> None:
        """Some grow, so that others are preempted."""
        engine = choice.choice([self._engines.prefill, self._engines.prefill, self._engines.spare])
        tokens = TOKENS
        if len(question.prompt) <= 2 * BLOCK_TOKENS:
            tokens = choice.choice([TOKENS, 4 * BLOCK_TOKENS])
        self._check(self._start(choice, "alone", engine, question, tokens, ignore_eos=True))


@pytest.fixture
def questions(engines: Engines, reference: Callable[..., Answer]) -> list[Question]:
    choice = random.Random(SEED)
    stories = [engines.prefill.tokenize(text * 2) for _, text in QUESTIONS[1:4]]
    prompts = []
    for n, length in enumerate(LENGTHS):
        story = choice.choice(stories)
        # Half of them have beginnings in common.
        prompts.append((story if n % 2 else [n, *story])[:length])
    return [Question(prompt, reference(prompt, TOKENS).tokens) for prompt in prompts]


def _pauses(engines: Engines, users: Users) -> Iterator[str]:
    choice = random.Random(SEED - 1)
    while time.monotonic() < users.ends and not users.faults:
        time.sleep(choice.uniform(0, 2 * PAUSE_S))
        engine = choice.choice([engines.prefill, engines.decode, engines.spare])
        with engine.paused():
            time.sleep(choice.uniform(0, PAUSE_S))
        yield engine.name


@pytest.mark.timeout(SECONDS + 300)
def test_answers_are_those_of_one_engine(engines: Engines, questions: list[Question]):
    print(f"KVFERRY_RANDOM_SEED={SEED}")
    users = Users(engines, questions, time.monotonic() + SECONDS)
    users.run()
    pauses = Counter(_pauses(engines, users))
    users.join()
    print(f"{dict(sorted(users.done.items()))}, pauses {dict(pauses)}")
    assert users.faults == []
    for engine in (engines.prefill, engines.decode, engines.spare):
        engine.wait_idle()
