"""bench/allocators.py without measuring: what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parent.parent.parent / "bench" / "allocators.py"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--build", "/nowhere"], "--build: /nowhere holds no bench/kvferry_micro_bench"),
        (["--reps", "0"], "--reps must be at least 1"),
    ],
)
def test_refuses(arguments, message):
    pytest.importorskip("numpy")
    done = subprocess.run(
        [sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert message in done.stderr
