"""An SGLang server's engine in a process of its own, driven as pair.py drives vLLM's."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples" / "vllm_pair"))

from pair import Answer, Child, Engine, child_main  # noqa: E402

# Of all servers, as a GPU needs them, such as {"device": "cuda", "attention_backend": "triton",
# "mem_fraction_static": 0.2}.
MORE_ARGUMENTS = json.loads(os.environ.get("KVFERRY_TEST_SGLANG_ARGS", "{}"))
DEVICE = MORE_ARGUMENTS.get("device", "cpu")


class Server(Engine):
    """mode: "prefill" or "decode". The params of a request say where both servers find each other:
    bootstrap_host, bootstrap_port and bootstrap_room."""

    SCRIPT = Path(__file__)
    # float32 and no overlap of steps: what SGLang on a CPU can do, and what makes the same tokens
    # as transformers.
    ARGS = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "dtype": "float32",
        "page_size": 16,
        "chunked_prefill_size": 64,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "sleep_on_idle": True,
        "host": "127.0.0.1",
        "disaggregation_transfer_backend": "kvferry",
        # The default wants 10 GiB of memory free.
        "disaggregation_decode_retraction_backup": "cpu_tensor",
        "log_level": "info",
    } | MORE_ARGUMENTS

    def __init__(self, mode: str, model: Path, log_folder: Path, bootstrap_port: int, **arguments):
        paths = [os.environ.get("PYTHONPATH")]
        if DEVICE == "cpu":
            paths.insert(0, str(HERE / "cpu"))
        else:  # Triton is the real one there.
            paths.append(os.environ.get("KVFERRY_TEST_SGLANG"))
        path = os.pathsep.join(filter(None, paths))
        super().__init__(
            mode,
            model,
            log_folder,
            {"PYTHONPATH": path, "SGLANG_HOST_IP": "127.0.0.1"},
            disaggregation_mode=mode,
            disaggregation_bootstrap_port=bootstrap_port,
            **arguments,
        )


class _Child(Child):
    def make_engine(self, arguments: dict[str, Any]) -> Any:
        import sglang

        return sglang.Engine(model_path=arguments.pop("model"), **arguments)

    async def abort(self, engine: Any, request_id: str) -> None:
        engine.tokenizer_manager.abort_request(request_id)

    async def answer(
        self,
        engine: Any,
        request_id: str,
        prompt: list[int],
        sampling: dict[str, Any],
        answer: Answer,
    ) -> AsyncIterator[None]:
        where = sampling.pop("extra_args")["kv_transfer_params"]
        sampling["max_new_tokens"] = sampling.pop("max_tokens")
        stream = await engine.async_generate(
            input_ids=prompt,
            sampling_params=sampling | {"ignore_eos": True},
            stream=True,
            rid=request_id,
            **where,
        )
        async for last in stream:
            answer.tokens, answer.text = list(last["output_ids"]), last["text"]
            meta = last["meta_info"]
            answer.finish_reason = (meta["finish_reason"] or {}).get("type")
            answer.error = (meta["finish_reason"] or {}).get("message") or ""
            answer.cached_tokens = meta["cached_tokens"]
            yield


if __name__ == "__main__":
    child_main(_Child)
