"""SGLang's servers with different numbers of tensor-parallel ranks."""

import contextlib
import os
import sys
from pathlib import Path

import pytest
from server import DEVICE
from servers import Servers, said_by

sys.path.append(str(Path(__file__).resolve().parents[1] / "engine"))
import random_model  # noqa: E402

_ALL_ONLY = pytest.mark.skipif(
    not os.environ.get("KVFERRY_TEST_ALL"), reason="only in ./dev test --all: two more servers"
)


@pytest.mark.parametrize(
    "sizes", [pytest.param((2, 1), id="2_to_1"), pytest.param((1, 2), id="1_to_2", marks=_ALL_ONLY)]
)
def test_tokens_are_those_of_the_model_alone(sizes, tokens, tmp_path, monkeypatch):
    if DEVICE != "cpu":
        pytest.skip("ranks of a server need a GPU each")
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        pytest.skip("SGLang wants a processor for each rank")
    # Without it SGLang on a CPU wants a NUMA node for each rank.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, processors[:2])))
    monkeypatch.setenv("SGLANG_NCCL_SO_PATH", "none")  # It takes an NCCL it finds for a GPU's.
    model = random_model.make(tmp_path / "model", "Llama")
    reference = said_by(model)
    prefill, decode = ({"tp_size": size} for size in sizes)
    with contextlib.closing(Servers(tmp_path, model, prefill, decode)) as servers:
        servers.wait_ready()
        for text in ("Hello", "One, two, three. " * 15, "One, two, three. " * 15 + "And four?"):
            prompt = tokens(text)
            answer = servers.answer(prompt).tokens
            assert answer == reference(prompt)
            assert len(set(answer)) > 4  # Not the same word over and over, whatever the KV.
