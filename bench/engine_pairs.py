"""Measures what the user of a vLLM pair waits for: the decode engine's first token, when the KV of
the prompt comes from the prefill engine through kvferry and through vLLM's own NixlConnector.

Starts a pair of engines on this machine for each of the two, with the same settings, and gives both
the same prompts in turn. With --at-once kvferry's pair also gets each prompt in both engines at the
same time. Prints one row for each length of prompt: medians, with the spread. An
answer whose KV did not come from the prefill engine does not count and makes the exit code 1.
README.md says what is checked and what the columns mean.
"""

import argparse
import contextlib
import csv
import dataclasses
import json
import math
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from run import cpu_model, git_commit
from systems import ROOT
from table import number

sys.path.insert(0, str(ROOT / "examples" / "vllm_pair"))

from pair import (  # noqa: E402
    DEFAULT_MODEL,
    ENGINE_ARGS,
    REMOTE_DECODE,
    Answer,
    EngineError,
    Pair,
    free_port,
)

ANSWER_TOKENS = 8
AT_ONCE = "at once"  # kvferry's pair, given the prompt in both engines at the same time.
PASSAGE_TOKENS = 48
COUNTERS_SECONDS = 10  # The engine's counters follow its answer.
START_SECONDS = 240
ENGINE = {"dtype": "bfloat16", "block_size": 128, "enable_prefix_caching": False}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": None,  # It is one of vLLM's.
}
ZEROING = {"kv_connector": "BrokenKVConnector", "kv_connector_module_path": "broken_connector"}


@dataclasses.dataclass(frozen=True)
class Connector:
    """How a pair's engines are started, and which of vLLM's metrics say what was moved."""

    name: str
    bytes_metric: str
    seconds_metric: str
    transfer: dict
    decode_transfer: dict = dataclasses.field(default_factory=dict)
    packages: str = ""  # A folder of Python packages that only these engines see.
    polls: bool = False  # Its engines use the processor when they have nothing to do.

    def environments(self):
        """By engine. vLLM takes no free port by itself for NIXL's side channel."""
        if self.transfer.get("kv_connector") != "NixlConnector":
            return {}
        path = os.pathsep.join(filter(None, [self.packages, os.environ.get("PYTHONPATH")]))
        ports = {free_port()}
        while len(ports) < 2:
            ports.add(free_port())
        return {
            engine: {
                "PYTHONPATH": path,
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
            }
            for engine, port in zip(("prefill", "decode"), ports, strict=True)
        }


def kvferry(decode_transfer):
    metrics = ("vllm:kvferry_fetched_bytes", "vllm:kvferry_fetch_seconds_sum")
    return Connector("kvferry", *metrics, {}, decode_transfer)


def nixl(packages, kv_device):
    metrics = ("vllm:nixl_bytes_transferred_sum", "vllm:nixl_xfer_time_seconds_sum")
    transfer = NIXL | {"kv_buffer_device": kv_device}
    return Connector("NIXL", *metrics, transfer, packages=str(packages), polls=True)


@dataclasses.dataclass
class Moved:
    """What the decode engine counted of one request, by vLLM's metrics."""

    prompt_tokens: int
    computed_tokens: int  # Of the prompt, by the decode engine itself.
    external_tokens: int  # Of the prompt, through the connector.
    kv_bytes: int
    kv_ms: float


@dataclasses.dataclass
class Sample:
    """One prompt, prefilled by one engine and answered by the other."""

    first_token_ms: float  # Of the decode engine: from its getting the request.
    step_ms: float  # A token of those that follow, in the mean.
    prefill_ms: float  # The other engine's work before, not part of first_token_ms.
    kv_ms: float
    kv_bytes: int
    whole_ms: float = 0.0  # From giving the prompt to the prefill engine on.


@dataclasses.dataclass
class Asked:
    """One prompt, and what both engines made of it."""

    began: float  # time.monotonic()
    prefilled: Answer  # Of the prefill engine: one token.
    answer: Answer
    moved: Moved


def problems(answer, prefilled, moved, prompt_tokens, kv_bytes):
    """What is wrong with a decode engine's answer; empty when its KV came from the other engine.

    prefilled: the prefill engine's answer, of one token. kv_bytes: of all blocks of the prompt.
    """
    found = []
    if answer.error or answer.finish_reason != "length":
        return [f"it ended with {answer.error or answer.finish_reason}"]
    if answer.tokens[:1] != prefilled.tokens:
        found.append(f"its first token is {answer.tokens[:1]}, the prefill's {prefilled.tokens}")
    if moved.external_tokens != prompt_tokens:
        found.append(f"{moved.external_tokens} of {prompt_tokens} tokens came by the connector")
    if moved.computed_tokens > 1:  # The last one is, to sample from it.
        found.append(f"it computed {moved.computed_tokens} of {prompt_tokens} tokens itself")
    if moved.kv_bytes != kv_bytes:
        found.append(f"{moved.kv_bytes} bytes were moved instead of {kv_bytes}")
    return found


def disagreement(answers):
    """What is wrong when the pairs' answers to one prompt differ; "" when they do not."""
    tokens = {name: tuple(answer.tokens) for name, answer in answers.items()}
    return "" if len(set(tokens.values())) <= 1 else f"the pairs' tokens differ: {tokens}"


def prompt_of(tokens, rng):
    """A random passage over and over: how it goes on is sure, to whoever has its KV.

    After random tokens alone several are about as likely, and bfloat16 decides.
    """
    passage = [rng.randrange(1000, 40000) for _ in range(PASSAGE_TOKENS)]
    return (passage * math.ceil(tokens / PASSAGE_TOKENS))[:tokens]


def kv_bytes_of(tokens, model, dtype, block_tokens):
    """Of whole blocks, which is what both connectors move."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    values = config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim * 2
    return math.ceil(tokens / block_tokens) * block_tokens * values * DTYPE_BYTES[dtype]


class EnginePair:
    """The two engines of one connector."""

    def __init__(self, connector, model, arguments, folder, hand_over=True):
        self.connector, self.name, self.hand_over = connector, connector.name, hand_over
        folder.mkdir()
        self.pair = Pair(
            model,
            folder,
            prefill=arguments,
            decode=arguments,
            prefill_transfer=connector.transfer,
            decode_transfer=connector.transfer | connector.decode_transfer,
            environments=connector.environments(),
        )

    @contextlib.contextmanager
    def paused(self):
        with self.pair.prefill.paused(), self.pair.decode.paused():
            yield

    def alone(self, prompt):
        """Both engines compute a prompt themselves; what the decode engine took for it."""
        self.pair.prefill.generate(prompt, 1, ignore_eos=True)
        return self.pair.decode.generate(prompt, 1, ignore_eos=True).first_token_ms

    def counters(self):
        metrics = self.pair.decode.metrics()
        names = ("prompt_tokens", "prompt_tokens_cached", "external_prefix_cache_hits")
        names = [f"vllm:{name}" for name in names]
        names += [self.connector.bytes_metric, self.connector.seconds_metric]
        return [metrics.get(name, 0) for name in names]

    def moved(self, before, prompt_tokens):
        """What was counted since; waits for the counters to follow the answer."""
        deadline = time.monotonic() + COUNTERS_SECONDS
        while True:
            delta = [b - a for a, b in zip(before, self.counters(), strict=True)]
            prompt, cached, external, kv_bytes, seconds = delta
            if prompt >= prompt_tokens and kv_bytes or time.monotonic() > deadline:
                return Moved(prompt, prompt - cached, external, kv_bytes, seconds * 1e3)
            time.sleep(0.05)

    def ask(self, prompt):
        """Prefill first, then decode."""
        before, began = self.counters(), time.monotonic()
        prefilled = self.pair.prefill.generate(prompt, 1, dict(REMOTE_DECODE), ignore_eos=True)
        if prefilled.error or not prefilled.params:
            raise EngineError(f"{self.name}: the prefill engine handed nothing over: {prefilled}")
        params = prefilled.params if self.hand_over else None
        answer = self.pair.decode.generate(prompt, ANSWER_TOKENS, params, ignore_eos=True)
        return Asked(began, prefilled, answer, self.moved(before, len(prompt)))

    def ask_at_once(self, prompt):
        """Both engines get the prompt at the same time."""
        before, began = self.counters(), time.monotonic()
        prefill, decode = self.pair.start_at_once(prompt, ANSWER_TOKENS, ignore_eos=True)
        prefilled, answer = prefill.answer(), decode.answer()
        return Asked(began, prefilled, answer, self.moved(before, len(prompt)))

    def wait_ready(self):
        self.pair.wait_ready()

    def close(self):
        self.pair.close()


def sample_of(asked, at_once=False):
    answer, prefilled, moved = asked.answer, asked.prefilled, asked.moved
    step_ms = (answer.total_ms - answer.first_token_ms) / (ANSWER_TOKENS - 1)
    # There is no getting the request later than the other engine's work then.
    after_prefill_ms = (answer.first_token_at - prefilled.first_token_at) * 1e3
    return Sample(
        after_prefill_ms if at_once else answer.first_token_ms,
        step_ms,
        prefilled.total_ms,
        moved.kv_ms,
        int(moved.kv_bytes),
        (answer.first_token_at - asked.began) * 1e3,
    )


class Row:
    """All samples of one length of prompt, by connector."""

    def __init__(self, tokens, kv_bytes):
        self.tokens, self.kv_bytes = tokens, kv_bytes
        self.alone_ms = {}  # By connector: of its decode engine.
        self.samples = {}

    def values(self, name, field="first_token_ms"):
        return [getattr(sample, field) for sample in self.samples.get(name, [])]

    def median(self, name, field="first_token_ms"):
        values = self.values(name, field)
        return statistics.median(values) if values else None

    def spread(self, name):
        values = self.values(name)
        return f"{min(values):.0f}..{max(values):.0f}" if values else "-"

    def ratio(self):
        ours, theirs = self.median("kvferry"), self.median("NIXL")
        return ours / theirs if ours and theirs else None

    def cells(self, names):
        """What the table shows, by column."""
        alone = statistics.median(self.alone_ms.values()) if self.alone_ms else None
        cells = {
            "tokens": str(self.tokens),
            "MB": number(self.kv_bytes / 1e6, 1),
            "alone": number(alone, 0),
        }
        for name in names:
            cells |= {name: number(self.median(name), 0), f"{name} min..max": self.spread(name)}
        if "NIXL" in names:
            cells["ratio"] = number(self.ratio())
        if AT_ONCE in names:
            for name in names:
                cells[f"{name} whole"] = number(self.median(name, "whole_ms"), 0)
        for name in names:
            cells[f"{name} KV"] = number(self.median(name, "kv_ms"), 1)
        for name in names:
            cells[f"{name} step"] = number(self.median(name, "step_ms"), 0)
        return cells

    def record(self):
        samples = {name: list(map(dataclasses.asdict, it)) for name, it in self.samples.items()}
        return {"tokens": self.tokens, "alone_ms": self.alone_ms, "systems": samples}


class Bench:
    """Pairs that take turns."""

    def __init__(self, pairs, args):
        self.pairs, self.args = pairs, args
        self.rng = random.Random(args.seed)
        self.rows, self.problems = [], []
        self.cold = {}  # By connector: the first request of its session.

    @contextlib.contextmanager
    def turn(self, pair):
        """The engines of others that poll are stopped: they would take cores from this one's."""
        with contextlib.ExitStack() as others:
            for other in self.pairs:
                if other is not pair and other.connector.polls:
                    others.enter_context(other.paused())
            yield

    def round(self, row, turn):
        """One prompt, by every pair; {connector: Sample} of those whose answers are right."""
        prompt, samples, answers = prompt_of(row.tokens, self.rng), {}, {}
        ways = [(pair, pair.name, pair.ask) for pair in self.pairs]
        if self.args.at_once:
            ways.append((self.pairs[0], AT_ONCE, self.pairs[0].ask_at_once))
        for pair, name, ask in ways if turn % 2 == 0 else reversed(ways):
            with self.turn(pair):
                asked = ask(prompt)
            found = problems(asked.answer, asked.prefilled, asked.moved, row.tokens, row.kv_bytes)
            self.problems += [f"{row.tokens} tokens, {name}: {it}" for it in found]
            answers[name] = asked.answer
            if not found:
                samples[name] = sample_of(asked, at_once=name == AT_ONCE)
        if differs := disagreement(answers):
            self.problems.append(f"{row.tokens} tokens: {differs}")
            return {}
        return samples

    def measure(self, tokens, say):
        """Adds a row, which has what was measured also when an EngineError ends it."""
        engine = engine_of(self.args)
        kv_bytes = kv_bytes_of(tokens, self.args.model, engine["dtype"], engine["block_size"])
        row = Row(tokens, kv_bytes)
        self.rows.append(row)
        for pair in self.pairs:
            with self.turn(pair):
                row.alone_ms[pair.name] = pair.alone(prompt_of(tokens, self.rng))
        for turn in range(self.args.reps + 1):
            samples = self.round(row, turn)
            if not self.cold:
                self.cold = samples
            texts = [f"{name} {it.first_token_ms:.0f} ms" for name, it in samples.items()]
            say(f"{tokens} tokens, {turn} of {self.args.reps}: {', '.join(texts) or 'failed'}")
            if turn == 0:  # It warms up.
                continue
            for name, sample in samples.items():
                row.samples.setdefault(name, []).append(sample)


def print_row(texts):
    print("  ".join(text.rjust(max(6, width)) for text, width in texts), flush=True)


def print_rows(rows, names):
    header = list(Row(0, 0).cells(names))
    print_row([(name, len(name)) for name in header])
    for row in rows:
        print_row([(text, len(name)) for name, text in row.cells(names).items()])


def write_files(args, header, names, bench):
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(Row(0, 0).cells(names)))
            writer.writeheader()
            writer.writerows(row.cells(names) for row in bench.rows)
    if args.json:
        cold = {name: dataclasses.asdict(sample) for name, sample in bench.cold.items()}
        results = [row.record() for row in bench.rows]
        whole = {**header, "cold": cold, "results": results, "problems": bench.problems}
        args.json.write_text(json.dumps(whole, indent=1) + "\n")


def lengths_of(text):
    lengths = [int(word) for word in text.split(",")]
    if min(lengths) <= PASSAGE_TOKENS:
        raise argparse.ArgumentTypeError(f"they have to be {PASSAGE_TOKENS + 1} at least")
    return lengths


def object_of(text):
    value = json.loads(text)  # A ValueError says what is wrong, and argparse passes it on.
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object")
    return value


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths",
        type=lengths_of,
        default=[128, 512, 1000, 1900],
        help="prompt tokens, comma-separated; default: 128,512,1000,1900",
    )
    parser.add_argument("--reps", type=int, default=7, help="measured rounds of each (default: 7)")
    parser.add_argument("--seed", type=int, default=1, help="which prompts (default: 1)")
    parser.add_argument(
        "--model",
        type=Path,
        default=DEFAULT_MODEL,
        help="Hugging Face folder (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=list(DTYPE_BYTES), default="bfloat16")
    parser.add_argument(
        "--engine-args",
        type=object_of,
        default={},
        metavar="JSON",
        help='more of vLLM\'s arguments for all engines: {"max_model_len": 8192, "block_size": 16}',
    )
    parser.add_argument(
        "--kv-device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where the engines of this vLLM have their KV; NixlConnector has to be told",
    )
    parser.add_argument(
        "--nixl",
        type=Path,
        metavar="FOLDER",
        help="Python packages of requirements/nixl.txt: measures NixlConnector as well",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a field of kvferry's Config, in both of its engines; may be repeated",
    )
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="also give each prompt to both engines of kvferry at the same time",
    )
    parser.add_argument(
        "--break-kv",
        choices=["drop", "zero"],
        help="to see that it fails: hand nothing over to the decode engines, or zero what that of "
        "kvferry has fetched",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every run there")
    args = parser.parse_args()
    check(args, parser)
    return args


def check(args, parser):
    """Ends the program, before engines are started, when it could not end well."""
    if args.reps < 1:
        parser.error("--reps must be at least 1")
    most = engine_of(args)["max_model_len"] - ANSWER_TOKENS
    if max(args.lengths) > most:
        parser.error(f"--lengths: {most} at most, or see --engine-args (max_model_len)")
    if not (args.model / "config.json").exists():
        parser.error(f"no model in {args.model}; ./dev setup makes it, or see --model")
    if args.nixl and not (args.nixl / "nixl").is_dir():
        parser.error(f"--nixl: there is no package nixl in {args.nixl} (requirements/nixl.txt)")
    if args.at_once and args.break_kv == "drop":
        parser.error("--at-once: nothing is handed over that --break-kv drop could leave out")
    for setting in args.config:
        if "=" not in setting:
            parser.error(f"--config: {setting} is not KEY=VALUE")
    for path in filter(None, (args.csv, args.json)):
        if not path.absolute().parent.is_dir():
            parser.error(f"there is no folder {path.parent} for {path.name}")


def engine_of(args):
    """The arguments of every engine."""
    return ENGINE_ARGS | ENGINE | {"dtype": args.dtype} | args.engine_args


def connectors_of(args):
    connectors = [kvferry(ZEROING if args.break_kv == "zero" else {})]
    return connectors + ([nixl(args.nixl, args.kv_device)] if args.nixl else [])


def describe(args):
    return {
        "commit": git_commit(),
        "cpu": f"{cpu_model()}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "model": args.model.name,
        "dtype": args.dtype,
        "load": os.getloadavg()[0],
        "reps": args.reps,
        "config": args.config,
        "engine_args": args.engine_args,
    }


def print_results(header, names, bench):
    print(
        f"\nkvferry {header['commit']}; {header['cpu']}; Linux {header['kernel']}; "
        f"{header['model']}, {header['dtype']}\nms to the decode engine's first token, median of "
        f"{header['reps']} rounds, in turn; load when started: {header['load']:.1f}\n"
    )
    print_rows(bench.rows, names)
    if bench.cold:
        texts = [f"{name} {sample.first_token_ms:.0f} ms" for name, sample in bench.cold.items()]
        print(f"\nfirst request of a session, {bench.rows[0].tokens} tokens: {', '.join(texts)}")
    if "NIXL" not in names:
        print("\nnot measured: NixlConnector: give --nixl (./dev bench --engines --peers does)")
    for problem in bench.problems:
        print(f"FAILED: {problem}")


def start_pairs(args, stack, say):
    """The pairs, ready. Raises EngineError."""
    folder = Path(tempfile.mkdtemp(prefix="kvferry-engines-"))
    pairs = []
    for connector in connectors_of(args):
        hand_over = args.break_kv != "drop"
        pairs.append(
            EnginePair(connector, args.model, engine_of(args), folder / connector.name, hand_over)
        )
        stack.callback(pairs[-1].close)
    say(f"starting {2 * len(pairs)} engines, about a minute; their logs are in {folder}")
    for pair in pairs:
        pair.wait_ready()
        say(f"{pair.name}: both engines are ready")
    return pairs


def measure_all(args, say):
    """(names of the connectors, Bench)."""
    with contextlib.ExitStack() as stack:
        try:
            pairs = start_pairs(args, stack, say)
        except EngineError as error:
            sys.exit(f"engine_pairs.py: {error}")
        bench = Bench(pairs, args)
        try:
            for tokens in args.lengths:
                bench.measure(tokens, say)
        except EngineError as error:
            bench.problems.append(f"ended early: {error}")
        return [pair.name for pair in pairs] + [AT_ONCE] * args.at_once, bench


def main():
    args = parse_arguments()
    for setting in args.config:
        key, _, value = setting.partition("=")
        os.environ[f"KVFERRY_{key.upper()}"] = value
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that engines are closed then too.
    started, header = time.monotonic(), describe(args)

    def say(text):
        print(f"[{time.monotonic() - started:4.0f} s] {text}", file=sys.stderr, flush=True)

    names, bench = measure_all(args, say)
    print_results(header, names, bench)
    write_files(args, header, names, bench)
    return 1 if bench.problems else 0


if __name__ == "__main__":
    sys.exit(main())
