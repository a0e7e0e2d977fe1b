"""The connector's decisions, without an engine: what its scheduler half hands to its worker
half."""

import time
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
from kvferry.vllm import KVFerryConnector  # noqa: E402
from kvferry.vllm.metadata import LoadPart, StepMetadata, parse_tickets  # noqa: E402
from kvferry.vllm.parts import WHOLE, cut  # noqa: E402
from kvferry.vllm.telemetry import FetchRecord, Options, TransferStats  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402
from vllm_steps import (  # noqa: E402
    BLOCK,
    FROM,
    LEASE_MS,
    TRANSFER,
    Blocks,
    Decode,
    Prefill,
    remote,
    request,
    window,
)


def test_prompt_is_published_in_the_step_that_computes_its_last_token():
    prefill = Prefill()
    it = prefill.arrive(40)
    assert prefill.step({"r": 32}).publications == []
    it.num_computed_tokens = 32
    (publication,) = prefill.step({"r": 8}).publications
    assert publication.block_ids == [4, 9, 2] and publication.num_tokens == 40
    assert publication.lease_id != 0
    it.num_computed_tokens = 40
    assert prefill.step({"r": 1}).publications == []  # Once.


def test_only_requests_for_remote_decode_are_published():
    prefill = Prefill()
    prefill.arrive(10, params={})
    assert prefill.step({"r": 10}) == StepMetadata()
    assert prefill.scheduler.request_finished(request("r", 10)) == (False, None)


def test_answer_carries_a_ticket_for_each_rank():
    prefill = Prefill(tp_size=2)
    it = prefill.arrive(20)
    (publication,) = prefill.step({"r": 20}).publications
    it.status = RequestStatus.FINISHED_LENGTH_CAPPED
    delay, params = prefill.scheduler.request_finished(it)
    assert delay
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
    assert params["remote_block_ids"] == [[4, 9]] and params["tp_size"] == 2
    assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", 5000)
    assert params["kvferry_block_size"] == BLOCK
    tickets = [kvferry.Ticket.parse(text) for text in params["kvferry_tickets"]]
    assert [(it.address, it.epoch) for it in tickets] == [
        ("tcp://127.0.0.1:5000", 7),
        ("tcp://127.0.0.1:5001", 8),
    ]
    assert {(it.lease_id, it.num_pages, it.num_tokens) for it in tickets} == {
        (publication.lease_id, 2, 20)
    }


def test_preempted_prompt_is_published_again():
    prefill = Prefill()
    it = prefill.arrive(10)
    (first,) = prefill.step({"r": 10}).publications
    assert prefill.step({}, {"r"}).preempted == ["r"]
    assert prefill.step({}, {"r"}) == StepMetadata()  # There is nothing left to take back.
    assert prefill.step({"r": 10}).publications == [first]
    it.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert prefill.scheduler.request_finished(it)[0]


@pytest.mark.parametrize("published", [False, True])
def test_aborted_prompt(published: bool):
    prefill = Prefill()
    it = prefill.arrive(40)
    prefill.step({"r": 40 if published else 16})
    it.status = RequestStatus.FINISHED_ABORTED
    assert prefill.scheduler.request_finished(it) == (published, None)
    assert prefill.step({}).withdrawn == (["r"] if published else [])
    assert prefill.step({}).withdrawn == []


@pytest.mark.parametrize(
    "status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_LENGTH_CAPPED]
)
def test_a_prompt_that_is_preempted_and_ends_before_the_next_step(status: RequestStatus):
    """As a reset of the prefix cache preempts: between steps."""
    prefill = Prefill()
    it = prefill.arrive(40)
    prefill.step({"r": 40})
    it.status = status
    assert prefill.scheduler.request_finished(it)[0]
    # Its blocks are others' from this step on, and the engine waits for the report all the same.
    meta = prefill.step({}, {"r"})
    assert (meta.preempted, meta.preempted_ended, meta.withdrawn) == ([], ["r"], [])
    assert prefill.step({}) == StepMetadata()
    prefill.report(finished_sending={"r"})
    assert prefill.step({}, {"r"}) == StepMetadata()


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
    assert "has failed" in load.error and load.block_ids == [1, 2, 3]
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
    monkeypatch.setattr("kvferry.vllm.scheduler._MAX_TAKERS", 2)
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


@pytest.mark.parametrize(
    "params, word",
    [
        ({}, "kvferry_tickets"),
        ({"kvferry_tickets": "t"}, "kvferry_tickets"),
        ({"kvferry_tickets": [None]}, "kvferry_tickets"),
        ({"kvferry_tickets": []}, "kvferry_tickets"),
        ({"kvferry_tickets": ["t"] * 129}, "kvferry_tickets"),
    ],
)
def test_wrong_parameters_become_a_load_that_fails(params: dict, word: str):
    decode, it = Decode(), request("r", 32, {"do_remote_prefill": True} | params)
    (load,) = decode.allocate(it, 0, [5, 6]).loads
    assert word in load.error and load.block_ids == [5, 6]
    assert word in parse_tickets(params)[1]


@pytest.mark.parametrize("same_id", [{}, TRANSFER])
def test_what_is_handed_over_is_for_a_lora_adapter(same_id):
    prefill, it = Prefill(), request("r", 40, {"do_remote_decode": True} | same_id)
    it.lora_request = SimpleNamespace(lora_name="a", lora_path="/prefill/a")
    prefill.scheduler.on_new_request(it)
    (published,) = prefill.step({"r": 40}).publications
    it.status = RequestStatus.FINISHED_LENGTH_CAPPED
    _, tickets = prefill.scheduler.request_finished(it)

    def asked_for(lora: SimpleNamespace | None) -> bool:
        mine = request("s", 40, dict(tickets or FROM))
        mine.lora_request = lora
        load = Decode().allocate(mine, 0, [5, 6, 8]).loads[0]
        assert not load.error or "another LoRA adapter" in load.error
        if load.error:
            return False
        (text,) = load.parts[0].tickets
        return kvferry.Ticket.parse(text).lease_id == published.lease_id

    assert asked_for(SimpleNamespace(lora_name="a", lora_path="/decode/a"))
    assert not asked_for(SimpleNamespace(lora_name="b", lora_path="/prefill/a"))
    assert not asked_for(None)


@pytest.mark.parametrize("windows", [(WHOLE,), (WHOLE, window(20))])
def test_tickets_are_for_the_tokens_of_their_prompt(windows):
    prefill = Prefill(windows=windows)
    it = prefill.arrive(40)
    prefill.step({"r": 40})
    it.status = RequestStatus.FINISHED_LENGTH_CAPPED
    _, params = prefill.scheduler.request_finished(it)
    blocks = [[5, 6, 8]] * len(windows)

    def load_of(tokens: list[int], **changes):
        decode = Decode(windows=windows)
        mine = request("s", 40, params | changes)
        mine.prompt_token_ids = tokens
        return decode.allocate(mine, 0, *blocks).loads[0]

    same = list(range(40))
    decode, turned_down = Decode(windows=windows), request("t", 1, dict(params))
    decode.scheduler.request_finished(turned_down)  # As vLLM does, with a prompt of one token.
    tickets = params.get("kvferry_group_tickets") or [params["kvferry_tickets"]]
    assert decode.step().dismissed == tickets
    good = load_of(same)
    assert good.error == "" and len(good.parts) == len(windows)
    other = load_of([*same[:-1], 9])
    assert "a prompt of other tokens" in other.error
    # Whoever they belong to may come for them.
    assert other.parts and not any(part.tickets for part in other.parts)
    assert load_of([*same[:-1], 9], kvferry_prompt="").error == ""  # Of a prefill engine of before.
    text = {"kvferry_tickets": ["\ud800"], "kvferry_group_tickets": [["\ud800"]] * len(windows)}
    assert load_of(same, **{key: it for key, it in text.items() if key in params}).error == ""
    for wrong in ("0123456789abcdef", "ä", "x" * 129, 17, None, ["x"]):
        error = load_of(same, kvferry_prompt=wrong).error
        assert "a prompt of other tokens" in error or "another kvferry_prompt" in error


@pytest.mark.parametrize("same_id", [{}, TRANSFER])
def test_prompts_of_embeddings_have_tickets_too(same_id):
    prefill = Prefill()
    it = request("r", 20, {"do_remote_decode": True} | same_id)
    it.prompt_token_ids = None
    prefill.scheduler.on_new_request(it)
    prefill.step({"r": 20})
    it.status = RequestStatus.FINISHED_LENGTH_CAPPED
    _, params = prefill.scheduler.request_finished(it)
    mine = request("s", 20, dict(params))
    mine.prompt_token_ids = None
    assert Decode().allocate(mine, 0, [5, 6]).loads[0].error == ""


def test_a_prompt_of_embeddings_cannot_be_asked_for_by_a_transfer_id():
    it = request("s", 20, dict(FROM))
    it.prompt_token_ids = None
    (load,) = Decode().allocate(it, 0, [5, 6]).loads
    assert "embeddings cannot have a transfer_id" in load.error and load.block_ids == [5, 6]


def test_tickets_come_before_a_transfer_id():
    """As of a prefill engine that has handed over by tickets what came with a wrong one."""
    it = request("r", 32, FROM | {"transfer_id": "short", "kvferry_tickets": ["t"]})
    (load,) = Decode().allocate(it, 0, [5, 6]).loads
    assert (load.error, load.parts) == ("", [LoadPart(["t"], 0, [5, 6], 2)])


def test_tickets_count_blocks_of_the_prefill_engine():
    decode, it = Decode(), request("r", 70, remote(kvferry_block_size=64))
    (load,) = decode.allocate(it, 32, [5, 6, 8, 1, 2]).loads
    assert load.parts == [LoadPart(["t"], 2, [8, 1, 2], 2)] and load.error == ""
    same = request("s", 70, remote(kvferry_tickets=["u"], kvferry_block_size=BLOCK))
    (load,) = decode.allocate(same, 0, [5, 6, 8, 1, 2]).loads
    assert load.parts == [LoadPart(["u"], 0, [5, 6, 8, 1, 2], 5)]


@pytest.mark.parametrize("size", [0, -16, "16", 16.0, True, None, (1 << 20) + 1])
def test_a_block_size_that_cannot_be_makes_a_load_that_fails(size):
    decode, it = Decode(), request("r", 32, remote(kvferry_block_size=size))
    (load,) = decode.allocate(it, 0, [5, 6]).loads
    assert f"kvferry_block_size of {size}" in load.error and load.block_ids == [5, 6]


def test_an_announced_prompt_is_published_part_by_part():
    prefill = Prefill()
    it = prefill.arrive(2500, {"do_remote_decode": True} | TRANSFER)
    parts = cut(TRANSFER["transfer_id"], range(2500), BLOCK)
    unasked, published = prefill.step({}).unasked, []
    for scheduled in (1000, 1100, 400):
        published.append(prefill.step({"r": scheduled}).publications)
        it.num_computed_tokens += scheduled
    # Whoever fetches asks for all parts at once, and the last one is there the longest.
    assert unasked == [parts[2].lease_id]
    assert [[new.lease_id for new in step] for step in published] == [
        [],
        [parts[0].lease_id, parts[1].lease_id],
        [parts[2].lease_id],
    ]
    blocks = [4, 9, 2, 7, *range(100, 253)]
    assert [new.block_ids for step in published for new in step] == [
        blocks[:64],
        blocks[64:128],
        blocks[128:157],
    ]
    assert {new.num_tokens for step in published for new in step} == {2500}
    it.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert prefill.scheduler.request_finished(it) == (True, None)
    prefill.report(finished_sending={"r"})
    assert prefill.step({}) == StepMetadata()


@pytest.mark.parametrize("drafts, again", [(0, 0), (1, 0), (2, 1), (4, 3)])
def test_a_part_whose_last_tokens_are_drafted_from_again_is_not_published_before(
    drafts: int, again: int
):
    """vLLM's draft layers write the KV of so many tokens again in the next step."""
    prefill = Prefill(drafts=drafts)
    it = prefill.arrive(2500, {"do_remote_decode": True} | TRANSFER)
    parts = [part.lease_id for part in cut(TRANSFER["transfer_id"], range(2500), BLOCK)]
    published = []
    for scheduled in (1024, max(0, again - 1), min(again, 1), 1024, 452 - again):
        published.append([new.lease_id for new in prefill.step({"r": scheduled}).publications])
        it.num_computed_tokens += scheduled
    first = [[], [], parts[:1]] if again > 0 else [parts[:1], [], []]
    assert published == [*first, parts[1:2], parts[2:]]


def test_what_an_announced_prompt_will_not_publish_is_given_up():
    prefill = Prefill()
    it = prefill.arrive(2500, {"do_remote_decode": True} | TRANSFER)
    parts = cut(TRANSFER["transfer_id"], range(2500), BLOCK)
    prefill.step({"r": 1024})
    it.status = RequestStatus.FINISHED_ABORTED
    assert prefill.scheduler.request_finished(it) == (True, None)
    meta = prefill.step({})
    assert meta.withdrawn == ["r"]
    assert meta.given_up == [part.lease_id for part in parts[1:]]
    prefill.report(finished_sending={"r"})
    assert prefill.step({}) == StepMetadata()


def test_an_announced_prompt_that_was_never_computed_is_given_up():
    prefill = Prefill()
    it = prefill.arrive(40, {"do_remote_decode": True} | TRANSFER)
    it.status = RequestStatus.FINISHED_ABORTED
    assert prefill.scheduler.request_finished(it) == (False, None)
    assert len(prefill.step({}).given_up) == 1


def test_preemption_takes_back_announced_parts_and_publishes_them_again():
    prefill = Prefill()
    it = prefill.arrive(2500, {"do_remote_decode": True} | TRANSFER)
    parts = [part.lease_id for part in cut(TRANSFER["transfer_id"], range(2500), BLOCK)]
    prefill.step({"r": 1024})
    assert prefill.step({}, {"r"}).preempted == ["r"]
    # What vLLM's prefix cache still had needs no computing.
    it.num_computed_tokens = 512
    assert [new.lease_id for new in prefill.step({"r": 600}).publications] == parts[:1]
    it.num_computed_tokens = 1112
    assert [new.lease_id for new in prefill.step({"r": 1388}).publications] == parts[1:]
    it.status = RequestStatus.FINISHED_STOPPED
    assert prefill.scheduler.request_finished(it) == (True, None)
    assert prefill.step({}).given_up == []


def test_a_preempted_request_that_is_aborted_gives_up_all_its_parts():
    prefill = Prefill()
    it = prefill.arrive(2500, {"do_remote_decode": True} | TRANSFER)
    parts = [part.lease_id for part in cut(TRANSFER["transfer_id"], range(2500), BLOCK)]
    prefill.step({"r": 1024})
    prefill.step({}, {"r"})
    it.status = RequestStatus.FINISHED_ABORTED
    assert prefill.scheduler.request_finished(it) == (False, None)
    meta = prefill.step({})
    assert (meta.withdrawn, meta.given_up) == ([], parts)


@pytest.mark.parametrize("transfer_id", ["short", "x" * 129, "ü" * 20, 17, ["0" * 16]])
def test_a_wrong_transfer_id_makes_tickets_or_a_load_that_fails(transfer_id):
    prefill = Prefill()
    it = prefill.arrive(40, {"do_remote_decode": True, "transfer_id": transfer_id})
    prefill.step({"r": 40})
    it.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert "kvferry_tickets" in prefill.scheduler.request_finished(it)[1]
    decode, it = Decode(), request("r", 40, FROM | {"transfer_id": transfer_id})
    (load,) = decode.allocate(it, 16, [5, 6, 8]).loads
    assert "transfer_id has to be" in load.error and load.block_ids == [6, 8]


@pytest.mark.parametrize(
    "change, word",
    [
        ({"remote_host": None}, "remote_host"),
        ({"remote_port": "5000"}, "remote_port"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": 65536}, "remote_port"),
        ({"remote_host": "a;tcp://b"}, "remote_host"),
        ({"remote_host": "\ud800"}, "remote_host"),
        ({"tp_size": 0}, "tp_size of 0"),
        ({"tp_size": "2"}, "tp_size of 2"),
        ({"tp_size": True}, "tp_size of True"),
        ({"tp_size": 1025}, "tp_size of 1025"),
    ],
)
def test_addresses_that_cannot_be_make_a_load_that_fails(change, word):
    decode, it = Decode(), request("r", 40, FROM | change)
    (load,) = decode.allocate(it, 0, [5, 6, 8]).loads
    assert word in load.error and load.block_ids == [5, 6, 8]


def test_the_prefill_engine_may_have_other_ranks():
    decode, it = Decode(tp_size=2), request("r", 40, FROM | {"tp_size": 4})
    (load,) = decode.allocate(it, 0, [5, 6, 8]).loads
    (part,) = load.parts
    assert [kvferry.Ticket.parse(text).address for text in part.tickets] == [
        f"tcp://[::1]:{5000 + rank}" for rank in range(4)
    ]
    it = request("s", 32, {"do_remote_prefill": True, "kvferry_tickets": ["t", "u", "v", "w"]})
    (load,) = decode.allocate(it, 0, [5, 6]).loads
    assert load.error == "" and load.parts[0].tickets == ["t", "u", "v", "w"]


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


def test_options_name_the_right_keys():
    options = Options.parse(
        {"trace_path": "/tmp/trace", "lease_ms": 1234, "listen_port": 6000, "data_port": 7000}
    )
    assert options.trace_path == "/tmp/trace"
    assert options.config(0).lease_ms == 1234
    assert [options.config(rank).listen_port for rank in range(3)] == [6000, 6001, 6002]
    assert [options.config(rank).data_port for rank in range(3)] == [7000, 7001, 7002]
    assert Options.parse({}).config(2).listen_port == 0
    assert Options.parse({}).share_kv_cache
    assert not Options.parse({"share_kv_cache": False}).share_kv_cache
    for wrong in (
        {"lease": 1},
        {"lease_ms": "soon"},
        {"lease_ms": -1},
        {"trace_path": 1},
        {"share_kv_cache": "no"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Options.parse(wrong)
    with pytest.raises(ValueError, match="mode, namespace, share_kv_cache, store and"):
        Options.parse({"lease": 1})


def test_wrong_options_are_told_where_vllm_is_configured():
    """With CUDA graphs, before the model is loaded."""
    assert not KVFerryConnector.requires_piecewise_for_cudagraph({"lease_ms": 1234})
    with pytest.raises(ValueError, match="unknown key 'lease'"):
        KVFerryConnector.requires_piecewise_for_cudagraph({"lease": 1})


def test_options_of_store_mode():
    assert Options.parse({}).store is None
    assert Options.parse({"mode": "store"}).store.config["backend"] == "host"
    redis = Options.parse({"mode": "store", "store": {"backend": "redis", "port": 1}}).store
    assert redis.config["port"] == 1 and not redis.embedded
    for wrong, words in (
        ({"mode": "push"}, "mode is 'push'; it has to be one of pull, store"),
        ({"store": {"backend": "host"}}, "store is of no use"),
        ({"namespace": "a"}, "namespace is of no use"),
        ({"mode": "store", "namespace": 1}, "namespace is 1"),
        ({"mode": "store", "store": "host"}, "one of host, rocksdb, tiered, remote, redis"),
        ({"mode": "store", "store": {"backend": "moon"}}, "one of host"),
    ):
        with pytest.raises(ValueError, match=words):
            Options.parse(wrong)


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


def test_stats_add_up():
    stats = TransferStats()
    assert stats.is_empty() and stats.take() is None
    stats.record(FetchRecord("a", True, "", 2, 0, 0, 3_000_000, 1.0, 2.0))
    stats.record(FetchRecord("b", False, "lost", 2, 0, 2, 0, 1.0, 2.0))
    stats.record(FetchRecord("c", False, "cancelled", 2, 0, 2, 0, 1.0, 2.0, cancelled=True))
    stats.record_expired()
    taken = stats.take()
    assert taken is not None and stats.is_empty()
    total = TransferStats().aggregate(taken).aggregate(TransferStats(dict(taken.to_dict())))
    assert total.reduce() == {
        "Fetches": 2,
        "MB fetched": 6.0,
        "Avg ms": 2.0,
        "GB/s": 1.5,
        "Failed fetches": 2,
        "Expired leases": 2,
    }
