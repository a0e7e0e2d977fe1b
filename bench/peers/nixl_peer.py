"""One side of a NIXL transfer, for bench/run.py and device.py to compare kvferry with.

Runs under a Python that has nixl and numpy (requirements/peers.txt), not under kvferry's own. With
--device its pool is a torch tensor on that GPU, and so is the other side's.
Besides what pool_side.py has, it answers:

    peer METADATA BASE           load the other side; describe all pages of both pools, once
    read LOCAL REMOTE            pull the other side's REMOTE pages into LOCAL: {"seconds", "cpu"}
    write LOCAL REMOTE           push LOCAL pages into the other side's REMOTE ones: the same
"""

import base64
import importlib
import importlib.metadata
import time

import numpy as np
from pool_side import PoolSide, parse_runs, serve

MODULES = ["nixl._api", "nixl_cu13._api", "nixl_cu12._api"]


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


class Side(PoolSide):
    commands = (*PoolSide.commands, "peer", "read", "write")

    def __init__(self, args):
        super().__init__(args)  # With torch first: NIXL's UCX finds the CUDA runtime it brings.
        self.memory, self.device = ("DRAM", 0) if args.device is None else ("VRAM", args.device)
        api = import_nixl()
        self.agent = api.nixl_agent(args.name, api.nixl_agent_config(backends=["UCX"]))
        self.registered = self.agent.register_memory(
            [(self.base + b * self.stride, self.stride, self.device, "")
             for b in range(self.buffers)],
            self.memory,
        )  # fmt: skip
        self.local = self.remote = None
        self.peer_name = ""

    def ready(self):
        return {
            "version": nixl_version(),
            "metadata": base64.b64encode(self.agent.get_agent_metadata()).decode(),
            "base": self.base,
        }

    def descriptors(self, base):
        """Every page of every buffer: [buffers * pages, 3] of address, bytes, device."""
        index = np.arange(self.buffers * self.pages, dtype=np.uint64)
        table = np.zeros((len(index), 3), dtype=np.uint64)
        table[:, 0] = np.uint64(base) + index * np.uint64(self.page_bytes)
        table[:, 1] = self.page_bytes
        table[:, 2] = self.device
        return table

    def peer(self, metadata, base):
        name = self.agent.add_remote_agent(base64.b64decode(metadata))
        self.peer_name = name.decode() if isinstance(name, bytes) else name
        begin = time.perf_counter()
        own = self.descriptors(self.base)
        self.local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", own, self.memory)
        self.remote = self.agent.prep_xfer_dlist(
            self.peer_name, self.descriptors(int(base)), self.memory
        )
        return {"prepare_seconds": time.perf_counter() - begin}

    def indices(self, pages):
        rows = np.arange(self.buffers)[:, None] * self.pages + pages[None, :]
        return rows.ravel().astype(np.int32)

    def read(self, local, remote):
        return self.transfer("READ", local, remote)

    def write(self, local, remote):
        return self.transfer("WRITE", local, remote)

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


def add_arguments(parser):
    parser.add_argument("--name", required=True)
    parser.add_argument("--device", type=int, help="GPU of the pool (default: host memory)")


if __name__ == "__main__":
    serve(Side, __doc__.splitlines()[0], add_arguments)
