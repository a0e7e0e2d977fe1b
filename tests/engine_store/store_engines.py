"""vLLM engines that keep their KV in a store, and what tests do with them."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from demo import QUESTIONS
from pair import DEFAULT_MODEL, Engine, transfer_config

BLOCK_TOKENS = 32
PROMPT_TOKENS = 1000
FULL_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
ENGINE = {"block_size": BLOCK_TOKENS, "num_gpu_blocks_override": 48, "max_model_len": 1280}
HOST = {"backend": "host", "capacity_bytes": 256 << 20}


class TracedEngine(Engine):
    """An engine of the tests' size with a connector that writes a trace of what it moves."""

    def __init__(self, name: str, folder: Path, trace_path: Path, transfer: dict[str, Any]):
        self.trace_path = trace_path
        super().__init__(name, DEFAULT_MODEL, folder, kv_transfer_config=transfer, **ENGINE)

    def blocks(self, event: str) -> int:
        """Blocks that it has loaded ("load"), saved ("save") or pulled ("fetch") so far."""
        events = [it for it in read_trace(self.trace_path) if it["event"] == event]
        return sum(
            it["blocks"] - it.get("failed", 0) - it.get("blocks_missing", 0) for it in events
        )

    def wait_saved(self, blocks: int) -> None:
        deadline = time.monotonic() + 60.0
        while self.blocks("save") < blocks:
            assert time.monotonic() < deadline, f"{self.blocks('save')} of {blocks} blocks saved"
            time.sleep(0.02)

    def again_where_unanswered(self, loads: Callable[[], bool]) -> bool:
        """Whether loads() ever says that the engine has loaded something. It is called again where
        the engine says that its store did not answer in the time that a step has for it, as on a
        machine that has much to do: for a while it is not asked then."""
        deadline = time.monotonic() + 60.0
        while not (loaded := loads()) and time.monotonic() < deadline:
            if "the KV store is not asked for" not in self.log_path.read_text(errors="replace"):
                break
        return loaded


class StoreEngine(TracedEngine):
    """An engine in store mode."""

    def __init__(self, name: str, folder: Path, store: dict[str, Any], **extra: Any):
        trace_path = folder / f"{name}.trace"
        extra |= {"mode": "store", "store": store, "trace_path": str(trace_path)}
        config = transfer_config(
            "kv_both",
            engine_id=name,
            kv_connector_extra_config=extra,
            kv_load_failure_policy="recompute",
        )
        super().__init__(name, folder, trace_path, config)


def read_trace(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@contextlib.contextmanager
def running(*engines: Engine) -> Iterator[None]:
    try:
        for engine in engines:
            engine.wait_ready()
        yield
    finally:
        for engine in engines:
            engine.stop()
        for engine in engines:
            engine.close()


def long_prompt(engine: Engine) -> list[int]:
    return engine.tokenize(QUESTIONS[1][1])[-PROMPT_TOKENS:]
