"""Answers of the pair are those of one engine, and the KV that makes them so was moved by
kvferry."""

import pytest
from demo import QUESTIONS, ask, problems
from engines import BLOCK_TOKENS, Engines


@pytest.mark.parametrize("name, question", QUESTIONS, ids=[name for name, _ in QUESTIONS])
def test_answer_equals_that_of_one_engine(engines: Engines, reference, name, question):
    prompt = engines.prefill.tokenize(question)
    outcome = ask(engines, name, prompt, reference(prompt, 32), 32)
    assert problems(outcome, BLOCK_TOKENS) == []


@pytest.mark.parametrize("length", [1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 4 * BLOCK_TOKENS])
def test_prompts_that_end_at_a_block_boundary(engines: Engines, reference, length):
    prompt = engines.prefill.tokenize(f"{length}. {QUESTIONS[1][1]}")[-length:]
    outcome = ask(engines, str(length), prompt, reference(prompt, 8), 8)
    assert problems(outcome, BLOCK_TOKENS) == []


def test_cached_blocks_are_not_moved_again(engines: Engines, reference):
    prompt = engines.prefill.tokenize(f"Once more, and twice. {QUESTIONS[2][1]}")
    expected = reference(prompt, 8)
    blocks = -(-len(prompt) // BLOCK_TOKENS)
    for skipped in (0, blocks - 1):
        outcome = ask(engines, "again", prompt, expected, 8)
        assert problems(outcome, BLOCK_TOKENS) == []
        assert outcome.fetches[0]["blocks_skipped"] >= skipped


def test_requests_at_the_same_time(engines: Engines, reference):
    prompts = [engines.prefill.tokenize(f"Count from {n} to {n + 9}.") for n in range(6)]
    expected = [reference(prompt, 12).tokens for prompt in prompts]
    handed_over = [engines.prefill.start(it, 1, {"do_remote_decode": True}) for it in prompts]
    params = [request.answer().params for request in handed_over]
    answers = [
        engines.decode.start(prompt, 12, it) for prompt, it in zip(prompts, params, strict=True)
    ]
    assert [request.answer().tokens for request in answers] == expected


def test_several_answers_to_one_prompt(engines: Engines, reference):
    prompt = engines.prefill.tokenize(f"Several times. {QUESTIONS[1][1]}")
    expected = reference(prompt, 8)
    params = engines.hand_over(prompt)
    requests = [engines.decode.start(prompt, 8, dict(params)) for _ in range(3)]
    assert [request.answer().tokens for request in requests] == [expected.tokens] * 3
    answer = engines.decode.generate(
        prompt, 8, engines.hand_over(prompt), n=2, temperature=1.0, ignore_eos=True
    )
    assert (answer.error, answer.finish_reason) == ("", "length")
    engines.decode.wait_idle()


def test_check_fails_when_kv_is_zeroed(engines: Engines, reference, break_kv):
    prompt = engines.prefill.tokenize(QUESTIONS[0][1])
    expected = reference(prompt, 8)
    answer = engines.spare.generate(prompt, 8, engines.hand_over(prompt))
    assert answer.finish_reason is not None
    assert answer.tokens != expected.tokens


def test_the_spare_engine_is_right_when_it_is_not_broken(engines: Engines, reference):
    prompt = engines.prefill.tokenize(QUESTIONS[0][1])
    expected = reference(prompt, 8)
    answer = engines.spare.generate(prompt, 8, engines.hand_over(prompt))
    assert answer.tokens == expected.tokens


def test_handed_over_parameters_are_those_of_vllms_proxies(engines: Engines):
    prompt = engines.prefill.tokenize("Which parameters?")
    params = engines.hand_over(prompt)
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
    assert params["remote_engine_id"] == "kv_producer"
    assert params["remote_host"] == "127.0.0.1" and params["remote_port"] > 0
    assert len(params["remote_block_ids"][0]) == -(-len(prompt) // BLOCK_TOKENS)
    assert params["tp_size"] == len(params["kvferry_tickets"]) == 1
    engines.decode.generate(prompt, 1, params)


def test_the_prefill_engine_s_kv_cache_is_read_where_it_lies(engines: Engines):
    prompt = engines.prefill.tokenize("Where does your cache lie?")
    engines.decode.generate(prompt, 1, engines.hand_over(prompt))
    maps = engines.decode.memory_maps()
    if any("/dev/nvidia" in line for line in maps):
        pytest.skip("it lies on a GPU, which the list of mappings does not show")
    ours = [line for line in maps if "/memfd:kvferry-engine" in line]
    assert ours and all(line.split()[1] == "r--s" for line in ours)
