"""Layers are announced when the device has computed them, and each group's by itself."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
from kvferry.vllm.metadata import Publication  # noqa: E402
from vllm_steps import SlowDevice  # noqa: E402
from vllm_workers import DEADLINE_S, LAYERS, Workers, overwrite, publication, wait_for  # noqa: E402


def test_layers_of_a_group_are_ready_when_that_group_has_saved_them(workers: Workers):
    """Two groups share the pool's layers: a block holds what one of them has of each."""
    names = [f"{group}.{layer}" for group in range(2) for layer in range(LAYERS)]
    workers.source.layer_index = {name: n % LAYERS for n, name in enumerate(names)}
    workers.source.group_of = {name: n // LAYERS for n, name in enumerate(names)}
    first, second = workers.part(101, [7]), workers.part(102, [8])
    workers.prefill.publish([Publication("p", 101, [1], 16), Publication("p", 102, [2], 16, 1)])
    workers.load(first, second)
    workers.source.fill([1, 2])
    for name in names[:LAYERS]:
        workers.prefill.layer_saved(name)
    wait_for(lambda: workers.part_fetched(101) or workers.prefill.take_finished(set()))
    assert not workers.target.block(0, 8).any()
    for name in names[LAYERS:]:
        workers.prefill.layer_saved(name)
    wait_for(workers.loaded)
    assert (workers.target.block(LAYERS - 1, 8) == 1 + (LAYERS - 1) * 70 + 2).all()
    workers.prefill.step_saved()


@pytest.fixture
def device(workers: Workers) -> Iterator[SlowDevice]:
    """That of the prefill side."""
    workers.source.device = SlowDevice()
    yield workers.source.device
    workers.source.device.finish(len(workers.source.device.points))


def test_a_layer_is_sent_when_the_device_has_computed_it(workers: Workers, device: SlowDevice):
    workers.load(workers.part(101, [7, 8]))
    workers.prefill.publish([publication(101, [1, 2])])
    workers.source.save(workers.prefill)
    assert len(device.points) == LAYERS  # The last call has nothing more to say.
    # Nothing has been computed yet, and nothing must have been read.
    for layer in range(LAYERS):
        assert not workers.loaded()
        assert not workers.target.block(layer, 8).any()
        for block in (1, 2):
            for tensor in range(2):
                workers.source.pool.page(layer, tensor, block)[:] = 50 + layer
        device.finish(layer + 1)
        wait_for(lambda at=layer: (workers.target.block(at, 8) == 50 + at).all())
    wait_for(workers.loaded)
    wait_for(lambda: workers.prefill.take_finished({"p"}) == {"p"})


class Listening:
    """A prefill endpoint, and which leases it was told layers of."""

    def __init__(self, endpoint: kvferry.PrefillEndpoint):
        self._endpoint = endpoint
        self.told: list[int] = []

    def layer_ready(self, lease_id: int, layer: int) -> None:
        self.told.append(lease_id)
        self._endpoint.layer_ready(lease_id, layer)

    def __getattr__(self, name: str):
        return getattr(self._endpoint, name)


def test_a_layer_is_not_ready_before_those_below_it(workers: Workers):
    endpoint = workers.prefill._endpoint = Listening(workers.prefill._endpoint)
    workers.prefill.publish([publication(101, [1])])
    workers.prefill.layer_saved("layer.1")
    assert endpoint.told == []
    workers.prefill.layer_saved("layer.0")
    assert endpoint.told == [101]
    workers.prefill.step_saved()


def test_what_was_asked_for_before_a_lease_was_taken_back_says_nothing_of_the_next_one(
    workers: Workers, device: SlowDevice
):
    endpoint = workers.prefill._endpoint = Listening(workers.prefill._endpoint)
    workers.load(workers.part(101, [7]))
    workers.prefill.publish([publication(101, [1])])
    workers.source.compute(workers.prefill, [1])
    # Before the device has done that, the engine preempts the request and begins it elsewhere.
    workers.prefill.release_preempted(["p"])
    overwrite(workers.source, [1])
    workers.prefill.publish([publication(101, [2])])
    device.finish(len(device.points))
    workers.prefill._announcer.submit(lambda: None).result(DEADLINE_S)  # It has looked at all.
    assert endpoint.told == []
    workers.source.compute(workers.prefill, [2])
    device.finish(len(device.points))
    wait_for(workers.loaded)
    for layer in range(LAYERS):
        assert (workers.target.block(layer, 7) == 1 + layer * 70 + 2).all()


def test_what_a_device_failed_to_compute_is_never_sent(
    workers: Workers, device: SlowDevice, caplog: pytest.LogCaptureFixture
):
    device.fails = True
    endpoint = workers.prefill._endpoint = Listening(workers.prefill._endpoint)
    workers.prefill.publish([publication(101, [1])])
    workers.source.compute(workers.prefill, [1])
    device.finish(len(device.points))
    workers.prefill._announcer.submit(lambda: None).result(DEADLINE_S)
    assert endpoint.told == []
    assert "an illegal memory access" in caplog.text


def test_what_goes_wrong_beside_the_engine_is_in_the_log(
    workers: Workers, device: SlowDevice, caplog: pytest.LogCaptureFixture, monkeypatch
):
    def fails(grown) -> None:
        raise MemoryError

    monkeypatch.setattr(workers.prefill, "_mark_ready", fails)
    workers.prefill.publish([publication(101, [1])])
    workers.prefill.step_saved()
    device.finish(1)
    wait_for(lambda: "were not announced: MemoryError()" in caplog.text)


def test_layers_that_no_thread_announces_are_announced_with_the_next(
    workers: Workers, device: SlowDevice, caplog
):
    workers.load(workers.part(101, [7]))
    workers.prefill.publish([publication(101, [1])])
    workers.source.fill([1])
    announcer = ThreadPoolExecutor(1)
    announcer.shutdown()
    workers.prefill._announcer = announcer  # Which starts nothing any more.
    workers.prefill.layer_saved(next(iter(workers.source.layer_index)))
    assert "layers stay unsent until the next are ready" in caplog.text
    workers.prefill._announcer = None
    workers.prefill.step_saved()
    device.finish(2)
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == set()
