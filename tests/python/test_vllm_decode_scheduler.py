"""What the scheduler half of a decode engine has loaded, kept and let go of, without an engine."""

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
from kvferry.vllm.metadata import LoadPart, StepMetadata  # noqa: E402
from kvferry.vllm.parts import cut  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402
from vllm_steps import (  # noqa: E402
    BLOCK,
    FROM,
    LEASE_MS,
    TRANSFER,
    Blocks,
    Decode,
    remote,
    request,
)


def test_blocks_of_a_cached_prefix_are_not_loaded():
    decode, it = Decode(), request("r", 40, remote())
    (load,) = decode.allocate(it, 32, [5, 6, 8]).loads
    assert load.parts == [LoadPart(["t"], 2, [8], 3)]
    assert (load.blocks_skipped, load.num_tokens, load.error) == (2, 40, "")
    assert decode.scheduler.get_num_new_matched_tokens(it, 0) == (0, False)  # Once.


def test_prompt_that_is_all_here_is_dismissed():
    decode, it = Decode(), request("r", 32, remote())
    meta = decode.allocate(it, 32, [5, 6])
    assert meta.loads == [] and meta.dismissed == [["t"]]


def test_what_waits_for_its_turn_is_kept(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    decode = Decode()
    first = request("r", 32, remote(kvferry_tickets=["t", "u"]))
    decode.scheduler.on_new_request(first)
    decode.scheduler.on_new_request(request("local", 32, {}))
    decode.scheduler.on_new_request(request("wrong", 32, remote(kvferry_tickets="v")))
    now += 5
    later = [request(name, 32, remote(kvferry_tickets=[name])) for name in ("a", "b")]
    for it in later:
        decode.scheduler.on_new_request(it)
    now += 4
    assert decode.step().kept == []
    now += 1  # A third of LEASE_MS.
    assert decode.step().kept == [["t", "u"]]
    now += 5
    assert decode.step().kept == [["a"], ["b"]]
    assert decode.allocate(first, 0, [5, 6]).kept == []
    decode.scheduler.request_finished(later[0])
    now += LEASE_MS / 1e3
    assert decode.step().kept == [["b"]]
    decode.scheduler.request_finished(later[1])
    now += LEASE_MS / 1e3
    assert decode.step().kept == []


def test_a_step_keeps_so_many_and_the_next_one_the_others(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    decode = Decode()
    names = [f"r{i}" for i in range(150)]
    for name in names:
        decode.scheduler.on_new_request(request(name, 32, remote(kvferry_tickets=[name])))
    now += LEASE_MS / 3e3
    kept = [decode.step().kept for _ in range(4)]
    assert [len(it) for it in kept] == [64, 64, 22, 0]
    assert [tickets[0] for it in kept for tickets in it] == names


def test_what_waits_of_an_announced_prompt_is_kept(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    decode, it = Decode(tp_size=2), request("r", 2000, dict(FROM))
    decode.scheduler.on_new_request(it)
    now += LEASE_MS / 3e3
    kept = [kvferry.Ticket.parse(text) for tickets in decode.step().kept for text in tickets]
    parts = cut(TRANSFER["transfer_id"], it.prompt_token_ids, BLOCK)
    assert len(parts) == 2
    assert [(it.address, it.lease_id) for it in kept] == [
        (f"tcp://[::1]:{port}", part.lease_id) for part in parts for port in (5000, 5001)
    ]


def test_request_that_ends_before_it_got_blocks_is_dismissed():
    decode, it = Decode(), request("r", 32, remote())
    decode.scheduler.request_finished(it)
    decode.scheduler.request_finished(it)
    assert decode.step().dismissed == [["t"]]  # Once.


def test_tickets_that_were_let_go_of_in_the_queue_have_served():
    """A router's retry: who comes with them again computes the prompt."""
    decode, first, second = Decode(), request("a", 32, remote()), request("b", 32, remote())
    for it in (first, second):
        decode.scheduler.on_new_request(it)
    decode.scheduler.request_finished(first)
    assert decode.step().dismissed == [["t"]]
    assert decode.scheduler.get_num_new_matched_tokens(second, 0) == (0, False)
    assert decode.allocate(second, 32, [5, 6]) == StepMetadata()  # None of its tokens come.


def test_tickets_that_are_none_have_not_served():
    """A router's fault does not hide the same one of other prompts."""
    decode = Decode()
    for tickets in ({"kvferry_tickets": []}, {}):
        params = remote() | tickets if tickets else {"do_remote_prefill": True}
        decode.scheduler.request_finished(request("a", 32, dict(params)))
        decode.allocate(request("b", 32, dict(params)), 32, [5, 6])
        later = request("c", 32, dict(params))
        assert decode.scheduler.get_num_new_matched_tokens(later, 0) == (32, True)
        (load,) = decode.allocate(later, 0, [5, 6]).loads
        assert load.error


def test_load_of_an_aborted_request_is_cancelled():
    decode, it = Decode(), request("r", 32, remote())
    decode.allocate(it, 0, [5, 6])
    decode.scheduler.request_finished(it)
    assert decode.step().cancelled == ["r"]


def test_load_that_was_reported_is_not_cancelled():
    decode, it = Decode(), request("r", 32, remote())
    decode.allocate(it, 0, [5, 6])
    decode.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    decode.scheduler.request_finished(it)
    assert decode.step().cancelled == []


@pytest.mark.parametrize("announced", [False, True])
def test_tickets_serve_once_and_who_comes_with_the_same_finds_the_blocks_here(announced: bool):
    params = FROM if announced else remote()
    decode = Decode()
    first, second, later = (request(name, 40, dict(params)) for name in "abc")
    ask = decode.scheduler.get_num_new_matched_tokens
    assert len(decode.allocate(first, 0, [5, 6, 8]).loads) == 1
    assert ask(second, 0) == (None, False)  # It is on its way.
    decode.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"a"}))
    assert decode.allocate(second, 32, [5, 6, 9]).loads == []
    assert decode.allocate(later, 0, [10, 11, 12]).loads == []  # They are not here any more.
    # Another prompt of the same batch has leases of its own.
    other = request("d", 48, dict(FROM if announced else remote(kvferry_tickets=["u"])))
    assert len(decode.allocate(other, 0, [1, 2, 3]).loads) == 1


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_who_waits_for_a_load_that_fails_fails_too(policy: str):
    decode = Decode()
    first, second, third = (request(name, 40, remote()) for name in "abc")
    decode.allocate(first, 0, [5, 6, 8])
    assert decode.scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
    if policy == "fail":  # vLLM ends it first.
        first.status = RequestStatus.FINISHED_ERROR
        decode.scheduler.request_finished(first)
    decode.scheduler.update_connector_output(
        KVConnectorOutput(finished_recving={"a"}, invalid_block_ids={6})
    )
    (load,) = decode.allocate(second, 0, [1, 2, 3]).loads
    assert "has failed; prefill the request again" in load.error and load.block_ids == [1, 2, 3]
    decode.scheduler.request_finished(third)
    assert decode.step().dismissed == [["t"]]  # Nobody has them.


@pytest.mark.parametrize("announced", [False, True])
def test_who_waits_for_a_load_leaves_its_tickets_alone_when_it_hangs_up(announced: bool):
    decode = Decode()
    params = FROM if announced else remote()
    first, second, third = (request(name, 40, dict(params)) for name in "abc")
    decode.allocate(first, 0, [5, 6, 8])
    assert decode.scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
    decode.scheduler.request_finished(second)
    assert decode.step().dismissed == []
    decode.scheduler.request_finished(third)  # Nobody has asked what it needs.
    assert decode.step().dismissed == []
    # One that reads no prefix cache is given blocks without waiting.
    fourth = request("d", 40, dict(params))
    decode.scheduler.update_state_after_alloc(fourth, Blocks([1, 2, 3]), 0)
    assert decode.step().dismissed == []
    assert decode.scheduler._transfers == {} and decode.scheduler._fetches == {}


@pytest.mark.parametrize("announced", [False, True])
def test_who_waits_for_a_load_that_is_aborted_computes_the_prompt(announced: bool):
    decode = Decode()
    params = FROM if announced else remote()
    first, second = (request(name, 40, dict(params)) for name in "ab")
    decode.allocate(first, 0, [5, 6, 8])
    first.status = RequestStatus.FINISHED_ABORTED
    decode.scheduler.request_finished(first)
    ask = decode.scheduler.get_num_new_matched_tokens
    assert ask(second, 0) == (None, False)
    assert decode.step().cancelled == ["a"]
    decode.scheduler.update_connector_output(
        KVConnectorOutput(finished_recving={"a"}, invalid_block_ids={5, 6, 8})
    )
    meta = decode.allocate(second, 0, [1, 2, 3])
    assert (meta.loads, meta.dismissed) == ([], [])


def test_another_adapters_prompt_of_the_same_batch_is_no_copy():
    decode = Decode()
    first, second = (request(name, 40, dict(FROM)) for name in "ab")
    second.lora_request = SimpleNamespace(lora_name="a", lora_path="/a")
    decode.allocate(first, 0, [5, 6, 8])
    assert decode.scheduler.get_num_new_matched_tokens(second, 0) == (40, True)


def test_takers_of_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvferry.vllm.decode_scheduler._MAX_TAKERS", 2)
    decode = Decode()
    for name in "abc":
        decode.allocate(request(name, 32, remote(kvferry_tickets=[name])), 0, [5, 6])
    assert list(decode.scheduler._takers.values()) == ["b", "c"]


def test_a_load_that_cannot_work_is_no_taker():
    decode = Decode()
    for name in "ab":
        it = request(name, 32, {"do_remote_prefill": True})
        assert decode.allocate(it, 0, [5, 6]).loads[0].error


def test_requests_without_parameters_are_left_alone():
    decode, it = Decode(), request("r", 32)
    assert decode.allocate(it, 0, [5, 6]) == StepMetadata()
    decode.scheduler.request_finished(it)
    assert decode.step() == StepMetadata()


def test_announced_parts_are_asked_for_behind_the_cached_prefix():
    decode, it = Decode(tp_size=2), request("r", 2500, dict(FROM))
    parts = cut(TRANSFER["transfer_id"], range(2500), BLOCK)
    blocks = list(range(1000, 1157))
    meta = decode.allocate(it, 1600, blocks)
    (load,) = meta.loads
    assert [(part.first_block, part.block_ids) for part in load.parts] == [
        (36, blocks[100:128]),
        (0, blocks[128:157]),
    ]
    assert (load.blocks_skipped, load.num_tokens, load.error) == (100, 2500, "")
    tickets = [kvferry.Ticket.parse(text) for part in load.parts for text in part.tickets]
    assert [(it.address, it.epoch, it.lease_id, it.num_pages) for it in tickets] == [
        (f"tcp://[::1]:{5000 + rank}", 0, part.lease_id, part.end_block - part.first_block)
        for part in parts[1:]
        for rank in range(2)
    ]
    (dismissed,) = meta.dismissed
    assert [kvferry.Ticket.parse(text).lease_id for text in dismissed] == [parts[0].lease_id] * 2


def test_announced_parts_are_dismissed_when_nothing_is_needed():
    decode, it = Decode(), request("r", 2048, dict(FROM))
    assert len(decode.allocate(it, 2048, list(range(128))).dismissed) == 2
    decode, it = Decode(), request("r", 2048, dict(FROM))
    decode.scheduler.request_finished(it)
    assert len(decode.step().dismissed) == 2


class Unread(list):
    def __iter__(self):
        raise AssertionError("they are looked at")


def test_blocks_of_loads_are_looked_at_when_some_have_failed_and_not_in_each_step():
    decode, it = Decode(), request("r", 40, remote())
    decode.allocate(it, 0, [5, 6, 8])
    loading = decode.scheduler._loading
    loading["r"] = loading["r"]._replace(block_ids=Unread([5, 6, 8]))
    decode.scheduler.update_connector_output(KVConnectorOutput(finished_sending={"s"}))
    loading["r"] = loading["r"]._replace(block_ids=[5, 6, 8])
    decode.scheduler.update_connector_output(KVConnectorOutput(invalid_block_ids={8}))
    assert list(decode.scheduler._takers.values()) == [""]
