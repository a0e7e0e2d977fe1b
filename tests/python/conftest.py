"""Fixtures of several files."""

import pytest


@pytest.fixture
def make():
    """Makes ranks of SGLang's servers, see sglang_pd."""
    from sglang_pd import make_ranks  # Where SGLang is not installed its tests are skipped.

    with make_ranks() as it:
        yield it


@pytest.fixture
def pair(make):
    """A prefill and a decode rank of SGLang's."""
    prefill, decode = make("prefill"), make("decode")
    prefill.fill(seed=1)
    decode.fill(seed=2)
    return prefill, decode


@pytest.fixture
def scheduler():
    """The scheduler's half of vLLM's store mode, with a store of its own."""
    from vllm_store_scheduler import Scheduler  # Its tests are skipped where vLLM is not installed.

    it = Scheduler()
    yield it
    it.close()


@pytest.fixture
def workers():
    """A prefill and a decode engine's worker, of vLLM's connector."""
    from vllm_workers import Workers

    it = Workers()
    yield it
    it.close()


@pytest.fixture
def peers():
    """A prefill and a decode endpoint of small pools."""
    from endpoints import Peers

    it = Peers(publish_grace_ms=50)
    yield it
    it.close()
