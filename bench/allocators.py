"""Our allocators beside free lists in torch: requests that come and go, and batches that decode.

Prints one row for each operation and pool, in microseconds: in C++ alone (kvferry_micro_bench)
PageAllocator ("pages") and TokenSlotAllocator ("slots", with its spread), which writes them to the
rows of a table, the latter from Python, with an array for each request, the same in torch on the
CPU, and how many times as long torch takes. For a decode also a memcpy of
what it returns, and the least that a checked one can do ("bound"): read its input, look at one
place for each sequence, write. They take turns, and a row shows the medians of the rounds. `run.py`
prints this table after its own; alone: bench/allocators.py --help.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
REQUEST_PAGES = 256
SEQUENCES, STEPS, LONGEST_PROMPT = 1024, 256, 512
SAMPLE_SECONDS = 0.1


class Ours:
    """kvferry.TokenSlotAllocator; arrays are numpy's."""

    def __init__(self, num_tokens, page_size):
        import kvferry

        self.allocator = kvferry.TokenSlotAllocator(num_tokens, page_size)
        self.alloc, self.free = self.allocator.alloc, self.allocator.free
        self.alloc_extend = self.allocator.alloc_extend
        self.alloc_decode = self.allocator.alloc_decode

    def available(self):
        return self.allocator.available_size

    def slots(self, values):
        return np.asarray(values, dtype=np.int32)

    def counts(self, values):
        return np.asarray(values, dtype=np.int64)


class Torch:
    def __init__(self, num_tokens, page_size, merge_and_sort=False):
        import torch
        from torch_allocators import TorchFreeList

        self.torch = torch
        # Copies of long lists would wait for a second core that something else may hold.
        torch.set_num_threads(1)
        self.allocator = TorchFreeList(num_tokens, page_size, merge_and_sort)
        self.free = self.allocator.free
        self.alloc, self.alloc_extend = self.allocator.alloc, self.allocator.alloc_extend
        self.alloc_decode = self.allocator.alloc_decode

    def available(self):
        return self.allocator.available_size

    def slots(self, values):
        return self.torch.as_tensor(values)

    counts = slots


class TorchSorted(Torch):
    def __init__(self, num_tokens, page_size):
        super().__init__(num_tokens, page_size, merge_and_sort=True)


def check_distinct(slots, num_tokens, available):
    """No slot of `slots` (arrays) was handed out twice, and what is not in them is free."""
    every = np.concatenate([np.asarray(part) for part in slots])
    if len(np.unique(every)) != len(every) or len(every) + available != num_tokens:
        raise AssertionError(f"{len(every)} slots held and {available} free of {num_tokens}")


class Requests:
    """Requests of 256 and 128 pages come and go at random in a pool nine tenths full."""

    def __init__(self, kind, pool_pages, page_size):
        self.num_tokens, self.page_size = pool_pages * page_size, page_size
        self.system = kind(self.num_tokens, page_size)
        self.rng = random.Random(1)
        self.live = []
        while self.system.available() > self.num_tokens // 10 + REQUEST_PAGES * page_size:
            self.live.append(self.copy(self.system.alloc(self.next_tokens())))
        # As many as it takes to use every free slot once: a sorting list has sorted then.
        self.fewest = self.num_tokens // 10 // (REQUEST_PAGES * page_size) * (kind is TorchSorted)

    def next_tokens(self):
        return (REQUEST_PAGES >> self.rng.randrange(2)) * self.page_size

    def copy(self, slots):
        """A slice of a tensor would keep all of the list that it was cut from."""
        return slots.copy() if isinstance(slots, np.ndarray) else slots.clone()

    def sample(self):
        alloc, free, clock = self.system.alloc, self.system.free, time.perf_counter
        spent, times = 0.0, 0
        while spent < SAMPLE_SECONDS or times < self.fewest:
            place, tokens = self.rng.randrange(len(self.live)), self.next_tokens()
            old = self.live[place]
            start = clock()
            free(old)
            new = alloc(tokens)
            spent += clock() - start
            times += 1
            if new is None:  # As full as it gets.
                new = alloc(self.page_size)
            self.live[place] = self.copy(new)
        check_distinct(self.live, self.num_tokens, self.system.available())
        return spent / times


class Decodes:
    """1,024 sequences of up to 512 tokens each grow by a token, 256 times."""

    def __init__(self, kind, pool_pages, page_size):
        self.num_tokens = pool_pages * page_size
        self.system = kind(self.num_tokens, page_size)
        self.page_size, self.rng = page_size, random.Random(1)

    def sample(self):
        system, clock = self.system, time.perf_counter
        prompts = [self.rng.randrange(1, LONGEST_PROMPT + 1) for _ in range(SEQUENCES)]
        none, tokens = system.counts([0] * SEQUENCES), system.counts(prompts)
        got = system.alloc_extend(none, tokens, system.slots([0] * SEQUENCES))
        last = system.slots(np.asarray(got)[np.cumsum(prompts) - 1])
        held, times = [got], []
        for _ in range(STEPS):
            tokens = tokens + 1
            start = clock()
            last = system.alloc_decode(tokens, last)
            times.append(clock() - start)
            held.append(last)
        slots = np.concatenate([np.asarray(part) for part in held])
        if len(np.unique(slots)) != sum(prompts) + STEPS * SEQUENCES:
            raise AssertionError("a slot was handed out twice")
        system.free(system.slots(slots))
        if system.available() != self.num_tokens:
            raise AssertionError(f"{system.available()} of {self.num_tokens} tokens free")
        return statistics.median(times)


@dataclasses.dataclass
class Row:
    operation: str
    pool_pages: int
    page_size: int
    work: type  # Requests or Decodes.
    torch: type
    benchmarks: dict  # Of kvferry_micro_bench, by the column that shows them.
    samples: dict = dataclasses.field(default_factory=dict)

    def median(self, system):
        return statistics.median(self.samples[system]) if self.samples.get(system) else None

    def record(self):
        """For JSON: every sample in seconds."""
        return {
            "operation": self.operation,
            "pool_pages": self.pool_pages,
            "seconds": self.samples,
        }


def table():
    pools = (10**4, 10**5, 10**6, 10**7)
    for page_size, kind, name in ((1, Torch, ""), (1, TorchSorted, ", sorted"), (16, Torch, "")):
        for pool in pools:
            if pool * page_size > 2 * 10**7:
                continue  # Gigabytes of token slots, and the same pages as with pages of 1.
            operation = f"256 pages of {page_size}{name}"
            benchmarks = {
                "pages": f"BM_AllocateFree/pages:256/pool:{pool}",
                "slots": f"BM_SlotsAllocateFree/pages:256/pool:{pool}/page_size:{page_size}",
            }
            yield Row(operation, pool, page_size, Requests, kind, benchmarks)
    for size in (1, 16, 64):
        arguments = f"/page_size:{size}/iterations:4096/manual_time"
        benchmarks = {"slots": f"BM_Decode{arguments}", "memcpy": f"BM_DecodeMemcpy{arguments}"}
        benchmarks["bound"] = f"BM_DecodeReadWriteLook{arguments}"
        yield Row(f"decode, pages of {size}", 2 * 10**6, size, Decodes, Torch, benchmarks)


SYSTEMS = ("pages", "slots", "Python", "torch", "memcpy", "bound")
COLUMNS = [
    ("operation", 26),
    ("pool pages", 10),
    *((name, 9) for name in SYSTEMS),
    ("min..max", 13),
    ("x pages", 8),
    ("x slots", 8),
    ("x Python", 8),
]


def cells(row):
    def number(value, digits):
        return "-" if value is None else f"{value:.{digits}f}"

    torch = row.median("torch")
    out = {"operation": row.operation, "pool pages": str(row.pool_pages)}
    for name in SYSTEMS:
        median = row.median(name)
        out[name] = number(median and median * 1e6, 2)
        if name in ("pages", "slots", "Python"):
            out[f"x {name}"] = number(torch / median if torch and median else None, 0)
    if row.samples.get("slots"):
        times = row.samples["slots"]
        out["min..max"] = f"{min(times) * 1e6:.2f}..{max(times) * 1e6:.2f}"
    return out


def micro_bench(build, benchmark):
    command = [build / "bench/kvferry_micro_bench", f"--benchmark_filter=^{benchmark}$"]
    command += ["--benchmark_format=json", f"--benchmark_min_time={SAMPLE_SECONDS}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    (result,) = json.loads(done.stdout)["benchmarks"]
    return result.get("median_ns", result["real_time"]) * 1e-9


def systems_of(row, build, problems):
    """What can be sampled for a row: functions by name."""
    where = f"{row.operation}, {row.pool_pages} pages"
    for name, benchmark in row.benchmarks.items():
        yield name, functools.partial(micro_bench, build, benchmark)
    for name, kind in (("Python", Ours), ("torch", row.torch)):
        try:
            work = row.work(kind, row.pool_pages, row.page_size)
        except (ImportError, AttributeError) as error:
            problems.append(f"{where}, {name}: {error}")
        else:
            yield name, work.sample


def measure(row, build, reps, problems):
    systems = dict(systems_of(row, build, problems))
    for _, name in itertools.product(range(reps), list(systems)):
        if name not in systems:
            continue
        try:
            row.samples.setdefault(name, []).append(systems[name]())
        except (AssertionError, OSError, subprocess.SubprocessError, ValueError) as error:
            problems.append(f"{row.operation}, {row.pool_pages} pages, {name}: {error}")
            row.samples.pop(name, None)
            del systems[name]


def print_line(values):
    print(
        "  ".join(
            f"{values.get(name, '-'):{'<' if name == 'operation' else '>'}{width}}"
            for name, width in COLUMNS
        ),
        flush=True,
    )


def print_table(build, reps, problems):
    """Measures and prints all rows; appends what could not be measured to `problems`."""
    print(f"allocators, us, median of {reps} rounds, in turn; target: 100 times torch")
    print_line({name: name for name, _ in COLUMNS})
    rows = list(table())
    for row in rows:
        measure(row, build, reps, problems)
        print_line(cells(row))
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--reps", type=int, default=5)
    args = parser.parse_args()
    if args.reps < 1:
        parser.error("--reps must be at least 1")
    if not os.access(args.build / "bench/kvferry_micro_bench", os.X_OK):
        parser.error(f"--build: {args.build} holds no bench/kvferry_micro_bench; ./dev build")
    problems = []
    print_table(args.build, args.reps, problems)
    for problem in problems:
        print(f"not measured: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
