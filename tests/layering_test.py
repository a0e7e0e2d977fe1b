"""Fails on an #include that runs against the one direction of the folders:

    base <- pool <- transport <- connector <- python, examples, bench

bench/ may also include what it shares with examples/ (layout flags, the pattern) and with tests/ (a
Redis server). Fails as well on third-party headers outside the one folder that wraps them: UCX in
transport/ucx/, ZeroMQ and msgpack in transport/control/, hiredis and RocksDB in connector/store/,
OpenSSL in base/, CUDA in pool/cuda/; but bench/peers/ may use what ours is compared with directly.
tests/ may include anything.

    python3 tests/layering_test.py              checks this tree
    python3 tests/layering_test.py --self-test  plants bad includes and checks that each is caught
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

# A folder of ours, and the folders that it may include.
MAY_INCLUDE = {
    "base": {"base"},
    "pool": {"base", "pool"},
    "transport": {"base", "pool", "transport"},
    "connector": {"base", "pool", "transport", "connector"},
    "python": {"base", "pool", "transport", "connector", "python"},
    "examples": {"base", "pool", "transport", "connector", "examples"},
    "bench": {"base", "pool", "transport", "connector", "examples", "bench", "tests"},
}
OURS = {*MAY_INCLUDE, "tests"}
PEERS = "bench/peers"

# Library, the headers that are its own, and the one folder that may include them.
WRAPPED = [
    ("UCX", re.compile(r"(ucp|ucs|uct|ucm)/"), "transport/ucx"),
    ("ZeroMQ", re.compile(r"zmq(_addon)?\.hp?p?$"), "transport/control"),
    ("hiredis", re.compile(r"hiredis/"), "connector/store"),
    ("RocksDB", re.compile(r"rocksdb/"), "connector/store"),
    ("OpenSSL", re.compile(r"openssl/"), "base"),
    ("msgpack", re.compile(r"msgpack(/|\.hp?p?$)"), "transport/control"),
    (
        "CUDA",
        re.compile(r"(cuda|cub|thrust|cooperative_groups|nv|nvtx3)/|cuda\w*\.h$|"
                   r"(cooperative_groups|nvToolsExt|nvml|nvrtc|device_launch_parameters)\.h$"),
        "pool/cuda",
    ),
]  # fmt: skip

SUFFIXES = {".h", ".hh", ".hpp", ".cc", ".cpp", ".cu", ".cuh", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include(?:_next)?\s*([<"])([^>"]+)[>"]')


def resolve(including: Path, quote: str, target: str, root: Path) -> str:
    """The included path as seen from the root; "../pool/x.h" and "x.h" become "pool/x.h"."""
    if quote == '"':
        beside = (root / including.parent / target).resolve()
        if beside.is_relative_to(root) and beside.exists() and not (root / target).exists():
            return beside.relative_to(root).as_posix()
        if ".." in Path(target).parts and beside.is_relative_to(root):
            return beside.relative_to(root).as_posix()
    return target


def faults_of(including: Path, quote: str, target: str, root: Path) -> list[str]:
    folder = including.parts[0]
    path = resolve(including, quote, target, root)
    faults = []
    to_folder = path.split("/", 1)[0] if "/" in path else ""
    if to_folder in OURS and to_folder not in MAY_INCLUDE[folder]:
        faults.append(
            f'{folder}/ includes "{path}", and may include only '
            + ", ".join(f"{name}/" for name in MAY_INCLUDE if name in MAY_INCLUDE[folder])
        )
    for library, pattern, home in WRAPPED:
        if to_folder not in OURS and pattern.match(target):
            if not including.as_posix().startswith((home + "/", PEERS + "/")):
                faults.append(f"includes {library}'s <{target}>, which belongs to {home}/ alone")
    return faults


def check(root: Path) -> tuple[list[str], int]:
    """Lines "file:line: reason", and the number of files read."""
    root = root.resolve()
    findings, files = [], 0
    for folder in MAY_INCLUDE:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file():
                continue
            files += 1
            including = path.relative_to(root)
            text = path.read_text(encoding="utf-8", errors="replace")
            for number, line in enumerate(text.splitlines(), 1):
                match = INCLUDE.match(line)
                if match:
                    for fault in faults_of(including, match.group(1), match.group(2), root):
                        findings.append(f"{including}:{number}: {fault}")
    return findings, files


PLANTED_BAD = [
    ("base/a.h", '#include "pool/slab.h"'),
    ("base/a.cc", '#include "../pool/slab.h"'),
    ("pool/a.h", '#  include "transport/plan.h"'),
    ("pool/cpu/a.cc", "#include <connector/endpoint.h>"),
    ("transport/a.h", '#include "connector/endpoint.h"'),
    ("transport/ucx/a.cc", '#include "connector/endpoint.h"'),
    ("connector/a.cc", '#include "python/module.h"'),
    ("connector/a.cc", '#include "tests/fake.h"'),
    ("connector/a.cc", '#include "bench/harness.h"'),
    ("examples/a.cc", '#include "bench/pair.h"'),
    ("python/a.cc", "#include <ucp/api/ucp.h>"),
    ("transport/a.cc", "#include <ucs/type/status.h>"),
    ("transport/control/a.cc", "#include <uct/api/uct.h>"),
    ("transport/ucx/a.cc", "#include <zmq.hpp>"),
    ("connector/a.cc", "#include <zmq.h>"),
    ("transport/a.cc", "#include <zmq_addon.hpp>"),
    ("connector/a.cc", "#include <msgpack.hpp>"),
    ("base/a.cc", "#include <msgpack/v3/unpack.hpp>"),
    ("connector/a.cc", "#include <hiredis/hiredis.h>"),
    ("connector/a.cc", "#include <rocksdb/db.h>"),
    ("bench/a.cc", "#include <hiredis/hiredis.h>"),
    ("connector/store/a.cc", "#include <openssl/evp.h>"),
    ("pool/a.cc", "#include <cuda_runtime.h>"),
    ("transport/ucx/a.cc", '#include "cuda.h"'),
    ("pool/cpu/a.cc", "#include <cuda_fp8.h>"),
    ("connector/a.cu", "#include <cub/cub.cuh>"),
]
PLANTED_GOOD = [
    ("base/a.cc", '#include "base/clock.h"'),
    ("base/a.cc", "#include <vector>"),
    ("base/a.cc", '// #include "pool/slab.h"'),
    ("pool/a.cc", '#include "pool/cuda/copy.h"'),
    ("pool/cuda/a.cu", "#include <cuda_runtime.h>"),
    ("transport/ucx/a.cc", "#include <ucp/api/ucp.h>"),
    ("transport/ucx/a.cc", '#include "pool/slab.h"'),
    ("transport/control/a.cc", "#include <zmq.hpp>"),
    ("transport/control/a.cc", "#include <msgpack.hpp>"),
    ("transport/a.cc", '#include "transport/control/zmq.h"'),
    ("connector/a.cc", '#include "transport/ucx/worker.h"'),
    ("python/a.cc", '#include "connector/endpoint.h"'),
    ("bench/a.cc", '#include "tests/support/redis_process.h"'),
    ("bench/peers/a.cc", "#include <hiredis/hiredis.h>"),
    ("tests/a.cc", "#include <ucp/api/ucp.h>"),
    ("tests/a.cc", '#include "python/module.h"'),
]


def self_test() -> int:
    wrong = 0
    for planted, expected in ((PLANTED_BAD, 1), (PLANTED_GOOD, 0)):
        for name, line in planted:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, name)
                path.parent.mkdir(parents=True)
                path.write_text(f"#pragma once\n{line}\n")
                findings, _ = check(Path(folder))
            caught = len(findings) == expected
            if expected and caught:
                caught = findings[0].startswith(f"{name}:2: ")
            if not caught:
                print(f"{name}: {line}\n  expected {expected} finding(s), got {findings}")
                wrong += 1
    planted = f"{len(PLANTED_BAD)} bad and {len(PLANTED_GOOD)} good includes planted"
    print(f"{planted}, {wrong} misjudged")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks the direction of our #includes.")
    parser.add_argument("--self-test", action="store_true", help="check the checker")
    args = parser.parse_args()
    if args.self_test:
        return self_test()
    findings, files = check(Path(__file__).resolve().parents[1])
    print("\n".join(findings) if findings else f"{files} files, every include runs the right way")
    if not files:
        print("no files found: nothing was checked")
    return 1 if findings or not files else 0


if __name__ == "__main__":
    sys.exit(main())
