import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "vllm_pair"), str(ROOT / "tests" / "python")]

from pair import DEFAULT_MODEL  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def engines_can_run() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed (./dev setup does it)")
    if not (DEFAULT_MODEL / "config.json").exists():
        pytest.skip(f"no model in {DEFAULT_MODEL} (./dev setup makes it)")
