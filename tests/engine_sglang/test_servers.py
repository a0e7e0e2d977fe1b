"""SGLang's prefill and decode servers, on the CPU if KVFERRY_TEST_SGLANG_ARGS says nothing else,
with kvferry between them: the tokens are those that the model makes alone."""

import contextlib
import os
import random
import time

import pytest
from server import Server
from servers import MODEL, free_port, new_room

RANDOM_SECONDS = float(os.environ.get("KVFERRY_RANDOM_SECONDS", "8"))


@pytest.mark.parametrize("words", [1, 16, 100])
def test_tokens_are_those_of_the_model_alone(servers, tokens, reference, words):
    """From less than a page to several chunks of prefill."""
    prompt = tokens(" ".join(f"number {n}," for n in range(words)) + " and then")
    assert servers.answer(prompt).tokens == reference(prompt)


def test_a_prefix_that_the_prefill_server_has(servers, tokens, reference):
    prompt = tokens("A long time ago " * 40)
    for _ in range(2):
        assert servers.answer(prompt).tokens == reference(prompt)
    longer = prompt + tokens("in a town by the sea")
    assert servers.answer(longer).tokens == reference(longer)


def test_several_at_the_same_time(servers, tokens, reference):
    prompts = [tokens(f"{n}. Tell me of {n} rivers. " * (n + 1)) for n in range(6)]
    requests = [servers.start(prompt, 8) for prompt in prompts]
    for prompt, (prefill, decode) in zip(prompts, requests, strict=True):
        assert prefill.answer().error == ""
        assert decode.answer().tokens == reference(prompt)


@pytest.mark.parametrize("on", ["prefill", "decode", "both"])
def test_requests_that_are_aborted(servers, tokens, reference, on):
    """A client that hangs up, at some moment: the others are answered, and nothing is left over,
    or SGLang's own check of its pages would end the server."""
    for delay_s in (0.0, 0.03, 0.1):
        prompt = tokens(f"Aborted after {delay_s} s on {on}. " * 20)
        other = tokens(f"Not aborted, but next to one that is, after {delay_s} s on {on}.")
        requests = servers.start(prompt, 64)
        others = servers.start(other, 8)
        time.sleep(delay_s)  # Any moment will do.
        for request, name in zip(requests, ("prefill", "decode"), strict=True):
            if on in (name, "both"):
                request.abort()
        for request in requests:
            request.answer()
        assert others[1].answer().tokens == reference(other)
        others[0].answer()
    prompt = tokens("And now one that nobody aborts.")
    assert servers.answer(prompt).tokens == reference(prompt)


@pytest.mark.parametrize("apart_s", [0.0, 0.02, 0.1])
def test_requests_of_one_room_end_and_no_server_does(servers, tokens, reference, apart_s):
    """As the samples of a request with n above 1. Most of them fail; none says something else."""
    prompt = tokens(f"Samples that are {apart_s} s apart. " * 20)
    requests, room = [], new_room()
    for _ in range(5):
        requests.append(servers.start(prompt, 8, room))
        time.sleep(apart_s)  # Any moment will do.
    for prefill, decode in requests:
        prefill.answer()
        answer = decode.answer()
        assert answer.error or answer.tokens == reference(prompt)
    prompt = tokens("And now one that has a room of its own.")
    assert servers.answer(prompt).tokens == reference(prompt)


class RandomRequest:
    """Given to both servers, and perhaps aborted on one or both at some moment."""

    def __init__(self, servers, prompt, expected, rng):
        self.expected = expected
        self._requests = servers.start(prompt, len(expected))
        self._aborts = [
            (time.monotonic() + rng.uniform(0, 0.4), request)
            for request in self._requests
            if rng.random() < 0.25
        ]
        self.is_aborted = bool(self._aborts)

    def abort_if_due(self) -> None:
        for due in [it for it in self._aborts if it[0] < time.monotonic()]:
            self._aborts.remove(due)
            due[1].abort()

    def check(self) -> None:
        answers = [request.answer() for request in self._requests]
        tokens = answers[1].tokens
        if self.is_aborted:  # As far as it came.
            assert tokens == self.expected[: len(tokens)]
        else:
            assert [answer.error for answer in answers] == ["", ""]
            assert tokens == self.expected


def test_at_random(servers, tokens, reference):
    """Prompts that share prefixes, several at a time, with clients that hang up."""
    rng = random.Random(int(os.environ.get("KVFERRY_RANDOM_SEED", "1")))
    prompts = []
    for n in range(12):
        shared = f"This is story {n % 3}. " * rng.choice([1, 5, 12])
        prompt = tokens(shared + f"It has {n} parts, " * rng.choice([1, 4, 9]))
        prompts.append((prompt, reference(prompt)))
    running, done = [], []
    end = time.monotonic() + RANDOM_SECONDS
    while running or time.monotonic() < end:
        if len(running) < 6 and time.monotonic() < end:
            running.append(RandomRequest(servers, *rng.choice(prompts), rng))
        for request in running:
            request.abort_if_due()
        if len(running) == 6 or time.monotonic() > end:
            while running[0]._aborts:
                running[0].abort_if_due()
                time.sleep(0.001)
            done.append(running.pop(0))
            done[-1].check()
        else:
            time.sleep(rng.uniform(0, 0.05))
    print(f"{len(done)} requests, {sum(it.is_aborted for it in done)} aborted")
    assert {it.is_aborted for it in done} == {False, True}


def test_a_prefill_server_with_pages_of_another_size_ends_its_own_requests(
    servers, tokens, reference, tmp_path
):
    """All of them, on both sides, and the decode server goes on with those of others."""
    prompt, port = tokens("Whose pages are these? " * 30), free_port()
    with contextlib.closing(Server("prefill", MODEL, tmp_path, port, page_size=32)) as other:
        other.wait_ready()
        for _ in range(3):
            prefill, decode = servers.start_at(other, port, prompt, 8)
            error = decode.answer().error
            assert "page_size=32" in error and "page_size=16" in error
            assert prefill.answer().error != ""
            assert servers.answer(prompt).tokens == reference(prompt)
        other.stop()


def test_a_prefill_server_that_dies_and_another_one(servers, tokens, reference):
    prompt = tokens("Who answers this? " * 30)
    with servers.prefill.paused():
        _, decode = servers.start(prompt, 8)
        servers.prefill.kill()
    assert decode.answer().error != ""
    servers.restart_prefill()
    assert servers.answer(prompt).tokens == reference(prompt)
