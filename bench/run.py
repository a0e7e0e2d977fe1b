"""Measures how fast kvferry moves the KV of one request between two processes of this host, over
loopback TCP and through shared memory.

For each shape and fragmentation it runs kvferry, what it is compared with and the limits of the
machine in turn, over and over, and prints one row: medians, with the spread of kvferry's. Every
byte is verified after every run. README.md says what the columns mean and what makes the
comparison fair.
"""

import argparse
import contextlib
import csv
import dataclasses
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

import allocators
from systems import ROOT, SALT, BenchError, Driver, Kvferry, Limit, Nixl, NixlPair
from workload import FRAGMENTATIONS, SHAPES, Shape, choose_pages

TABLES_SECONDS = 1800  # Longest that a program that prints tables may take.


def memory_available():
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(match[1]) * 1024 if match else 0


@dataclasses.dataclass
class Plan:
    """What to set up for one row; memory is in pools (and requests) of the row's shape."""

    args: argparse.Namespace
    shape: Shape
    remote: list
    local: list

    def makers(self):
        shape, args = self.shape, self.args
        lists = (shape, self.remote, self.local)
        two_pools = 2 * shape.pool_bytes

        def ours(name, mapped_path, settings):
            path = [f"mapped_path={mapped_path}"]  # First: what the user says wins.
            return lambda: [Kvferry(name, *lists, args.build, path + settings)]

        yield "kvferry", two_pools, ours("kvferry", "false", args.config)
        yield "same host", two_pools, ours("same host", "true", args.config)
        if args.also:
            settings = args.also_config if args.also_config is not None else args.config
            yield "also", two_pools, lambda: [Kvferry("also", *lists, args.also, settings)]
        if args.nixl_python:

            def nixl():
                pair = NixlPair(shape, args.nixl_python, args.nixl_tls)
                return [Nixl(operation, *lists, pair) for operation in ("READ", "WRITE")]

            yield "NIXL", two_pools, nixl
        if not args.no_limits:

            def limits():
                command = [args.build / "bench/kvferry_bench_limits", *shape.layout]
                command += ["--pool-pages", shape.pool_pages, "--tcp-bytes", shape.request_bytes]
                driver = Driver(command)
                driver.ask("fill", SALT)
                return [Limit(kind, *lists, driver) for kind in ("memcpy", "tcp stream")]

            yield "limits", two_pools + 2 * shape.request_bytes, limits


class Row:
    def __init__(self, shape_name, fragmentation, shape):
        self.shape_name, self.fragmentation, self.shape = shape_name, fragmentation, shape
        self.samples = {}

    def rates(self, name):
        return [self.shape.request_bytes / s.seconds * 1e-9 for s in self.samples.get(name, [])]

    def rate(self, name):
        return statistics.median(self.rates(name)) if self.samples.get(name) else None

    def milliseconds(self, name):
        return statistics.median(s.seconds for s in self.samples[name]) * 1e3

    def cpu_per_gb(self, name):
        return statistics.median(s.cpu for s in self.samples[name]) / (
            self.shape.request_bytes * 1e-9
        )

    def nixl(self):
        return max(filter(None, (self.rate("NIXL READ"), self.rate("NIXL WRITE"))), default=None)


COLUMNS = [
    ("shape", 12),
    ("pages", 6),
    ("MB", 6),
    ("GB/s", 6),
    ("min..max", 11),
    ("ms", 7),
    ("CPU s/GB", 9),
    ("READ", 6),
    ("WRITE", 6),
    ("NIXL CPU", 9),
    ("x NIXL", 7),
    ("tcp", 6),
    ("x tcp", 6),
    ("host", 6),
    ("memcpy", 7),
    ("x memcpy", 8),
    ("also", 6),
    ("x also", 7),
]


def cells(row):
    """The values of a row's columns; "-" for what was not measured."""

    def number(value, digits=2):
        return "-" if value is None else f"{value:.{digits}f}"

    def ratio(value, name="kvferry"):
        ours = row.rate(name)
        return number(ours / value if ours and value else None)

    out = {"shape": row.shape_name, "pages": row.fragmentation}
    out["MB"] = f"{row.shape.request_bytes / 1e6:.0f}"
    if row.samples.get("kvferry"):
        rates = row.rates("kvferry")
        out["GB/s"] = number(row.rate("kvferry"))
        out["min..max"] = f"{min(rates):.2f}..{max(rates):.2f}"
        out["ms"] = number(row.milliseconds("kvferry"), 1)
        out["CPU s/GB"] = number(row.cpu_per_gb("kvferry"))
    out["READ"], out["WRITE"] = number(row.rate("NIXL READ")), number(row.rate("NIXL WRITE"))
    if row.nixl():
        better = max(("NIXL READ", "NIXL WRITE"), key=lambda name: row.rate(name) or 0)
        out["NIXL CPU"] = number(row.cpu_per_gb(better))
    out["x NIXL"] = ratio(row.nixl())
    out["tcp"], out["x tcp"] = number(row.rate("tcp stream")), ratio(row.rate("tcp stream"))
    out["host"], out["memcpy"] = number(row.rate("same host")), number(row.rate("memcpy"))
    out["x memcpy"] = ratio(row.rate("memcpy"), "same host")
    out["also"], out["x also"] = number(row.rate("also")), ratio(row.rate("also"))
    return out


def print_line(values, columns):
    left = {"shape", "pages"}
    print(
        "  ".join(
            f"{values.get(name, '-'):{'<' if name in left else '>'}{width}}"
            for name, width in columns
        ),
        flush=True,
    )


def measure(args, shape_name, fragmentation, problems, notes):
    shape = SHAPES[shape_name]
    rng = random.Random(args.seed)
    plan = Plan(args, shape, choose_pages(shape, fragmentation, rng), None)
    plan.local = choose_pages(shape, fragmentation, rng)
    row = Row(shape_name, fragmentation, shape)
    where = f"{shape_name} {fragmentation}"
    systems, drivers = [], []
    try:
        for name, memory, make in plan.makers():
            if memory + (1 << 30) > memory_available():
                problems.append(f"{where}, {name}: {memory >> 20} MiB of memory are not available")
                continue
            try:
                made = make()
            except BenchError as error:
                problems.append(f"{where}, {name}: {error}")
                continue
            systems += made
            drivers += made[0].drivers
            notes.update(system.about for system in made if system.about)
        for rep in range(args.reps + 1):
            for system in list(systems):
                try:
                    sample = system.sample()
                except BenchError as error:
                    problems.append(f"{where}, {system.name}, run {rep}: {error}")
                    systems.remove(system)
                    continue
                if rep > 0:  # The first one warms up.
                    row.samples.setdefault(system.name, []).append(sample)
    finally:
        for driver in drivers:
            driver.stop()
    return row


def git_commit():
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return "unknown"


def cpu_model():
    with contextlib.suppress(OSError):
        match = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
        if match:
            return match[1]
    return platform.processor() or platform.machine()


def congestion_control():
    with contextlib.suppress(OSError):
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return "unknown"


def names_of(text, known, what):
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no {what} {', '.join(unknown)}; there are {', '.join(known)}"
        )
    return names


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes",
        type=lambda text: names_of(text, SHAPES, "shape"),
        default=list(SHAPES),
        help=f"comma-separated; default: {','.join(SHAPES)}",
    )
    parser.add_argument(
        "--frags",
        type=lambda text: names_of(text, FRAGMENTATIONS, "fragmentation"),
        default=FRAGMENTATIONS,
        help=f"comma-separated; default: {','.join(FRAGMENTATIONS)}",
    )
    parser.add_argument("--reps", type=int, default=5, help="measured runs of each (default: 5)")
    parser.add_argument("--seed", type=int, default=1, help="which pages are chosen (default: 1)")
    parser.add_argument(
        "--build",
        type=Path,
        default=ROOT / "build/release",
        help="CMake build folder of what is measured (default: build/release)",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a field of kvferry's Config, on both sides; may be repeated",
    )
    parser.add_argument(
        "--also", type=Path, metavar="BUILD", help="another build, measured in turn with the first"
    )
    parser.add_argument(
        "--also-config",
        action="append",
        metavar="KEY=VALUE",
        help="settings of --also; default: those of --config",
    )
    parser.add_argument(
        "--nixl-python",
        type=Path,
        metavar="PYTHON",
        help="a Python that has nixl (requirements/peers.txt): measures NIXL as well",
    )
    parser.add_argument(
        "--nixl-tls", default="tcp,self", help="UCX_TLS of NIXL (default: tcp,self)"
    )
    parser.add_argument(
        "--mooncake",
        type=Path,
        metavar="FOLDER",
        help="site-packages with Mooncake (requirements/peers.txt): measures its store as well",
    )
    parser.add_argument("--no-limits", action="store_true", help="no memcpy and no TCP stream")
    parser.add_argument("--no-pools", action="store_true", help="only what moves KV")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every run there")
    args = parser.parse_args()
    if args.reps < 1:
        parser.error("--reps must be at least 1")
    for build in filter(None, (args.build, args.also)):
        if not (build / "bench/kvferry_bench_transfer").exists():
            parser.error(f"{build} holds no bench/kvferry_bench_transfer; build it: ./dev build")
    if args.also_config is not None and args.also is None:
        args.also = args.build
    return args


def print_tables(name, command, reps, problems):
    """The tables that a program of ours prints by itself."""
    print(flush=True)
    try:
        subprocess.run([*command, f"--reps={reps}"], check=True, timeout=TABLES_SECONDS)
    except subprocess.CalledProcessError as error:
        problems.append(f"{name}: exit status {error.returncode}, see there")
    except (OSError, subprocess.TimeoutExpired) as error:
        problems.append(f"{name}: {error}")


def print_pools(args, problems):
    """Everything but what moves KV between processes; the allocators' rows."""
    rows = allocators.print_table(args.build, args.reps, problems)
    for driver in ("kernels", "buffers", "stores", "sessions"):
        command = [args.build / f"bench/kvferry_bench_{driver}"]
        print_tables(driver, command, args.reps, problems)
    if args.mooncake:
        command = [sys.executable, ROOT / "bench/mooncake_bench.py", "--peers", args.mooncake]
        print_tables("Mooncake", command, args.reps, problems)
    else:
        problems.append("Mooncake: not measured; give --mooncake (./dev bench --peers does)")
    return rows


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name, _ in COLUMNS], restval="-")
        writer.writeheader()
        writer.writerows(cells(row) for row in rows)


def write_json(path, header, rows, allocator_rows, problems):
    results = [
        {
            "shape": row.shape_name,
            "fragmentation": row.fragmentation,
            "bytes": row.shape.request_bytes,
            "systems": {
                name: [dataclasses.asdict(sample) for sample in samples]
                for name, samples in row.samples.items()
            },
        }
        for row in rows
    ]
    path.write_text(
        json.dumps(
            {
                **header,
                "results": results,
                "allocators": [row.record() for row in allocator_rows],
                "problems": problems,
            },
            indent=1,
        )
        + "\n"
    )


def main():
    args = parse_arguments()
    header = {
        "commit": git_commit(),
        "cpu": f"{cpu_model()}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "congestion_control": congestion_control(),
        "load": os.getloadavg()[0],
        "reps": args.reps,
        "config": args.config,
    }
    print(
        f"kvferry {header['commit']}; {header['cpu']}; Linux {header['kernel']}, "
        f"TCP {header['congestion_control']}"
    )
    print(
        f"loopback TCP (host: shared memory), host memory, median of {args.reps} runs, in turn; "
        f"GB/s; load when started: {header['load']:.1f}",
        flush=True,
    )
    hidden = set()
    if not args.nixl_python:
        hidden |= {"READ", "WRITE", "NIXL CPU", "x NIXL"}
    if args.no_limits:
        hidden |= {"memcpy", "x memcpy", "tcp", "x tcp"}
    if not args.also:
        hidden |= {"also", "x also"}
    columns = [column for column in COLUMNS if column[0] not in hidden]
    print_line({name: name for name, _ in columns}, columns)

    rows, problems, notes = [], [], set()
    if not args.nixl_python:
        problems.append("NIXL: not measured; give --nixl-python (./dev bench --peers does)")
    for shape_name in args.shapes:
        for fragmentation in args.frags:
            row = measure(args, shape_name, fragmentation, problems, notes)
            rows.append(row)
            print_line(cells(row), columns)
    print("; ".join(sorted(notes)))
    allocator_rows = []
    if not args.no_pools:
        allocator_rows = print_pools(args, problems)
    for problem in problems:
        print(f"not measured: {problem}" if "not measured" not in problem else problem)
    if args.csv:
        write_csv(args.csv, rows)
    if args.json:
        write_json(args.json, {**header, "versions": sorted(notes)}, rows, allocator_rows, problems)
    # Only what was asked for counts: a missing peer is said, not failed.
    return 0 if all(row.samples.get("kvferry") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
