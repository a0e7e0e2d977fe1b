"""Prompts with LoRA adapters: the KV that moves is that of the adapter, and no other one's."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import random_model
from engines import BLOCK_TOKENS, DECODE_ENGINE, ENGINE, PATIENT
from pair import Pair
from random_model import HEAD_DIM, HEADS, LAYERS, QUESTION

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def make_adapter(folder: Path, seed: int) -> None:
    """One of random weights, on what makes K and V among others."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name in ("q_proj", "k_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a, b = (8, 256), (HEADS * HEAD_DIM, 8)
            weights[f"{prefix}.lora_A.weight"] = torch.randn(a, generator=random)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(b, generator=random)
    safetensors.save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("lora")
    with Pair(
        random_model.make(folder / "model", "Llama"),
        folder,
        prefill=ENGINE | LORA,
        decode=DECODE_ENGINE | LORA,
        prefill_transfer=PATIENT["prefill_transfer"],
        decode_transfer=PATIENT["decode_transfer"],
    ) as pair:
        # The decode engine has the same adapters elsewhere, as on another machine.
        for side in ("prefill", "decode"):
            for seed, name in enumerate("ab"):
                make_adapter(folder / side / name, seed)
        yield pair


def adapter(pair: Pair, side: str, name: str | None) -> dict[str, str]:
    return {"lora": str(pair.log_folder / side / name)} if name else {}


@pytest.mark.parametrize("at_once", [False, True])
def test_answers_are_those_of_one_engine(pair: Pair, at_once: bool):
    prompt = pair.prefill.tokenize(f"{'At once. ' * at_once}{QUESTION}")
    answers = []
    for name in ("a", "b", None):
        here, there = adapter(pair, "prefill", name), adapter(pair, "decode", name)
        expected = pair.prefill.generate(prompt, 20, **here)
        fetches = len(pair.trace("decode"))
        if at_once:
            announced, params = pair.params_at_once()
            pair.prefill.start(prompt, 1, announced, **here)
        else:
            params = pair.hand_over(prompt, **here)
        answer = pair.decode.generate(prompt, 20, params, **there)
        assert (answer.error, answer.tokens) == ("", expected.tokens)
        answers.append(tuple(answer.tokens))
        (event,) = pair.wait_trace("decode", fetches + 1)[fetches:]
        assert event["ok"] and event["blocks"] == -(-len(prompt) // BLOCK_TOKENS)
    assert len(set(answers)) == 3


def test_tickets_of_another_adapter_are_no_use(pair: Pair):
    prompt = pair.prefill.tokenize(f"Once more. {QUESTION}")
    of_a = adapter(pair, "prefill", "a")
    params = pair.hand_over(prompt, **of_a)
    answer = pair.decode.generate(prompt, 4, dict(params), **adapter(pair, "decode", "b"))
    assert (answer.finish_reason, answer.tokens) == ("error", [])
    answer = pair.decode.generate(prompt, 4, dict(params), **adapter(pair, "decode", "a"))
    assert answer.tokens == pair.prefill.generate(prompt, 4, **of_a).tokens
