import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import MODEL, Servers


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


def said_by(folder: Path) -> Callable[..., list[int]]:
    """(prompt, max_tokens=8): what the model says, by transformers."""
    transformers, torch = (pytest.importorskip(name) for name in ("transformers", "torch"))
    torch.set_num_threads(1)  # Beside busy servers more threads would wait for each other.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def generate(prompt: list[int], max_tokens: int = 8) -> list[int]:
        with torch.no_grad():
            answer = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
            )
        return answer[0, len(prompt) :].tolist()

    return generate
