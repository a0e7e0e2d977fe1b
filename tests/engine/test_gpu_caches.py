"""Pairs of engines on a GPU whose KV caches are what a CPU's never are: of other blocks, orders and
dtypes on the two sides, latents, and written by compiled graphs. Skipped where there is no GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import random_model
from engines import MAX_TOKENS, PATIENT
from pair import Answer, Pair
from random_model import HEAD_DIM, HEADS, LAYERS, QUESTION

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

ENGINE: dict[str, Any] = {
    "attention_backend": "TRITON_ATTN",
    "gpu_memory_utilization": 0.1,
    "max_model_len": MAX_TOKENS,
    "block_size": 16,
}
# So that float32 is no less on the GPU.
ENVIRONMENT = {"TRITON_F32_DEFAULT": "ieee"}
NHD = {"VLLM_KV_CACHE_LAYOUT": "NHD"}
FP8 = {"kv_cache_dtype": "fp8"}
# Of DeepSeek's kind, with no experts, in the sizes that kernels for it want.
LATENT = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": LAYERS,
    "head_dim": 64,
}
LATENT_ENGINE = {"dtype": "bfloat16", "attention_backend": "TRITON_MLA"}
PROMPTS, ANSWER = 8, 12


class Case(NamedTuple):
    """What the engines are given beside ENGINE, and which of them has, alone, the answers of the
    pair: the same, or, where the two round otherwise, the same first tokens but for one."""

    prefill: dict[str, Any] = {}
    decode: dict[str, Any] = {}
    environments: dict[str, dict[str, str]] = {}
    like: str = "prefill"
    same: bool = True
    kind: str = "Llama"
    config: dict[str, Any] = {}
    # Of a token in a layer of the decode engine.
    kv_bytes: int = 2 * HEADS * HEAD_DIM * 4


# One layer, whose KV hangs on the tokens alone: the decode engine would have computed the same.
SHALLOW: dict[str, Any] = {"config": {"num_hidden_layers": 1}}
COMPILED = {"enforce_eager": False}
INTO_FP8 = Case({}, FP8, like="decode", kv_bytes=2 * HEADS * HEAD_DIM, **SHALLOW)
LATENTS = Case(
    LATENT_ENGINE,
    LATENT_ENGINE,
    same=False,
    kind="DeepseekV2",
    config=LATENT,
    kv_bytes=(512 + 64) * 2,
)
CASES = {
    "other_blocks": Case({"block_size": 64}),
    "longer_blocks": Case({}, {"block_size": 64}),
    "other_order": Case(environments={"prefill": NHD}),
    "other_order_and_blocks": Case({"block_size": 32}, environments={"decode": NHD}),
    "compiled": Case(COMPILED, COMPILED),
    "fp8": Case(FP8, FP8, kv_bytes=2 * HEADS * HEAD_DIM),
    "into_fp8": INTO_FP8,
    "into_fp8_of_other_blocks": INTO_FP8._replace(
        prefill={"block_size": 64}, environments={"prefill": NHD}
    ),
    "out_of_fp8": Case(FP8, {}, same=False, **SHALLOW),
    "latent": LATENTS,
    "latent_of_other_blocks": LATENTS._replace(prefill=LATENT_ENGINE | {"block_size": 64}),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def pair(case: Case, tmp_path: Path) -> Iterator[Pair]:
    model = random_model.make(tmp_path / "model", case.kind, **case.config)
    environments = {
        side: ENVIRONMENT | case.environments.get(side, {}) for side in ("prefill", "decode")
    }
    with Pair(
        model,
        tmp_path,
        prefill=ENGINE | case.prefill,
        decode=ENGINE | case.decode | {"enable_prefix_caching": False},
        environments=environments,
        **PATIENT,
    ) as pair:
        yield pair


def agree(answers: list[Answer], expected: list[Answer]) -> list[int]:
    """How many tokens each begins with that are the expected ones."""
    counts = []
    for answer, other in zip(answers, expected, strict=True):
        assert (answer.error, len(answer.tokens)) == ("", len(other.tokens))
        pairs = list(zip(answer.tokens, other.tokens, strict=True))
        counts.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs)))
    return counts


def test_answers_are_those_of_one_engine(pair: Pair, case: Case):
    words = pair.prefill.tokenize(QUESTION * 20)
    prompts = [words[start : start + 20 + 33 * start] for start in range(PROMPTS)]
    alone = getattr(pair, case.like)
    expected = [alone.generate(prompt, ANSWER, ignore_eos=True) for prompt in prompts]
    assert len({tuple(answer.tokens) for answer in expected}) == PROMPTS
    # The last one at once: it is named by its tokens, and what it is called hangs on no block size.
    answers = [pair.answer(prompt, ANSWER, ignore_eos=True) for prompt in prompts[:-1]]
    answers.append(pair.answer_at_once(prompts[-1], ANSWER, ignore_eos=True))
    counts = agree(answers, expected)
    if case.same:
        assert counts == [ANSWER] * PROMPTS
    else:  # Tokens that are as good as others are told apart by rounding.
        assert sum(count > 0 for count in counts) >= PROMPTS - 1, counts
    layers = case.config.get("num_hidden_layers", LAYERS)
    block = (ENGINE | case.decode)["block_size"]
    for prompt, event in zip(prompts, pair.wait_trace("decode", PROMPTS), strict=True):
        assert event["ok"]
        assert event["bytes"] == event["blocks"] * block * layers * case.kv_bytes
        # The last token is the decode engine's own.
        assert event["blocks"] == -(-(len(prompt) - 1) // block)
    pair.prefill.wait_idle()
    pair.decode.wait_idle()
