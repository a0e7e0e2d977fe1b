"""vLLM engines in processes of their own, driven over pipes: one that prefills, one that decodes.

A small stand-in for API servers and a router, so that an example or a test is one program:

    with Pair(model) as pair:
        answer = pair.answer([1, 2, 3], max_tokens=32)            # first one engine, then the other
        answer = pair.answer_at_once([1, 2, 3], max_tokens=32)    # both at the same time

An engine is AsyncLLM, as in vLLM's API server, in a child process that reads commands from its
standard input, one JSON object a line, and answers on its standard output. Every wait has a
deadline, and the processes are killed when their owner closes them, exits or dies.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import itertools
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEFAULT_MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
YIELD_S = 100e-6
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}

# Engines that share few cores must not bind their threads to the same one or spin in OpenMP. A
# thread of ours reads standard input, which a forked process would close, waiting for that thread.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# float32: decode computes the last prompt token alone and prefill computed it among others, and in
# bfloat16 that difference in rounding can flip a near-tie between two tokens.
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "seed": 0,
    "kv_cache_memory_bytes": 256 << 20,  # 43 blocks of 128 tokens of SmolLM2-135M in float32.
    "enable_prefix_caching": False,
}


def transfer_config(role: str, **changes: Any) -> dict[str, Any]:
    """A kv_transfer_config for KVFerryConnector. role: "kv_producer" or "kv_consumer"."""
    return {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_role": role,
        "engine_id": role,
    } | changes


def free_port() -> int:
    """One below those that the system hands out by itself, so that nobody gets it meanwhile."""
    for port in random.sample(range(15000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port of a hundred tried is free")


def _all_stopped(group: int) -> bool:
    """Whether no thread of the process group can run."""
    for stat in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # It has ended.
        if int(pgrp) == group and state not in "TtZX":
            return False
    return True


class EngineError(RuntimeError):
    """An engine died, did not answer in time, or answered with an error."""


@dataclasses.dataclass
class Answer:
    """What an engine made of one request."""

    tokens: list[int]
    text: str
    finish_reason: str | None  # "length", "stop", "abort", "error"; None after an exception.
    params: dict[str, Any] | None  # kv_transfer_params for the next engine.
    cached_tokens: int  # Prompt tokens that were not computed: from its own cache or from a peer.
    first_token_ms: float
    total_ms: float
    error: str = ""
    first_token_at: float = 0.0  # time.monotonic(), which all processes of a machine share.


class Request:
    """A request under way."""

    def __init__(self, engine: Engine, key: int):
        self._engine = engine
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        self.key = key

    def answer(self, timeout_s: float = REQUEST_TIMEOUT_S) -> Answer:
        """Waits for the end. Raises EngineError when it does not come."""
        return Answer(**self._engine._wait(self._replies, timeout_s, "an answer"))

    def abort(self) -> None:
        """As when a client hangs up; answer() then returns what there is."""
        self._engine._send(op="abort", key=self.key)


class Engine:
    """One vLLM engine in a process group of its own."""

    SCRIPT = HERE / "pair.py"  # What the process runs: child_main().
    ARGS = ENGINE_ARGS

    def __init__(
        self,
        name: str,
        model: Path | str,
        log_folder: Path,
        environment: dict[str, str] | None = None,
        **engine_args: Any,
    ):
        """Starts it and returns at once; wait_ready() waits. engine_args override ARGS,
        environment what this process's says.
        """
        self.name = name
        self.log_path = log_folder / f"{name}.log"
        arguments = self.ARGS | {"model": str(model)} | engine_args
        environment = os.environ | ENVIRONMENT | (environment or {})
        path = os.pathsep.join(filter(None, [str(HERE), environment.get("PYTHONPATH")]))
        with open(self.log_path, "w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(self.SCRIPT), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment | {"PYTHONPATH": path},
                start_new_session=True,  # So that its own children can be killed with it.
            )
        atexit.register(self.close)
        self._keys = itertools.count(1)
        self._lock = threading.Lock()
        self._ready: queue.Queue[dict[str, Any]] = queue.Queue()
        self._replies: dict[int, queue.Queue[dict[str, Any]]] = {0: self._ready}
        threading.Thread(target=self._read, daemon=True).start()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until it can take requests."""
        self._ready.put(self._wait(self._ready, timeout_s, "its start"))

    def is_ready(self, timeout_s: float) -> bool:
        """Whether it can take requests; waits so long for it. Raises EngineError if it died."""
        try:
            reply = self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return False
        self._ready.put(reply)
        self.wait_ready()
        return True

    def tokenize(self, question: str) -> list[int]:
        """A question as prompt tokens, by the model's chat template."""
        return self._call(op="tokenize", question=question)["tokens"]

    def start(
        self,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> Request:
        """Starts a greedy request. params: kv_transfer_params; sampling: more SamplingParams, and
        with lora=FOLDER the adapter that lies there."""
        request = Request(self, next(self._keys))
        self._replies[request.key] = request._replies
        sampling = {"temperature": 0.0, "max_tokens": max_tokens} | sampling
        if params is not None:
            sampling["extra_args"] = {"kv_transfer_params": params}
        self._send(op="generate", key=request.key, prompt=prompt, sampling=sampling)
        return request

    def generate(
        self, prompt: list[int], max_tokens: int, params: dict[str, Any] | None = None, **more: Any
    ) -> Answer:
        return self.start(prompt, max_tokens, params, **more).answer()

    def reject(self, params: dict[str, Any]) -> None:
        """As when a server turns a request down after it was handed over."""
        self._call(op="reject", params=params)

    def metrics(self) -> dict[str, float]:
        """vLLM's counters, gauges and sums of histograms (NAME_sum), by name or
        name{value of its "source" label}."""
        return self._call(op="metrics")["metrics"]

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Waits until it holds no block and no request. EngineError if that does not come."""
        names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        deadline = time.monotonic() + timeout_s
        while True:
            metrics = self.metrics()
            held = {name: metrics.get(f"vllm:{name}", 0) for name in names}
            if not any(held.values()):
                return
            if time.monotonic() >= deadline:
                raise EngineError(f"{self.name} still holds {held}")
            time.sleep(0.05)

    def memory_maps(self) -> list[str]:
        """Lines of /proc/PID/maps of all its processes."""
        lines: list[str] = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                group = stat.read_text().rpartition(")")[2].split()[2]
                if int(group) == self._process.pid:
                    lines += (stat.parent / "maps").read_text().splitlines()
            except (OSError, ValueError):
                continue  # It has ended.
        return lines

    def log_tail(self, lines: int = 30) -> str:
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops all its processes meanwhile, as on a machine that stalls."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + STOP_TIMEOUT_S
            # A thread stops when it is next scheduled, which on a busy machine is not at once.
            while not _all_stopped(self._process.pid) and time.monotonic() < deadline:
                time.sleep(0.001)
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """As if its machine had died."""
        os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Asks it to end, so that it cleans up; close() makes sure."""
        try:
            self._send(op="quit", key=0)
        except EngineError:
            pass

    def close(self) -> None:
        """Ends it, and kills what is left of it and its children after STOP_TIMEOUT_S."""
        atexit.unregister(self.close)
        try:
            if self._process.poll() is None:
                self.stop()
                self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # Nothing is left.
            self._process.wait()

    def _call(self, **command: Any) -> dict[str, Any]:
        key = next(self._keys)
        replies = self._replies[key] = queue.Queue()
        self._send(key=key, **command)
        return self._wait(replies, REQUEST_TIMEOUT_S, f"an answer to {command['op']}")

    def _send(self, **command: Any) -> None:
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(command) + "\n")
                self._process.stdin.flush()
        except OSError as error:
            raise self._error(f"does not listen any more ({error})") from error

    def _wait(
        self, replies: queue.Queue[dict[str, Any]], timeout_s: float, what: str
    ) -> dict[str, Any]:
        try:
            reply = replies.get(timeout=timeout_s)
        except queue.Empty:
            raise self._error(f"took more than {timeout_s:.0f} s for {what}") from None
        if "died" in reply:
            replies.put(reply)
            raise self._error(f"ended ({reply['died']}) before {what}")
        return reply

    def _error(self, what: str) -> EngineError:
        return EngineError(
            f"the {self.name} engine {what}; the end of {self.log_path}:\n{self.log_tail()}"
        )

    def _read(self) -> None:
        for line in self._process.stdout:
            reply = json.loads(line)
            replies = self._replies.get(reply.pop("key"))
            if replies is not None:
                replies.put(reply)
        code = self._process.wait()
        for replies in list(self._replies.values()):
            replies.put({"died": f"exit code {code}"})


class Pair:
    """A prefill engine and a decode engine, and a trace of what moved between them."""

    def __init__(
        self,
        model: Path | str = DEFAULT_MODEL,
        log_folder: Path | None = None,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        prefill_transfer: dict[str, Any] | None = None,
        decode_transfer: dict[str, Any] | None = None,
        environments: dict[str, dict[str, str]] | None = None,
    ):
        """Starts both and returns at once. The dicts change engine arguments and
        kv_transfer_configs; environments has those of "prefill" and "decode".

        In a kv_transfer_config, kv_connector_extra_config gets a trace_path for trace().
        """
        self.log_folder = log_folder or Path(tempfile.mkdtemp(prefix="kvferry-pair-"))
        self._environments = environments or {}
        self._prefill_port = free_port()  # Known beforehand, for answer_at_once(), as the next.
        self._prefill_ranks = (prefill or {}).get("tensor_parallel_size", 1)
        self.prefill = self._engine("prefill", "kv_producer", model, prefill, prefill_transfer)
        self.decode = self._engine("decode", "kv_consumer", model, decode, decode_transfer)

    def _engine(
        self,
        name: str,
        role: str,
        model: Path | str,
        arguments: dict[str, Any] | None,
        transfer: dict[str, Any] | None,
    ) -> Engine:
        changes = dict(transfer or {})
        extra: dict[str, Any] = {"trace_path": str(self.log_folder / f"{name}.trace")}
        if name == "prefill":
            extra["listen_port"] = self._prefill_port
        extra |= changes.pop("kv_connector_extra_config", {})
        config = transfer_config(role, kv_connector_extra_config=extra, **changes)
        if name == "decode":  # Prefix caching there shows that cached blocks are not moved again.
            arguments = {"enable_prefix_caching": True} | (arguments or {})
        return Engine(
            name,
            model,
            self.log_folder,
            self._environments.get(name),
            kv_transfer_config=config,
            **(arguments or {}),
        )

    def wait_ready(self) -> None:
        self.prefill.wait_ready()
        self.decode.wait_ready()

    def hand_over(self, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        """Prefills a prompt; what the decode engine has to be given to fetch it."""
        answer = self.prefill.generate(prompt, 1, dict(REMOTE_DECODE), **sampling)
        if not answer.params:
            raise EngineError(f"the prefill engine returned no kv_transfer_params: {answer}")
        return answer.params

    def answer(self, prompt: list[int], max_tokens: int, **sampling: Any) -> Answer:
        """Prefills in one engine and decodes in the other, as a router would have it."""
        return self.decode.generate(prompt, max_tokens, self.hand_over(prompt), **sampling)

    def start_at_once(
        self, prompt: list[int], max_tokens: int, **sampling: Any
    ) -> tuple[Request, Request]:
        """Gives a request to both engines at the same time, as a router can that knows where the
        prefill engine listens: the decode engine fetches what the other one has computed while
        that computes the rest."""
        announced, awaited = self.params_at_once()
        prefill = self.prefill.start(prompt, 1, announced)
        return prefill, self.decode.start(prompt, max_tokens, awaited, **sampling)

    def params_at_once(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """kv_transfer_params of a request that neither engine has yet: the prefill engine's and the
        decode engine's."""
        transfer = {"transfer_id": uuid.uuid4().hex}
        source = {
            "remote_host": "127.0.0.1",
            "remote_port": self._prefill_port,
            "tp_size": self._prefill_ranks,
        }
        awaited = {"do_remote_prefill": True, "do_remote_decode": False}
        return REMOTE_DECODE | transfer, awaited | transfer | source

    def answer_at_once(self, prompt: list[int], max_tokens: int, **sampling: Any) -> Answer:
        """As answer(), but both engines get the request at the same time."""
        prefill, decode = self.start_at_once(prompt, max_tokens, **sampling)
        prefill.answer()
        return decode.answer()

    def trace(self, name: str) -> list[dict[str, Any]]:
        """What the connector in "prefill" (leases) or "decode" (fetches) has written so far."""
        path = self.log_folder / f"{name}.trace"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def wait_trace(self, name: str, count: int, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """Waits until the trace has `count` events. Raises EngineError if they do not come."""
        deadline = time.monotonic() + timeout_s
        while len(events := self.trace(name)) < count:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{len(events)} of {count} events in the {name} trace after {timeout_s:.0f} s"
                )
            time.sleep(0.02)
        return events

    def close(self) -> None:
        self.prefill.stop()
        self.decode.stop()
        self.prefill.close()
        self.decode.close()

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- The child process


class Child:
    """Runs the engine and does what the commands say."""

    def __init__(self, out: Any):
        self._out = out
        self._running: dict[int, str] = {}  # Request ids by key.
        self._tasks: set[asyncio.Task[None]] = set()
        self._loras: list[str] = []  # Folders; vLLM wants adapters numbered from 1 on.

    def reply(self, key: int, **fields: Any) -> None:
        print(json.dumps({"key": key} | fields), file=self._out, flush=True)

    async def run(self, arguments: dict[str, Any]) -> None:
        loop, commands = asyncio.get_running_loop(), asyncio.Queue()
        threading.Thread(target=_read_commands, args=(loop, commands), daemon=True).start()
        engine = self.make_engine(arguments)
        try:
            self.reply(0)
            while (command := await commands.get())["op"] != "quit":
                task = asyncio.create_task(self._do(engine, **command))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            engine.shutdown()

    def make_engine(self, arguments: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def _do(self, engine: Any, op: str, key: int, **fields: Any) -> None:
        if op == "generate":
            await self._generate(engine, key, **fields)
        elif op == "abort":
            while key in self._running:  # Engines ignore it while the request is on its way in.
                await self.abort(engine, self._running[key])
                await asyncio.sleep(0.005)
        elif op == "reject":
            await engine.notify_kv_transfer_request_rejected(f"request-{key}", fields["params"])
            self.reply(key)
        elif op == "tokenize":
            chat = [{"role": "user", "content": fields["question"]}]
            tokens = engine.get_tokenizer().apply_chat_template(
                chat, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            self.reply(key, tokens=list(tokens))
        elif op == "metrics":
            self.reply(key, metrics=_metrics())

    async def abort(self, engine: Any, request_id: str) -> None:
        await engine.abort(request_id)

    async def _generate(
        self, engine: Any, key: int, prompt: list[int], sampling: dict[str, Any]
    ) -> None:
        request_id = self._running[key] = f"request-{key}"
        answer = Answer([], "", None, None, 0, 0.0, 0.0)
        started = time.monotonic()
        try:
            async for _ in self.answer(engine, request_id, prompt, sampling, answer):
                if not answer.first_token_ms and answer.tokens:
                    answer.first_token_at = time.monotonic()
                    answer.first_token_ms = (answer.first_token_at - started) * 1e3
        except Exception as caught:  # Whatever the engine raises is the answer.
            answer.error = f"{type(caught).__name__}: {caught}"
        finally:
            del self._running[key]
        answer.total_ms = (time.monotonic() - started) * 1e3
        self.reply(key, **dataclasses.asdict(answer))

    async def answer(
        self,
        engine: Any,
        request_id: str,
        prompt: list[int],
        sampling: dict[str, Any],
        answer: Answer,
    ) -> AsyncIterator[None]:
        """Fills in the answer, as far as it has come at each step."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        lora = None
        if folder := sampling.pop("lora", None):
            if folder not in self._loras:
                self._loras.append(folder)
            lora = LoRARequest(Path(folder).name, 1 + self._loras.index(folder), folder)
        async for last in engine.generate(
            {"prompt_token_ids": prompt}, SamplingParams(**sampling), request_id, lora_request=lora
        ):
            output = last.outputs[0]
            answer.tokens, answer.text = list(output.token_ids), output.text
            answer.finish_reason, answer.params = output.finish_reason, last.kv_transfer_params
            answer.cached_tokens = last.num_cached_tokens or 0
            yield


def _metrics() -> dict[str, float]:
    from vllm.v1.metrics.reader import get_metrics_snapshot

    values: dict[str, float] = {}
    for metric in get_metrics_snapshot():
        is_histogram = hasattr(metric, "sum")
        if not is_histogram and not hasattr(metric, "value"):
            continue
        name = f"{metric.name}_sum" if is_histogram else metric.name
        if (source := metric.labels.get("source")) is not None:
            name = f"{name}{{{source}}}"
        values[name] = values.get(name, 0) + (metric.sum if is_histogram else metric.value)
    return values


_owner_is_gone = threading.Event()


def _kill_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _read_commands(loop: asyncio.AbstractEventLoop, commands: asyncio.Queue[Any]) -> None:
    for line in sys.stdin:
        loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))
    # The owner is gone. vLLM's processes go too, and leave no shared memory behind if they can.
    _owner_is_gone.set()
    loop.call_soon_threadsafe(commands.put_nowait, {"op": "quit"})
    time.sleep(STOP_TIMEOUT_S)
    _kill_group()


def child_main(child: type[Child]) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What vLLM prints goes to the log, not between our answers.
    try:
        asyncio.run(child(out).run(json.loads(sys.argv[1])))
    finally:
        if _owner_is_gone.is_set():  # Else the owner kills what is left.
            _kill_group()


if __name__ in ("__main__", "__mp_main__"):  # The second in the processes that vLLM spawns.
    # vLLM's workers look for their next step for a second, with os.sched_yield() in between. On few
    # processors Linux (6.18, seen) then keeps others that want one waiting for seconds a turn, and
    # engines of several ranks, which wait for each other, stand still for minutes.
    os.sched_yield = lambda: time.sleep(YIELD_S)

if __name__ == "__main__":
    child_main(Child)
