"""What KV cache a model's config.json asks for, also compared with transformers' own reading."""

import json

import kvferry
import pytest

# The fields that count of config.json files on Hugging Face.
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
MISTRAL_7B = LLAMA_3_8B | {
    "architectures": ["MistralForCausalLM"],
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "sliding_window": 4096,
}
QWEN_2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
QWEN_3_14B = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 40960,
    "max_window_layers": 40,
    "model_type": "qwen3",
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
GEMMA_2_9B = {
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 256,
    "hidden_size": 3584,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
GEMMA_3_4B_TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "sliding_window": 1024,
    "torch_dtype": "bfloat16",
}
# As inside of multimodal models' files, which leave out what the class says.
GEMMA_TEXT = {"hidden_size": 3072, "model_type": "gemma", "torch_dtype": "bfloat16"}
GEMMA_2_TEXT = {"hidden_size": 2304, "model_type": "gemma2", "torch_dtype": "bfloat16"}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
DEEPSEEK_V3_2 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "model_type": "deepseek_v32",
}
# As inside of DeepSeek-VL2's file, whose class says the ranks.
DEEPSEEK_V2_TEXT = {
    "hidden_size": 2048,
    "max_position_embeddings": 4096,
    "model_type": "deepseek_v2",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "torch_dtype": "bfloat16",
}
# Command R7B's, which does not say which layers have windows, its class does.
COHERE_2_7B = {
    "architectures": ["Cohere2ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 4096,
    "max_position_embeddings": 132096,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
LONGCAT_FLASH = {
    "architectures": ["LongcatFlashForCausalLM"],
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "model_type": "longcat_flash",
    "num_attention_heads": 64,
    "num_layers": 28,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
QWEN_3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "model_type": "qwen3_next",
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}


def read(config: dict, **options) -> kvferry.ModelConfig:
    return kvferry.ModelConfig.from_json(json.dumps(config), **options)


def test_llama():
    config = read(LLAMA_3_8B, tensor_parallel_size=4)
    assert config.architecture == "LlamaForCausalLM" and config.model_type == "llama"
    assert config.layers == ["full"] * 32 and config.num_attention_layers == 32
    assert config.attention == "mha" and config.num_kv_heads == 2
    assert config.head_dim == 128 and config.v_head_dim == 128
    assert config.dtype == "bfloat16" and config.kv_dtype == "bfloat16"
    assert config.kv_bytes_per_token == 32 * config.layer_kv_bytes_per_token == 32 << 10
    assert config.sliding_window_tokens == 0 and config.max_position_embeddings == 8192
    assert config.indexer is None and config.linear is None
    assert config == read(LLAMA_3_8B, tensor_parallel_size=4)
    assert config != read(LLAMA_3_8B)


def test_mla_with_indexer():
    config = read(DEEPSEEK_V3_2, tensor_parallel_size=8, kv_cache_dtype="fp8")
    assert config.attention == "mla" and config.kv_dtype == "float8_e4m3fn"
    assert (config.kv_lora_rank, config.qk_rope_head_dim) == (512, 64)
    assert config.kv_bytes_per_token == 61 * 576
    indexer = config.indexer
    assert (indexer.num_heads, indexer.head_dim, indexer.topk) == (64, 128, 2048)


def test_linear_layers_size_a_gdn_pool():
    config = read(QWEN_3_NEXT_80B, dtype="half")
    assert config.num_attention_layers == 12 and config.num_linear_layers == 36
    assert config.layers[:4] == ["linear", "linear", "linear", "full"]
    shape = config.linear
    pool = kvferry.GdnPool(
        max_requests=2,
        num_layers=shape.num_layers,
        num_v_heads=shape.num_v_heads,
        head_k_dim=shape.head_k_dim,
        head_v_dim=shape.head_v_dim,
        conv_dim=shape.conv_dim,
        conv_kernel_size=shape.conv_kernel_size,
        dtype=shape.dtype,
    )
    assert pool.bytes == 36 * 3 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)


def test_errors():
    with pytest.raises(ValueError, match="num_hidden_layers is missing; looked for"):
        read(LLAMA_3_8B | {"num_hidden_layers": None})
    with pytest.raises(ValueError, match="tensor_parallel_size 3"):
        read(LLAMA_3_8B, tensor_parallel_size=3)
    with pytest.raises(ValueError, match="option kv_cache_dtype is 'int3'"):
        read(LLAMA_3_8B, kv_cache_dtype="int3")
    with pytest.raises(ValueError, match="not a JSON object"):
        kvferry.ModelConfig.from_json("config.json")
    with pytest.raises(kvferry.Error, match="global_head_dim is 512"):
        read(LLAMA_3_8B | {"global_head_dim": 512})


KINDS = {
    "full_attention": "full",
    "indexed_attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "linear",
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "file",
    [
        LLAMA_3_8B,
        LLAMA_3_8B | {"num_key_value_heads": None},
        MISTRAL_7B,
        MISTRAL_7B | {"sliding_window": None, "head_dim": 64},
        QWEN_2_5_7B,
        QWEN_2_5_7B | {"use_sliding_window": True, "max_window_layers": 20},
        QWEN_3_14B,
        QWEN_3_14B | {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 0},
        GEMMA_TEXT,
        GEMMA_2_TEXT,
        GEMMA_2_9B,
        GEMMA_3_4B_TEXT,
        GPT_OSS_20B,
        COHERE_2_7B,
        DEEPSEEK_V2_TEXT,
        DEEPSEEK_V3,
        DEEPSEEK_V3_2,
        LONGCAT_FLASH,
        QWEN_3_NEXT_80B,
        QWEN_3_NEXT_80B | {"full_attention_interval": 3},
    ],
    ids=lambda file: file["model_type"],
)
def test_transformers_reads_the_same(file, dtype):
    """Of the file, and of the file that transformers writes back, with all its defaults."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    file = file | {"torch_dtype": dtype}
    theirs = transformers.AutoConfig.for_model(**file)
    for ours in (
        read(file),
        kvferry.ModelConfig.from_json(theirs.to_json_string(use_diff=False)),
    ):
        assert len(ours.layers) == theirs.num_hidden_layers
        types = getattr(theirs, "layer_types", None)
        if types is None:
            window = getattr(theirs, "sliding_window", None)
            types = ["sliding_attention" if window else "full_attention"] * len(ours.layers)
        assert ours.layers == [KINDS[kind] for kind in types]
        if "sliding" in ours.layers:
            assert ours.sliding_window_tokens == theirs.sliding_window
        assert ours.max_position_embeddings == theirs.max_position_embeddings
        assert ours.dtype == str(theirs.dtype).removeprefix("torch.") == dtype
        if ours.attention == "mla":
            assert ours.head_dim == theirs.kv_lora_rank + theirs.qk_rope_head_dim
            continue
        assert ours.num_kv_heads == theirs.num_key_value_heads
        default = theirs.hidden_size // theirs.num_attention_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or default)


@pytest.mark.parametrize(
    ("model_type", "refusal"),
    [
        ("gemma4_text", "per_layer_config is"),
        ("mamba2", "state_size is 128"),
        ("xlstm", "qk_dim_factor is 0.5"),
        ("falcon_h1", "mamba_d_state is"),
        ("bamba", "mamba_d_state is"),
    ],
)
def test_files_that_transformers_writes_of_models_with_other_caches(model_type, refusal):
    """They are refused by what they have, although Python writes Infinity in some of them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    try:
        theirs = transformers.AutoConfig.for_model(model_type, dtype="bfloat16")
    except ValueError as unknown:
        pytest.skip(str(unknown).splitlines()[0])
    file = json.dumps(theirs.to_dict(), default=str)
    with pytest.raises(kvferry.Error, match=refusal):
        kvferry.ModelConfig.from_json(file)


def test_how_the_checkpoint_stores_kv():
    quantised = LLAMA_3_8B | {
        "quantization_config": {
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}
        }
    }
    assert kvferry.ModelConfig.from_json(json.dumps(quantised)).kv_dtype == "float8_e4m3fn"
    modelopt = json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}})
    config = kvferry.ModelConfig.from_json(json.dumps(LLAMA_3_8B), hf_quant_config=modelopt)
    assert (config.kv_dtype, config.kv_blocks) == ("float8_e4m3fn", None)
    quantised["quantization_config"] = {"kv_cache_quant_algo": "NVFP4"}
    with pytest.raises(ValueError, match='kv_cache_quant_algo is "NVFP4"'):
        kvferry.ModelConfig.from_json(json.dumps(quantised))
    config = kvferry.ModelConfig.from_json(json.dumps(quantised), kv_cache_dtype="fp4")
    assert (config.kv_dtype, config.kv_blocks) == ("uint8", "mxfp4")
