"""One side of a transfer with Mooncake's Transfer Engine over TCP, for bench/run.py.

Runs under a Python that has mooncake and numpy (requirements/peers.txt). Besides what pool_side.py
has, it answers:

    peer ADDRESS BASE            the other side, and where its pool lies
    read LOCAL REMOTE            pull the other side's REMOTE pages into LOCAL: {"seconds", "cpu"}
    write LOCAL REMOTE           push LOCAL pages into the other side's REMOTE ones: the same
"""

import importlib.metadata
import time

import numpy as np
from pool_side import PoolSide, parse_runs, serve


def check(code, what):
    if code != 0:
        raise RuntimeError(f"Mooncake's {what} returned {code}")


class Side(PoolSide):
    commands = (*PoolSide.commands, "peer", "read", "write")

    def __init__(self, args):
        super().__init__(args)
        from mooncake.engine import TransferEngine

        self.host, self.engine = args.host, TransferEngine()
        check(self.engine.initialize(self.host, "P2PHANDSHAKE", "tcp", ""), "initialize")
        places = [self.base + b * self.stride for b in range(self.buffers)]
        register = self.engine.batch_register_memory
        check(register(places, [self.stride] * self.buffers), "batch_register_memory")

    def ready(self):
        return {
            "version": importlib.metadata.version("mooncake-transfer-engine-non-cuda"),
            "address": f"{self.host}:{self.engine.get_rpc_port()}",
            "base": self.base,
        }

    def peer(self, address, base):
        self.address, self.peer_base = address, int(base)
        return {}

    def read(self, local, remote):
        return self.transfer(self.engine.batch_transfer_sync_read, local, remote)

    def write(self, local, remote):
        return self.transfer(self.engine.batch_transfer_sync_write, local, remote)

    def pieces(self, local, remote):
        """Addresses here, there, and bytes: pages that are neighbours on both sides as one, which
        is how SGLang calls Mooncake."""
        cuts = np.flatnonzero((np.diff(local) != 1) | (np.diff(remote) != 1)) + 1
        first = np.concatenate([[0], cuts])
        pages = np.diff(np.concatenate([first, [len(local)]]))
        offsets = np.arange(self.buffers)[:, None] * self.stride

        def addresses(base, ids):
            return (base + offsets + ids[first][None] * self.page_bytes).ravel().tolist()

        here, there = addresses(self.base, local), addresses(self.peer_base, remote)
        return here, there, np.tile(pages * self.page_bytes, self.buffers).tolist()

    def transfer(self, operation, local, remote):
        local, remote = parse_runs(local), parse_runs(remote)
        cpu_before, begin = time.process_time(), time.perf_counter()
        here, there, sizes = self.pieces(local, remote)
        code = operation(self.address, here, there, sizes)
        seconds = time.perf_counter() - begin
        if code != 0:
            return {"error": f"it returned {code} after {seconds:.0f} s, for {len(sizes)} pieces"}
        return {"seconds": seconds, "cpu": time.process_time() - cpu_before}


if __name__ == "__main__":
    serve(
        Side, __doc__.splitlines()[0], lambda parser: parser.add_argument("--host", required=True)
    )
