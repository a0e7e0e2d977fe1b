"""What a request says of where its blocks are: taken as it is meant, or a load that fails with the
reason."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry  # noqa: E402
from kvferry.vllm.metadata import LoadPart, parse_tickets  # noqa: E402
from kvferry.vllm.parts import WHOLE  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402
from vllm_steps import BLOCK, FROM, TRANSFER, Decode, Prefill, remote, request, window  # noqa: E402


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


DEEP: list = []
for _ in range(5000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "change",
    [
        {key: value}
        for key in (*FROM, *remote(), "kvferry_block_size")
        for value in (DEEP, 10**5000)
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_has_no_text_makes_a_load_that_fails(change: dict):
    """Lists in lists in lists, and numbers of thousands of digits."""
    for params in (remote(), FROM):
        decode, it = Decode(), request("r", 40, params | change | {"do_remote_prefill": True})
        decode.scheduler.on_new_request(it)
        assert decode.scheduler.get_num_new_matched_tokens(it, 0) == (40, True)
        decode.step()
        (load,) = decode.allocate(it, 0, [5, 6, 8]).loads
        assert not load.error or load.block_ids == [5, 6, 8]
        ended = request("s", 40, params | change | {"do_remote_prefill": True})
        decode.scheduler.request_finished(ended)


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
