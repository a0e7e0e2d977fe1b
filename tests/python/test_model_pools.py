"""From a model's config.json to its pools, in Python."""

import json

import kvferry
import numpy as np
import pytest

torch = pytest.importorskip("torch")

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 16,
    "hidden_size": 64,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "sliding_window": 16,
    "sliding_window_pattern": 3,
    "torch_dtype": "bfloat16",
}
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "head_dim": 32,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}


DEEPSEEK_V3_2 = {
    "index_head_dim": 128,
    "index_n_heads": 2,
    "index_topk": 4,
    "kv_lora_rank": 64,
    "max_position_embeddings": 64,
    "num_hidden_layers": 1,
    "qk_rope_head_dim": 16,
    "torch_dtype": "float32",
}


def make(config: dict, **options) -> kvferry.ModelPools:
    model = kvferry.ModelConfig.from_json(json.dumps(config))
    return kvferry.ModelPools.create(model, page_size=4, max_requests=3, **options)


def test_full_and_sliding_layers():
    pools = make(GEMMA, num_tokens=64, window_ratio=0.5)
    assert pools.slots is None and pools.states is None
    assert (pools.kv.num_tokens, pools.window_kv.num_tokens) == (64, 32)
    assert [pools.place_of(layer) for layer in range(4)] == [
        ("sliding", 0),
        ("sliding", 1),
        ("full", 0),
        ("sliding", 2),
    ]
    gone, mine = pools.window_slots.alloc(8), pools.window_slots.alloc(4)
    pools.window_slots.free_window(gone)
    k, v = torch.randn(2, 4, 1, 16).bfloat16()
    for layer in range(6):
        pools.set_kv_buffer(layer, mine, [k, v])
    window = torch.from_numpy(pools.window_slots.to_window(mine))
    assert torch.equal(torch.from_dlpack(pools.window_kv.key_buffer(2))[window], k)
    assert torch.equal(torch.from_dlpack(pools.kv.value_buffer(0))[torch.from_numpy(mine)], v)
    with pytest.raises(ValueError, match="layer 6"):
        pools.place_of(6)


def test_the_callers_kv_dtype():
    pools = make(GEMMA, num_tokens=64, kv_cache_dtype="fp8")
    assert (pools.model.kv_dtype, pools.kv.layout.dtype) == ("float8_e4m3fn",) * 2
    pools = make(GEMMA, num_tokens=64, kv_cache_dtype="fp4")
    assert (pools.model.kv_dtype, pools.model.kv_blocks) == ("uint8", "mxfp4")
    slots = pools.window_slots.alloc(4)
    k, v = torch.randn(2, 4, 1, 16)
    pools.set_kv_buffer(2, slots, [k, v])
    for tensor, rows in ((0, k), (2, v)):
        got = torch.from_numpy(pools.kv.get_quantized("mxfp4", 0, tensor, slots))
        scale = torch.exp2(torch.ceil(torch.log2(rows.abs().amax(-1, keepdim=True) / 6)))
        assert (got - rows).abs().le(scale).all()
    with pytest.raises(ValueError, match="scales of their own"):
        pools.set_kv_buffer(2, slots, [k, v], scales=[1, 1])
    with pytest.raises(ValueError, match="'nvfp4'"):
        make(GEMMA, num_tokens=64, kv_cache_dtype="nvfp4")


def test_rows_beside_blocks_may_be_a_view_of_the_pool_itself():
    model = kvferry.ModelConfig.from_json(json.dumps(DEEPSEEK_V3_2))
    pools = kvferry.ModelPools.create(model, num_tokens=64, page_size=1, kv_cache_dtype="fp4")
    names = [tensor[0] for tensor in pools.kv.layout.tensors]
    keys, scales = (
        torch.from_dlpack(pools.kv.buffer(0, names.index(name)))
        for name in ("index_k", "index_k_scale")
    )
    keys[:] = torch.arange(65)[:, None, None]
    scales[:] = torch.arange(65.0)[:, None, None]
    to = np.arange(11, 51, 2, dtype=np.int32)  # Over the rows.
    want = keys[2:22].clone(), scales[2:22].clone()
    rows = [torch.zeros(20, 80), keys[2:22].view(torch.float8_e4m3fn), scales[2:22]]
    pools.set_kv_buffer(0, to, rows)
    assert torch.equal(keys[torch.from_numpy(to)], want[0])
    assert torch.equal(scales[torch.from_numpy(to)], want[1])


def test_linear_layers():
    pools = make(QWEN3_NEXT, kv_bytes=1 << 20, max_track_slots=2)
    assert pools.window_kv is None and pools.window_slots is None
    assert pools.states.num_slots == 1 + 3 + 2
    assert pools.slots.available_size == pools.kv.num_tokens
    assert pools.requests.req_to_token.shape == (3, 128)
    with pytest.raises(ValueError, match="layer 0 is linear"):
        pools.set_kv_buffer(0, np.array([4]), [torch.zeros(1, 2, 32)] * 2)
    states = torch.from_dlpack(pools.states.recurrent_state)
    del pools
    assert states.shape == (3, 6, 4, 8, 8) and not states.any()
    with pytest.raises(ValueError, match="give one of them"):
        make(QWEN3_NEXT)
