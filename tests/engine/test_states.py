"""Models with recurrent states beside attention: linear attention, short convolutions, Mamba. A
state is handed over behind all tokens of the prompt but the last, which the decode engine
computes."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import random_model
from engines import MAX_TOKENS, PATIENT, PREFILL_RANKS
from pair import REMOTE_DECODE, Pair
from random_model import LAYERS, QUESTION

_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention"] * (LAYERS - 1) + ["full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
_CONV: dict[str, Any] = {
    "layer_types": ["conv"] * (LAYERS - 1) + ["full_attention"],
    "conv_dim": 256,
    "block_dim": 256,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "norm_eps": 1e-5,
}
# Layers of which each is both.
_BOTH: dict[str, Any] = {
    "mamba_d_ssm": 256,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 64,
    "mamba_expand": 2,
}


class Kind(NamedTuple):
    config: dict[str, Any]
    groups: int  # Of layers, that share their memory; one has attention.
    dtype: str
    caches: tuple[bool, bool]  # Whether prefill and decode engine cache prefixes.
    policy: str  # kv_load_failure_policy


KINDS = {
    # vLLM's kernels on a CPU take no other dtype.
    "Qwen3Next": Kind(_LINEAR, LAYERS, "bfloat16", (True, False), "recompute"),
    "Lfm2": Kind(_CONV, LAYERS, "float32", (True, True), "fail"),
    "FalconH1": Kind(_BOTH, 2, "float32", (False, True), "recompute"),
}
CHUNK = 128  # Tokens in a step.
RANKS = int(PREFILL_RANKS)  # Of either engine: models with states move between as many alone.


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    kind = KINDS[request.param]
    torch = pytest.importorskip("torch")
    if kind.dtype == "bfloat16" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM's linear attention has been tried on processors with AVX-512 BF16 alone")
    model = random_model.make(
        tmp_path_factory.mktemp("model"), request.param, num_key_value_heads=2, **kind.config
    )
    # vLLM makes blocks of so many tokens that a state fits in.
    engine = {
        "max_model_len": MAX_TOKENS,
        "num_gpu_blocks_override": 100,
        "dtype": kind.dtype,
        "tensor_parallel_size": RANKS,
        # vLLM's Mamba on a CPU fails on a step of more than 256.
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": CHUNK,
    }
    with Pair(
        model,
        tmp_path_factory.mktemp("states"),
        prefill=engine | {"enable_prefix_caching": kind.caches[0]},
        decode=engine | {"enable_prefix_caching": kind.caches[1]},
        prefill_transfer=PATIENT["prefill_transfer"],
        decode_transfer=PATIENT["decode_transfer"] | {"kv_load_failure_policy": kind.policy},
    ) as pair:
        pair.kind = kind
        yield pair


def prompt_of(pair: Pair, name: str, length: int = 4 * CHUNK + 1) -> list[int]:
    """One of whose steps the last computes the last token alone, as the decode engine does: with
    other kernels than that it would be another number in the last places, and so another answer."""
    assert length % CHUNK == 1
    return pair.prefill.tokenize(f"{name}. {QUESTION * 80}")[:length]


def check(
    pair: Pair, prompt: list[int], tokens: int = 1, at_once: bool = False, cached: int = 0
) -> None:
    expected = pair.prefill.generate(prompt, 40)
    fetches = len(pair.trace("decode"))
    if at_once:
        answer = pair.answer_at_once(prompt, 40)
    else:
        handed_over = pair.prefill.generate(prompt, tokens, dict(REMOTE_DECODE))
        assert len(handed_over.tokens) == 1  # More would change the state.
        assert len(handed_over.params["kvferry_group_tickets"]) == pair.kind.groups
        assert handed_over.params["remote_num_tokens"] == len(prompt) - 1
        pair.block_tokens = handed_over.params["kvferry_block_size"]
        answer = pair.decode.generate(prompt, 40, handed_over.params)
    assert (answer.error, answer.tokens) == ("", expected.tokens)
    assert len(set(answer.tokens)) > 4  # Not the same word over and over, whatever the KV.
    events = pair.wait_trace("decode", fetches + RANKS)[fetches:]
    # A block of each state, and what the attention has of all tokens but the last.
    blocks = pair.kind.groups - 1 + -(-(len(prompt) - 1 - cached) // pair.block_tokens)
    assert [(it["ok"], it["blocks"]) for it in events] == [(True, blocks)] * RANKS
    pair.prefill.wait_idle()
    pair.decode.wait_idle()


@pytest.mark.parametrize("length", [CHUNK + 1, 2 * CHUNK + 1, 8 * CHUNK + 1])
def test_answer_equals_that_of_one_engine(pair: Pair, length: int):
    check(pair, prompt_of(pair, str(length), length))


def test_a_prompt_of_one_token_is_computed_here(pair: Pair):
    prompt = pair.prefill.tokenize(QUESTION)[:1]
    expected = pair.prefill.generate(prompt, 8)
    handed_over = pair.prefill.generate(prompt, 1, dict(REMOTE_DECODE))
    answer = pair.decode.generate(prompt, 8, handed_over.params or {"do_remote_prefill": True})
    assert answer.tokens == expected.tokens
    pair.prefill.wait_idle()
    pair.decode.wait_idle()


# Its state would be behind what it decodes.
def test_a_prefill_engine_does_not_decode_too(pair: Pair):
    check(pair, prompt_of(pair, "Both"), tokens=100)


def test_the_same_prompt_again(pair: Pair):
    prompt = prompt_of(pair, "Once more")
    check(pair, prompt)
    if not pair.kind.caches[1]:
        return check(pair, prompt)
    fetches = len(pair.trace("decode"))
    assert pair.answer(prompt, 8).tokens == pair.prefill.generate(prompt, 8).tokens
    assert len(pair.trace("decode")) == fetches  # All is there.
    pair.prefill.wait_idle()
    # One that goes on behind it.
    check(pair, prompt[:-1] + prompt_of(pair, "On and on", 3 * CHUNK + 1), cached=len(prompt) - 1)


@pytest.mark.parametrize("group", [0, -1])
def test_a_load_that_fails_is_what_the_policy_says(pair: Pair, group: int):
    prompt = prompt_of(pair, f"Lost {group}")
    expected = pair.prefill.generate(prompt, 8)
    answer = random_model.answer_without_a_group(pair, prompt, group, 8)
    if pair.kind.policy == "fail":
        assert answer.finish_reason == "error"
    else:
        assert answer.tokens == expected.tokens
    check(pair, prompt_of(pair, f"Found {group}"))


@pytest.mark.parametrize("length", [CHUNK + 1, 9 * CHUNK + 1])
def test_at_once(pair: Pair, length: int):
    check(pair, prompt_of(pair, f"At once {length}", length), at_once=True)


# Only the first tokens: vLLM's own answers differ from those when it computes several together.
@pytest.mark.parametrize("at_once", [False, True])
def test_several_at_the_same_time(pair: Pair, at_once: bool):
    if pair.kind.dtype != "float32":
        pytest.skip("already the first tokens differ then with what else is computed")
    prompts = [prompt_of(pair, f"{at_once} {n}", n * CHUNK + 1) for n in range(1, 7)]
    expected = [pair.prefill.generate(prompt, 2).tokens for prompt in prompts]
    if at_once:
        requests = [pair.start_at_once(prompt, 2) for prompt in prompts]
        assert [decode.answer().tokens for _, decode in requests] == expected
    else:
        assert random_model.answer_together(pair, prompts, 2) == expected
    pair.prefill.wait_idle()
    pair.decode.wait_idle()
