"""Measures transfers between two processes of this machine whose KV pools lie in a GPU's memory or
on the host.

For each page size it starts a pair of processes for each path and pair of places, lets them and
plain copies of as many bytes by CUDA take turns, over and over, and prints one row each: medians of
the rounds. With --nixl NIXL moves the same pages in its turn. After the last round every byte is
verified. README.md says what the columns mean.
A row that fails says why, the others go on, and the exit code is 1.
"""

import argparse
import contextlib
import csv
import dataclasses
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from drivers import BenchError, Driver, check_settings
from systems import ROOT, SALT, Stage, nixl_sides
from systems import Pair as Sides
from workload import SHAPES, choose_pages, format_runs

# By the name of their rows: a request of 4,096 tokens takes 512 MiB in either.
PAGES = {"32KiB": (SHAPES["llama8b-p16"], 16), "2KiB": (SHAPES["llama8b-p1"], 1)}
PATHS = {"host": "auto", "arena": "arena", "tcp": "network"}  # Config's same_host_path.
PLACES = ("host-host", "device-device", "device-host", "host-device")
NIXL = {"read": "NIXL READ", "write": "NIXL WRITE"}  # Its operations, as paths of rows.
NIXL_PLACES = ("host-host", "device-device")
PLAIN = ("device_to_device", "to_host", "to_device")
REST_SECONDS = 0.02  # Before each run, as in run.py: all begin alike.


def has_gpu():
    """As far as NVIDIA's driver says."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
        return listed.returncode == 0 and "GPU" in listed.stdout
    return False


@dataclasses.dataclass
class Row:
    pages: str
    path: str
    places: str
    bytes: int
    seconds: list = dataclasses.field(default_factory=list)

    @property
    def name(self):
        return f"{self.pages} {self.path} {self.places}"

    def rates(self):
        return [self.bytes / seconds * 1e-9 for seconds in self.seconds]


class Pair:
    """Two processes of ours; the prefill side's pool holds the pattern."""

    def __init__(self, row, shape, lists, args, drivers):
        self.row = row
        self.remote, self.local = map(format_runs, lists)
        command = [args.bin / "kvferry_bench_transfer", "--pool-pages", shape.pool_pages]
        command += [*shape.layout, f"--config=same_host_path={PATHS[row.path]}"]
        command += [f"--config={setting}" for setting in args.config]

        def start(role, place):
            device = ["--device", args.device] if place == "device" else []
            return drivers.enter_context(Driver([*command, "--role", role, *device]))

        source, target = row.places.split("-")
        self.prefill, self.decode = start("prefill", source), start("decode", target)
        self.prefill.ask("fill", SALT)

    def sample(self):
        ticket = self.prefill.ask("publish", self.remote)["ticket"]
        seconds = self.decode.ask("fetch", ticket, self.local)["seconds"]
        outcome = self.prefill.ask("ended")["outcome"]
        if outcome != "fetched":
            raise BenchError(f"the lease {outcome}")
        return seconds

    def last_sample(self):
        """Of pages that hold nothing before, and are verified afterwards."""
        self.decode.ask("zero", self.local)
        seconds = self.sample()
        self.decode.ask("verify", SALT, self.local, self.remote)
        return seconds

    def metrics(self):
        return {"prefill": self.prefill.ask("metrics"), "decode": self.decode.ask("metrics")}


class Nixl:
    """One of NIXL's operations; both have the two sides in common, whose source holds the pattern
    and which are stopped when it is not their turn."""

    def __init__(self, operation, row, sides, lists):
        self.operation, self.row, self.sides = operation, row, sides
        self.remote, self.local = map(format_runs, lists)

    def sample(self):
        if self.sides.broken:
            raise BenchError("not tried: the other operation failed")
        self.sides.broken = True
        source, target = self.sides.source, self.sides.target
        with self.sides.awake():
            if self.operation == "read":
                answer = target.ask("read", self.local, self.remote)
            else:
                answer = source.ask("write", self.remote, self.local)
        self.sides.broken = False
        return answer["seconds"]

    def last_sample(self):
        with self.sides.awake():
            self.sides.target.ask("zero", self.local)
        seconds = self.sample()
        with self.sides.awake():
            self.sides.target.ask("verify", SALT, self.local, self.remote)
        return seconds

    def metrics(self):
        return {}


def changes(before, after):
    """Of metrics, what one run changed."""
    return {
        side: {name: value - before[side].get(name, 0) for name, value in metrics.items()
               if value != before[side].get(name, 0)}
        for side, metrics in after.items()
    }  # fmt: skip


class PlainCopies:
    """CUDA's own, in a process for itself."""

    def __init__(self, pages, num_bytes, args, drivers):
        self.rows = [Row(pages, "plain", place, num_bytes) for place in PLAIN]
        command = [args.bin / "kvferry_bench_transfer", "--role", "copies", "--pool-pages", 1]
        self.driver = drivers.enter_context(Driver([*command, "--device", args.device]))

    def run(self, counts):
        answer = self.driver.ask("copies", self.rows[0].bytes)
        for row in self.rows if counts else ():
            row.seconds.append(answer[row.places])


class Measured:
    """The rows of one page size, and what could not be measured of them."""

    def __init__(self, pages, args):
        shape, page_size = PAGES[pages]
        self.shape = dataclasses.replace(shape, pages=args.tokens // page_size)
        self.pages, self.args = pages, args
        self.rows, self.pairs, self.plain = [], [], None
        self.metrics, self.problems = {}, []
        self.notes = set()  # Versions, to be printed once.

    def make(self, drivers):
        rng = random.Random(self.args.seed)
        lists = [choose_pages(self.shape, "rand", rng) for _ in range(2)]
        size = self.shape.request_bytes
        if any("device" in places for places in self.args.places):
            with self.telling(f"{self.pages} plain"):
                self.plain = PlainCopies(self.pages, size, self.args, drivers)
                self.rows += self.plain.rows
        for path, places in self.paths_and_places():
            row = Row(self.pages, path, places, size)
            self.rows.append(row)
            with self.telling(row.name):
                self.pairs.append(Pair(row, self.shape, lists, self.args, drivers))
        for places in self.args.nixl_places if self.args.nixl else ():
            self.make_nixl(places, lists, drivers)

    def paths_and_places(self):
        """The device's arena is for pools on devices; bench/run.py has the host's."""
        for path in self.args.paths:
            for places in self.args.places:
                if path != "arena" or places == "device-device":
                    yield path, places

    def make_nixl(self, places, lists, drivers):
        """Over what NIXL's UCX picks of all transports that it finds."""
        rows = [Row(self.pages, path, places, self.shape.request_bytes) for path in NIXL.values()]
        self.rows += rows
        with self.telling(f"{self.pages} NIXL {places}"):
            flags = ["--device", self.args.device] if places == "device-device" else []
            sides = Sides(*nixl_sides(self.shape, Stage(drivers), self.args.nixl, None, flags))
            self.notes.add(f"NIXL {sides.target.ready['version']}")
            self.pairs += [Nixl(*each, sides, lists) for each in zip(NIXL, rows, strict=True)]

    @contextlib.contextmanager
    def telling(self, name):
        try:
            yield
        except BenchError as error:
            self.problems.append(f"{name}: {error}")
            print(f"FAILED: {self.problems[-1]}", file=sys.stderr, flush=True)

    def run(self):
        with contextlib.ExitStack() as drivers:
            progress(f"{self.pages}: starting {self.num_processes()} processes")
            self.make(drivers)
            for rep in range(self.args.reps + 1):  # The first one warms up.
                progress(f"{self.pages}: round {rep} of {self.args.reps}")
                self.round(rep)

    def num_processes(self):
        pairs = len(list(self.paths_and_places()))
        return 2 * (pairs + (len(self.args.nixl_places) if self.args.nixl else 0))

    def round(self, rep):
        if self.plain:
            plain, self.plain = self.plain, None  # Back again unless it fails.
            with self.telling(f"{self.pages} plain"):
                plain.run(counts=rep > 0)
                self.plain = plain
        pairs, self.pairs = self.pairs, []
        for pair in pairs:
            time.sleep(REST_SECONDS)
            with self.telling(f"{pair.row.name}, round {rep}"):
                try:
                    self.turn(pair, rep)
                except BenchError:
                    pair.row.seconds.clear()  # Where bytes may be wrong there is no speed.
                    raise
                self.pairs.append(pair)

    def turn(self, pair, rep):
        if rep < self.args.reps:
            seconds = pair.sample()
        else:
            before = pair.metrics()
            seconds = pair.last_sample()
            self.metrics[pair.row.name] = changes(before, pair.metrics())
        if rep > 0:
            pair.row.seconds.append(seconds)


def progress(text):
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- what is printed


WIDTHS = {"pages": -6, "path": -10, "places": -16, "MB": 5, "GB/s": 7, "min..max": 14, "ms": 8}
WIDTHS |= {"x copy": 6, "x bounce": 8, "x to host": 9, "x NIXL": 6}


def print_line(values):
    """A negative width: to the left."""
    cells = (f"{values[name]:{'<' if w < 0 else '>'}{abs(w)}}" for name, w in WIDTHS.items())
    print("  ".join(cells), flush=True)


def cells(row, rows):
    if not row.seconds:
        return {name: "-" for name in WIDTHS} | {
            "pages": row.pages, "path": row.path, "places": row.places
        }  # fmt: skip
    median = statistics.median(row.seconds)
    plain = {r.places: r for r in rows if r.path == "plain" and r.pages == row.pages}

    def over(*copies):
        """The row's rate over that of these copies, one after the other."""
        used = [plain[name].seconds for name in copies if name in plain]
        if "device" not in row.places or row.path == "plain" or not all(used) or not used:
            return "-"
        return f"{sum(map(statistics.median, used)) / median:.2f}"

    def over_nixl():
        """The row's rate over that of NIXL's faster operation on the same pages and places."""
        same = (r for r in rows if (r.pages, r.places) == (row.pages, row.places) and r.seconds)
        theirs = [statistics.median(r.seconds) for r in same if r.path in NIXL.values()]
        return f"{min(theirs) / median:.2f}" if theirs and row.path == "host" else "-"

    rates = row.rates()
    return {
        "pages": row.pages,
        "path": row.path,
        "places": row.places,
        "MB": f"{row.bytes / 1e6:.0f}",
        "GB/s": f"{row.bytes / median * 1e-9:.2f}",
        "min..max": f"{min(rates):.2f}..{max(rates):.2f}",
        "ms": f"{median * 1e3:.2f}",
        "x copy": over("device_to_device"),
        "x bounce": over("to_host", "to_device"),
        "x to host": over("to_host"),
        "x NIXL": over_nixl(),
    }


def print_metrics(metrics):
    for name, sides in metrics.items():
        for side, values in sides.items():
            said = ", ".join(f"{metric} {value}" for metric, value in values.items())
            print(f"{name}, {side}: {said or 'nothing changed'}")


def write_files(args, rows, metrics, problems):
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, WIDTHS)
            writer.writeheader()
            writer.writerows(cells(row, rows) for row in rows)
    if args.json:
        names = ("device", "reps", "tokens", "config", "nixl")
        asked = {name: getattr(args, name) for name in names}
        results = [dataclasses.asdict(row) for row in rows]
        whole = {**asked, "results": results, "metrics": metrics, "problems": problems}
        args.json.write_text(json.dumps(whole, indent=1) + "\n")


# ---------------------------------------------------------------- arguments


def some_of(known):
    def parse(text):
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"no {', '.join(unknown)}; there are {', '.join(known)}"
            )
        return names

    return parse


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bin",
        type=Path,
        default=ROOT / "build/release/bench",
        metavar="DIR",
        help="folder of kvferry_bench_transfer (default: build/release/bench)",
    )
    parser.add_argument("--device", type=int, default=0, help="GPU of the pools (default: 0)")
    for name, known, what in (
        ("pages", PAGES, "bytes of a page in one buffer"),
        ("paths", PATHS, "on one host, there through chunks on the device, or over loopback TCP"),
        ("places", PLACES, "where the pages lie and where they go"),
    ):
        parser.add_argument(
            f"--{name}",
            type=some_of(known),
            default=list(known),
            help=f"{what}, comma-separated; default: {','.join(known)}",
        )
    parser.add_argument(
        "--nixl",
        metavar="PYTHON",
        help="also measure NIXL, with this interpreter: it has nixl, numpy and, for a GPU, torch",
    )
    parser.add_argument(
        "--nixl-places",
        type=some_of(NIXL_PLACES),
        default=["device-device"],
        help="where its pages lie and go, comma-separated; default: device-device",
    )
    parser.add_argument("--reps", type=int, default=5, help="measured rounds (default: 5)")
    parser.add_argument(
        "--tokens", type=int, default=4096, help="of a request, 128 KiB each (default: 4096)"
    )
    parser.add_argument("--seed", type=int, default=1, help="which pages are chosen (default: 1)")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a field of kvferry's Config, on both sides; may be repeated",
    )
    parser.add_argument(
        "--metrics", action="store_true", help="also what each row's last run changed of them"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every run there")
    args = parser.parse_args()
    if args.reps < 1:
        parser.error("--reps must be at least 1")
    if args.tokens < 16:
        parser.error("--tokens must be at least 16, a page")
    if not os.access(args.bin / "kvferry_bench_transfer", os.X_OK):
        parser.error(f"--bin: {args.bin} holds no kvferry_bench_transfer; build it: ./dev build")
    if args.config:
        check_settings(args.bin / "kvferry_bench_transfer", args.config, parser)
    if args.nixl and not shutil.which(args.nixl):
        parser.error(f"--nixl: there is no program {args.nixl}")
    for path in filter(None, (args.csv, args.json)):
        if not path.absolute().parent.is_dir():
            parser.error(f"there is no folder {path.parent} for {path.name}")
    return args


def main():
    args = parse_arguments()
    rows, metrics, problems, notes = [], {}, [], set()
    print(f"pools on GPU {args.device} and the host, random pages, median of {args.reps} rounds, "
          "in turn")  # fmt: skip
    print_line({name: name for name in WIDTHS})
    for pages in args.pages:
        measured = Measured(pages, args)
        measured.run()
        rows += measured.rows
        metrics |= measured.metrics
        problems += measured.problems
        notes |= measured.notes
        for row in measured.rows:
            print_line(cells(row, rows))
    for note in sorted(notes):
        print(note)
    if args.metrics:
        print_metrics(metrics)
    for problem in problems:
        print(f"not measured: {problem}")
    write_files(args, rows, metrics, problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
