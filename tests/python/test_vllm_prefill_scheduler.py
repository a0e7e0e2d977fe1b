"""What the scheduler half of a prefill engine has published and given up, without an engine."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
from kvferry.vllm.metadata import LoadPart, StepMetadata  # noqa: E402
from kvferry.vllm.parts import cut  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402
from vllm_steps import BLOCK, FROM, TRANSFER, Decode, Prefill, request  # noqa: E402


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
