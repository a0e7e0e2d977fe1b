import importlib.util
from collections.abc import Callable, Iterator

import pytest
from engines import MODEL, Engines
from pair import Answer


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Started once for all tests here, because a start takes half a minute."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed (./dev setup does it)")
    if not (MODEL / "config.json").exists():
        pytest.skip(f"no model in {MODEL} (./dev setup makes it; or set KVFERRY_TEST_MODEL)")
    with Engines(tmp_path_factory.mktemp("engines")) as engines:
        yield engines


@pytest.fixture
def break_kv(engines: Engines) -> Iterator[None]:
    """While a test has this, the spare engine zeroes the KV that it fetched."""
    engines.break_switch.touch()
    yield
    engines.break_switch.unlink()


@pytest.fixture
def reference(engines: Engines) -> Callable[[list[int], int], Answer]:
    """What the prefill engine answers alone, without kvferry."""
    return engines.prefill.generate


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test of these engines none holds a block, and the pair still serves."""
    yield
    if "engines" in request.fixturenames:
        request.getfixturevalue("engines").check_alive()
