"""Store mode: a prompt that any engine has computed before is loaded, and the answer is the same.

Each test's first engine computes the prompt; another one, or the same one later, loads its blocks.
The prefix cache of vLLM is off, so that what is not computed came from the store.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo import QUESTIONS
from servers import free_port
from store_engines import BLOCK_TOKENS, FULL_BLOCKS, HOST, StoreEngine, long_prompt, running
from stores import mooncake_master, redis_server


def expect_loaded(engine: StoreEngine, prompt: list[int], tokens: list[int]) -> None:
    """The engine answers with these tokens and has computed only what fills no block."""

    def loads() -> bool:
        before = engine.blocks("load")
        answer = engine.generate(prompt, len(tokens))
        assert answer.tokens == tokens
        loaded = engine.blocks("load") - before
        assert loaded in (0, FULL_BLOCKS)
        assert answer.cached_tokens == loaded * BLOCK_TOKENS
        return loaded > 0

    assert engine.again_where_unanswered(loads)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StoreEngine, str]]:
    """An engine with a store in its own memory, and the address of that."""
    port = free_port()
    engine = StoreEngine("host", tmp_path_factory.mktemp("host"), HOST, listen_port=port)
    with running(engine):
        yield engine, f"tcp://127.0.0.1:{port}"


def test_host_memory_then_another_engine(host: tuple[StoreEngine, str], tmp_path: Path):
    first, address = host
    second = StoreEngine("second", tmp_path, {"backend": "remote", "address": address})
    prompt = long_prompt(first)
    expected = first.generate(prompt, 40)
    assert expected.cached_tokens == 0
    first.wait_saved(FULL_BLOCKS)
    expect_loaded(first, prompt, expected.tokens)
    with running(second):
        expect_loaded(second, prompt, expected.tokens)
        # Blocks of the answer were saved too: a prompt that goes on from it loads them.
        longer = prompt + expected.tokens[:-1]
        blocks = len(longer) // BLOCK_TOKENS
        first.wait_saved(blocks)
        assert second.again_where_unanswered(
            lambda: second.generate(longer, 4).cached_tokens == blocks * BLOCK_TOKENS
        )


def test_other_prompts_and_salts_share_nothing(host: tuple[StoreEngine, str]):
    first, _ = host
    prompt = first.tokenize("What is the capital of France? " * 20)
    first.generate(prompt, 1)
    changed = [prompt[0] + 1, *prompt[1:]]
    assert first.generate(changed, 1).cached_tokens == 0


def test_requests_at_the_same_time(host: tuple[StoreEngine, str]):
    first, _ = host
    prompts = [first.tokenize(f"{n}. " + QUESTIONS[2][1])[:160] for n in range(5)]
    saved = first.blocks("save")
    expected = [first.generate(prompt, 8).tokens for prompt in prompts]
    first.wait_saved(saved + sum(len(prompt) // BLOCK_TOKENS for prompt in prompts))

    def loads() -> bool:
        loaded = first.blocks("load")
        answers = [first.start(prompt, 8) for prompt in prompts]
        assert [request.answer().tokens for request in answers] == expected
        return first.blocks("load") > loaded

    assert first.again_where_unanswered(loads)


def test_preempted_requests_are_saved_and_loaded_right(host: tuple[StoreEngine, str]):
    first, _ = host
    prompts = [first.tokenize(f"{n}. {QUESTIONS[3][1]}")[:190] for n in range(6)]
    expected = [first.generate(prompt, 60, ignore_eos=True).tokens for prompt in prompts]
    preemptions = first.metrics().get("vllm:num_preemptions", 0)
    # Together they outgrow the cache while they generate; what is computed again or loaded again
    # must not differ.
    requests = [first.start(prompt, 60, ignore_eos=True) for prompt in prompts]
    assert [request.answer().tokens for request in requests] == expected
    assert first.metrics()["vllm:num_preemptions"] > preemptions


def test_files_outlive_the_engine(tmp_path: Path):
    store = {
        "backend": "tiered",
        "upper": {"backend": "host", "capacity_bytes": 64 << 20},
        "lower": {"backend": "rocksdb", "path": str(tmp_path / "blocks")},
    }
    first = StoreEngine("before", tmp_path, store)
    with running(first):
        prompt = long_prompt(first)
        expected = first.generate(prompt, 8)
        first.wait_saved(FULL_BLOCKS)
    second = StoreEngine("after", tmp_path, store)
    with running(second):
        expect_loaded(second, prompt, expected.tokens)


@pytest.mark.skipif(
    not os.environ.get("KVFERRY_TEST_ALL"), reason="only in ./dev test --all: one more engine start"
)
@pytest.mark.parametrize("backend", ["redis", "mooncake"])
def test_servers_of_their_own(backend: str, tmp_path: Path):
    server = redis_server(tmp_path) if backend == "redis" else mooncake_master(tmp_path)
    store = {"backend": backend}
    if backend == "redis":
        store |= {"port": server.port}
    else:
        store |= {
            "local_hostname": "127.0.0.1",
            "master_address": f"127.0.0.1:{server.port}",
            "global_segment_bytes": 256 << 20,
        }
    try:
        engine = StoreEngine(backend, tmp_path, store)
        with running(engine):
            prompt = long_prompt(engine)
            expected = engine.generate(prompt, 8)
            engine.wait_saved(FULL_BLOCKS)
            expect_loaded(engine, prompt, expected.tokens)
    finally:
        server.kill()


def test_a_store_that_is_down_costs_the_loads_only(tmp_path: Path):
    nobody = {"backend": "remote", "address": f"tcp://127.0.0.1:{free_port()}"}
    engine = StoreEngine("alone", tmp_path, nobody, connect_timeout_ms=500, fetch_timeout_ms=1000)
    with running(engine):
        prompt = engine.tokenize("What is the capital of France?" * 10)
        answers = [engine.generate(prompt, 4) for _ in range(2)]
        assert answers[0].tokens == answers[1].tokens != []
        assert [answer.cached_tokens for answer in answers] == [0, 0]
