"""Models with random weights, small ones of a kind that SmolLM2 is not.

What they say makes no sense, but hangs on every head, layer and token.
"""

from pathlib import Path
from typing import Any

import kvferry
import pytest
from engines import MODEL
from pair import Answer, Pair

HEADS = 4
LAYERS = 4
HEAD_DIM = 64
QUESTION = "Name three rivers, and say of each where it begins, and what lies at its mouth."


def make(folder: Path, kind: str, **config: Any) -> Path:
    """kind: transformers' "Llama", "Gemma2", ... Returns the folder. Skips without SmolLM2, whose
    tokenizer it takes."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if not (MODEL / "config.json").exists():
        pytest.skip(f"no model in {MODEL} (./dev setup makes it; or set KVFERRY_TEST_MODEL)")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "eos_token_id": tokenizer.eos_token_id,
    }
    made = getattr(transformers, f"{kind}Config")(**sizes | config)
    getattr(transformers, f"{kind}ForCausalLM")(made).save_pretrained(folder)
    return folder


def answer_together(pair: Pair, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """By tickets: all prompts are handed over first, and then decoded at the same time."""
    params = [pair.hand_over(prompt) for prompt in prompts]
    requests = [
        pair.decode.start(prompt, max_tokens, it)
        for prompt, it in zip(prompts, params, strict=True)
    ]
    return [request.answer().tokens for request in requests]


def answer_without_a_group(pair: Pair, prompt: list[int], group: int, max_tokens: int) -> Answer:
    """What the decode engine makes of tickets of which a group's first is of no lease. Later the
    right ones are let go of."""
    params = pair.hand_over(prompt)
    right = params["kvferry_group_tickets"][group]
    ticket = kvferry.Ticket.parse(right[0])
    wrong = kvferry.Ticket(
        address=ticket.address,
        epoch=ticket.epoch,
        lease_id=ticket.lease_id ^ 1,
        num_pages=ticket.num_pages,
        num_tokens=ticket.num_tokens,
    )
    params["kvferry_group_tickets"][group] = [str(wrong), *right[1:]]
    answer = pair.decode.generate(prompt, max_tokens, params)
    params["kvferry_group_tickets"][group] = right
    pair.decode.reject(params)
    return answer
