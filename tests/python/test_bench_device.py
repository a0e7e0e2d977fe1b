"""bench/device.py without measuring on a GPU: what it refuses, and what it makes of samples."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "bench"
sys.path.append(str(BENCH))

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
        (["--bin", "/nowhere"], "/nowhere holds no kvferry_bench_transfer"),
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
    assert device.cells(row("host", "device-host"), plain)["GB/s"] == "-"


def test_metrics_are_what_a_run_changed():
    before = {"decode": {"transfers_ok": 2, "leases_live": 1}}
    after = {"decode": {"transfers_ok": 3, "leases_live": 1, "chunks_in_place": 4}}
    assert device.changes(before, after) == {"decode": {"transfers_ok": 1, "chunks_in_place": 4}}
