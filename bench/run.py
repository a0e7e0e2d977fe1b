"""Measures how fast kvferry moves the KV of one request between two processes over loopback TCP.

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
import select
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ANSWER_SECONDS = 300  # Longest that any one command may take.
SALT = 7


@dataclasses.dataclass(frozen=True)
class Shape:
    """One request, in a pool twice its size: `pages` pages in each of layers x tensors buffers."""

    layout: tuple
    layers: int
    tensors: int
    page_bytes: int
    pages: int

    @property
    def buffers(self):
        return self.layers * self.tensors

    @property
    def request_bytes(self):
        return self.buffers * self.page_bytes * self.pages

    @property
    def pool_pages(self):
        return 2 * self.pages + 1  # Page 0 is padding, as in SGLang.

    @property
    def pool_bytes(self):
        return self.buffers * self.page_bytes * self.pool_pages


def mha(page_size, pages):
    flags = f"--layout mha --layers 32 --kv-heads 8 --head-dim 128 --page-size {page_size}"
    return Shape(tuple(flags.split()), 32, 2, page_size * 8 * 128 * 2, pages)


def mla(page_size, pages):
    flags = f"--layout mla --layers 61 --latent-dim 576 --page-size {page_size}"
    return Shape(tuple(flags.split()), 61, 1, page_size * 576 * 2, pages)


SHAPES = {
    "llama8b-p16": mha(16, 256),  # Llama 3 8B, 4,096 tokens, vLLM's usual page size: 32 KiB items
    "llama8b-p1": mha(1, 4096),  # the same in SGLang's default page size: 2 KiB items
    "mla-p64": mla(64, 64),  # DeepSeek-V3's latent, 4,096 tokens: 72 KiB items
    "mla-p1": mla(1, 4096),  # the same at page size 1: 1,152-byte items
    "short-p16": mha(16, 8),  # a prompt of 128 tokens: 16 MiB
}
FRAGMENTATIONS = ["seq", "runs8", "rand"]


def choose_pages(shape, fragmentation, rng):
    """Page ids in [1, pool_pages): one run, runs of 8 in random places, or all at random."""
    ids = range(1, shape.pool_pages)
    if fragmentation == "seq":
        return list(ids[: shape.pages])
    if fragmentation == "rand":
        return rng.sample(ids, shape.pages)
    places = rng.sample(range(len(ids) // 8), shape.pages // 8)
    return [ids[place * 8 + i] for place in places for i in range(8)]


def format_runs(pages):
    runs = []
    for page in pages:
        if runs and runs[-1][0] + runs[-1][1] == page:
            runs[-1][1] += 1
        else:
            runs.append([page, 1])
    return ",".join(f"{first}+{count}" for first, count in runs)


class BenchError(Exception):
    pass


class Driver:
    """A process that answers each command line with a line of JSON (driver.h, nixl_peer.py)."""

    def __init__(self, command, env=None):
        self.name = Path(command[0]).name
        self.errors = ErrorTail()
        try:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors.file,
                env={**os.environ, **(env or {})},
            )
        except OSError as error:
            raise BenchError(f"cannot start {command[0]}: {error.strerror}") from error
        self.pending = b""
        self.ready = self.receive()

    def ask(self, *words):
        try:
            self.process.stdin.write((" ".join(str(word) for word in words) + "\n").encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # receive() says why.
        return self.receive(words[0])

    def receive(self, what="starting"):
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\n" not in self.pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise BenchError(f"{self.name}: no answer to {what} in {ANSWER_SECONDS} s")
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                rc = self.process.wait()
                raise BenchError(
                    f"{self.name}: ended with code {rc} while {what}: {self.errors.tail()}"
                )
            self.pending += chunk
        line, _, self.pending = self.pending.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {what}: {answer['error']}")
        return answer

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def stop(self):
        self.resume()
        with contextlib.suppress(OSError):
            self.process.stdin.write(b"quit\n")
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.file.close()


class ErrorTail:
    def __init__(self):
        self.file = open(os.memfd_create("stderr"), "w+b", buffering=0)

    def tail(self):
        self.file.seek(0)
        lines = self.file.read().decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or "(nothing on stderr)"


@dataclasses.dataclass
class Sample:
    seconds: float
    cpu: float


class System:
    """Moves `remote` pages of one pool to `local` pages of another, and can be timed."""

    def __init__(self, name, shape, remote, local):
        self.name, self.shape = name, shape
        self.remote, self.local = format_runs(remote), format_runs(local)
        self.drivers = []

    def start_driver(self, command, env=None):
        driver = Driver(command, env)
        self.drivers.append(driver)
        return driver

    def sample(self):
        raise NotImplementedError

    def stop(self):
        for driver in self.drivers:
            driver.stop()


class Kvferry(System):
    def __init__(self, name, shape, remote, local, build, settings):
        super().__init__(name, shape, remote, local)
        command = [build / "bench/kvferry_bench_transfer", "--pool-pages", shape.pool_pages]
        command += shape.layout
        for setting in settings:
            command += ["--config", setting]
        self.prefill = self.start_driver([*command, "--role", "prefill"])
        self.decode = self.start_driver([*command, "--role", "decode"])
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


class NixlPair:
    """Two NIXL processes; `source` holds the pattern. Shared by the READ and the WRITE system."""

    def __init__(self, shape, python, tls):
        command = [python, ROOT / "bench/peers/nixl_peer.py", "--buffers", shape.buffers]
        command += ["--page-bytes", shape.page_bytes, "--pool-pages", shape.pool_pages]
        env = {"UCX_TLS": tls, "UCX_NET_DEVICES": "lo"}
        self.source = Driver([*command, "--name", "source"], env)
        try:
            self.target = Driver([*command, "--name", "target"], env)
        except BenchError:
            self.source.stop()
            raise
        self.about = f"NIXL {self.source.ready['version']}"
        for own, other in ((self.source, self.target), (self.target, self.source)):
            own.ask("peer", other.ready["metadata"], other.ready["base"])
        self.source.ask("fill", SALT)
        self.source.pause()
        self.target.pause()

    @contextlib.contextmanager
    def awake(self):
        """NIXL's progress threads poll without pause and would take cores from the others' runs."""
        self.source.resume()
        self.target.resume()
        try:
            yield
        finally:
            self.source.pause()
            self.target.pause()


class Nixl(System):
    def __init__(self, operation, shape, remote, local, pair):
        super().__init__(f"NIXL {operation}", shape, remote, local)
        self.operation, self.pair = operation.lower(), pair
        self.drivers = [pair.source, pair.target]
        self.about = pair.about

    def sample(self):
        with self.pair.awake():
            return self.move()

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


class Limit(System):
    def __init__(self, kind, shape, remote, local, driver):
        super().__init__(kind, shape, remote, local)
        self.driver = driver
        self.drivers = [driver]
        self.about = ""

    def sample(self):
        if self.name == "memcpy":
            result = self.driver.ask("memcpy", SALT, self.local, self.remote)
        else:
            result = self.driver.ask("tcp", self.shape.request_bytes)
        return Sample(result["seconds"], result["cpu"])


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
        yield "kvferry", two_pools, lambda: [Kvferry("kvferry", *lists, args.build, args.config)]
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
    ("memcpy", 7),
    ("tcp", 6),
    ("x tcp", 6),
    ("also", 6),
    ("x also", 7),
]


def cells(row):
    """The values of a row's columns; "-" for what was not measured."""

    def number(value, digits=2):
        return "-" if value is None else f"{value:.{digits}f}"

    def ratio(value):
        ours = row.rate("kvferry")
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
    out["memcpy"], out["tcp"] = number(row.rate("memcpy")), number(row.rate("tcp stream"))
    out["x tcp"] = ratio(row.rate("tcp stream"))
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
    parser.add_argument("--no-limits", action="store_true", help="no memcpy and no TCP stream")
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


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name, _ in COLUMNS], restval="-")
        writer.writeheader()
        writer.writerows(cells(row) for row in rows)


def write_json(path, header, rows, problems):
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
        json.dumps({**header, "results": results, "problems": problems}, indent=1) + "\n"
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
        f"loopback TCP, host memory, median of {args.reps} runs, in turn; GB/s; "
        f"load when started: {header['load']:.1f}",
        flush=True,
    )
    hidden = set()
    if not args.nixl_python:
        hidden |= {"READ", "WRITE", "NIXL CPU", "x NIXL"}
    if args.no_limits:
        hidden |= {"memcpy", "tcp", "x tcp"}
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
    for problem in problems:
        print(f"not measured: {problem}" if "not measured" not in problem else problem)
    if args.csv:
        write_csv(args.csv, rows)
    if args.json:
        write_json(args.json, {**header, "versions": sorted(notes)}, rows, problems)
    # Only what was asked for counts: a missing peer is said, not failed.
    return 0 if all(row.samples.get("kvferry") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
