"""Models with sliding windows: only what is left of a window moves, and the answers are those of
one engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import random_model
from engines import BLOCK_TOKENS, DECODE_ENGINE, ENGINE, PATIENT
from pair import REMOTE_DECODE, Pair
from random_model import HEAD_DIM, LAYERS, QUESTION

WINDOW = 4 * BLOCK_TOKENS


# By kind: groups of layers, with and without a window, and kv_load_failure_policy. Of two groups
# each takes half of the layers.
KINDS = {"Olmo3": (1, 1, "recompute"), "Mistral": (1, 0, "fail")}


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    windowed, full, policy = KINDS[request.param]
    config: dict[str, Any] = {"sliding_window": WINDOW, "num_key_value_heads": 2}
    if request.param == "Olmo3":
        config["layer_types"] = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    model: Path = random_model.make(tmp_path_factory.mktemp("model"), request.param, **config)
    # Of two groups each takes blocks of its own. Long prompts take several steps, in which blocks
    # leave the window.
    blocks = {"num_gpu_blocks_override": 2 * DECODE_ENGINE["num_gpu_blocks_override"]}
    with Pair(
        model,
        tmp_path_factory.mktemp("windows"),
        prefill=ENGINE | blocks | {"enable_chunked_prefill": True, "max_num_batched_tokens": 128},
        decode=DECODE_ENGINE | blocks,
        prefill_transfer=PATIENT["prefill_transfer"],
        decode_transfer=PATIENT["decode_transfer"] | {"kv_load_failure_policy": policy},
    ) as pair:
        pair.windowed, pair.full, pair.policy = windowed, full, policy
        yield pair


def blocks_moved(pair: Pair, prompt: list[int], cached: int) -> int:
    """All but the last token's: the decode engine computes that one."""
    end = -(-(len(prompt) - 1) // BLOCK_TOKENS)
    first = max(0, len(prompt) - WINDOW) // BLOCK_TOKENS
    return pair.full * (end - cached) + pair.windowed * (end - max(first, cached))


def check(
    pair: Pair, prompt: list[int], cached: int = 0, tokens: int = 1, at_once: bool = False
) -> None:
    expected = pair.prefill.generate(prompt, 40)
    fetches = len(pair.trace("decode"))
    if at_once:
        answer = pair.answer_at_once(prompt, 40)
    else:
        handed_over = pair.prefill.generate(prompt, tokens, dict(REMOTE_DECODE))
        assert "kvferry_group_tickets" in handed_over.params
        answer = pair.decode.generate(prompt, 40, handed_over.params)
    assert (answer.error, answer.tokens) == ("", expected.tokens)
    assert len(set(answer.tokens)) > 4  # Not the same word over and over, whatever the KV.
    (event,) = pair.wait_trace("decode", fetches + 1)[fetches:]
    assert (event["ok"], event["blocks"]) == (True, blocks_moved(pair, prompt, cached))
    # A block holds what it has of half of the layers, or of all where there is one group.
    layers = LAYERS // (pair.full + pair.windowed)
    assert event["bytes"] == event["blocks"] * layers * 2 * 2 * HEAD_DIM * 4 * BLOCK_TOKENS
    pair.prefill.wait_idle()
    pair.decode.wait_idle()


@pytest.mark.parametrize("length", [2, 33, WINDOW + 1, 1000])
def test_answer_equals_that_of_one_engine(pair: Pair, length: int):
    check(pair, pair.prefill.tokenize(f"{length}. {QUESTION * 60}")[:length])


# Where a block ends with the first token that the last one of the prompt looks at, vLLM gives it
# back before anybody has fetched it.
@pytest.mark.parametrize("more", range(-1, 2))
def test_the_first_block_of_the_window(pair: Pair, more: int):
    length = 3 * BLOCK_TOKENS + WINDOW - 1 + more
    check(pair, pair.prefill.tokenize(f"{more}, at the edge. {QUESTION * 30}")[:length])


def test_a_prefill_engine_that_decodes_too_keeps_the_window(pair: Pair):
    prompt = pair.prefill.tokenize(f"Both. {QUESTION * 30}")[:500]
    check(pair, prompt, tokens=3 * BLOCK_TOKENS)


def test_cached_blocks_are_not_moved_again(pair: Pair):
    prompt = pair.prefill.tokenize(f"Once more. {QUESTION * 30}")[:500]
    check(pair, prompt)
    check(pair, prompt, cached=499 // BLOCK_TOKENS)


def test_several_at_the_same_time(pair: Pair):
    prompts = [pair.prefill.tokenize(f"{n}. {QUESTION * (2 * n + 1)}")[:700] for n in range(6)]
    expected = [pair.prefill.generate(prompt, 8).tokens for prompt in prompts]
    assert random_model.answer_together(pair, prompts, 8) == expected
    pair.prefill.wait_idle()
    pair.decode.wait_idle()


@pytest.mark.parametrize("group", [0, -1])
def test_a_load_that_fails_is_what_the_policy_says(pair: Pair, group: int):
    prompt = pair.prefill.tokenize(f"Lost {group}. {QUESTION * 10}")
    expected = pair.prefill.generate(prompt, 4)
    answer = random_model.answer_without_a_group(pair, prompt, group, 4)
    if pair.policy == "fail":
        assert answer.finish_reason == "error"
    else:
        assert answer.tokens == expected.tokens
    check(pair, pair.prefill.tokenize(f"Found {group}. {QUESTION * 10}"))


@pytest.mark.parametrize("length", [33, 1270])
def test_at_once(pair: Pair, length: int):
    check(pair, pair.prefill.tokenize(f"At once {length}. {QUESTION * 80}")[:length], at_once=True)


def test_several_at_once(pair: Pair):
    prompts = [pair.prefill.tokenize(f"At {n}. {QUESTION * (2 * n + 1)}")[:700] for n in range(6)]
    expected = [pair.prefill.generate(prompt, 8).tokens for prompt in prompts]
    requests = [pair.start_at_once(prompt, 8) for prompt in prompts]
    assert [decode.answer().tokens for _, decode in requests] == expected
    pair.prefill.wait_idle()
    pair.decode.wait_idle()
