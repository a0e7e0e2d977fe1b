"""bench/run.py without measuring anything: what it refuses, and what it prints of given samples."""

import contextlib
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"
sys.path.append(str(BENCH))

import network  # noqa: E402
import picture  # noqa: E402
import table  # noqa: E402
from row import PARTS, Row  # noqa: E402
from systems import BenchError, Pair, Peer, Sample  # noqa: E402


@pytest.fixture
def build(tmp_path):
    """A build folder as far as run.py looks before it measures."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/kvferry_bench_transfer").touch()
    return tmp_path


def run(build, *arguments, **environment):
    return subprocess.run(
        [sys.executable, BENCH / "run.py", "--build", build, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
    )


def test_help_names_every_choice(build):
    done = run(build, "--help")
    assert done.returncode == 0
    for word in ("llama8b-p16", "runs8", "--paths", "--peers", "--push", "--picture", "--json"):
        assert word in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shapes", "short-p16,huge"], "no shape huge; there are llama8b-p16"),
        (["--frags", "odd"], "no fragmentation odd; there are seq, runs8, rand"),
        (["--paths", "rdma"], "no path rdma; there are tcp, host"),
        (["--reps", "0"], "--reps must be at least 1"),
        (["--reps", "many"], "invalid int value: 'many'"),
        (["--also", "/nowhere"], "/nowhere holds no bench/kvferry_bench_transfer"),
        (["--netns", "--paths", "host"], "--netns is of the path tcp"),
        (["--apart", "--paths", "host"], "--apart is of the path tcp"),
        (["--peers", "/nowhere/python"], "/nowhere/python is no Python that can be started"),
        (["--csv", "/nowhere/a.csv"], "there is no folder /nowhere for a.csv"),
        (["--picture", "/nowhere/a"], "there is no folder /nowhere for a"),
    ],
)
def test_bad_usage_is_refused_before_anything_is_measured(build, arguments, message):
    done = run(build, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize("option", ["--config", "--also-config"])
def test_settings_that_kvferry_refuses_are_refused_before_anything_is_measured(build, option):
    ours = build / "bench/kvferry_bench_transfer"
    ours.write_text('#!/bin/sh\necho "config: unknown key in $*" >&2\nexit 1\n')
    ours.chmod(0o755)
    done = run(build, option, "leas_ms=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "leas_ms=3: config: unknown key in --role=prefill" in done.stderr
    assert "--config=leas_ms=3" in done.stderr


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(build):
    missing = build / "path/matplotlib"
    missing.mkdir(parents=True)
    (missing / "__init__.py").write_text("raise ImportError('none here')")
    done = run(build, "--picture", build / "a", PYTHONPATH=str(missing.parent))
    assert (done.returncode, done.stdout) == (2, "")
    assert "--picture needs matplotlib: none here (requirements/picture.txt" in done.stderr


def test_namespaces_are_refused_to_users_other_than_root(monkeypatch):
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    with pytest.raises(network.CannotMake, match="needs root"):
        network.check_netns()


def test_namespaces_are_refused_without_the_ip_command(build, monkeypatch):
    monkeypatch.setattr(network.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(build))
    with pytest.raises(network.CannotMake, match="ip command is missing"):
        network.check_netns()


def test_a_machine_that_refuses_namespaces_says_why_and_keeps_none(monkeypatch):
    asked = []

    def refuse_veth(*words):
        asked.append(words)
        if "link" in words:
            raise network.CannotMake("not permitted")

    monkeypatch.setattr(network, "check_netns", lambda: None)
    monkeypatch.setattr(network, "ip", refuse_veth)
    with pytest.raises(network.CannotMake, match="not permitted"), network.netns_pair():
        pass
    added = [words[2] for words in asked if words[:2] == ("netns", "add")]
    deleted = [words[2] for words in asked if words[:2] == ("netns", "delete")]
    assert len(added) == 2 and sorted(added) == sorted(deleted)


def test_a_pair_of_namespaces_reaches_across_and_is_removed():
    with contextlib.ExitStack() as stack:
        try:
            pair = stack.enter_context(network.netns_pair())
        except network.CannotMake as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        # Says in one what it received from the other.
        listen = "import socket; s = socket.create_server(('10.77.0.1', 0)); "
        listen += "print(s.getsockname()[1], flush=True); print(s.accept()[0].recv(9).decode())"
        source = subprocess.Popen(
            [*pair.source.prefix, sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True
        )
        port = source.stdout.readline().strip()
        send = f"import socket; socket.create_connection(('10.77.0.1', {port}), 9).send(b'across')"
        subprocess.run([*pair.target.prefix, sys.executable, "-c", send], check=True, timeout=30)
        assert source.communicate(timeout=30)[0].strip() == "across"
    names = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert pair.source.netns not in names and pair.target.netns not in names


def test_the_sides_of_one_processor_cannot_be_kept_apart(build, monkeypatch):
    monkeypatch.setattr(network.os, "sched_getaffinity", lambda _: {3})
    with pytest.raises(network.CannotMake, match="one processor only"):
        network.check_apart()
    monkeypatch.setattr(network.os, "sched_getaffinity", lambda _: {3, 5})
    monkeypatch.setenv("PATH", str(build))
    with pytest.raises(network.CannotMake, match="taskset command is missing"):
        network.check_apart()


def test_sides_that_are_kept_apart_share_no_processor(monkeypatch):
    monkeypatch.setattr(network.os, "sched_getaffinity", lambda _: {7, 2, 3, 5, 11})
    joined = network.apart(network.Network("n", network.End(netns="a"), network.End()))
    assert (joined.source.cpus, joined.target.cpus) == ((2, 3), (5, 7, 11))
    assert joined.source.prefix == [*"ip netns exec a taskset --cpu-list 2,3".split()]
    assert joined.target.prefix == [*"taskset --cpu-list 5,7,11".split()]
    assert joined.name == "n; source on CPU 2,3, target on 5,7,11"


def test_a_command_runs_where_its_side_does():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one processor only")
    allowed = "import os; print(sorted(os.sched_getaffinity(0)))"
    for end in (network.apart(network.LOOPBACK).source, network.apart(network.LOOPBACK).target):
        command = [*end.prefix, sys.executable, "-c", allowed]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        assert json.loads(done.stdout) == list(end.cpus)


def row_of(part, fragmentation="rand", **rates):
    """A row whose systems ("NIXL_READ") have one sample each, at these GB/s."""
    row = Row(PARTS[part], "short-p16", fragmentation)
    for name, rate in rates.items():
        seconds = row.shape.request_bytes * 1e-9 / rate
        row.samples[name.replace("_", " ")] = [Sample(seconds, cpu=2 * seconds)]
    return row


TCP = {"kvferry": 2.0, "NIXL_READ": 0.5, "NIXL_WRITE": 1.0, "ZeroMQ": 4.0, "Mooncake_READ": 0.25}
TCP |= {"tcp_1": 2.5, "tcp_2": 5.0, "tcp_4": 4.0}
HOST = {"kvferry": 3.0, "NIXL_READ": 1.5, "memcpy_1": 6.0, "memcpy_2": 12.0}


def cells(row):
    return {column.name: column.text(row) for column in table.all_columns(row.part)}


def test_ratios_are_over_the_faster_operation_and_the_fastest_limit():
    tcp, host = cells(row_of("tcp", **TCP)), cells(row_of("host", **HOST))
    assert (tcp["x NIXL"], tcp["x ZeroMQ"], tcp["x Mooncake"]) == ("2.00", "0.50", "8.00")
    assert (tcp["x 1"], tcp["x limit"], tcp["NIXL CPU"]) == ("0.80", "0.40", "2.00")
    assert (host["x NIXL"], host["x 1"], host["x limit"]) == ("2.00", "0.50", "0.25")


def test_what_was_not_measured_is_a_dash():
    empty = cells(row_of("tcp"))
    assert set(list(empty.values())[3:]) == {"-"}
    no_ours = cells(row_of("tcp", ZeroMQ=1.0))
    assert (no_ours["ZeroMQ"], no_ours["x ZeroMQ"]) == ("1.00", "-")


def test_a_table_has_only_the_columns_asked_for_in_lines_of_one_width(capsys):
    table.Table(PARTS["tcp"], {"kvferry", "ZeroMQ"}).add(row_of("tcp", **TCP))
    header, line = capsys.readouterr().out.splitlines()
    assert "ZeroMQ" in header and "NIXL" not in header and "tcp 1" not in header
    assert len(header) == len(line)


def test_files_hold_both_parts(tmp_path):
    rows = [row_of("tcp", **TCP), row_of("host", **HOST)]
    table.write_csv(tmp_path / "a.csv", rows)
    table.write_json(tmp_path / "a.json", {"reps": 1}, rows, [], ["NIXL: no"])
    with (tmp_path / "a.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["path"], line["GB/s"]) for line in lines] == [("tcp", "2.00"), ("host", "3.00")]
    assert (lines[0]["memcpy 2"], lines[1]["memcpy 2"]) == ("-", "12.00")
    assert (lines[0]["NIXL READ min..max"], lines[1]["tcp 4 min..max"]) == ("0.50..0.50", "-")
    written = json.loads((tmp_path / "a.json").read_text())
    assert [result["path"] for result in written["results"]] == ["tcp", "host"]
    assert written["problems"] == ["NIXL: no"]


def test_a_picture_shows_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row_of("tcp", **TCP, push=1.5), row_of("tcp", "seq", kvferry=1.0)]
    rows += [row_of("host", **HOST)]
    picture.write_picture(tmp_path / "a.png", "title", rows)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "a.svg").read_text()
    bars = picture.series(rows[:2])
    assert list(bars) == ["kvferry", "push", "NIXL", "ZeroMQ", "Mooncake"]
    assert bars["NIXL"] == ["NIXL WRITE", None]


def test_bars_have_the_spread_of_their_runs():
    quick, usual, slow = (row_of("tcp", NIXL_READ=rate) for rate in (4.0, 2.0, 1.0))
    usual.samples["NIXL READ"] += quick.samples["NIXL READ"] + slow.samples["NIXL READ"]
    rows = [usual, row_of("tcp", kvferry=1.0)]
    heights, (below, above) = picture.heights_and_whiskers(rows, ["NIXL READ", None])
    assert heights == [pytest.approx(2.0), 0]
    assert (below, above) == ([pytest.approx(1.0), 0], [pytest.approx(2.0), 0])
    assert table.spread(usual, "NIXL READ") == "1.00..4.00"


class FakeDriver:
    def __init__(self):
        self.awake, self.fails = True, ()

    def pause(self):
        self.awake = False

    def resume(self):
        self.awake = True

    def ask(self, word, *_):
        assert self.awake
        if word in self.fails:
            raise BenchError(word)
        return {"seconds": 1.0, "cpu": 1.0}


def test_a_pair_sleeps_between_turns_and_is_not_used_after_a_failure():
    source, target = FakeDriver(), FakeDriver()
    pair = Pair(source, target)
    lists = (Row(PARTS["tcp"], "short-p16", "seq").shape, [1], [2])
    read, write = (Peer(op, op, lists, pair, "") for op in ("read", "write"))
    assert read.sample().seconds == 1.0
    assert not source.awake and not target.awake
    target.fails = ("verify",)
    with pytest.raises(BenchError, match="verify"):
        write.sample()
    assert not source.awake and not target.awake
    with pytest.raises(BenchError, match="the other operation failed"):
        read.sample()
