"""SGLang's prefill and decode servers on the CPU, with kvferry between them: the tokens are those
that the model makes alone."""

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "examples" / "vllm_pair")]

from pair import DEFAULT_MODEL, Answer, Request, free_port  # noqa: E402
from server import Server  # noqa: E402

MODEL = Path(os.environ.get("KVFERRY_TEST_MODEL", DEFAULT_MODEL))
_rooms = itertools.count(1000)


class Servers:
    def __init__(self, folder: Path):
        self.port = free_port()
        self.folder = folder
        self.prefill = Server("prefill", MODEL, folder, self.port)
        self.decode = Server("decode", MODEL, folder, self.port)

    def start(self, prompt: list[int], max_tokens: int) -> tuple[Request, Request]:
        """As a router does: both get the request."""
        where = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": next(_rooms),
        }
        return tuple(it.start(prompt, max_tokens, where) for it in (self.prefill, self.decode))

    def answer(self, prompt: list[int], max_tokens: int = 8) -> Answer:
        prefill, decode = self.start(prompt, max_tokens)
        assert prefill.answer().error == ""
        answer = decode.answer()
        assert answer.error == ""
        return answer

    def close(self) -> None:
        self.prefill.stop()
        self.decode.stop()
        self.prefill.close()
        self.decode.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    if not os.environ.get("KVFERRY_TEST_SGLANG"):
        pytest.skip("SGLang is not installed (./dev test does it)")
    if not (MODEL / "config.json").exists():
        pytest.skip(f"no model in {MODEL} (./dev setup makes it; or set KVFERRY_TEST_MODEL)")
    servers = Servers(tmp_path_factory.mktemp("sglang"))
    try:
        servers.prefill.wait_ready()
        servers.decode.wait_ready()
        yield servers
    finally:
        servers.close()


@pytest.fixture(scope="module")
def tokens() -> Callable[[str], list[int]]:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    return lambda text: tokenizer(text)["input_ids"]


@pytest.fixture(scope="module")
def reference() -> Callable[[list[int], int], list[int]]:
    """What the model says, by transformers."""
    transformers, torch = (pytest.importorskip(name) for name in ("transformers", "torch"))
    torch.set_num_threads(1)  # Schedulers of SGLang never sleep; more threads wait for each other.
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    def generate(prompt: list[int], max_tokens: int = 8) -> list[int]:
        with torch.no_grad():
            answer = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                use_cache=True,
            )
        return answer[0, len(prompt) :].tolist()

    return generate


@pytest.mark.parametrize("words", [1, 16, 100])
def test_tokens_are_those_of_the_model_alone(servers, tokens, reference, words):
    """From less than a page to several chunks of prefill."""
    prompt = tokens(" ".join(f"number {n}," for n in range(words)) + " and then")
    assert servers.answer(prompt).tokens == reference(prompt)


def test_a_prefix_that_the_prefill_server_has(servers, tokens, reference):
    prompt = tokens("A long time ago " * 40)
    for _ in range(2):
        assert servers.answer(prompt).tokens == reference(prompt)
    longer = prompt + tokens("in a town by the sea")
    assert servers.answer(longer).tokens == reference(longer)


def test_several_at_the_same_time(servers, tokens, reference):
    prompts = [tokens(f"{n}. Tell me of {n} rivers. " * (n + 1)) for n in range(6)]
    requests = [servers.start(prompt, 8) for prompt in prompts]
    for prompt, (prefill, decode) in zip(prompts, requests, strict=True):
        assert prefill.answer().error == ""
        assert decode.answer().tokens == reference(prompt)


@pytest.mark.parametrize("on", ["prefill", "decode", "both"])
def test_requests_that_are_aborted(servers, tokens, reference, on):
    """A client that hangs up, at some moment: the others are answered, and nothing is left over,
    or SGLang's own check of its pages would end the server."""
    for delay_s in (0.0, 0.03, 0.1):
        prompt = tokens(f"Aborted after {delay_s} s on {on}. " * 20)
        other = tokens(f"Not aborted, but next to one that is, after {delay_s} s on {on}.")
        requests = servers.start(prompt, 64)
        others = servers.start(other, 8)
        time.sleep(delay_s)  # Any moment will do.
        for request, name in zip(requests, ("prefill", "decode"), strict=True):
            if on in (name, "both"):
                request.abort()
        for request in requests:
            request.answer(30)
        assert others[1].answer().tokens == reference(other)
        others[0].answer()
    prompt = tokens("And now one that nobody aborts.")
    assert servers.answer(prompt).tokens == reference(prompt)


def test_a_prefill_server_that_dies_and_another_one(servers, tokens, reference):
    """The last test here: the servers are not the fixture's afterwards."""
    prompt = tokens("Who answers this? " * 30)
    with servers.prefill.paused():
        _, decode = servers.start(prompt, 8)
        servers.prefill.kill()
    answer = decode.answer(60)
    assert answer.error != ""
    servers.prefill = Server("prefill", MODEL, servers.folder, servers.port)
    servers.prefill.wait_ready()
    assert servers.answer(prompt).tokens == reference(prompt)
