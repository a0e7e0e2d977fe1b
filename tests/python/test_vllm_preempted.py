"""A prefill engine's worker takes back what a preempted request has published."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
from kvferry.vllm.telemetry import Trace  # noqa: E402
from kvferry.vllm.worker import _PREEMPTION_ATTEMPTS  # noqa: E402
from vllm_workers import LAYERS, Workers, overwrite, publication, wait_for  # noqa: E402


def test_a_load_goes_on_when_a_preempted_request_is_computed_again(
    workers: Workers, caplog: pytest.LogCaptureFixture
):
    workers.load(workers.part(101, [7, 8]), workers.part(102, [9, 10]), workers.part(103, [11]))
    workers.prefill.publish([publication(101, [1, 2])])
    workers.source.compute(workers.prefill, [1, 2])
    wait_for(lambda: not workers.prefill.take_finished(set()) and workers.part_fetched(101))
    # The second one is not computed to its end.
    workers.prefill.publish([publication(102, [3, 4])])
    workers.prefill.release_preempted(["p"])
    overwrite(workers.source, [1, 2, 3, 4])
    assert not workers.loaded()
    # In other blocks. The first part has arrived, and nobody comes for it again.
    workers.prefill.publish([publication(101, [21, 22]), publication(102, [23, 24])])
    workers.source.compute(workers.prefill, [21, 22, 23, 24])
    workers.prefill.publish([publication(103, [25])])
    workers.source.compute(workers.prefill, [25])
    wait_for(workers.loaded)
    assert "cannot publish" not in caplog.text
    for block, source in zip([7, 8, 9, 10, 11], [1, 2, 23, 24, 25], strict=True):
        for layer in range(LAYERS):
            assert (workers.target.block(layer, block) == 1 + layer * 70 + source).all()
    assert workers.decode.take_missing_blocks() == set()
    wait_for(lambda: workers.prefill.take_finished({"p"}) == {"p"})
    assert workers.prefill._ended_before == {} and workers.prefill._computing == []


class LateEndpoint:
    """A prefill endpoint that takes leases back, but does not say so in time."""

    def __init__(self, endpoint: kvferry.PrefillEndpoint, times: int):
        self._endpoint = endpoint
        self.times = times

    def unpublish(self, lease_id: int, *, timeout_ms: int) -> None:
        self._late(self._endpoint.unpublish, lease_id, timeout_ms)

    def release(self, lease_id: int, *, timeout_ms: int) -> None:
        self._late(self._endpoint.release, lease_id, timeout_ms)

    def _late(self, take_back: Callable[..., None], lease_id: int, timeout_ms: int) -> None:
        if self.times == 1:
            take_back(lease_id, timeout_ms=timeout_ms)
        if self.times > 0:
            self.times -= 1
            raise kvferry.DeadlineExceeded("late")
        take_back(lease_id, timeout_ms=timeout_ms)

    def __getattr__(self, name: str):
        return getattr(self._endpoint, name)


def begin_transfer(workers: Workers) -> None:
    """Of block 1, all but its last layer."""
    workers.load(workers.part(101, [7]))
    workers.prefill.publish([publication(101, [1])])
    workers.source.fill([1])
    for layer in list(workers.source.layer_index)[:-1]:
        workers.prefill.layer_saved(layer)
    wait_for(lambda: not workers.loaded() and workers.target.block(LAYERS - 2, 7).any())


@pytest.mark.parametrize("times", [1, _PREEMPTION_ATTEMPTS - 1])
def test_a_lease_that_is_taken_back_late_is_published_again(
    workers: Workers, caplog: pytest.LogCaptureFixture, times: int
):
    workers.prefill._endpoint = LateEndpoint(workers.prefill._endpoint, times)
    begin_transfer(workers)
    workers.prefill.release_preempted(["p"])
    overwrite(workers.source, [1])
    workers.prefill.publish([publication(101, [2])])
    workers.source.compute(workers.prefill, [2])
    wait_for(workers.loaded)
    assert (workers.target.block(LAYERS - 1, 7) == 1 + (LAYERS - 1) * 70 + 2).all()
    assert caplog.text.count("may be read still") == times
    assert "cannot publish" not in caplog.text


@pytest.mark.parametrize("times", [0, 1, _PREEMPTION_ATTEMPTS - 1])
def test_a_preempted_request_that_has_ended_is_read_no_more_and_reported(
    workers: Workers, times: int
):
    workers.prefill._endpoint = LateEndpoint(workers.prefill._endpoint, times)
    begin_transfer(workers)
    workers.prefill.publish([publication(102, [2])])  # Nobody has come for this one.
    workers.prefill.release_preempted([], ["p", "unknown"])
    assert workers.prefill._endpoint.metrics()["transfers_active"] == 0
    overwrite(workers.source, [1, 2])
    workers.prefill.step_saved()
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == {7}
    wait_for(lambda: workers.prefill.take_finished({"p"}) == {"p"})
    assert workers.prefill._leases == {}


def test_blocks_of_a_request_that_has_ended_are_not_given_away_either(workers: Workers):
    late = LateEndpoint(workers.prefill._endpoint, _PREEMPTION_ATTEMPTS)
    workers.prefill._endpoint = late
    begin_transfer(workers)
    with pytest.raises(kvferry.DeadlineExceeded):
        workers.prefill.release_preempted([], ["p"])
    assert late.times == 0


def test_blocks_that_may_be_read_still_are_not_given_away(workers: Workers):
    late = LateEndpoint(workers.prefill._endpoint, _PREEMPTION_ATTEMPTS)
    workers.prefill._endpoint = late
    begin_transfer(workers)
    with pytest.raises(kvferry.DeadlineExceeded):
        workers.prefill.release_preempted(["p"])
    assert late.times == 0


def test_a_lease_that_ends_as_its_request_is_preempted_is_in_the_trace(
    workers: Workers, tmp_path: Path
):
    path = tmp_path / "trace"
    workers.prefill._trace = Trace(str(path), 0)
    workers.prefill.publish([publication(101, [1, 2])])
    workers.source.compute(workers.prefill, [1, 2])
    workers.load(workers.part(101, [7, 8]))
    wait_for(lambda: workers.prefill._endpoint.metrics()["leases_live"] == 0)
    workers.prefill.release_preempted(["p"])
    workers.prefill.publish([publication(101, [3, 4])])  # Nobody would come for it.
    assert workers.prefill.take_finished({"p"}) == {"p"}
    (event,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert event["outcome"] == "fetched"
    assert workers.prefill._leases == {}


def test_a_preempted_request_that_is_aborted_fails_its_load(workers: Workers):
    workers.load(workers.part(101, [7, 8]))
    workers.prefill.publish([publication(101, [1, 2])])
    workers.prefill.release_preempted(["p"])
    assert not workers.loaded() and workers.prefill._leases == {}
    workers.prefill.give_up([101])
    assert workers.prefill.take_finished({"p"}) == set()  # The engine has its blocks already.
    wait_for(workers.loaded)
    assert workers.decode.take_missing_blocks() == {7, 8}
