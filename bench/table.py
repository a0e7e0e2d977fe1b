"""What run.py prints and writes about its rows. README.md says what the columns mean."""

import csv
import dataclasses
import json
from collections.abc import Callable

from row import NIXL


def number(value, digits=2):
    """ "-" for what was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"


@dataclasses.dataclass(frozen=True)
class Column:
    name: str
    text: Callable  # Of a row.
    of: str = "kvferry"  # The system without which the column is left out.
    left: bool = False


def rate(name, systems, of):
    """Of the fastest of these."""
    return Column(name, lambda row: number(row.best_rate(systems)), of)


def ratio(name, systems, of, ours_name="kvferry"):
    """kvferry, or a variant of it, over the fastest of these."""

    def text(row):
        ours, best = row.rate(ours_name), row.best_rate(systems)
        return number(ours / best if ours and best else None)

    return Column(name, text, of)


def spread(row, name="kvferry"):
    found = row.spread(name)
    return f"{found[0]:.2f}..{found[1]:.2f}" if found else "-"


def milliseconds(row):
    return number(row.milliseconds("kvferry"), 1) if row.rates("kvferry") else "-"


def cpu(systems):
    def text(row):
        best = row.fastest(systems)
        return number(row.cpu_per_gb(best)) if best else "-"

    return text


FIRST = [
    Column("shape", lambda row: row.shape_name, left=True),
    Column("pages", lambda row: row.fragmentation, left=True),
    Column("MB", lambda row: number(row.shape.request_bytes / 1e6, 0)),
    rate("GB/s", ["kvferry"], "kvferry"),
    Column("min..max", spread),
    Column("ms", milliseconds),
    Column("CPU s/GB", cpu(["kvferry"])),
    rate("READ", ["NIXL READ"], "NIXL"),
    rate("WRITE", ["NIXL WRITE"], "NIXL"),
    Column("NIXL CPU", cpu(NIXL), "NIXL"),
    ratio("x NIXL", NIXL, "NIXL"),
]
LAST = [
    rate("push", ["push"], "push"),
    ratio("x pull", ["kvferry"], "push", "push"),
    ratio("x WRITE", ["NIXL WRITE"], "push, NIXL", "push"),
    rate("also", ["also"], "also"),
    ratio("x also", ["also"], "also"),
]


def all_columns(part):
    peers = [
        column
        for name, systems in part.peers.items()
        for column in (rate(name, systems, name), ratio(f"x {name}", systems, name))
    ]
    limits = [rate(name, [name], "limits") for name in part.limits]
    ratios = [
        ratio("x 1", part.limits[:1], "limits"),
        ratio("x limit", part.limits, "limits"),
    ]
    variants = [
        column
        for variant in part.variants
        for column in (
            rate(variant.name, [variant.name], "kvferry"),
            ratio(
                variant.ratio,
                variant.over,
                "NIXL" if variant.over is NIXL else "limits",
                variant.name,
            ),
        )
    ]
    items = [
        column
        for name, ours in part.items.items()
        for column in (rate(name, [name], "limits"), ratio(f"x {name}", [name], "limits", ours))
    ]
    ways = [rate(name, [name], "ways") for name in part.ways]
    chosen = ratio("x best way", list(part.ways), "ways")
    return [*FIRST, *peers, *limits, *ratios, *variants, *items, *ways, chosen, *LAST]


class Table:
    """Prints the rows of one part as they come."""

    def __init__(self, part, shown):
        self.columns = [column for column in all_columns(part) if column.of in shown]
        self.print([column.name for column in self.columns])

    def add(self, row):
        self.print([column.text(row) for column in self.columns])

    def print(self, texts):
        print("  ".join(map(self.pad, texts, self.columns)), flush=True)

    @staticmethod
    def pad(text, column):
        width = {"shape": 11, "min..max": 11}.get(column.name, max(5, len(column.name)))
        return text.ljust(width) if column.left else text.rjust(width)


def write_csv(path, rows):
    """One line a row, with the columns of every part and the spread of every system."""
    cells = [
        {"path": row.part.name}
        | {c.name: c.text(row) for c in all_columns(row.part)}
        | {f"{name} min..max": spread(row, name) for name in row.samples if name != "kvferry"}
        for row in rows
    ]
    names = dict.fromkeys(name for line in cells for name in line)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="-")
        writer.writeheader()
        writer.writerows(cells)


def record(row):
    return {
        "path": row.part.name,
        "shape": row.shape_name,
        "fragmentation": row.fragmentation,
        "bytes": row.shape.request_bytes,
        "systems": {
            name: [dataclasses.asdict(sample) for sample in samples]
            for name, samples in row.samples.items()
        },
    }


def write_json(path, header, rows, allocator_rows, problems):
    results = [record(row) for row in rows]
    allocators = [row.record() for row in allocator_rows]
    whole = {**header, "results": results, "allocators": allocators, "problems": problems}
    path.write_text(json.dumps(whole, indent=1) + "\n")
