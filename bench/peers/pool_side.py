"""What the Python peers share: a pool with a pattern in it, and the loop that serves run.py and
device.py.

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


class HostPool:
    """Buffers of pages, each page of 64-bit words."""

    def __init__(self, buffers, pages, words):
        # Touched here, so that no measured transfer pays for that.
        self.pool = np.zeros((buffers, pages, words), dtype=np.uint64)
        self.pool.fill(0)
        self.base = self.pool.ctypes.data

    def store(self, buffer, words):
        self.pool[buffer] = words

    def load(self, buffer):
        return self.pool[buffer]

    def zero(self, pages):
        self.pool[:, pages] = 0


class TorchPool:
    """The same in a tensor, such as one on a GPU; the host has one buffer of it at a time."""

    def __init__(self, buffers, pages, words, device):
        import torch  # It takes seconds, and whoever has no GPU may not have it.

        self.torch, self.device = torch, torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # UCX takes the CUDA context of its thread.
        self.pool = torch.zeros((buffers, pages, words * 8), dtype=torch.uint8, device=self.device)
        self.base = self.pool.data_ptr()
        self.finish()

    def finish(self):
        """Transfers do not wait for what torch has queued."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    def store(self, buffer, words):
        self.pool[buffer].copy_(self.torch.from_numpy(words.view(np.uint8)))
        self.finish()

    def load(self, buffer):
        return self.pool[buffer].cpu().numpy().view(np.uint64)

    def zero(self, pages):
        self.pool.index_fill_(1, self.torch.from_numpy(pages).to(self.device), 0)
        self.finish()


class PoolSide:
    """A pool; `commands` names the methods that run.py may call with the words of a line."""

    commands = ("fill", "zero", "verify", "cpu")

    def __init__(self, args):
        self.buffers, self.page_bytes, self.pages = args.buffers, args.page_bytes, args.pool_pages
        self.stride = self.pages * self.page_bytes  # Bytes from one buffer to the next.
        self.pool = self.make_pool(args)
        self.base = self.pool.base

    def make_pool(self, args):
        shape = self.buffers, self.pages, self.page_bytes // 8
        # Only peers that can move it have the argument.
        if getattr(args, "device", None) is not None:
            return TorchPool(*shape, f"cuda:{args.device}")
        return HostPool(*shape)

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
            self.pool.store(buffer, self.expected(int(salt), buffer, np.arange(self.pages)))
        return {}

    def zero(self, runs):
        self.pool.zero(parse_runs(runs))
        return {}

    def verify(self, salt, local, remote):
        local, remote = parse_runs(local), parse_runs(remote)
        others = np.ones(self.pages, dtype=bool)
        others[local] = False
        for buffer in range(self.buffers):
            there = self.pool.load(buffer)
            if not np.array_equal(there[local], self.expected(int(salt), buffer, remote)):
                return {"error": f"buffer {buffer}: pages that were moved hold other bytes"}
            if there[others].any():
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
