import contextlib
import os
from collections.abc import Callable, Iterator

import pytest
from servers import MODEL, Servers, said_by


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    if not os.environ.get("KVFERRY_TEST_SGLANG"):
        pytest.skip("SGLang is not installed (./dev test --sglang does it)")
    if not (MODEL / "config.json").exists():
        pytest.skip(f"no model in {MODEL} (./dev setup makes it; or set KVFERRY_TEST_MODEL)")


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Started once for most tests here, because a start takes half a minute."""
    with contextlib.closing(Servers(tmp_path_factory.mktemp("sglang"))) as servers:
        servers.wait_ready()
        yield servers


@pytest.fixture(scope="session")
def tokens() -> Callable[[str], list[int]]:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    return lambda text: tokenizer(text)["input_ids"]


@pytest.fixture(scope="session")
def reference() -> Callable[..., list[int]]:
    return said_by(MODEL)
