"""Where a worker's endpoint finds no memory the engine goes on."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvferry.vllm.worker import _ATTEMPTS  # noqa: E402
from vllm_steps import SlowDevice  # noqa: E402
from vllm_workers import LAYERS, Workers, publication, wait_for  # noqa: E402


class OutOfMemory:
    """An endpoint that finds no memory for so many calls of one kind."""

    def __init__(self, endpoint, name: str, times: int = 1):
        self._endpoint, self._name = endpoint, name
        self.times = times

    def __getattr__(self, name: str):
        fails = name == self._name and self.times > 0
        return self._fail if fails else getattr(self._endpoint, name)

    def _fail(self, *args, **kwargs) -> None:
        self.times -= 1
        raise MemoryError


@pytest.mark.parametrize("on_device", [False, True])
def test_a_lease_that_finds_no_memory_is_told_again_what_is_ready(
    workers: Workers, on_device: bool, caplog: pytest.LogCaptureFixture
):
    if on_device:
        workers.source.device = SlowDevice()
    workers.load(workers.part(101, [7]), workers.part(102, [8]))
    workers.prefill.publish([publication(101, [1]), publication(102, [2])])
    workers.source.fill([1, 2])
    workers.prefill._endpoint = OutOfMemory(workers.prefill._endpoint, "layer_ready")
    workers.prefill.step_saved()
    if on_device:
        workers.source.device.finish(1)
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == set()
    assert caplog.text.count(f"cannot tell whoever fetches p that {LAYERS} layers are ready") == 1


def test_a_lease_that_never_finds_memory_keeps_nothing_from_those_behind_it(workers: Workers):
    workers.load(workers.part(102, [8]))
    workers.prefill.publish([publication(101, [1]), publication(102, [2])])
    workers.source.fill([1, 2])
    endpoint = OutOfMemory(workers.prefill._endpoint, "layer_ready", _ATTEMPTS)
    workers.prefill._endpoint = endpoint
    workers.prefill.step_saved()
    assert endpoint.times == 0
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == set()


def test_a_load_that_finds_no_memory_fails_with_its_blocks(workers: Workers):
    endpoint = OutOfMemory(workers.decode._endpoint, "fetch")
    workers.decode._endpoint = endpoint
    workers.load(workers.part(101, [7, 8]))
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == {7, 8}
    assert workers.decode.take_failed() == {"d"}
    endpoint.times = 1
    workers.decode.dismiss(workers.part(102, [9]).tickets)
    workers.decode.take_finished()


def test_a_prompt_that_finds_no_memory_is_not_published_and_the_next_one_is(
    workers: Workers, caplog: pytest.LogCaptureFixture
):
    endpoint = OutOfMemory(workers.prefill._endpoint, "publish")
    workers.prefill._endpoint = endpoint
    workers.load(workers.part(101, [7]), workers.part(102, [8]))
    workers.prefill.publish([publication(101, [1]), publication(102, [2])])
    assert "cannot publish the KV of p: MemoryError" in caplog.text
    workers.source.compute(workers.prefill, [2])
    wait_for(workers.loaded)  # Not at the first one's deadline.
    assert workers.decode.take_missing_blocks() == {7}
    wait_for(lambda: workers.prefill.take_finished({"p"}) == {"p"})


@pytest.mark.parametrize("call", ["release", "give_up"])
def test_what_is_taken_back_without_memory_does_not_end_the_engine(workers: Workers, call: str):
    workers.prefill.publish([publication(101, [1])])
    workers.prefill._endpoint = OutOfMemory(workers.prefill._endpoint, call)
    workers.prefill.withdraw(["p"])
    workers.prefill.give_up([102])
    assert workers.prefill._endpoint.times == 0


def test_whoever_waits_is_told_where_there_is_no_memory_the_first_time(workers: Workers):
    workers.prefill._endpoint = OutOfMemory(workers.prefill._endpoint, "give_up")
    workers.load(workers.part(101, [7]))
    workers.prefill.give_up([101])
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == {7}


def test_what_is_asked_again_anyway_may_find_no_memory(workers: Workers, caplog):
    workers.prefill._endpoint = OutOfMemory(workers.prefill._endpoint, "asked_for")
    workers.load(workers.part(101, [7]))
    assert workers.prefill.asked_for([101]) == set()
    wait_for(lambda: workers.prefill.asked_for([101]) == {101})
    workers.prefill.give_up([101])
    wait_for(workers.loaded)
    workers.decode._endpoint = OutOfMemory(workers.decode._endpoint, "keep")
    workers.decode.keep([workers.part(102, [8]).tickets])
    assert "cannot ask for leases to be kept: MemoryError" in caplog.text


def test_a_cancel_that_finds_no_memory_does_not_end_the_engine(workers: Workers):
    workers.load(workers.part(101, [7, 8]))
    (fetch,) = workers.decode._loading["d"].fetches
    fetch.handle = OutOfMemory(fetch.handle, "cancel")
    workers.decode.cancel(["d"])
    assert fetch.handle.times == 0
    workers.decode.cancel(["d"])
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == {7, 8}
