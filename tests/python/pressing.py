"""Ctrl-C, pressed while something waits."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from waiting import wait_for


class PressedError(Exception):
    """In KeyboardInterrupt's place, which would end the tests."""


@contextlib.contextmanager
def heeding(count: int) -> Iterator[list]:
    """Gives a list of the presses that Python has heard of. The one of that number raises."""
    heard = []

    def hear(*_):
        heard.append(None)
        if len(heard) == count:
            raise PressedError

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def pressing(heard: list, count: int) -> Iterator[None]:
    """Presses so often meanwhile, each time when the one before has been heard."""

    def press():
        for number in range(1, count + 1):
            os.kill(os.getpid(), signal.SIGINT)
            wait_for(lambda number=number: len(heard) == number)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        thread.join()
