"""What the Python peers share: a pool with a pattern in it, and the loop that serves run.py.

Like our own drivers they read commands from stdin, one a line, and answer each with one line of
JSON. Besides what a peer adds:

    fill SALT | zero RUNS | verify SALT LOCAL REMOTE | cpu | quit
"""

import argparse
import json
import os
import sys
import time

import numpy as np

MIX = np.uint64(0x9E3779B97F4A7C15)
PER_BUFFER = np.uint64(0xD1342543DE82EF95)
PER_PAGE = np.uint64(0xAF251AF3B0F025B5)


def parse_runs(text):
    runs = (item.split("+") for item in text.split(","))
    return np.concatenate([np.arange(int(first), int(first) + int(count)) for first, count in runs])


class PoolSide:
    """A pool; `commands` names the methods that run.py may call with the words of a line."""

    commands = ("fill", "zero", "verify", "cpu")

    def __init__(self, args):
        self.buffers, self.page_bytes, self.pages = args.buffers, args.page_bytes, args.pool_pages
        # Touched here, so that no measured transfer pays for that.
        self.pool = np.zeros((self.buffers, self.pages, self.page_bytes // 8), dtype=np.uint64)
        self.pool.fill(0)
        self.base = self.pool.ctypes.data
        self.stride = self.pages * self.page_bytes  # Bytes from one buffer to the next.

    def ready(self):
        """What the driver's first line says."""
        raise NotImplementedError

    def cpu(self):
        return {"cpu": time.process_time()}

    def expected(self, salt, buffer, pages):
        """The pattern in these pages of one buffer: each word is a hash of all its indices."""
        word = np.arange(self.page_bytes // 8, dtype=np.uint64)
        key = (np.uint64(salt) + np.uint64(buffer) * PER_BUFFER) ^ (
            pages.astype(np.uint64) * PER_PAGE
        )
        mixed = (key[:, None] + word[None, :]) * MIX
        return mixed ^ (mixed >> np.uint64(29))

    def fill(self, salt):
        for buffer in range(self.buffers):
            self.pool[buffer] = self.expected(int(salt), buffer, np.arange(self.pages))
        return {}

    def zero(self, runs):
        self.pool[:, parse_runs(runs)] = 0
        return {}

    def verify(self, salt, local, remote):
        local, remote = parse_runs(local), parse_runs(remote)
        others = np.ones(self.pages, dtype=bool)
        others[local] = False
        for buffer in range(self.buffers):
            if not np.array_equal(
                self.pool[buffer][local], self.expected(int(salt), buffer, remote)
            ):
                return {"error": f"buffer {buffer}: pages that were moved hold other bytes"}
            if self.pool[buffer][others].any():
                return {"error": f"buffer {buffer}: a page that was not moved was written"}
        return {}

    def handle(self, words):
        if words[0] not in self.commands:
            return {"error": f"no command {words[0]}"}
        return getattr(self, words[0])(*words[1:])


def serve(make_side, description, add_arguments=None):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--buffers", type=int, required=True)
    parser.add_argument("--page-bytes", type=int, required=True)
    parser.add_argument("--pool-pages", type=int, required=True)
    if add_arguments:
        add_arguments(parser)
    args = parser.parse_args()
    # Peers print to stdout now and then: answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    side = make_side(args)
    print(json.dumps({"ready": True, **side.ready()}), file=answers)
    for line in sys.stdin:
        words = line.split()
        if words == ["quit"]:
            break
        try:
            answer = side.handle(words)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    # A peer may crash while it shuts down, and there is nothing left to lose.
    answers.flush()
    os._exit(0)
