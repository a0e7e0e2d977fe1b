"""Adds up the stages of `./dev test`.

Reads FOLDER/stages.tsv (name, exit code, seconds) and FOLDER/<name>.xml (JUnit, from ctest or
pytest), prints a table, the failed tests and the skipped ones with their reasons, and as its last
line "N passed, N failed, N skipped". A stage that died without naming a failed test counts as one
failure. Exits 1 when anything failed or nothing ran.
"""

import argparse
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    name: str
    exit_code: int
    seconds: int
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    died: str = ""


def one_line(text: str, limit: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def skip_reason(case: ElementTree.Element) -> str:
    # GoogleTest prints "file:line: Skipped", then the reason; ctest keeps it as output of the test.
    output = case.findtext("system-out") or ""
    match = re.search(r": Skipped\n(.*?)\n*\[  SKIPPED \]", output, re.DOTALL)
    if match and match.group(1).strip():
        return one_line(match.group(1))
    for tag in ("skipped", "disabled"):
        element = case.find(tag)
        if element is not None:
            return one_line(element.get("message") or element.text or tag)
    return one_line(case.get("status") or "no reason given")


def read_junit(path: Path, stage: Stage) -> None:
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = case.get("name") or "?"
        owner = case.get("classname") or ""
        if owner and owner != name:
            name = f"{owner}::{name}"
        if case.find("failure") is not None or case.find("error") is not None:
            stage.failed.append(name)
        elif case.get("status") == "fail":
            stage.failed.append(name)
        elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            stage.skipped.append((name, skip_reason(case)))
        else:
            stage.passed += 1


def read_stages(folder: Path) -> list[Stage]:
    stages = []
    for line in (folder / "stages.tsv").read_text().splitlines():
        name, exit_code, seconds = line.split("\t")
        stage = Stage(name, int(exit_code), int(seconds))
        try:
            read_junit(folder / f"{name}.xml", stage)
        except (OSError, ElementTree.ParseError):
            stage.died = f"no results (exit code {stage.exit_code})"
        if not stage.died and not stage.failed:
            if stage.exit_code != 0:
                stage.died = f"exit code {stage.exit_code} though no test failed"
            elif stage.passed == 0:
                stage.died = "not one test passed"
        stages.append(stage)
    return stages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where stages.tsv and the JUnit files are")
    stages = read_stages(parser.parse_args().folder)

    print(f"{'stage':<14} {'passed':>7} {'failed':>7} {'skipped':>8} {'time':>7}")
    for stage in stages:
        counts = f"{stage.passed:>7} {len(stage.failed):>7} {len(stage.skipped):>8}"
        print(f"{stage.name:<14} {counts} {stage.seconds:>5} s  {stage.died}".rstrip())
    for stage in stages:
        for name, reason in stage.skipped:
            print(f"skipped  {stage.name}: {name}: {reason}")
    for stage in stages:
        for name in stage.failed:
            print(f"failed   {stage.name}: {name}")
        if stage.died:
            print(f"died     {stage.name}: {stage.died}")

    passed = sum(stage.passed for stage in stages)
    failed = sum(len(stage.failed) + bool(stage.died) for stage in stages)
    skipped = sum(len(stage.skipped) for stage in stages)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not stages else 0


if __name__ == "__main__":
    sys.exit(main())
