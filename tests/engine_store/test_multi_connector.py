"""vLLM's MultiConnector with two of ours in each engine: one pulls, one keeps blocks in a store.

The prefill engine holds the store, the decode engine uses it from afar, as a deployment of several
would. What each of the two moved is in the trace, which they share.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from demo import QUESTIONS
from pair import REMOTE_DECODE, Answer, transfer_config
from servers import free_port
from store_engines import (
    BLOCK_TOKENS,
    FULL_BLOCKS,
    HOST,
    PROMPT_TOKENS,
    TracedEngine,
    long_prompt,
    read_trace,
    running,
)

pytestmark = pytest.mark.skipif(
    not os.environ.get("KVFERRY_TEST_ALL"), reason="only in ./dev test --all: two more engines"
)
PROMPT_BLOCKS = -(-PROMPT_TOKENS // BLOCK_TOKENS)


def child(role: str, **extra: Any) -> dict[str, Any]:
    """One of "connectors". The engine's id is the parent's to give."""
    config = transfer_config(role, kv_connector_extra_config=extra)
    del config["engine_id"]
    return config


def start(name: str, folder: Path, role: str, store: dict[str, Any], **extra: Any) -> TracedEngine:
    trace = folder / f"{name}.trace"
    extra |= {"mode": "store", "store": store, "trace_path": str(trace)}
    children = [
        child(role, trace_path=str(trace)),
        child("kv_both", **extra) | {"kv_load_failure_policy": "recompute"},
    ]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "engine_id": name,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    return TracedEngine(name, folder, trace, transfer)


class Both(NamedTuple):
    prefill: TracedEngine
    decode: TracedEngine

    def hand_over(self, prompt: list[int]) -> dict[str, Any]:
        params = self.prefill.generate(prompt, 1, dict(REMOTE_DECODE)).params
        assert params
        return params


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("multi")
    port = free_port()
    remote = {"backend": "remote", "address": f"tcp://127.0.0.1:{port}"}
    both = Both(
        start("prefill", folder, "kv_producer", HOST, listen_port=port),
        start("decode", folder, "kv_consumer", remote),
    )
    with running(*both):
        yield both


@pytest.fixture(autouse=True)
def nothing_leaks(engines: Both) -> Iterator[None]:
    """Blocks are free when both connectors have let go of them, and not only one."""
    yield
    for engine in engines:
        engine.wait_idle()


def moved(engine: TracedEngine, before: dict[str, int] | None = None) -> dict[str, int]:
    now = {event: engine.blocks(event) for event in ("fetch", "load")}
    return {event: count - (before or {}).get(event, 0) for event, count in now.items()}


def test_a_pair_pulls_and_both_engines_save(engines: Both):
    prefill, decode = engines
    prompt = long_prompt(prefill)
    expected = prefill.generate(prompt, 60, ignore_eos=True)
    assert expected.cached_tokens == 0
    prefill.wait_saved(FULL_BLOCKS)

    # The prompt's prefill comes out of the store, and its KV goes to the decode engine directly.
    outcomes: list[str] = []

    def comes_out_of_the_store() -> bool:
        before = moved(prefill), moved(decode)
        answer = decode.generate(prompt, 60, engines.hand_over(prompt), ignore_eos=True)
        assert answer.tokens == expected.tokens
        assert moved(decode, before[1]) == {"fetch": PROMPT_BLOCKS, "load": 0}
        outcomes.append("fetched")
        return moved(prefill, before[0]) == {"fetch": 0, "load": FULL_BLOCKS}

    assert prefill.again_where_unanswered(comes_out_of_the_store)
    leases = [it for it in read_trace(prefill.trace_path) if it["event"] == "lease"]
    assert [it["outcome"] for it in leases] == outcomes

    # What the decode engine generated is in the store too: the next turn's prefill loads it.
    longer = prompt + expected.tokens[:-1]
    decode.wait_saved(len(longer) // BLOCK_TOKENS - FULL_BLOCKS)
    cached = len(longer) // BLOCK_TOKENS * BLOCK_TOKENS
    assert prefill.again_where_unanswered(
        lambda: prefill.generate(longer, 1).cached_tokens == cached
    )


def test_the_decode_engine_alone_loads_what_the_other_has_saved(engines: Both):
    prefill, decode = engines
    prompt = prefill.tokenize(QUESTIONS[2][1])[:321]
    saved = prefill.blocks("save")
    expected = prefill.generate(prompt, 20)
    prefill.wait_saved(saved + len(prompt) // BLOCK_TOKENS)

    def loads() -> bool:
        before = moved(decode)
        assert decode.generate(prompt, 20).tokens == expected.tokens
        return moved(decode, before) == {"fetch": 0, "load": len(prompt) // BLOCK_TOKENS}

    assert decode.again_where_unanswered(loads)


def test_what_nobody_hands_over_any_more_comes_out_of_the_store(engines: Both):
    prefill, decode = engines
    prompt = prefill.tokenize("What is the capital of France? " * 12)
    saved = prefill.blocks("save")
    params = engines.hand_over(prompt)
    prefill.wait_saved(saved + len(prompt) // BLOCK_TOKENS)
    expected = decode.generate(prompt, 8, dict(params))

    def loads() -> bool:
        before = moved(decode)
        again = decode.generate(prompt, 8, dict(params))  # The ticket is used up.
        assert again.tokens == expected.tokens != []
        return moved(decode, before) == {"fetch": 0, "load": len(prompt) // BLOCK_TOKENS}

    assert decode.again_where_unanswered(loads)


def test_pairs_at_the_same_time(engines: Both):
    prefill, decode = engines
    prompts = [prefill.tokenize(f"{n}. {QUESTIONS[2][1]}")[:160] for n in range(5)]
    expected = [prefill.generate(prompt, 12).tokens for prompt in prompts]
    handed = [prefill.start(prompt, 1, dict(REMOTE_DECODE)) for prompt in prompts]
    answers: list[Answer] = [it.answer() for it in handed]
    requests = [
        decode.start(prompt, 12, answer.params)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    assert [request.answer().tokens for request in requests] == expected


def test_the_numbers_of_both_are_in_the_metrics(engines: Both):
    fetched = engines.decode.metrics()["vllm:kvferry_fetched_bytes"]
    traced = [
        it for it in read_trace(engines.decode.trace_path) if it["event"] in ("fetch", "load")
    ]
    assert fetched == sum(it["bytes"] for it in traced if it["ok"]) > 0
