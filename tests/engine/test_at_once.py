"""Both engines get the request at the same time: KV moves while more of it is computed."""

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Iterator

import pytest
from demo import PART_TOKENS, QUESTIONS, ask, problems
from engines import BLOCK_TOKENS, ENGINE, FETCH_TIMEOUT_MS, MODEL, Engines
from pair import REMOTE_DECODE, Engine, free_port, transfer_config

# Of the longest prompt that these engines take: one of 1,024 tokens, and one that takes two steps.
PARTS = 2
LENGTH = 1270
OTHERS = 5


@pytest.fixture(scope="module")
def long_prompt(engines: Engines) -> list[int]:
    prompt = engines.prefill.tokenize(QUESTIONS[1][1] * 2)[-LENGTH:]
    assert len(prompt) == LENGTH
    return prompt


@pytest.fixture(scope="module")
def prefill_s(engines: Engines, long_prompt: list[int]) -> float:
    """What the prefill engine takes for it."""
    return engines.prefill.generate([*long_prompt[1:], 1], 1).total_ms / 1e3


@pytest.mark.parametrize("name, question", QUESTIONS, ids=[name for name, _ in QUESTIONS])
def test_answer_equals_that_of_one_engine(engines: Engines, reference, name, question):
    prompt = engines.prefill.tokenize(f"At once. {question}")
    outcome = ask(engines, name, prompt, reference(prompt, 32), 32, at_once=True)
    assert problems(outcome, BLOCK_TOKENS) == []


def test_a_part_has_moved_before_the_prompt_is_computed(engines: Engines, reference, long_prompt):
    expected = reference(long_prompt, 8)
    fetches, leases = len(engines.trace("decode")), len(engines.trace("prefill"))
    assert engines.answer_at_once(long_prompt, 8).tokens == expected.tokens
    first, last = engines.wait_trace("prefill", leases + PARTS)[leases:]
    assert [first["outcome"], last["outcome"]] == ["fetched"] * 2
    assert first["blocks"] == PART_TOKENS // BLOCK_TOKENS
    # The last one is published in the step that computes the prompt's last token.
    assert first["time"] <= last["time"] - last["held_ms"] / 1e3
    (fetch,) = engines.trace("decode")[fetches:]
    assert fetch["ok"] and fetch["blocks"] == -(-LENGTH // BLOCK_TOKENS)


def test_cached_parts_are_not_moved_again(engines: Engines, reference, long_prompt):
    expected = reference(long_prompt, 8)
    for _ in range(2):
        outcome = ask(engines, "again", long_prompt, expected, 8, at_once=True)
        assert problems(outcome, BLOCK_TOKENS) == []
    assert outcome.fetches[0]["blocks_skipped"] >= PART_TOKENS // BLOCK_TOKENS
    assert outcome.parts == PARTS  # One of which was let go of.


def test_requests_at_the_same_time(engines: Engines, reference):
    prompts = [engines.prefill.tokenize(f"Count from {n} down to {n - 9}.") for n in range(6)]
    expected = [reference(prompt, 12).tokens for prompt in prompts]
    requests = [engines.start_at_once(prompt, 12) for prompt in prompts]
    assert [decode.answer().tokens for _, decode in requests] == expected


@pytest.mark.parametrize("part", [0.0, 0.3])
def test_prefill_aborted(engines: Engines, long_prompt, prefill_s, part):
    prompt = [*engines.prefill.tokenize(f"Abort after {part}."), *long_prompt][:LENGTH]
    began = time.monotonic()
    prefill, decode = engines.start_at_once(prompt, 8)
    time.sleep(part * prefill_s)
    prefill.abort()
    prefill.answer()
    answer = decode.answer()
    assert answer.finish_reason == "error" and answer.tokens == []
    assert time.monotonic() - began < FETCH_TIMEOUT_MS / 2e3  # Not at the fetch's deadline.


@pytest.mark.parametrize("part", [0.0, 0.3])
def test_decode_aborted(engines: Engines, long_prompt, prefill_s, part):
    prompt = [*engines.prefill.tokenize(f"Nobody listens after {part}."), *long_prompt][:LENGTH]
    leases = len(engines.trace("prefill"))
    prefill, decode = engines.start_at_once(prompt, 8)
    time.sleep(part * prefill_s)
    decode.abort()
    assert decode.answer().finish_reason == "abort"
    prefill.answer()
    # Each part is let go of, whether it had been published by then or not.
    ended = engines.wait_trace("prefill", leases + PARTS)[leases:]
    assert [event["outcome"] for event in ended] == ["fetched"] * PARTS


def test_prefill_preempted(engines: Engines, reference, long_prompt):
    """Others fill the cache meanwhile: it has published a part when it has to start anew."""
    prompt = [*engines.prefill.tokenize("Preempted."), *long_prompt][:LENGTH]
    expected = reference(prompt, 8)
    leases = len(engines.trace("prefill"))
    # Two blocks each: the prompt has room for its first part, and not for the rest.
    others = [
        engines.prefill.start([n, *long_prompt[:31]], 32, ignore_eos=True)
        for n in range(OTHERS, 2 * OTHERS)
    ]
    engines.wait_metric(engines.prefill, "vllm:num_requests_running", OTHERS - 1)
    announced, awaited = engines.params_at_once()
    # It begins when it is asked for, and then nobody comes until it is taken back.
    decode = engines.decode.start(prompt, 8, awaited)
    prefill = engines.prefill.start(prompt, 1, announced)
    engines.wait_metric(engines.prefill, "vllm:num_requests_running", OTHERS)
    with engines.decode.paused():
        engines.wait_trace("prefill", leases + 1)
    for request in (*others, prefill):
        request.answer()
    assert decode.answer().tokens == expected.tokens
    # It may have been preempted more than once; what was taken back came later.
    preempted = sum(it["outcome"] == "preempted" for it in engines.trace("prefill")[leases:])
    assert preempted > 0
    ended = engines.wait_trace("prefill", leases + preempted + PARTS)[leases:]
    assert Counter(it["outcome"] for it in ended) == {"preempted": preempted, "fetched": PARTS}


def test_engines_do_not_wait_for_each_other(engines: Engines, reference, long_prompt):
    """Two fill decode's cache and one prefill's, and the engines get them in different orders:
    neither would have room for what the other one has begun with, and some would fail at their
    fetch's deadline."""
    prompts = [[n, *long_prompt[: 30 * BLOCK_TOKENS - 2]] for n in range(3)]
    expected = [reference(prompt, 4).tokens for prompt in prompts]
    params = [engines.params_at_once() for _ in prompts]
    decode = {n: engines.decode.start(prompts[n], 4, params[n][1]) for n in (1, 2, 0)}
    prefill = [engines.prefill.start(prompts[n], 1, params[n][0]) for n in (0, 1, 2)]
    assert [decode[n].answer().tokens for n in range(3)] == expected
    assert [request.answer().finish_reason for request in prefill] == ["length"] * 3


SHORT_BLOCKS = 8  # Of the longest prompts that the following engines take.


class BothWays:
    """Two engines that prefill and decode for each other, in caches of twice the longest prompt."""

    def __init__(self, folder):
        self.ports = [free_port(), free_port()]
        self.engines = [
            Engine(
                f"both{n}",
                MODEL,
                folder,
                kv_transfer_config=transfer_config(
                    "kv_both",
                    engine_id=f"both{n}",
                    kv_connector_extra_config={
                        "listen_port": port,
                        "fetch_timeout_ms": FETCH_TIMEOUT_MS,
                    },
                ),
                **ENGINE
                | {
                    "num_gpu_blocks_override": 1 + 2 * SHORT_BLOCKS,
                    "max_model_len": SHORT_BLOCKS * BLOCK_TOKENS,
                },
            )
            for n, port in enumerate(self.ports)
        ]

    def params_at_once(self, prefill: int) -> tuple[dict, dict]:
        transfer = {"transfer_id": uuid.uuid4().hex}
        source = {"remote_host": "127.0.0.1", "remote_port": self.ports[prefill]}
        return REMOTE_DECODE | transfer, {"do_remote_prefill": True} | source | transfer


@pytest.fixture(scope="module")
def both_ways(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothWays]:
    with contextlib.ExitStack() as stack:
        both = BothWays(tmp_path_factory.mktemp("both_ways"))
        for engine in both.engines:
            stack.callback(engine.close)
        for engine in both.engines:
            engine.wait_ready()
        yield both


def prompts_both_ways(long_prompt: list[int], first: int) -> list[list[int]]:
    length = SHORT_BLOCKS * BLOCK_TOKENS - 6
    return [[n, *long_prompt[: length - 1]] for n in range(first, first + 6)]


def test_engines_that_decode_for_each_other_at_once(both_ways: BothWays, reference, long_prompt):
    """Each has prompts for all of its cache before it hears that the other one waits for some."""
    prompts = prompts_both_ways(long_prompt, first=10)
    expected = [reference(prompt, 4).tokens for prompt in prompts]
    params = [both_ways.params_at_once(n % 2) for n in range(len(prompts))]
    prefill = [
        both_ways.engines[n % 2].start(prompt, 1, params[n][0]) for n, prompt in enumerate(prompts)
    ]
    decode = [
        both_ways.engines[1 - n % 2].start(prompt, 4, params[n][1])
        for n, prompt in enumerate(prompts)
    ]
    assert [request.answer().tokens for request in decode] == expected
    assert {request.answer().finish_reason for request in prefill} == {"length"}


def test_engines_that_decode_for_each_other_by_tickets(both_ways: BothWays, reference, long_prompt):
    prompts = prompts_both_ways(long_prompt, first=20)
    expected = [reference(prompt, 4).tokens for prompt in prompts]
    prefill = [
        both_ways.engines[n % 2].start(prompt, 1, REMOTE_DECODE) for n, prompt in enumerate(prompts)
    ]
    decode = [
        both_ways.engines[1 - n % 2].start(prompts[n], 4, request.answer().params)
        for n, request in enumerate(prefill)
    ]
    assert [request.answer().tokens for request in decode] == expected
