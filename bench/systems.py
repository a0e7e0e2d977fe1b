"""What run.py measures: kvferry, its peers and the limits of the machine.

Each is made with a Stage, which says where its two sides run and ends them with the row."""

import contextlib
import dataclasses
from pathlib import Path

from drivers import BenchError, Driver
from network import LOOPBACK, Network
from workload import format_runs

ROOT = Path(__file__).resolve().parent.parent
SALT = 7
MEMCPY_THREADS = (1, 2)
TCP_STREAMS = (1, 2, 4)
ITEM_STREAMS = (1, 2)
MOONCAKE = {"MC_LOG_LEVEL": "WARNING"}  # What it warns of is the reason when it fails.


@dataclasses.dataclass
class Sample:
    seconds: float
    cpu: float


@dataclasses.dataclass
class Stage:
    drivers: contextlib.ExitStack  # Ends them.
    network: Network = LOOPBACK
    congestion_control: str = ""  # Of the bulk streams, as of kvferry; "" is the system's.

    def start(self, end, command, env=None):
        return self.drivers.enter_context(Driver(command, env, end.prefix))


class System:
    """Moves `remote` pages of one pool to `local` pages of another, and can be timed."""

    def __init__(self, name, shape, remote, local):
        self.name, self.shape = name, shape
        self.remote, self.local = format_runs(remote), format_runs(local)
        self.about = ""  # Versions, to be printed once.

    def sample(self):
        raise NotImplementedError


class Kvferry(System):
    def __init__(self, name, lists, stage, build, settings, flags=()):
        super().__init__(name, *lists)
        command = [build / "bench/kvferry_bench_transfer", "--pool-pages", self.shape.pool_pages]
        command += [*self.shape.layout, *flags]

        def start(end, role):
            words = [f"--config={setting}" for setting in stage.network.settings(end) + settings]
            return stage.start(end, [*command, "--role", role, *words])

        self.prefill = start(stage.network.source, "prefill")
        self.decode = start(stage.network.target, "decode")
        self.prefill.ask("fill", SALT)
        self.about = f"UCX {self.decode.ready['ucx']}, {self.decode.ready['build']} build"

    def sample(self):
        cpu_before = self.prefill.ask("cpu")["cpu"]
        ticket = self.prefill.ask("publish", self.remote)["ticket"]
        result = self.decode.ask("fetch", ticket, self.local)
        outcome = self.prefill.ask("ended")["outcome"]
        cpu = self.prefill.ask("cpu")["cpu"] - cpu_before
        if outcome != "fetched":
            raise BenchError(f"{self.name}: the lease {outcome}")
        self.decode.ask("verify", SALT, self.local, self.remote)
        self.decode.ask("zero", self.local)
        return Sample(result["seconds"], result["cpu"] + cpu)


class Pushed(Kvferry):
    """The decode side registers its pages first; timed from Push() to its answer, as NIXL's and
    Mooncake's writes are, on the side that has the pages."""

    def sample(self):
        cpu_before = self.decode.ask("cpu")["cpu"]
        ticket = self.decode.ask("receive", self.local)["ticket"]
        result = self.prefill.ask("push", ticket, self.remote)
        self.decode.ask("received")
        cpu = self.decode.ask("cpu")["cpu"] - cpu_before
        outcome = self.prefill.ask("ended")["outcome"]
        if outcome != "fetched":
            raise BenchError(f"{self.name}: the lease {outcome}")
        self.decode.ask("verify", SALT, self.local, self.remote)
        self.decode.ask("zero", self.local)
        return Sample(result["seconds"], result["cpu"] + cpu)


class Pair:
    """Two processes of a peer; `source` holds the pattern. Stopped when it is not their turn."""

    def __init__(self, source, target):
        self.source, self.target = source, target
        self.broken = False  # An operation failed, and may still write somewhere.
        self.source.ask("fill", SALT)
        self.pause()

    def pause(self):
        self.source.pause()
        self.target.pause()

    @contextlib.contextmanager
    def awake(self):
        """Threads that poll without pause, as NIXL's, would take cores from the others' runs."""
        self.source.resume()
        self.target.resume()
        try:
            yield
        finally:
            self.pause()


class Peer(System):
    """One operation of a pair: `read` has the target pull, `write` the source push."""

    def __init__(self, name, operation, lists, pair, about):
        super().__init__(name, *lists)
        self.operation, self.pair, self.about = operation, pair, about

    def sample(self):
        if self.pair.broken:
            raise BenchError("not tried: the other operation failed")
        self.pair.broken = True
        with self.pair.awake():
            sample = self.move()
        self.pair.broken = False
        return sample

    def move(self):
        source, target = self.pair.source, self.pair.target
        active, passive = (target, source) if self.operation == "read" else (source, target)
        own, other = self.local, self.remote
        if self.operation == "write":
            own, other = other, own
        cpu_before = passive.ask("cpu")["cpu"]
        result = active.ask(self.operation, own, other)
        cpu = passive.ask("cpu")["cpu"] - cpu_before
        target.ask("verify", SALT, self.local, self.remote)
        target.ask("zero", self.local)
        return Sample(result["seconds"], result["cpu"] + cpu)


def python_peer(program, shape, python):
    command = [python, ROOT / "bench/peers" / program, "--buffers", shape.buffers]
    return [*command, "--page-bytes", shape.page_bytes, "--pool-pages", shape.pool_pages]


def both_operations(name, lists, source, target):
    pair, about = Pair(source, target), f"{name} {source.ready['version']}"
    return [Peer(f"{name} {op.upper()}", op, lists, pair, about) for op in ("read", "write")]


def introduce(source, target, key):
    """Tells each of the other; `key` is under what it says how to reach it."""
    for own, other in ((source, target), (target, source)):
        own.ask("peer", other.ready[key], other.ready["base"])


def nixl_sides(shape, stage, python, env, flags=()):
    command = [*python_peer("nixl_peer.py", shape, python), *flags]
    source = stage.start(stage.network.source, [*command, "--name", "source"], env)
    target = stage.start(stage.network.target, [*command, "--name", "target"], env)
    introduce(source, target, "metadata")
    return source, target


def nixl(lists, stage, python, tls):
    env = {"UCX_TLS": tls, "UCX_NET_DEVICES": stage.network.source.device}
    return both_operations("NIXL", lists, *nixl_sides(lists[0], stage, python, env))


def mooncake(lists, stage, python):
    command = python_peer("mooncake_peer.py", lists[0], python)
    ends = (stage.network.source, stage.network.target)
    source, target = (stage.start(e, [*command, "--host", e.host], MOONCAKE) for e in ends)
    introduce(source, target, "address")
    return both_operations("Mooncake", lists, source, target)


def plain_zmq(lists, stage, build):
    """Pages in ZeroMQ messages, written by hand."""
    shape = lists[0]
    command = [build / "bench/kvferry_bench_plain_zmq_transfer", *shape.layout]
    command += ["--pool-pages", shape.pool_pages]
    source = stage.start(stage.network.source, [*command, "--role", "source"])
    target = stage.start(stage.network.target, [*command, "--role", "target"])
    target.ask("connect", source.ask("listen", stage.network.source.host)["address"])
    return [Peer("ZeroMQ", "read", lists, Pair(source, target), "")]


class Limit(System):
    """A command of kvferry_bench_limits."""

    def __init__(self, name, lists, driver, words):
        super().__init__(name, *lists)
        self.driver, self.words = driver, words

    def sample(self):
        result = self.driver.ask(*self.words)
        return Sample(result["seconds"], result["cpu"])


def memcpy_limits(lists, stage, build):
    shape = lists[0]
    command = [build / "bench/kvferry_bench_limits", *shape.layout]
    driver = stage.start(stage.network.target, [*command, "--pool-pages", shape.pool_pages])
    driver.ask("fill", SALT)
    remote, local = (format_runs(pages) for pages in lists[1:])
    return [
        Limit(f"memcpy {threads}", lists, driver, ("memcpy", threads, SALT, local, remote))
        for threads in MEMCPY_THREADS
    ]


def tcp_limits(lists, stage, build):
    shape = lists[0]
    command = [build / "bench/kvferry_bench_limits", *shape.layout, "--pool-pages", 1]
    command += ["--tcp-bytes", shape.request_bytes, "--tcp-streams", max(TCP_STREAMS)]
    command += ["--tcp-host", stage.network.target.host]
    if stage.network.source.netns:
        command += ["--tcp-senders-netns", f"/run/netns/{stage.network.source.netns}"]
    if stage.network.source.cpus:
        command += ["--tcp-senders-cpus", stage.network.source.cpu_list]
    if stage.congestion_control:
        command += ["--tcp-congestion-control", stage.congestion_control]
    driver = stage.start(stage.network.target, command)
    bulk = [(f"tcp {streams}", streams, 0, "packed") for streams in TCP_STREAMS]
    items = [
        (f"{how} {streams}", streams, shape.page_bytes, how)
        for how in ("packed", "straight")
        for streams in ITEM_STREAMS
    ]
    return [
        Limit(name, lists, driver, ("tcp", streams, shape.request_bytes, item_bytes, how))
        for name, streams, item_bytes, how in bulk + items
    ]
