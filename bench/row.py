"""Measures one row: every system on the same pages, in turn, over and over."""

import contextlib
import dataclasses
import random
import re
import statistics
import time
from pathlib import Path

from drivers import BenchError
from network import LOOPBACK
from systems import (
    MEMCPY_THREADS,
    TCP_STREAMS,
    Kvferry,
    Pushed,
    Stage,
    memcpy_limits,
    mooncake,
    nixl,
    plain_zmq,
    tcp_limits,
)
from workload import SHAPES, choose_pages

SPARE_BYTES = 1 << 30  # To be left free on the machine.


def memory_available():
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(match[1]) * 1024 if match else 0


@dataclasses.dataclass
class Variant:
    """kvferry in another way, with a column of its own, as a ratio to a limit or to NIXL."""

    name: str
    over: tuple
    ratio: str
    settings: tuple = ()
    flags: tuple = ()


@dataclasses.dataclass
class Part:
    """A table of its own: over TCP, or on the same host."""

    name: str
    title: str
    same_host_path: str
    peers: dict  # Column: the systems of which it shows the fastest. NIXL has columns of its own.
    limits: tuple  # Of the machine, systems' names.
    variants: tuple = ()  # Of kvferry.
    items: dict = dataclasses.field(default_factory=dict)  # Limit of scattered items: of what.
    ways: dict = dataclasses.field(default_factory=dict)  # That kvferry chooses from: how to force.


TCP_LIMITS = tuple(f"tcp {streams}" for streams in TCP_STREAMS)
HOST_LIMITS = tuple(f"memcpy {threads}" for threads in MEMCPY_THREADS)
TCP_PEERS = {"ZeroMQ": ("ZeroMQ",), "Mooncake": ("Mooncake READ", "Mooncake WRITE")}
NIXL = ("NIXL READ", "NIXL WRITE")
TCP_VARIANTS = (Variant("2 lanes", ("tcp 2",), "x tcp 2", settings=("lanes=2",)),)
HOST_VARIANTS = (
    Variant("2 threads", ("memcpy 2",), "x 2", settings=("copy_threads=2",)),
    Variant("arena", NIXL, "arena x NIXL", flags=("--private-pool",)),
)
TCP_ITEMS = {
    "packed 1": "kvferry",
    "packed 2": "2 lanes",
    "straight 1": "kvferry",
    "straight 2": "2 lanes",
}
TCP_WAYS = {"packed": "network_path=packed", "direct": "network_path=direct"}
HOST_WAYS = {"in place": "same_host_path=in_place", "gathered": "same_host_path=arena"}
PARTS = {
    "tcp": Part(
        "tcp", "over TCP", "network", TCP_PEERS, TCP_LIMITS, TCP_VARIANTS, TCP_ITEMS, TCP_WAYS
    ),
    "host": Part(
        "host", "on the same host", "auto", {}, HOST_LIMITS, HOST_VARIANTS, ways=HOST_WAYS
    ),
}


class Row:
    def __init__(self, part, shape_name, fragmentation):
        self.part, self.shape_name, self.fragmentation = part, shape_name, fragmentation
        self.shape = SHAPES[shape_name]
        self.samples = {}

    def rates(self, name):
        return [self.shape.request_bytes / s.seconds * 1e-9 for s in self.samples.get(name, [])]

    def rate(self, name):
        return statistics.median(self.rates(name)) if self.samples.get(name) else None

    def spread(self, name):
        """(lowest, highest) rate; None when it was not measured."""
        rates = self.rates(name)
        return (min(rates), max(rates)) if rates else None

    def milliseconds(self, name):
        return statistics.median(s.seconds for s in self.samples[name]) * 1e3

    def cpu_per_gb(self, name):
        gigabytes = self.shape.request_bytes * 1e-9
        return statistics.median(s.cpu for s in self.samples[name]) / gigabytes

    def fastest(self, names):
        """The name among these of what was fastest; None when none was measured."""
        return max(filter(self.samples.get, names), key=self.rate, default=None)

    def best_rate(self, names):
        return max((self.rate(name) for name in names if self.samples.get(name)), default=None)


def makers(part, args, lists, stage):
    """(name, bytes that it needs, what makes its systems) of all that this row measures."""
    shape = lists[0]
    two_pools = 2 * shape.pool_bytes

    def ours(name, build, settings, flags=(), kind=Kvferry):
        path = [f"same_host_path={part.same_host_path}"]  # First: what the user says wins.
        return lambda: [kind(name, lists, stage, build, path + settings, flags)]

    yield "kvferry", two_pools, ours("kvferry", args.build, args.config)
    for variant in part.variants:
        settings = [*variant.settings, *args.config]
        yield variant.name, two_pools, ours(variant.name, args.build, settings, variant.flags)
    for way, setting in part.ways.items() if args.ways else ():
        yield way, two_pools, ours(way, args.build, [*args.config, setting])
    if args.push:
        flags = ("--accept-pushes",)
        yield "push", two_pools, ours("push", args.build, args.config, flags, Pushed)
    if args.also:
        settings = args.also_config if args.also_config is not None else args.config
        yield "also", two_pools, ours("also", args.also, settings)
    if args.peers:
        tls = args.nixl_tls if part.name == "tcp" else args.nixl_host_tls
        yield "NIXL", two_pools, lambda: nixl(lists, stage, args.peers, tls)
    if part.name == "tcp" and args.peers:
        yield "Mooncake", two_pools, lambda: mooncake(lists, stage, args.peers)
    if part.name == "tcp" and not args.no_zmq:
        yield "ZeroMQ", two_pools, lambda: plain_zmq(lists, stage, args.build)
    if not args.no_limits:
        make, need = memcpy_limits, two_pools
        if part.name == "tcp":
            make, need = tcp_limits, 2 * shape.request_bytes
        yield "limits", need, lambda: make(lists, stage, args.build)


def make_all(part, args, lists, stage, problem):
    """The systems that could be made; problem(name, why) is told of the others."""
    systems = []
    for name, memory, make in makers(part, args, lists, stage):
        if memory + SPARE_BYTES > memory_available():
            problem(name, f"{memory >> 20} MiB of memory are not available")
            continue
        try:
            systems += make()
        except BenchError as error:
            problem(name, error)
    return systems


def take_turns(row, systems, reps, rest_ms, problem):
    for rep in range(reps + 1):
        for system in list(systems):
            # All begin alike: right after a run, what it has left awake and where would count.
            time.sleep(rest_ms * 1e-3)
            try:
                sample = system.sample()
            except BenchError as error:
                problem(f"{system.name}, run {rep}", error)
                systems.remove(system)
                continue
            if rep > 0:  # The first one warms up.
                row.samples.setdefault(system.name, []).append(sample)


def measure(part, args, network, shape_name, fragmentation, problems, notes):
    row = Row(part, shape_name, fragmentation)
    rng = random.Random(args.seed)
    lists = (row.shape, *(choose_pages(row.shape, fragmentation, rng) for _ in range(2)))

    def problem(what, why):
        problems.append(f"{shape_name} {fragmentation} {part.title}, {what}: {why}")

    with contextlib.ExitStack() as drivers:
        chosen = dict(setting.split("=", 1) for setting in args.config if "=" in setting)
        congestion_control = chosen.get("tcp_congestion_control", "")
        stage = Stage(drivers, network if part.name == "tcp" else LOOPBACK, congestion_control)
        systems = make_all(part, args, lists, stage, problem)
        notes.update(system.about for system in systems if system.about)
        take_turns(row, systems, args.reps, args.rest_ms, problem)
    return row
