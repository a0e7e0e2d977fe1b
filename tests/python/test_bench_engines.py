"""bench/engine_pairs.py without engines: what it refuses, which answers count, what it prints."""

import csv
import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"
sys.path.append(str(BENCH))

import engine_pairs  # noqa: E402
from engine_pairs import Moved, Row, Sample  # noqa: E402
from pair import Answer  # noqa: E402

PREFILLED = Answer([7], "", "length", {"remote": 1}, 0, 500.0, 500.0)
ANSWER = Answer([7, 8, 9], "", "length", None, 0, 100.0, 200.0)
MOVED = Moved(prompt_tokens=1000, computed_tokens=1, external_tokens=1000, kv_bytes=4096, kv_ms=9.0)


def problems(answer=ANSWER, moved=MOVED):
    return engine_pairs.problems(answer, PREFILLED, moved, prompt_tokens=1000, kv_bytes=4096)


def test_an_answer_with_the_other_engine_s_kv_counts():
    assert problems() == []
    assert problems(moved=dataclasses.replace(MOVED, computed_tokens=0)) == []


@pytest.mark.parametrize(
    "answer, moved, words",
    [
        ({}, {"computed_tokens": 1000}, "it computed 1000 of 1000 tokens itself"),
        ({}, {"external_tokens": 0}, "0 of 1000 tokens came by the connector"),
        ({}, {"kv_bytes": 0}, "0 bytes were moved instead of 4096"),
        ({}, {"kv_bytes": 2048}, "2048 bytes were moved instead of 4096"),
        ({"tokens": [6, 8, 9]}, {}, "its first token is [6], the prefill's [7]"),
        ({"tokens": []}, {}, "its first token is [], the prefill's [7]"),
        ({"finish_reason": "error"}, {}, "it ended with error"),
        ({"error": "ValueError: no"}, {}, "it ended with ValueError: no"),
    ],
)
def test_an_answer_with_any_other_kv_does_not_count(answer, moved, words):
    found = problems(dataclasses.replace(ANSWER, **answer), dataclasses.replace(MOVED, **moved))
    assert found == [words]


def test_pairs_have_to_agree():
    other = dataclasses.replace(ANSWER, tokens=[7, 8, 1])
    assert engine_pairs.disagreement({"kvferry": ANSWER}) == ""
    assert engine_pairs.disagreement({"kvferry": ANSWER, "NIXL": ANSWER}) == ""
    assert "[7, 8, 1]" in engine_pairs.disagreement({"kvferry": ANSWER, "NIXL": other}).replace(
        "(7, 8, 1)", "[7, 8, 1]"
    )


def test_a_prompt_is_one_passage_over_and_over_and_another_each_time():
    rng = random.Random(1)
    first, second = (engine_pairs.prompt_of(130, rng) for _ in range(2))
    period = engine_pairs.PASSAGE_TOKENS
    assert len(first) == len(second) == 130
    assert first[period:] == first[:-period] and first != second


def test_bytes_of_kv_are_those_of_whole_blocks(tmp_path):
    shape = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"hidden_size": 576}))
    block = 30 * 2 * 3 * 64 * 128 * 2
    assert engine_pairs.kv_bytes_of(128, tmp_path, "bfloat16", 128) == block
    assert engine_pairs.kv_bytes_of(129, tmp_path, "bfloat16", 128) == 2 * block
    assert engine_pairs.kv_bytes_of(1000, tmp_path, "float32", 128) == 16 * block


def row(**times):
    """A row of 1,000 tokens whose systems have these times to the first token."""
    row = Row(1000, 23_592_960)
    row.alone_ms = {"kvferry": 5000.0}
    for name, values in times.items():
        row.samples[name] = [Sample(value, 50.0, 4000.0, 8.0, 4096) for value in values]
    return row


def test_ratios_are_of_medians():
    cells = row(kvferry=[70, 80, 900], NIXL=[100, 160, 120]).cells(["kvferry", "NIXL"])
    assert (cells["kvferry"], cells["kvferry min..max"], cells["ratio"]) == (
        "80",
        "70..900",
        "0.67",
    )
    assert (cells["alone"], cells["NIXL"], cells["NIXL step"]) == ("5000", "120", "50")


def test_at_once_counts_from_the_prefill_s_answer_and_from_the_start():
    prefilled = dataclasses.replace(PREFILLED, first_token_at=101.0)
    answer = dataclasses.replace(ANSWER, first_token_ms=1500.0, first_token_at=101.02)
    asked = engine_pairs.Asked(100.0, prefilled, answer, MOVED)
    at_once, after = (engine_pairs.sample_of(asked, at_once=it) for it in (True, False))
    assert (round(at_once.first_token_ms), round(at_once.whole_ms)) == (20, 1020)
    assert (after.first_token_ms, round(after.whole_ms)) == (1500, 1020)
    both = row(kvferry=[70])
    both.samples["at once"] = [at_once]
    cells = both.cells(["kvferry", "at once"])
    assert (cells["at once"], cells["at once whole"], cells["kvferry whole"]) == ("20", "1020", "0")
    assert "kvferry whole" not in both.cells(["kvferry"])


def test_what_was_not_measured_is_a_dash():
    cells = row(kvferry=[70]).cells(["kvferry", "NIXL"])
    assert (cells["NIXL"], cells["ratio"], cells["NIXL KV"]) == ("-", "-", "-")
    assert "ratio" not in row(kvferry=[70]).cells(["kvferry"])


def run(tmp_path, *arguments):
    (tmp_path / "config.json").touch()
    command = [sys.executable, BENCH / "engine_pairs.py", "--model", tmp_path, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_help_says_what_is_measured(tmp_path):
    done = run(tmp_path, "--help")
    assert done.returncode == 0
    for word in ("--lengths", "--reps", "--nixl", "--break-kv", "first token"):
        assert word in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--reps", "0"], "--reps must be at least 1"),
        (["--lengths", "40"], "they have to be 49 at least"),
        (["--lengths", "128,4000"], "2040 at most, or see --engine-args (max_model_len)"),
        (["--engine-args", '{"max_model_len": 512}'], "504 at most"),
        (["--engine-args", "[1]"], "is no JSON object"),
        (["--engine-args", "{"], "invalid object_of value"),
        (["--lengths", "long"], "invalid lengths_of value: 'long'"),
        (["--nixl", "/nowhere"], "there is no package nixl in /nowhere"),
        (["--model", "/nowhere"], "no model in /nowhere"),
        (["--config", "lanes"], "lanes is not KEY=VALUE"),
        (["--at-once", "--break-kv", "drop"], "nothing is handed over"),
        (["--csv", "/nowhere/a.csv"], "there is no folder /nowhere for a.csv"),
    ],
)
def test_bad_usage_is_refused_before_engines_are_started(tmp_path, arguments, message):
    done = run(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_files_hold_every_length(tmp_path):
    bench = engine_pairs.Bench([], type("Args", (), {"seed": 1}))
    bench.rows, bench.problems = [row(kvferry=[70], NIXL=[100])], ["128 tokens: no"]
    args = type("Args", (), {"csv": tmp_path / "a.csv", "json": tmp_path / "a.json"})
    engine_pairs.write_files(args, {"reps": 1}, ["kvferry", "NIXL"], bench)
    with args.csv.open() as file:
        assert [(line["tokens"], line["ratio"]) for line in csv.DictReader(file)] == [
            ("1000", "0.70")
        ]
    written = json.loads(args.json.read_text())
    assert written["results"][0]["systems"]["NIXL"][0]["first_token_ms"] == 100
    assert written["problems"] == ["128 tokens: no"]
