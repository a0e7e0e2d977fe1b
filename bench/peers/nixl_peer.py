"""One side of a NIXL transfer, for bench/run.py to compare kvferry with.

Runs under a Python that has nixl and numpy (requirements/peers.txt), not under kvferry's own. Like
our own drivers it reads commands from stdin, one a line, and answers each with one line of JSON:

    peer METADATA BASE           load the other side; describe all pages of both pools, once
    read LOCAL REMOTE            pull the other side's REMOTE pages into LOCAL: {"seconds", "cpu"}
    write LOCAL REMOTE           push LOCAL pages into the other side's REMOTE ones: the same
    fill SALT | zero RUNS | verify SALT LOCAL REMOTE | cpu | quit
"""

import argparse
import base64
import importlib
import importlib.metadata
import json
import os
import sys
import time

import numpy as np

MODULES = ["nixl._api", "nixl_cu13._api", "nixl_cu12._api"]
MIX = np.uint64(0x9E3779B97F4A7C15)
PER_BUFFER = np.uint64(0xD1342543DE82EF95)
PER_PAGE = np.uint64(0xAF251AF3B0F025B5)


def import_nixl():
    reasons = []
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except Exception as error:  # A CUDA library that is missing is an OSError or RuntimeError.
            reasons.append(f"{name}: {error}")
    raise SystemExit("no NIXL that imports: " + "; ".join(reasons))


def nixl_version():
    for name in ("nixl", "nixl-cu13", "nixl-cu12"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "unknown"


def parse_runs(text):
    runs = (item.split("+") for item in text.split(","))
    return np.concatenate([np.arange(int(first), int(first) + int(count)) for first, count in runs])


class Side:
    def __init__(self, args):
        api = import_nixl()
        self.buffers, self.page_bytes, self.pages = args.buffers, args.page_bytes, args.pool_pages
        # Touched here, so that no measured transfer pays for that.
        self.pool = np.zeros((self.buffers, self.pages, self.page_bytes // 8), dtype=np.uint64)
        self.pool.fill(0)
        self.agent = api.nixl_agent(args.name, api.nixl_agent_config(backends=["UCX"]))
        stride = self.pages * self.page_bytes
        base = self.pool.ctypes.data
        self.registered = self.agent.register_memory(
            [(base + b * stride, stride, 0, "") for b in range(self.buffers)], "DRAM"
        )
        self.local = self.remote = None
        self.peer_name = ""

    def answer_ready(self):
        return {
            "ready": True,
            "version": nixl_version(),
            "metadata": base64.b64encode(self.agent.get_agent_metadata()).decode(),
            "base": self.pool.ctypes.data,
        }

    def descriptors(self, base):
        """Every page of every buffer: [buffers * pages, 3] of address, bytes, device."""
        index = np.arange(self.buffers * self.pages, dtype=np.uint64)
        table = np.zeros((len(index), 3), dtype=np.uint64)
        table[:, 0] = np.uint64(base) + index * np.uint64(self.page_bytes)
        table[:, 1] = self.page_bytes
        return table

    def peer(self, metadata, base):
        name = self.agent.add_remote_agent(base64.b64decode(metadata))
        self.peer_name = name.decode() if isinstance(name, bytes) else name
        begin = time.perf_counter()
        own = self.descriptors(self.pool.ctypes.data)
        self.local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", own, "DRAM")
        self.remote = self.agent.prep_xfer_dlist(
            self.peer_name, self.descriptors(int(base)), "DRAM"
        )
        return {"prepare_seconds": time.perf_counter() - begin}

    def indices(self, pages):
        rows = np.arange(self.buffers)[:, None] * self.pages + pages[None, :]
        return rows.ravel().astype(np.int32)

    def transfer(self, operation, local, remote):
        local, remote = parse_runs(local), parse_runs(remote)
        cpu_before, begin = time.process_time(), time.perf_counter()
        handle = self.agent.make_prepped_xfer(
            operation, self.local, self.indices(local), self.remote, self.indices(remote)
        )
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        seconds = time.perf_counter() - begin
        cpu = time.process_time() - cpu_before
        self.agent.release_xfer_handle(handle)
        if state != "DONE":
            return {"error": f"NIXL transfer ended in state {state}"}
        return {"seconds": seconds, "cpu": cpu}

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
        command, arguments = words[0], words[1:]
        if command == "cpu":
            return {"cpu": time.process_time()}
        if command in ("read", "write"):
            return self.transfer(command.upper(), *arguments)
        if command in ("peer", "fill", "zero", "verify"):
            return getattr(self, command)(*arguments)
        return {"error": f"no command {command}"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--buffers", type=int, required=True)
    parser.add_argument("--page-bytes", type=int, required=True)
    parser.add_argument("--pool-pages", type=int, required=True)
    # NIXL and UCX print to stdout now and then: answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    side = Side(parser.parse_args())

    print(json.dumps(side.answer_ready()), file=answers)
    for line in sys.stdin:
        words = line.split()
        if words == ["quit"]:
            break
        try:
            answer = side.handle(words)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    # NIXL may crash while it shuts down, and there is nothing left to lose.
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
