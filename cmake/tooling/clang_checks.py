"""Runs clang-tidy, with .clang-tidy and Clang's thread-safety analysis, over our .cc files, using
the compile commands of a build folder. The clang-tidy is the one beside this Python.

A file that passed is remembered, with a hash of itself, of our headers that it includes, of its
command and of the configuration, so a second run looks only at what changed.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("base", "pool", "transport", "connector", "python", "examples", "bench", "tests")
NOISE = re.compile(
    r"^(\d+ warnings? (generated|treated as)|Suppressed \d+ warning|Use -header-filter)"
)
LAUNCHERS = ("ccache", "sccache", "distcc")


def bare_command(entry: dict) -> list[str]:
    """The entry's command without launcher, output and warnings turned into errors."""
    words = entry.get("arguments") or shlex.split(entry["command"])
    while Path(words[0]).name in LAUNCHERS:
        words = words[1:]
    result = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in ("-o", "-MF", "-MT", "-MQ"):
            skip = True
        elif word not in ("-c", "-MD", "-MMD", "-Werror") and not word.startswith("-flto"):
            result.append(word)
    return result


def own_sources(build: Path) -> list[dict]:
    entries = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = (Path(entry["directory"]) / entry["file"]).resolve()
        if path.suffix != ".cc" or not path.is_relative_to(ROOT):
            continue
        if path.relative_to(ROOT).parts[0] in FOLDERS:
            entries.setdefault(path, {**entry, "file": str(path)})
    return [entries[path] for path in sorted(entries)]


def own_includes(entry: dict) -> list[Path]:
    """The file and our headers behind it, as its compiler says; just the file if that fails."""
    command = [*bare_command(entry), "-w", "-MM"]
    done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)
    if done.returncode != 0:
        return [Path(entry["file"])]
    words = done.stdout.replace("\\\n", " ").split(":", 1)[-1].split()
    paths = {(Path(entry["directory"]) / word).resolve() for word in words}
    return sorted(path for path in paths if path.is_relative_to(ROOT))


def fingerprint(entry: dict, salt: bytes) -> str:
    digest = hashlib.sha256(salt)
    digest.update("\0".join(bare_command(entry)).encode())
    for path in own_includes(entry):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def write_database(folder: Path, entries: list[dict]) -> None:
    """Compile commands that Clang understands, whatever compiler they are for."""
    database = [
        {
            "directory": entry["directory"],
            "file": entry["file"],
            "arguments": ["clang++", *bare_command(entry)[1:], "-Wthread-safety"],
        }
        for entry in entries
    ]
    (folder / "compile_commands.json").write_text(json.dumps(database))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=Path("build/dev"), help="build folder")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--again", action="store_true", help="also files that passed before")
    args = parser.parse_args()

    entries = own_sources(args.build)
    if not entries:
        print(f"no source of ours in {args.build}/compile_commands.json", file=sys.stderr)
        return 1
    folder = (args.build / "clang-checks").resolve()
    marks = folder / "passed"
    marks.mkdir(parents=True, exist_ok=True)
    write_database(folder, entries)

    tidy = [str(Path(sys.executable).parent / "clang-tidy"), "--quiet", "-p", str(folder)]
    salt = subprocess.run([tidy[0], "--version"], capture_output=True, check=True).stdout
    salt += (ROOT / ".clang-tidy").read_bytes() + Path(__file__).read_bytes()

    def one(entry: dict) -> tuple[str, str]:
        mark = marks / hashlib.sha256(entry["file"].encode()).hexdigest()
        key = fingerprint(entry, salt)
        if not args.again and mark.exists() and mark.read_text() == key:
            return "unchanged", ""
        done = subprocess.run(
            [*tidy, entry["file"]], cwd=entry["directory"], capture_output=True, text=True
        )
        if done.returncode == 0:
            mark.write_text(key)
            return "passed", ""
        mark.unlink(missing_ok=True)
        lines = (done.stdout + done.stderr).splitlines()
        return "failed", "\n".join(line for line in lines if not NOISE.match(line))

    counts = {"passed": 0, "unchanged": 0, "failed": 0}
    with ThreadPoolExecutor(args.jobs) as pool:
        for entry, (outcome, output) in zip(entries, pool.map(one, entries), strict=True):
            counts[outcome] += 1
            if outcome == "failed":
                print(f"clang-tidy: {Path(entry['file']).relative_to(ROOT)}\n{output}")
    print("        clang-tidy: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
