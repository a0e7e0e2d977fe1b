"""Fails when a test whose name says a path (process_ucx/...) does not run on it.

paths_test.py CTEST BUILD_FOLDER: the environment of each test is what ctest was told of it.
"""

import json
import re
import subprocess
import sys

PATHS = ("arena", "tcp", "ucx", "direct", "device_arena", "device_tcp")


def wrong_tests(tests: list[dict]) -> tuple[list[str], int]:
    """Names of those on another path than they say, and how many say one."""
    wrong, seen = [], 0
    for test in tests:
        named = re.match(rf"\w+?_({'|'.join(PATHS)})/", test["name"])
        if named is None:
            continue
        seen += 1
        properties = {entry["name"]: entry["value"] for entry in test["properties"]}
        if f"KVFERRY_TEST_PATH={named[1]}" not in properties.get("ENVIRONMENT", []):
            wrong.append(test["name"])
    return wrong, seen


def main() -> int:
    ctest, folder = sys.argv[1:]
    shown = subprocess.run(
        [ctest, "--show-only=json-v1", "--test-dir", folder],
        check=True,
        capture_output=True,
        text=True,
    )
    wrong, seen = wrong_tests(json.loads(shown.stdout)["tests"])
    print(f"{seen} tests name a path, {len(wrong)} of them run on another: {wrong[:5]}")
    return 1 if wrong or seen == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
