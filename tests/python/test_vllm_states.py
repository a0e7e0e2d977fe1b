"""Requests of models with recurrent states, in the connector's scheduler half."""

from collections import Counter

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

import kvferry  # noqa: E402
from kvferry.vllm.metadata import LoadPart  # noqa: E402
from kvferry.vllm.parts import LAST_STATE, STATE, WHOLE, blocks_of  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm_steps import BLOCK, Blocks, Decode, Prefill, request, window  # noqa: E402

WINDOWS = (STATE, WHOLE, STATE)
TRANSFER = {"transfer_id": "0123456789abcdef"}


def of_vllm(prompt: int, params: dict, **changes) -> Request:
    sampling = SamplingParams(
        max_tokens=20,
        prompt_logprobs=1 if changes.pop("logprobs", False) else None,
        extra_args={"kv_transfer_params": {"do_remote_decode": True} | params},
    )
    inputs = {"prompt_token_ids": list(range(prompt))} | changes
    return Request("r", inputs.pop("prompt_token_ids"), sampling, None, **inputs)


def arrive(prefill: Prefill, request: Request) -> Request:
    prefill.blocks = Blocks([31], [4, 9, 2, 7, *range(100, 300)], [32])
    prefill.scheduler.on_new_request(request)
    return request


def test_a_prompt_is_computed_up_to_its_last_token_alone():
    prefill = Prefill(windows=WINDOWS)
    it = arrive(prefill, of_vllm(40, {}))
    assert (it.num_prompt_tokens, it.num_tokens, it.max_tokens) == (39, 39, 1)
    assert it.prompt_token_ids == list(it.all_token_ids) == list(range(39))
    assert prefill.step({"r": 32}).publications == []
    it.num_computed_tokens = 32
    publications = prefill.step({"r": 7}).publications
    assert [(p.group, p.block_ids, p.num_tokens) for p in publications] == [
        (0, [31], 39),
        (1, [4, 9, 2], 39),
        (2, [32], 39),
    ]
    it.status = RequestStatus.FINISHED_LENGTH_CAPPED
    delay, params = prefill.scheduler.request_finished(it)
    assert delay
    tickets = [kvferry.Ticket.parse(text) for (text,) in params["kvferry_group_tickets"]]
    assert [(it.num_pages, it.num_tokens) for it in tickets] == [(1, 39), (3, 39), (1, 39)]


def test_all_that_is_published_is_held_until_it_is_taken_back():
    """vLLM may zero the blocks of a preempted request before the workers take its leases back, if
    it gives them to another one in the same step."""
    prefill = Prefill(windows=WINDOWS)
    it = arrive(prefill, of_vllm(1500, dict(TRANSFER)))
    (part,) = prefill.step({"r": 1024}).publications
    assert +prefill.blocks.held == Counter(part.block_ids)
    assert prefill.step({}, {"r"}).preempted == ["r"]
    assert not +prefill.blocks.held
    published = prefill.step({"r": 1499}).publications
    assert +prefill.blocks.held == Counter(block for it in published for block in it.block_ids)
    it.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert prefill.scheduler.request_finished(it)[0]
    assert +prefill.blocks.held
    prefill.report(finished_sending={"r"})
    assert not +prefill.blocks.held


def test_a_prompt_of_embeddings_is_shortened_too():
    embeds = torch.arange(40 * 4).view(40, 4)
    it = arrive(
        Prefill(windows=WINDOWS), of_vllm(40, {}, prompt_token_ids=None, prompt_embeds=embeds)
    )
    assert (it.num_prompt_tokens, it.num_tokens) == (39, 39)
    assert torch.equal(it.prompt_embeds, embeds[:39])


@pytest.mark.parametrize("prompt, logprobs", [(1, False), (40, True)])
def test_what_cannot_be_handed_over_is_left_as_it_is(prompt: int, logprobs: bool):
    prefill = Prefill(windows=WINDOWS)
    it = arrive(prefill, of_vllm(prompt, dict(TRANSFER), logprobs=logprobs))
    assert (it.num_prompt_tokens, it.num_tokens, it.max_tokens) == (prompt, prompt, 20)
    assert prefill.scheduler.may_begin(it)
    assert prefill.step({"r": prompt}).publications == []
    it.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert prefill.scheduler.request_finished(it) == (False, None)


def test_models_without_states_are_computed_whole():
    it = of_vllm(40, {})
    Prefill().scheduler.on_new_request(it)
    assert (it.num_prompt_tokens, it.max_tokens) == (40, 20)


def remote(**changes) -> dict:
    groups = [["s"], ["t"], ["u"]]
    return {"do_remote_prefill": True, "kvferry_group_tickets": groups} | changes


# 65 tokens: with the last one a block more, which nobody hands over.
@pytest.mark.parametrize("prompt, blocks", [(40, 3), (48, 3), (65, 4), (2, 1)])
def test_all_but_the_last_token_is_loaded(prompt: int, blocks: int):
    decode, it = Decode(windows=WINDOWS), request("r", prompt, remote())
    of_attention = [1, 2, 3, 4, 5]
    (load,) = decode.allocate(it, 0, [8], of_attention, [9]).loads
    assert load.parts == [
        LoadPart(["s"], 0, [8], 1),
        LoadPart(["t"], 0, of_attention[:blocks], blocks),
        LoadPart(["u"], 0, [9], 1),
    ]
    assert (load.num_tokens, load.blocks_skipped, load.error) == (prompt - 1, 0, "")


def test_a_window_beside_states_is_that_of_the_token_that_is_not_handed_over():
    """It looks at 32, itself among them: of a prompt of 48 at none of the first block."""
    assert blocks_of((STATE, window(2 * BLOCK)), 1, 47, BLOCK) == range(1, 3)
    assert blocks_of((STATE, window(2 * BLOCK)), 1, 46, BLOCK) == range(3)


def test_a_state_among_cached_ones_is_in_the_block_of_the_last_token():
    windows = (LAST_STATE, WHOLE)
    prefill = Prefill(windows=windows)
    prefill.blocks = Blocks([0, 0, 31], [4, 9, 2])
    prefill.scheduler.on_new_request(of_vllm(40, {}))
    publications = prefill.step({"r": 39}).publications
    assert [(p.group, p.block_ids) for p in publications] == [(0, [31]), (1, [4, 9, 2])]
    groups = {"kvferry_group_tickets": [["s"], ["t"]]}
    decode, it = Decode(windows=windows), request("r", 40, remote(**groups))
    (load,) = decode.allocate(it, 16, [0, 0, 8], [1, 2, 3]).loads
    assert load.parts == [LoadPart(["s"], 0, [8], 1), LoadPart(["t"], 1, [2, 3], 3)]
    # vLLM has put it elsewhere: it must not be taken for one.
    (load,) = decode.allocate(
        request("u", 40, remote(kvferry_group_tickets=[["v"], ["w"]])), 0, [8, 0, 0], [1, 2, 3]
    ).loads
    assert load.error


def test_a_prompt_of_one_token_is_not_loaded():
    decode, it = Decode(windows=WINDOWS), request("r", 1, {"do_remote_prefill": True})
    meta = decode.allocate(it, 0, [8], [1], [9])
    assert meta.loads == []


def test_both_engines_name_the_parts_of_a_prompt_alike():
    prefill, decode = Prefill(windows=WINDOWS), Decode(windows=WINDOWS)
    it = arrive(prefill, of_vllm(1500, dict(TRANSFER)))
    prefill.step({"r": 1024})
    it.num_computed_tokens = 1024
    published = prefill.scheduler._watched["r"].published
    assert [(p.group, len(p.block_ids)) for p in published] == [(1, 64)]
    prefill.step({"r": 475})
    assert [(p.group, len(p.block_ids)) for p in published] == [(1, 64), (0, 1), (1, 30), (2, 1)]
    where = {"remote_host": "::1", "remote_port": 5000}
    fetched = request("d", 1500, {"do_remote_prefill": True} | TRANSFER | where)
    of_attention = list(range(1, 95))
    (load,) = decode.allocate(fetched, 0, [198], of_attention, [199]).loads
    tickets = [kvferry.Ticket.parse(part.tickets[0]) for part in load.parts]
    assert [(it.lease_id, it.num_pages, it.num_tokens) for it in tickets] == [
        (p.lease_id, len(p.block_ids), 1499) for p in published
    ]
    assert [part.block_ids for part in load.parts] == [
        of_attention[:64],
        [198],
        of_attention[64:],
        [199],
    ]


def test_blocks_of_another_size_are_no_use():
    decode = Decode(windows=WINDOWS)
    it = request("r", 40, remote(kvferry_block_size=2 * BLOCK))
    (load,) = decode.allocate(it, 0, [8], [1, 2, 3], [9]).loads
    assert "Give both the same" in load.error
