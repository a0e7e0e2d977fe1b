"""Tables of the documentation that name what the code has."""

from pathlib import Path

from kvferry.store import _BACKENDS

ROOT = Path(__file__).parents[2]


def test_every_option_of_every_store_is_described():
    text = (ROOT / "docs" / "stores.md").read_text().split("### Options")[1].split("### ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    described = {
        (row[0].strip("`"), option.strip(" `")): row[2]
        for row in rows
        if len(row) == 5 and row[0].startswith("`")
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
