"""Five questions, prefilled by one vLLM engine and answered by another, with kvferry between them.

Starts two vLLM engines on this machine, moves the KV cache of each prompt from the first to the
second, and checks that the second says, token for token, what one engine alone says. Exits 1 if a
token differs, if KV was not moved by kvferry, or if the decode engine computed prompts itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pair import DEFAULT_MODEL, Answer, EngineError, Pair

BLOCK_TOKENS = 128  # vLLM's default block size on CPU.
MAX_TOKENS = 32
PART_TOKENS = (
    1024  # What kvferry hands over under one lease when both engines get a request at once.
)

STORY = """Mara kept the lighthouse on Gull Rock for thirty-one years. Every evening she climbed the
two hundred and twelve steps with a can of oil in each hand, trimmed the wicks, polished the great
lens with a chamois cloth and lit the lamp before the sun had touched the sea. In the logbook she
wrote the wind, the height of the tide and the names of the ships that passed. One autumn a letter
came from the harbour office: an electric lamp would be fitted in spring, and a keeper would no
longer be needed. Mara read it twice, folded it into the logbook, and climbed the steps as she did
every evening. That night a fog rolled in so thick that the beam could not reach the water, and
somewhere below her a ferry with forty passengers had lost its way between the reefs."""


def logbook() -> str:
    """A ferry's logbook of more than a thousand tokens, no two entries alike."""
    winds = ["a light southerly breeze", "a stiff north-westerly", "no wind", "easterly gusts"]
    cargoes = [
        "crates of apples",
        "a brass band and its instruments",
        "sacks of mail",
        "two startled goats",
        "a church bell wrapped in straw",
        "barrels of tar",
        "a circus tent",
        "window glass",
    ]
    events = [
        "The cook burned the porridge again.",
        "A seal followed us half the way.",
        "The bosun repaired the port lamp.",
        "We waited an hour for the tide.",
        "A child dropped her hat overboard and a sailor fished it out.",
        "The engine coughed twice but held.",
        "Fog hid the far shore until noon.",
    ]
    lines = ["This is the logbook of the ferry Marigold."]
    for day in range(1, 27):
        lines.append(
            f"Day {day}. Sailed at {5 + day % 4}:{(day * 17) % 60:02d} with {winds[day % 4]}; "
            f"{20 + day * 7 % 61} passengers and {cargoes[day * 3 % 8]} aboard. "
            f"{events[day * 2 % 7]}"
        )
    return "\n".join(lines)


QUESTIONS = [
    ("short", "What is the capital of France?"),
    ("logbook", f"{logbook()}\n\nWhat kind of ship is the Marigold, and what did it carry?"),
    ("story, 1st question", f"{STORY}\n\nWho is the keeper of the lighthouse?"),
    ("story, 2nd question", f"{STORY}\n\nWrite what happens next in two sentences."),
    ("list", "Name three things that one should check on a bicycle before a long ride, and why."),
]


@dataclasses.dataclass
class Outcome:
    """One question, both ways."""

    name: str
    prompt: list[int]
    expected: Answer
    got: Answer
    fetches: list[dict[str, Any]]  # Events of the decode engine's trace, see docs/vllm.md.
    leases: list[dict[str, Any]]  # Events of the prefill engine's trace.
    computed_tokens: int  # Prompt tokens that the decode engine computed itself, says vLLM.
    external_tokens: int  # Prompt tokens that came through the connector, says vLLM.
    parts: int = 1  # Leases that the prompt was handed over in.


def problems(outcome: Outcome, block_tokens: int = BLOCK_TOKENS) -> list[str]:
    """What is wrong with an outcome; empty when it is as it should be."""
    found = []
    got, expected = outcome.got, outcome.expected
    if got.error or got.finish_reason == "error":
        found.append(f"the decode engine failed: {got.error or 'finish_reason error'}")
    if got.tokens != expected.tokens:
        same = sum(1 for _ in _common_prefix(got.tokens, expected.tokens))
        found.append(
            f"token {same + 1} differs: {got.tokens[same : same + 3]} instead of "
            f"{expected.tokens[same : same + 3]}\n      instead of {expected.text!r}\n"
            f"      it said    {got.text!r}"
        )
    if not expected.tokens:
        found.append("the reference is empty")
    blocks = math.ceil(len(outcome.prompt) / block_tokens)
    if len(outcome.fetches) != 1:
        found.append(f"{len(outcome.fetches)} fetches by kvferry instead of 1")
    for fetch in outcome.fetches:
        if not fetch["ok"] or fetch["bytes"] == 0 or fetch["blocks_missing"]:
            found.append(f"kvferry moved {fetch['bytes']} bytes: {fetch['error'] or 'incomplete'}")
        if fetch["blocks"] + fetch["blocks_skipped"] != blocks:
            found.append(
                f"{fetch['blocks']} blocks moved and {fetch['blocks_skipped']} skipped, of {blocks}"
            )
    if [lease["outcome"] for lease in outcome.leases] != ["fetched"] * outcome.parts:
        found.append(f"the prefill engine's leases ended as {outcome.leases}")
    skipped = sum(fetch["blocks_skipped"] for fetch in outcome.fetches) * block_tokens
    if outcome.external_tokens != len(outcome.prompt) - skipped:
        found.append(
            f"vLLM counts {outcome.external_tokens} prompt tokens that came through the connector, "
            f"not {len(outcome.prompt)} less {skipped} in skipped blocks"
        )
    if outcome.computed_tokens > 1:  # The last one may be computed again, to sample from it.
        found.append(
            f"the decode engine computed {outcome.computed_tokens} of {len(outcome.prompt)} "
            f"prompt tokens"
        )
    return found


def _common_prefix(a: list[int], b: list[int]):
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def ask(
    pair: Pair,
    name: str,
    prompt: list[int],
    expected: Answer,
    max_tokens: int,
    at_once: bool = False,
) -> Outcome:
    """Prefills in one engine, decodes in the other, and collects what is known about the way."""
    before = _prompt_tokens(pair)
    fetches, leases = len(pair.trace("decode")), len(pair.trace("prefill"))
    parts = math.ceil(len(prompt) / PART_TOKENS) if at_once else 1
    got = (pair.answer_at_once if at_once else pair.answer)(prompt, max_tokens)
    deadline = time.monotonic() + 60
    while True:  # Counters and traces may come a moment after the answer.
        after = _prompt_tokens(pair)
        total, cached, external = (b - a for a, b in zip(before, after, strict=True))
        new_fetches, new_leases = pair.trace("decode")[fetches:], pair.trace("prefill")[leases:]
        complete = total == len(prompt) and new_fetches and len(new_leases) >= parts
        if complete or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    computed = int(total - cached)
    return Outcome(
        name, prompt, expected, got, new_fetches, new_leases, computed, int(external), parts
    )


def _prompt_tokens(pair: Pair) -> tuple[float, float, float]:
    """Of the decode engine so far: prompt tokens, those not computed, those from the connector."""
    metrics = pair.decode.metrics()
    return (
        metrics.get("vllm:prompt_tokens", 0),
        metrics.get("vllm:prompt_tokens_cached", 0),
        metrics.get("vllm:external_prefix_cache_hits", 0),
    )


class _Progress:
    def __init__(self) -> None:
        self.started = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)


def start(pair: Pair, progress: _Progress, timeout_s: float = 240.0) -> None:
    """Waits for both engines and says so. Raises EngineError."""
    waiting = [pair.prefill, pair.decode]
    progress.say(f"starting a prefill and a decode engine; their logs are in {pair.log_folder}")
    while waiting:
        if waiting[0].is_ready(timeout_s=10.0):
            progress.say(f"the {waiting.pop(0).name} engine is ready")
            continue
        names = " and ".join(engine.name for engine in waiting)
        progress.say(f"waiting for {names} to load the model")
        if time.monotonic() - progress.started > timeout_s:
            waiting[0].wait_ready(0.0)


def run(pair: Pair, progress: _Progress, at_once: bool) -> list[Outcome]:
    """All questions: first by the prefill engine alone, then by the pair."""
    start(pair, progress)
    prompts = [pair.prefill.tokenize(question) for _, question in QUESTIONS]
    progress.say("reference: the prefill engine answers every question alone, without kvferry")
    expected = [pair.prefill.generate(prompt, MAX_TOKENS) for prompt in prompts]
    progress.say(
        f"now prefill here, decode there{', both given the request at once' if at_once else ''}"
    )
    outcomes = []
    for (name, question), prompt, reference in zip(QUESTIONS, prompts, expected, strict=True):
        outcome = ask(pair, name, prompt, reference, MAX_TOKENS, at_once)
        outcomes.append(outcome)
        progress.say(f"{name} ({len(prompt)} prompt tokens): ...{question[-60:]!r}")
        for line in outcome.got.text.strip().splitlines() or [""]:
            print(f"         | {line}")
    return outcomes


def print_table(outcomes: list[Outcome], at_once: bool) -> None:
    header = (
        ("request", "prompt", "blocks", "blocks", "KV", "transfer", "", "1st token", "1st token"),
        ("", "tokens", "moved", "skipped", "MB", "ms", "GB/s", "decode ms", "alone ms"),
    )
    rows = []
    for it in outcomes:
        fetch = it.fetches[0] if it.fetches else {}
        rows.append(
            (
                it.name,
                len(it.prompt),
                fetch.get("blocks", 0),
                fetch.get("blocks_skipped", 0),
                f"{fetch.get('bytes', 0) / 1e6:.1f}",
                f"{fetch.get('move_ms', 0):.1f}",
                f"{fetch.get('gb_per_s', 0):.2f}",
                f"{it.got.first_token_ms:.0f}",
                f"{it.expected.first_token_ms:.0f}",
            )
        )
    print()
    for first, *rest in (*header, *rows):
        print(f"{first:<20}" + "".join(f"{value:>10}" for value in rest))
    of_prefill = (
        "the transfer and the prefill engine's\nwork included: the transfer waits for that."
        if at_once
        else "the transfer included, the prefill engine's work not."
    )
    print(f"""
A block is {BLOCK_TOKENS} tokens; skipped blocks were in the decode engine's prefix cache. The first
transfer also opens the connection. First token, decode: from getting the request to its first
token, {of_prefill} Alone: the reference, with prefill.""")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        type=Path,
        default=DEFAULT_MODEL,
        help="Hugging Face folder (default: %(default)s)",
    )
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="give each question to both engines at the same time, so that KV moves while more of "
        "it is computed (docs/vllm.md); without it first to one, then to the other",
    )
    parser.add_argument(
        "--break-kv",
        action="store_true",
        help="zero the KV after each transfer, to see that the check fails (exit code 1)",
    )
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").exists():
        parser.error(f"no model in {arguments.model}; ./dev setup makes it, or see --model")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that engines are closed then too.
    progress = _Progress()
    broken = {"kv_connector": "BrokenKVConnector", "kv_connector_module_path": "broken_connector"}
    if arguments.break_kv:
        progress.say("--break-kv: the decode engine zeroes what it fetched, so this has to fail")
    pair = Pair(
        arguments.model,
        log_folder=Path(tempfile.mkdtemp(prefix="kvferry-demo-")),
        decode_transfer=broken if arguments.break_kv else None,
    )
    try:
        outcomes = run(pair, progress, arguments.at_once)
    except EngineError as error:
        print(f"FAILED: {error}")
        return 1
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    finally:
        pair.close()
    print_table(outcomes, arguments.at_once)
    failed = [it for it in outcomes if problems(it)]
    for it in failed:
        print(f"\n{it.name}:")
        for problem in problems(it):
            print(f"    - {problem}")
    took = f"after {time.monotonic() - progress.started:.0f} s"
    if failed:
        print(
            f"\nFAILED: {len(failed)} of {len(outcomes)} answers are not as they should be, {took}"
        )
        return 1
    moved = sum(it.fetches[0]["bytes"] for it in outcomes) / 1e6
    skipped = sum(it.fetches[0]["blocks_skipped"] for it in outcomes)
    print(
        f"OK: {len(outcomes)} of {len(outcomes)} answers equal those of one engine alone; "
        f"{moved:.1f} MB of KV moved, {skipped} blocks skipped, {took}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
