"""Measures what a user of a vLLM pair waits for: the decode engine's first token, with the prompt's
KV coming from the prefill engine through kvferry and through vLLM's NixlConnector.

Starts two pairs of engines on this machine, one for each connector, and gives both the same
prompts in turn; the pair whose turn it is not is stopped. For each length of prompt it prints one
row: medians, with the spread of kvferry's. The tokens of both pairs are compared.
"""

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "vllm_pair"))

from pair import DEFAULT_MODEL, REMOTE_DECODE, Engine, EngineError, transfer_config  # noqa: E402

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
NIXL_PORTS = {"prefill": "25611", "decode": "25712"}  # vLLM takes no free ones by itself.
ANSWER_TOKENS = 8
# vLLM's NixlConnector looks for all of these.
NIXL_REMOTE = dict.fromkeys(
    ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"], None
)


class Connector:
    """A prefill and a decode engine that share KV through one connector."""

    def __init__(self, name, model, folder, config):
        self.name, self.engines = name, {}
        (folder / name).mkdir()
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        for engine, role in ROLES.items():
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = NIXL_PORTS[engine]
            transfer = transfer_config(role, **config) | {"engine_id": f"{name}-{engine}"}
            self.engines[engine] = Engine(
                engine, model, folder / name, kv_transfer_config=transfer, dtype="bfloat16"
            )

    def wait_ready(self):
        for engine in self.engines.values():
            engine.wait_ready()

    def paused(self):
        stack = contextlib.ExitStack()
        for engine in self.engines.values():
            stack.enter_context(engine.paused())
        return stack

    def ask(self, prompt, max_tokens):
        params = REMOTE_DECODE | NIXL_REMOTE
        first = self.engines["prefill"].generate(prompt, 1, params, ignore_eos=True)
        answer = self.engines["decode"].generate(prompt, max_tokens, first.params, ignore_eos=True)
        if answer.error or not answer.tokens:
            raise EngineError(f"{self.name}: {answer}")
        if answer.cached_tokens < len(prompt) - 1:
            raise EngineError(f"{self.name}: decode computed the prompt itself: {answer}")
        return answer

    def close(self):
        for engine in self.engines.values():
            engine.close()


def measure(connectors, tokens, reps, rng):
    """Times of the first token in ms, by connector; and of a prompt computed by decode itself."""
    times = {connector.name: [] for connector in connectors}
    local = []
    for rep in range(reps + 1):  # The first is for connections to be made.
        prompt = [rng.randrange(100, 40000) for _ in range(tokens)]
        answers = []
        for i, connector in enumerate(connectors):
            with contextlib.ExitStack() as others:
                for other in connectors[:i] + connectors[i + 1 :]:
                    others.enter_context(other.paused())
                answers.append(connector.ask(prompt, ANSWER_TOKENS))
                if i == 0 and rep > 0:
                    local.append(connector.engines["decode"].generate(prompt, 1).first_token_ms)
            if rep > 0:
                times[connector.name].append(answers[-1].first_token_ms)
        if len({tuple(answer.tokens) for answer in answers}) != 1:
            raise EngineError(f"the pairs do not agree: {[answer.tokens for answer in answers]}")
    return times, local


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model's folder")
    parser.add_argument(
        "--reps", type=int, default=9, help="rounds of a length; default %(default)s"
    )
    parser.add_argument("--lengths", default="128,512,1000", help="prompt tokens; %(default)s")
    parser.add_argument("--config", action="append", default=[], metavar="KEY=VALUE",
                        help="a setting of kvferry")  # fmt: skip
    args = parser.parse_args(argv)
    args.lengths = [int(length) for length in args.lengths.split(",")]
    return args


def main():
    args = parse(sys.argv[1:])
    extra = dict(setting.split("=", 1) for setting in args.config)
    os.environ.update({f"KVFERRY_{key.upper()}": value for key, value in extra.items()})
    nixl = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": None,
        "kv_buffer_device": "cpu",
    }
    rng = random.Random(1)
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="kvferry-engines-"))
        connectors = []
        for name, config in (("kvferry", {}), ("NixlConnector", nixl)):
            connectors.append(Connector(name, args.model, folder, config))
            stack.callback(connectors[-1].close)
        print(f"starting four engines; their logs are in {folder}", file=sys.stderr)
        for connector in connectors:
            connector.wait_ready()
        print("| prompt tokens | local prefill, ms | kvferry, ms | NixlConnector, ms | ratio |")
        print("| --- | --- | --- | --- | --- |")
        for tokens in args.lengths:
            times, local = measure(connectors, tokens, args.reps, rng)
            ours, theirs = times["kvferry"], times["NixlConnector"]
            ratio = statistics.median(ours) / statistics.median(theirs)
            print(
                f"| {tokens} | {statistics.median(local):.0f} | {statistics.median(ours):.0f} "
                f"({min(ours):.0f}–{max(ours):.0f}) | {statistics.median(theirs):.0f} "
                f"({min(theirs):.0f}–{max(theirs):.0f}) | {ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    try:
        main()
    except EngineError as error:
        sys.exit(f"bench/engines.py: {error}")
