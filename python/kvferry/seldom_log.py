"""Warnings of what may come as often as it likes."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

_EVERY_S = 30.0


class SeldomLog:
    """Warns at most every _EVERY_S, and says then how many others there were. Thread-safe."""

    def __init__(self, logger: logging.Logger, prefix: str = "kvferry: "):
        self._logger = logger
        self._prefix = prefix
        self._mutex = threading.Lock()
        self._next_s = 0.0
        self._unsaid = 0

    def warn(self, text: str, *of: Any) -> None:
        with self._mutex:
            now = time.monotonic()
            if now < self._next_s:
                self._unsaid += 1
                return
            unsaid, self._unsaid = self._unsaid, 0
            self._next_s = now + _EVERY_S
        line = f"{self._prefix}{text} (%d more since the last)"
        self._logger.warning(line, *of, unsaid, stacklevel=2)
