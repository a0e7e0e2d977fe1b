"""Groups of layers have tickets of their own, and hand over their windows."""

from collections import Counter

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
from kvferry.vllm.metadata import LoadPart  # noqa: E402
from kvferry.vllm.parts import WHOLE, cut  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402
from vllm_steps import BLOCK, FROM, TRANSFER, Blocks, Decode, Prefill, request, window  # noqa: E402


def test_groups_without_a_window_have_their_own_tickets_too():
    prefill = Prefill(windows=(WHOLE, WHOLE))
    it = prefill.arrive(40)
    assert [it.group for it in prefill.step({"r": 40}).publications] == [0, 1]
    it.status = RequestStatus.FINISHED_LENGTH_CAPPED
    params = prefill.scheduler.request_finished(it)[1]
    assert len(params["kvferry_group_tickets"]) == 2
    decode, it = Decode(windows=(WHOLE, WHOLE)), request("r", 40, params)
    (load,) = decode.allocate(it, 0, [5, 6, 8], [1, 2, 3]).loads
    assert (load.error, load.block_ids) == ("", [5, 6, 8, 1, 2, 3])


WINDOWS = (window(2 * BLOCK), WHOLE)


@pytest.mark.parametrize(
    "prompt, first", [(1, 0), (32, 0), (33, 0), (47, 0), (48, 1), (63, 1), (64, 2)]
)
def test_each_group_hands_over_its_window(prompt: int, first: int):
    """The last token looks at the 32 up to itself, that is from token prompt - 32 on."""
    prefill = Prefill(windows=WINDOWS)
    it = prefill.arrive(prompt)
    windowed, full = prefill.step({"r": prompt}).publications
    end = -(-prompt // BLOCK)
    assert (windowed.group, windowed.block_ids) == (0, [4, 9, 2, 7][first:end])
    assert (full.group, full.block_ids) == (1, [4, 9, 2, 7][:end])
    assert windowed.lease_id != full.lease_id
    # Which vLLM gives back as the window moves on.
    assert +prefill.blocks.held == Counter(windowed.block_ids)
    it.status = RequestStatus.FINISHED_LENGTH_CAPPED
    delay, params = prefill.scheduler.request_finished(it)
    assert delay and "kvferry_tickets" not in params
    tickets = [kvferry.Ticket.parse(text) for (text,) in params["kvferry_group_tickets"]]
    assert [(it.lease_id, it.num_pages) for it in tickets] == [
        (windowed.lease_id, end - first),
        (full.lease_id, end),
    ]
    prefill.report(finished_sending={"r"})
    assert not +prefill.blocks.held


def test_a_window_is_let_go_of_by_preemption():
    prefill = Prefill(windows=WINDOWS)
    it = prefill.arrive(40)
    prefill.step({"r": 40})
    assert +prefill.blocks.held
    assert prefill.step({}, preempted={"r"}).preempted == ["r"]
    assert prefill.blocks.none_held()
    assert len(prefill.step({"r": 40}).publications) == 2
    it.status = RequestStatus.FINISHED_ABORTED
    assert prefill.scheduler.request_finished(it) == (True, None)
    prefill.report(finished_sending={"r"})
    assert prefill.blocks.none_held()  # Nor given back twice: they may be others' by now.


def test_a_window_that_vllm_has_given_back_is_not_handed_over(caplog: pytest.LogCaptureFixture):
    prefill = Prefill(windows=WINDOWS)
    prefill.blocks = Blocks([0, 0, 2, 7], [4, 9, 2, 7])
    it = prefill.arrive(40)
    assert prefill.step({"r": 40}).publications == []
    assert "too early" in caplog.text
    it.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert prefill.scheduler.request_finished(it) == (False, None)


def test_whoever_waits_for_a_window_that_vllm_has_given_back_is_told():
    prefill = Prefill(windows=WINDOWS)
    prefill.blocks = Blocks([0, 0, 2, 7], [4, 9, 2, 7])
    it = prefill.arrive(40, {"do_remote_decode": True} | TRANSFER)
    assert prefill.begin(it)
    assert prefill.step({"r": 40}).publications == []
    it.num_computed_tokens = 40
    leases = {part.lease_id for part in cut(TRANSFER["transfer_id"], range(40), BLOCK, WINDOWS)}
    assert set(prefill.step({"r": 1}).given_up) == leases
    assert prefill.step({"r": 1}).given_up == []  # Once.
    assert prefill.begin(it)  # Nobody is to ask for it any more.


def remote_groups(**changes) -> dict:
    return {"do_remote_prefill": True, "kvferry_group_tickets": [["t"], ["u"]]} | changes


def test_each_group_loads_what_it_needs():
    decode, it = Decode(windows=WINDOWS), request("r", 81, remote_groups())
    (load,) = decode.allocate(it, 32, [0, 0, 0, 7, 8], [1, 2, 3, 4, 5]).loads
    # All but the last token, which the decode engine computes, and which has a block of its own.
    assert load.parts == [LoadPart(["t"], 0, [7, 8], 3), LoadPart(["u"], 2, [3, 4, 5], 6)]
    assert (load.blocks_skipped, load.error) == (2, "")


def test_windows_need_blocks_of_one_size():
    """The lease of a window begins with a block of the prefill engine's."""
    decode = Decode(windows=WINDOWS)
    it = request("r", 81, remote_groups(kvferry_block_size=32))
    (load,) = decode.allocate(it, 32, [0, 0, 0, 7, 8], [1, 2, 3, 4, 5]).loads
    assert "block_size of 32 and this one of 16" in load.error
    assert load.block_ids == [7, 8, 3, 4, 5]
    same = remote_groups(kvferry_group_tickets=[["v"], ["w"]], kvferry_block_size=BLOCK)
    (load,) = decode.allocate(request("s", 81, same), 32, [0, 0, 0, 7, 8], [1, 2, 3, 4, 5]).loads
    assert load.parts == [LoadPart(["v"], 0, [7, 8], 3), LoadPart(["w"], 2, [3, 4, 5], 6)]


def test_a_group_that_is_all_here_is_dismissed():
    decode, it = Decode(windows=WINDOWS), request("r", 81, remote_groups())
    assert decode.scheduler.get_num_new_matched_tokens(it, 80) == (0, False)
    meta = decode.allocate(it, 80, [0, 0, 0, 7, 8], [1, 2, 3, 4, 5])
    assert meta.loads == [] and meta.dismissed == [["t"], ["u"]]


@pytest.mark.parametrize(
    "params, word",
    [
        ({"kvferry_group_tickets": None}, "kvferry_group_tickets"),
        ({"kvferry_group_tickets": [["t"], "u"]}, "kvferry_group_tickets"),
        ({"kvferry_group_tickets": [["t"]]}, "in 1 groups of layers and this one in 2"),
        ({"kvferry_group_tickets": [["t"], []]}, "kvferry_group_tickets"),
    ],
)
def test_wrong_tickets_of_groups_make_a_load_that_fails(params: dict, word: str):
    decode, it = Decode(windows=WINDOWS), request("r", 40, remote_groups() | params)
    (load,) = decode.allocate(it, 0, [5, 6, 8], [1, 2, 3]).loads
    assert word in load.error and load.block_ids == [5, 6, 8, 1, 2, 3]
    it = request("s", 40, remote_groups() | params)
    decode.scheduler.request_finished(it)  # Never had blocks.


def test_windows_are_handed_over_at_once_at_the_end():
    parts = cut(TRANSFER["transfer_id"], range(2500), BLOCK, WINDOWS)
    assert [(it.group, it.first_block, it.end_block, it.end_token) for it in parts] == [
        (1, 0, 64, 1024),
        (1, 64, 128, 2048),
        (0, 154, 157, 2500),
        (1, 128, 157, 2500),
    ]
    assert len({it.lease_id for it in parts}) == 4
    prefill = Prefill(windows=WINDOWS)
    it = prefill.arrive(2500, {"do_remote_decode": True} | TRANSFER)
    assert prefill.begin(it)
    (first,) = prefill.step({"r": 1500}).publications
    assert (first.lease_id, first.group, len(first.block_ids)) == (parts[0].lease_id, 1, 64)
    it.num_computed_tokens = 1500
    rest = prefill.step({"r": 1000}).publications
    assert [(it.lease_id, it.group) for it in rest] == [(it.lease_id, it.group) for it in parts[1:]]
    assert +prefill.blocks.held == Counter(rest[1].block_ids)

    decode, it = Decode(windows=WINDOWS), request("d", 2500, dict(FROM))
    windowed, full = [0] * 154 + [1, 2, 3], list(range(1000, 1157))
    (load,) = decode.allocate(it, 1600, windowed, full).loads
    assert load.error == ""
    assert [(part.first_block, part.block_ids, part.num_blocks) for part in load.parts] == [
        (36, full[100:128], 64),
        (0, [1, 2, 3], 3),
        (0, full[128:], 29),
    ]
    leases = [kvferry.Ticket.parse(part.tickets[0]).lease_id for part in load.parts]
    assert leases == [part.lease_id for part in parts[1:]]


def test_a_failed_load_of_groups_counts_for_all_that_came_with_its_tickets():
    decode = Decode(windows=WINDOWS)
    it = request("r", 40, remote_groups())
    assert decode.allocate(it, 0, [5, 6, 8], [1, 2, 3]).loads[0].error == ""
    output = KVConnectorOutput(finished_recving={"r"}, failed_recving={"r"})
    decode.scheduler.update_connector_output(output)
    it = request("s", 40, remote_groups())
    assert "has failed" in decode.allocate(it, 0, [5, 6, 8], [1, 2, 3]).loads[0].error
