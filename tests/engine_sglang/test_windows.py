"""A model some of whose layers have sliding windows: what is left of them lies in a pool of its
own, and moves beside the KV of the other layers."""

import contextlib
import sys
from pathlib import Path

from servers import Servers, said_by

sys.path.append(str(Path(__file__).resolve().parents[1] / "engine"))
import random_model  # noqa: E402

_WINDOW = 48
_KINDS = ["sliding_attention", "full_attention"]
_MODEL = {
    "sliding_window": _WINDOW,
    "layer_types": _KINDS * (random_model.LAYERS // 2),
    "mlp_layer_types": ["dense"] * random_model.LAYERS,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "num_key_value_heads": 2,
    "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _KINDS},
}


def test_tokens_are_those_of_the_model_alone(tokens, tmp_path):
    model = random_model.make(tmp_path / "model", "Mellum", **_MODEL)
    reference = said_by(model)
    with contextlib.closing(Servers(tmp_path, model)) as servers:
        servers.wait_ready()
        start = "One, two, three. " * 15
        # Less than a window, several chunks of prefill, and a prefix that both servers have.
        long = " ".join(f"number {n}," for n in range(100))
        for text in ("Hello", start, start + "And four?", long, start + "And four?"):
            prompt = tokens(text)
            answer = servers.answer(prompt, 12).tokens
            assert answer == reference(prompt, 12)
            assert len(set(answer)) > 4  # Not the same word over and over, whatever the KV.
        prompts = [tokens(f"{n}. Tell me of {n} rivers. " * (n + 4)) for n in range(5)]
        requests = [servers.start(prompt, 8) for prompt in prompts]
        for prompt, (prefill, decode) in zip(prompts, requests, strict=True):
            assert prefill.answer().error == ""
            assert decode.answer().tokens == reference(prompt)
    # For the KV of either kind of layers.
    assert (tmp_path / "prefill.log").read_text().count("kvferry: prefill tp 0 dp 0 listens") == 2
