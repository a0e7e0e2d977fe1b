"""kvferry's Mooncake backend beside Mooncake's own client: values of 2 MiB put and got back.

Both are clients of one master and keep nothing themselves: a third process lends the memory, so
every value crosses a loopback TCP connection each way. They take turns; the table has medians of
the rounds, and every value got back is compared with what was put. What was put is removed after
each round, outside of the times. `run.py` prints this table among its own; alone:
bench/mooncake_bench.py --help.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "python"))

from servers import NoServer, mooncake_master  # noqa: E402

VALUE_BYTES = 2 << 20
VALUES = 64
SEGMENT_BYTES = 1 << 30


class CannotRun(RuntimeError):
    pass


def connect(master, segment_bytes):
    """A client of Mooncake's own."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", f"127.0.0.1:{master}"
    )
    if code != 0:
        raise CannotRun(f"Mooncake's set-up failed with error {code}")
    return store


def lend_memory(master, pipe):
    """The third process, until its parent closes the pipe."""
    store = connect(master, SEGMENT_BYTES)
    pipe.send("ready")
    try:
        pipe.recv()
    except EOFError:
        store.close()


def check(code):
    if code < 0:
        raise CannotRun(f"Mooncake: error {code}")


class Plain:
    """put_from() and get_into() on memory that was registered beforehand."""

    name = "put_from, get_into"

    def __init__(self, master, source, target):
        self.store = connect(master, 0)
        for memory in (source, target):
            check(self.store.register_buffer(memory.ctypes.data, memory.nbytes))

    def put(self, key, value):
        check(self.store.put_from(key, value.ctypes.data, value.nbytes))

    def get(self, key, out):
        check(self.store.get_into(key, out.ctypes.data, out.nbytes))

    def erase(self, key):
        check(self.store.remove(key, True))


class Ours:
    name = "kvferry"

    def __init__(self, master):
        from kvferry.mooncake import MooncakeStore

        self.store = MooncakeStore(
            "127.0.0.1", f"127.0.0.1:{master}", max_value_bytes=VALUE_BYTES, staging_buffers=1
        )
        self.put, self.get, self.erase = self.store.put, self.store.get_into, self.store.erase


class Values:
    def __init__(self):
        rng = np.random.default_rng(2)
        self.source = rng.integers(0, 256, (VALUES, VALUE_BYTES), dtype=np.uint8)
        self.target = np.zeros_like(self.source)

    def round(self, system, number):
        """(seconds of all puts, seconds of all gets). Each round puts other values."""
        values = np.roll(np.arange(VALUES), number)
        begin = time.perf_counter()
        for key in range(VALUES):
            system.put(f"{number}-{key}", self.source[values[key]])
        put = time.perf_counter() - begin
        self.target[:] = 0
        begin = time.perf_counter()
        for key in range(VALUES):
            system.get(f"{number}-{key}", self.target[key])
        get = time.perf_counter() - begin
        if not np.array_equal(self.target, self.source[values]):
            raise CannotRun(f"{system.name}: values got back are not what was put")
        for key in range(VALUES):
            system.erase(f"{number}-{key}")
        return put, get


def measure(master, reps):
    values = Values()
    systems = [Ours(master), Plain(master, values.source, values.target)]
    samples = {system.name: [] for system in systems}
    for number in range(reps + 1):
        for system in systems if number % 2 == 0 else reversed(systems):
            sample = values.round(system, number)
            if number > 0:  # The first one warms up.
                samples[system.name].append(sample)
    return samples


def print_rows(samples):
    gigabytes = VALUES * VALUE_BYTES * 1e-9
    print("| store | GB/s | GB/s min-max | beside | GB/s | GB/s min-max | x |")
    print("|---|---|---|---|---|---|---|")
    for at, what in enumerate(("put", "get")):
        cells = []
        for name in (Ours.name, Plain.name):
            rates = [gigabytes / sample[at] for sample in samples[name]]
            cells.append(f"{statistics.median(rates):.2f} | {min(rates):.2f}-{max(rates):.2f}")
        beside = Plain.name.split(", ")[at]
        pairs = zip(samples[Ours.name], samples[Plain.name], strict=True)
        ratio = statistics.median(theirs[at] / ours[at] for ours, theirs in pairs)
        print(
            f"| mooncake, {what} | {cells[0]} | {beside} | {cells[1]} | {ratio:.2f} |", flush=True
        )


def run(reps):
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        try:
            server = mooncake_master(Path(folder))
        except NoServer as missing:
            raise CannotRun(str(missing)) from missing
        ours, theirs = context.Pipe()
        lender = context.Process(target=lend_memory, args=(server.port, theirs), daemon=True)
        try:
            lender.start()
            theirs.close()
            if not ours.poll(60) or ours.recv() != "ready":
                raise CannotRun("the process that lends memory did not start in 60 s")
            return measure(server.port, reps)
        except EOFError:
            raise CannotRun("the process that lends memory ended") from None
        finally:
            ours.close()
            lender.join(10)
            lender.kill()
            server.kill()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reps", type=int, default=9, help="measured rounds (default: 9)")
    parser.add_argument(
        "--peers", type=Path, metavar="FOLDER", help="site-packages that has Mooncake"
    )
    args = parser.parse_args()
    if args.peers:
        sys.path.append(str(args.peers))  # Last: this Python's own packages come first.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # Mooncake says a lot.
    try:
        import kvferry
    except ImportError as error:
        sys.exit(f"mooncake: not measured: {error} (./dev setup installs kvferry)")
    print(f"{VALUES} values of 2 MiB, one after another, in Mooncake Store\n", flush=True)
    try:
        print_rows(run(args.reps))
    except (RuntimeError, ImportError, kvferry.Error) as error:
        sys.exit(f"mooncake: not measured: {error}")


if __name__ == "__main__":
    main()
