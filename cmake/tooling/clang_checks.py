"""Runs Clang's checks over our .cc files, using the compile commands of a build folder.

  tidy           clang-tidy with .clang-tidy
  thread-safety  clang++ -fsyntax-only -Wthread-safety -Werror=thread-safety

A file that passed is remembered, with a hash of itself, of our headers that it includes, of its
command and of the check's configuration, so a second run looks only at what changed.
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


def clang_command(entry: dict) -> list[str]:
    """The entry's command for Clang: no launcher, no output, no warnings turned into errors."""
    words = entry.get("arguments") or shlex.split(entry["command"])
    while Path(words[0]).name in LAUNCHERS:
        words = words[1:]
    result = ["clang++"]
    skip = False
    for word in words[1:]:
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
    """The file and our headers behind it, by way of clang++ -MM; just the file if that fails."""
    command = [*clang_command(entry), "-w", "-MM"]
    done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)
    if done.returncode != 0:
        return [Path(entry["file"])]
    words = done.stdout.replace("\\\n", " ").split(":", 1)[-1].split()
    paths = {(Path(entry["directory"]) / word).resolve() for word in words}
    return sorted(path for path in paths if path.is_relative_to(ROOT))


def fingerprint(check: str, entry: dict, salt: bytes) -> str:
    digest = hashlib.sha256(salt)
    digest.update("\0".join([check, *clang_command(entry)]).encode())
    for path in own_includes(entry):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def run_check(check: str, entry: dict, database: Path) -> subprocess.CompletedProcess:
    if check == "tidy":
        command = ["clang-tidy", "--quiet", "-p", str(database), entry["file"]]
    else:
        flags = ["-fsyntax-only", "-Wthread-safety", "-Werror=thread-safety"]
        command = [*clang_command(entry), *flags]
    return subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("check", choices=("tidy", "thread-safety"))
    parser.add_argument("--build", type=Path, default=Path("build/dev"), help="build folder")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--again", action="store_true", help="also files that passed before")
    args = parser.parse_args()

    entries = own_sources(args.build)
    if not entries:
        print(f"no source of ours in {args.build}/compile_commands.json", file=sys.stderr)
        return 1
    # clang-tidy reads its commands from a database: one that Clang understands.
    folder = (args.build / "clang-checks").resolve()
    (folder / args.check).mkdir(parents=True, exist_ok=True)
    database = [
        {"directory": e["directory"], "file": e["file"], "arguments": clang_command(e)}
        for e in entries
    ]
    (folder / "compile_commands.json").write_text(json.dumps(database))

    tool = "clang-tidy" if args.check == "tidy" else "clang++"
    salt = subprocess.run([tool, "--version"], capture_output=True, check=True).stdout
    salt += (ROOT / ".clang-tidy").read_bytes() if args.check == "tidy" else b""

    def one(entry: dict) -> tuple[str, str]:
        mark = folder / args.check / hashlib.sha256(entry["file"].encode()).hexdigest()
        key = fingerprint(args.check, entry, salt)
        if not args.again and mark.exists() and mark.read_text() == key:
            return "unchanged", ""
        done = run_check(args.check, entry, folder)
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
                print(f"{args.check}: {Path(entry['file']).relative_to(ROOT)}\n{output}")
    print(f"        {args.check}: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
