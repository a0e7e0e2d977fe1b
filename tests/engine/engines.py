"""Three vLLM engines for the tests here, and what tests do with them."""

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "vllm_pair"))

from pair import DEFAULT_MODEL, Engine, Pair, transfer_config  # noqa: E402

MODEL = Path(os.environ.get("KVFERRY_TEST_MODEL", DEFAULT_MODEL))
BLOCK_TOKENS = 32
MAX_TOKENS = 1280
NUM_BLOCKS = 48  # Block 0 is vLLM's own.
# Of engines that are given prompts in both ways (docs/vllm.md, Both engines at once).
DECODE_BLOCKS = 1 + 2 * MAX_TOKENS // BLOCK_TOKENS
SPARE_LEASE_MS = 2000
# With its queue in prefill, on a machine that has much to do.
FETCH_TIMEOUT_MS = 90_000
# Of pairs that other tests start beside these engines, and that may be kept waiting by all of them.
PATIENT = {
    "prefill_transfer": {"kv_connector_extra_config": {"lease_ms": 2 * FETCH_TIMEOUT_MS}},
    "decode_transfer": {"kv_connector_extra_config": {"fetch_timeout_ms": FETCH_TIMEOUT_MS}},
}
# More than one is for test_random.py, and for test_states.py if it is the same on both sides: the
# others count what one rank traces.
PREFILL_RANKS, _, DECODE_RANKS = os.environ.get("KVFERRY_TEST_TP_SIZE", "1").partition(":")
# Of all engines, as a GPU needs them: docs/vllm.md, On a GPU.
MORE_ARGUMENTS = json.loads(os.environ.get("KVFERRY_TEST_ENGINE_ARGS", "{}"))
# Small blocks and few of them: leaks show soon.
ENGINE = {
    "block_size": BLOCK_TOKENS,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "max_model_len": MAX_TOKENS,
    "tensor_parallel_size": int(PREFILL_RANKS),
} | MORE_ARGUMENTS
DECODE_ENGINE = ENGINE | {
    "num_gpu_blocks_override": DECODE_BLOCKS,
    "tensor_parallel_size": int(DECODE_RANKS or PREFILL_RANKS),
}


# The longest prompts take several steps to prefill. They are begun before there is room for all of
# it, so that they can be preempted in between.
CHUNKED = {
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 128,
    "scheduler_reserve_full_isl": False,
}


class Engines(Pair):
    """prefill and decode: a pair as in production. spare: a kv_both engine with what a pair must
    not have.

    That is leases that expire soon, kv_load_failure_policy "recompute", and a connector that zeroes
    the KV it fetched while the file `break_switch` exists.
    """

    def __init__(self, folder: Path):
        """Starts all three and returns at once."""
        self.break_switch = folder / "break"
        os.environ["KVFERRY_BREAK_FILE"] = str(self.break_switch)
        super().__init__(
            MODEL,
            folder,
            prefill=ENGINE | CHUNKED,
            decode=DECODE_ENGINE,
            decode_transfer={
                "kv_connector_extra_config": {
                    "connect_timeout_ms": 5000,
                    "fetch_timeout_ms": FETCH_TIMEOUT_MS,
                }
            },
        )
        options = {
            "lease_ms": SPARE_LEASE_MS,
            "fetch_timeout_ms": FETCH_TIMEOUT_MS,
            "trace_path": str(folder / "spare.trace"),
        }
        transfer = transfer_config(
            "kv_both",
            kv_connector="BrokenKVConnector",
            kv_connector_module_path="broken_connector",
            kv_connector_extra_config=options,
            kv_load_failure_policy="recompute",
            engine_id="spare",
        )
        self.spare = Engine("spare", MODEL, folder, kv_transfer_config=transfer, **DECODE_ENGINE)

    def wait_ready(self) -> None:
        super().wait_ready()
        self.spare.wait_ready()

    def close(self) -> None:
        self.spare.stop()
        super().close()
        self.spare.close()

    def wait_metric(self, engine: Engine, name: str, more_than: float) -> None:
        """Waits until a metric of the engine exceeds a value. Fails if it does not in a minute."""
        deadline = time.monotonic() + 60.0
        while (value := engine.metrics().get(name, 0)) <= more_than:
            assert time.monotonic() < deadline, f"{engine.name}: {name} stays at {value}"
            time.sleep(0.02)

    def check_alive(self) -> None:
        """The pair serves a request as if nothing had happened, and no block is lost."""
        prompt = self.decode.tokenize(f"How are you? It is {time.monotonic_ns()}.")
        expected = self.prefill.generate(prompt, 4)
        assert self.answer(prompt, 4).tokens == expected.tokens != []
        self.prefill.wait_idle()
        self.decode.wait_idle()
