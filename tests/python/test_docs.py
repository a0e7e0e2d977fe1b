"""What the documentation says of the code: tables that name what is there, snippets that run."""

import re
from pathlib import Path

import kvferry
import numpy as np
import pytest
from kvferry.store import _BACKENDS

ROOT = Path(__file__).parents[2]


def rows_of(page: str, section: str, columns: int) -> list[list[str]]:
    """Cells of the tables of a section of docs/."""
    text = (ROOT / "docs" / page).read_text().split(f"# {section}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return [row for row in rows if len(row) == columns and row[0].startswith("`")]


def test_every_option_of_every_store_is_described():
    described = {
        (row[0].strip("`"), option.strip(" `")): row[2]
        for row in rows_of("stores.md", "Options", 5)
        for option in row[1].split(",")
    }
    known = {
        (backend, option): option in needed
        for backend, (_, needed, optional) in _BACKENDS.items()
        for option in needed + optional
    }
    assert described.keys() == known.keys()
    assert {it for it, default in described.items() if default == "needed"} == {
        it for it, needed in known.items() if needed
    }


def test_what_a_store_counts_is_described():
    with kvferry.KVStoreBuffer({"backend": "host", "capacity_bytes": 1 << 20}) as store:
        counted = store.stats().keys()
    [line] = re.findall(r"^`stats\(\)` says .*$", (ROOT / "docs/stores.md").read_text(), re.M)
    assert set(re.findall(r"`(\w+)`", line)) == counted


UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def number(text: str) -> int:
    digits, *unit = text.split()
    return int(digits.replace(",", "")) * (UNITS[unit[0]] if unit else 1)


def default_of(cell: str):
    if cell.startswith("`"):
        return cell.strip("`")
    return {"none": "", "false": False}[cell] if cell.isalpha() else number(cell)


def refusal_of(field: str, value) -> str:
    with pytest.raises(ValueError) as refused:
        kvferry.Config.make({field: value})
    return str(refused.value)


def test_every_option_of_an_endpoint_is_described(monkeypatch):
    for field in kvferry.Config.field_names():
        monkeypatch.delenv(f"KVFERRY_{field.upper()}", raising=False)
    rows = {row[0].strip("`"): row for row in rows_of("operations.md", "Options", 4)}
    assert list(rows) == kvferry.Config.field_names()
    defaults = kvferry.Config.make()
    for field, (_, default, bounds, _) in rows.items():
        value = getattr(defaults, field)
        assert (type(value), value) == (type(default_of(default)), default_of(default)), field
        if type(value) is int:
            low, high = map(number, bounds.split(" to "))
            assert f"must lie in [{low}, {high}]" in refusal_of(field, -(1 << 60))
        elif bounds:
            choices = bounds.replace("`", "")
            assert refusal_of(field, "no").endswith(f"one of {choices}"), field


def snippet(page: str) -> str:
    """The first in Python."""
    return re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[1]


def test_publishing_and_fetching_runs():
    names = {}
    exec(snippet("README.md"), names)
    try:
        assert names["fetch"].ok and names["fetch"].missing_pages() == []
    finally:
        names["decode"].close()
        names["prefill"].close()


def test_tensors_in_a_store_run():
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    names = {"tensor": tensor}
    exec(snippet("docs/stores.md"), names)
    assert names["tensor"] is not tensor and np.array_equal(names["tensor"], tensor)
