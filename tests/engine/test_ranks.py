"""Engines with different numbers of tensor-parallel ranks: the answers are those of one engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import random_model
from engines import BLOCK_TOKENS, DECODE_ENGINE, ENGINE, PATIENT
from pair import Pair
from random_model import HEAD_DIM, HEADS, LAYERS, QUESTION


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model.make(tmp_path_factory.mktemp("model"), "Llama")


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["2_to_1", "1_to_2"])
def pair(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    prefill_size, decode_size = request.param
    with Pair(
        model,
        tmp_path_factory.mktemp("ranks"),
        prefill=ENGINE | {"tensor_parallel_size": prefill_size},
        decode=DECODE_ENGINE | {"tensor_parallel_size": decode_size},
        **PATIENT,
    ) as pair:
        pair.decode_ranks = decode_size
        yield pair


def check(pair: Pair, prompt: list[int], at_once: bool, blocks_skipped: int = 0) -> None:
    expected = pair.prefill.generate(prompt, 16)
    fetches = len(pair.trace("decode"))
    answer = (pair.answer_at_once if at_once else pair.answer)(prompt, 16)
    assert (answer.error, answer.tokens) == ("", expected.tokens)
    assert len(set(answer.tokens)) > 4  # Not the same word over and over, whatever the KV.
    events = pair.wait_trace("decode", fetches + pair.decode_ranks)[fetches:]
    assert sorted(event["tp_rank"] for event in events) == list(range(pair.decode_ranks))
    blocks = -(-len(prompt) // BLOCK_TOKENS) - blocks_skipped
    block_bytes = LAYERS * 2 * HEADS * HEAD_DIM * 4 * BLOCK_TOKENS
    for event in events:
        assert (event["ok"], event["blocks_missing"]) == (True, 0)
        assert event["bytes"] == blocks * block_bytes // pair.decode_ranks
    pair.prefill.wait_idle()
    pair.decode.wait_idle()


@pytest.mark.parametrize("at_once", [False, True], ids=["by_tickets", "at_once"])
def test_answer_equals_that_of_one_engine(pair: Pair, at_once: bool):
    prompt = pair.prefill.tokenize(f"{at_once}. {QUESTION * 4}")
    check(pair, prompt, at_once)
    # What is cached moves no more; at the least the last block does.
    check(pair, prompt, at_once, blocks_skipped=(len(prompt) - 1) // BLOCK_TOKENS)


def test_what_is_cached_whole_is_let_go_of_by_every_rank(pair: Pair):
    prompt = pair.prefill.tokenize(QUESTION * 8)[: 4 * BLOCK_TOKENS]
    check(pair, prompt, at_once=False)
    check(pair, prompt, at_once=False, blocks_skipped=3)


def test_several_at_the_same_time(pair: Pair):
    prompts = [pair.prefill.tokenize(f"{n}. {QUESTION * (n + 1)}") for n in range(6)]
    expected = [pair.prefill.generate(prompt, 8).tokens for prompt in prompts]
    assert random_model.answer_together(pair, prompts, 8) == expected
    pair.prefill.wait_idle()
    pair.decode.wait_idle()
