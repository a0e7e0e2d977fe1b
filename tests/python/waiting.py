"""Waiting for what comes in its own time, in tests."""

import time
from collections.abc import Callable


def wait_for(holds: Callable[[], bool], seconds: float = 20) -> None:
    """Returns when it holds; fails when it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)
