"""bench/device.py without measuring on a GPU: what it refuses, and what it makes of samples."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"
sys.path += [str(BENCH), str(BENCH / "peers")]

import device  # noqa: E402


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, BENCH / "device.py", "--bin", folder, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def folder(tmp_path):
    """A driver that ends at once, saying why."""
    driver = tmp_path / "kvferry_bench_transfer"
    driver.write_text("#!/bin/sh\necho no such device >&2\nexit 1\n")
    driver.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--pages", "3KiB"], "no 3KiB; there are 32KiB, 2KiB"),
        (["--places", "host-moon"], "no host-moon; there are host-host, device-device"),
        (["--reps", "0"], "--reps must be at least 1"),
        (["--tokens", "15"], "--tokens must be at least 16"),
        (["--csv", "/nowhere/a.csv"], "there is no folder /nowhere for a.csv"),
        (["--nixl", "/nowhere/python"], "--nixl: there is no program /nowhere/python"),
        (["--nixl-places", "device-host"], "no device-host; there are host-host, device-device"),
        (["--bin", "/nowhere"], "/nowhere holds no kvferry_bench_transfer"),
        (["--config", "leas_ms=3"], "leas_ms=3: no such device"),
    ],
)
def test_refuses(folder, arguments, message):
    done = run(folder, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_row_that_fails_is_said_and_the_others_go_on(folder):
    done = run(folder, "--places", "host-host", "--csv", folder / "rows.csv")
    assert done.returncode == 1
    for name in ("32KiB host", "32KiB tcp", "2KiB host", "2KiB tcp"):
        failure = f"not measured: {name} host-host: kvferry_bench_transfer: ended with code 1"
        assert f"{failure} while starting: no such device" in done.stdout
    assert len((folder / "rows.csv").read_text().splitlines()) == 5


def test_nixl_that_does_not_start_is_said_too(folder):
    python = folder / "python3-without-nixl"
    python.write_text("#!/bin/sh\necho no nixl here >&2\nexit 1\n")
    python.chmod(0o755)
    done = run(folder, "--places", "host-host", "--paths", "host", "--nixl", python)
    assert done.returncode == 1
    for pages in ("32KiB", "2KiB"):
        failure = f"not measured: {pages} NIXL device-device: nixl_peer.py: ended with code 1"
        assert f"{failure} while starting: no nixl here" in done.stdout
    assert done.stdout.count("NIXL READ") == done.stdout.count("NIXL WRITE") == 2


def test_nixls_operations_move_the_pages_one_way():
    class Side:
        def __init__(self):
            self.asked = []

        def ask(self, *words):
            self.asked.append(words)
            return {"seconds": 1.0}

        def pause(self):
            pass

        resume = pause

    source, target = Side(), Side()
    sides = device.Sides(source, target)
    lists = [[5, 6], [9, 10]]  # Where the pages lie, and where they go.
    for operation in device.NIXL:
        device.Nixl(operation, None, sides, lists).last_sample()
    assert source.asked[1:] == [("write", "5+2", "9+2")]
    ends = [("zero", "9+2"), ("verify", device.SALT, "9+2", "5+2")]
    assert target.asked == [ends[0], ("read", "9+2", "5+2"), ends[1], *ends]


def test_a_pool_in_a_tensor_holds_and_verifies_the_pattern():
    torch = pytest.importorskip("torch")
    pytest.importorskip("numpy")
    import pool_side

    class Side(pool_side.PoolSide):
        def make_pool(self, args):
            return pool_side.TorchPool(self.buffers, self.pages, self.page_bytes // 8, "cpu")

    args = argparse.Namespace(buffers=3, page_bytes=64, pool_pages=5)
    source, target = Side(args), Side(args)
    assert source.fill(7) == {}
    on_host = pool_side.PoolSide(args)
    on_host.fill(7)
    assert source.base == source.pool.pool.data_ptr()
    assert (source.pool.load(2) == on_host.pool.load(2)).all()
    target.pool.pool[:, [4, 2]] = source.pool.pool[:, [1, 3]]
    assert target.verify(7, "4+1,2+1", "1+1,3+1") == {}
    assert "hold other bytes" in target.verify(7, "4+1,2+1", "3+1,1+1")["error"]
    assert "was not moved was written" in target.verify(7, "4+1", "1+1")["error"]
    target.zero("4+1,2+1")
    assert not torch.any(target.pool.pool)


def test_ratios_are_to_the_plain_copies_of_the_same_pages():
    def row(path, places, *seconds, pages="2KiB"):
        return device.Row(pages, path, places, 10**9, list(seconds))

    ours = row("host", "device-device", 0.5, 0.25, 0.2)
    plain = [row("plain", name, 0.01, pages="32KiB") for name in device.PLAIN]
    plain += [row("plain", name, s) for name, s in zip(device.PLAIN, (0.1, 0.2, 0.3), strict=True)]
    shown = device.cells(ours, [ours, *plain])
    assert (shown["GB/s"], shown["min..max"], shown["ms"]) == ("4.00", "2.00..5.00", "250.00")
    assert (shown["x copy"], shown["x bounce"], shown["x to host"]) == ("0.40", "2.00", "0.80")
    on_host = device.cells(row("host", "host-host", 0.25), plain)
    assert (on_host["GB/s"], on_host["x copy"]) == ("4.00", "-")
    assert device.cells(ours, [ours])["x bounce"] == "-"
    nixl = [row("NIXL READ", "device-device", 0.5), row("NIXL WRITE", "device-device", 1.0)]
    assert [device.cells(r, [ours, *nixl])["x NIXL"] for r in (ours, *nixl)] == ["2.00", "-", "-"]
    others = [row("NIXL READ", "device-device", 0.5, pages="32KiB"), row("NIXL READ", "host-host")]
    assert device.cells(ours, [ours, *others])["x NIXL"] == "-"
    assert device.cells(row("host", "device-host"), plain)["GB/s"] == "-"


def test_metrics_are_what_a_run_changed():
    before = {"decode": {"transfers_ok": 2, "leases_live": 1}}
    after = {"decode": {"transfers_ok": 3, "leases_live": 1, "chunks_in_place": 4}}
    assert device.changes(before, after) == {"decode": {"transfers_ok": 1, "chunks_in_place": 4}}
