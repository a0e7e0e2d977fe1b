"""What goes wrong is said, hurts one request only, and leaves no block behind."""

import time

import kvferry
import pytest
from demo import QUESTIONS
from engines import BLOCK_TOKENS, DECODE_BLOCKS, MODEL, Engines
from pair import REMOTE_DECODE

torch = pytest.importorskip("torch")


def _ticket(params, **changes) -> str:
    ticket = kvferry.Ticket.parse(params["kvferry_tickets"][0])
    fields = ("address", "epoch", "lease_id", "num_pages", "num_tokens")
    return str(kvferry.Ticket(**({name: getattr(ticket, name) for name in fields} | changes)))


BAD_PARAMETERS = {
    "unknown lease": lambda p: {"kvferry_tickets": [_ticket(p, lease_id=kvferry.random_id())]},
    "another process at the address": lambda p: {
        "kvferry_tickets": [_ticket(p, epoch=kvferry.random_id())]
    },
    "nobody at the address": lambda p: {
        "kvferry_tickets": [_ticket(p, address="tcp://127.0.0.1:9", epoch=1)]
    },
    "host not allowed": lambda p: {"kvferry_tickets": [_ticket(p, address="tcp://192.0.2.1:5000")]},
    "not a ticket": lambda p: {"kvferry_tickets": ["kvferry1|nonsense"]},
    "not text": lambda p: {"kvferry_tickets": [17]},
    "no tickets": lambda p: {"kvferry_tickets": None},
    "two ranks": lambda p: {"kvferry_tickets": p["kvferry_tickets"] * 2},
    "another prompt": lambda p: {
        "kvferry_tickets": [_ticket(p, num_tokens=p["remote_num_tokens"] + 1)]
    },
}


@pytest.mark.parametrize("change", BAD_PARAMETERS.values(), ids=BAD_PARAMETERS.keys())
def test_bad_parameters_fail_the_request_and_nothing_else(engines: Engines, change):
    prompt = engines.prefill.tokenize(f"Nobody will answer this at {time.monotonic_ns()}.")
    params = engines.hand_over(prompt)
    failed = engines.decode.generate(prompt, 4, params | change(params))
    assert failed.finish_reason == "error" and failed.tokens == []
    event = engines.trace("decode")[-1]
    assert not event["ok"] and event["error"] and event["blocks_missing"] == event["blocks"]
    engines.decode.reject(params)  # The lease itself is good, and is let go of.


def test_policy_recompute_computes_what_did_not_arrive(engines: Engines, reference):
    prompt = engines.prefill.tokenize(QUESTIONS[2][1])
    expected = reference(prompt, 16)
    params = engines.hand_over(prompt)
    bad = params | {"kvferry_tickets": [_ticket(params, lease_id=kvferry.random_id())]}
    answer = engines.spare.generate(prompt, 16, bad)
    assert answer.finish_reason == expected.finish_reason
    assert answer.tokens == expected.tokens
    engines.spare.wait_idle()
    engines.decode.reject(params)


def test_expired_lease_frees_its_blocks_and_fails_the_fetch(engines: Engines):
    prompt = engines.spare.tokenize(QUESTIONS[3][1])
    events = len(engines.trace("spare"))
    params = engines.spare.generate(prompt, 1, dict(REMOTE_DECODE)).params
    assert engines.wait_trace("spare", events + 1)[-1]["outcome"] == "expired"
    engines.spare.wait_idle()
    answer = engines.decode.generate(prompt, 4, params)
    assert answer.finish_reason == "error" and answer.tokens == []
    assert "expired" in engines.trace("decode")[-1]["error"]


def test_leases_that_expire_do_not_fill_the_cache(engines: Engines):
    prompt = engines.spare.tokenize(QUESTIONS[1][1])
    requests = 5
    assert requests * len(prompt) > DECODE_BLOCKS * BLOCK_TOKENS
    for _ in range(requests):
        assert engines.spare.generate(prompt, 1, dict(REMOTE_DECODE)).params
    engines.spare.wait_idle()


def test_prompt_that_decode_does_not_need_frees_the_lease(engines: Engines, reference):
    prompt = engines.prefill.tokenize("A prompt whose log-probabilities are wanted.")
    expected = reference(prompt, 4)
    fetches, leases = len(engines.trace("decode")), len(engines.trace("prefill"))
    # For the log-probabilities of a prompt vLLM computes all of it, whatever is there.
    answer = engines.decode.generate(prompt, 4, engines.hand_over(prompt), prompt_logprobs=1)
    assert answer.tokens == expected.tokens
    assert engines.wait_trace("prefill", leases + 1)[-1]["outcome"] == "fetched"
    assert len(engines.trace("decode")) == fetches


def test_request_turned_down_by_the_decode_server_frees_the_lease(engines: Engines):
    leases = len(engines.trace("prefill"))
    engines.decode.reject(engines.hand_over(engines.prefill.tokenize("Turn me down.")))
    assert engines.wait_trace("prefill", leases + 1)[-1]["outcome"] == "fetched"


def test_prefill_aborted_before_it_was_published(engines: Engines):
    request = engines.prefill.start(
        engines.prefill.tokenize(QUESTIONS[1][1]), 1, dict(REMOTE_DECODE)
    )
    request.abort()
    assert not request.answer().params
    engines.prefill.wait_idle()


def test_prefill_aborted_after_it_was_published(engines: Engines):
    leases = len(engines.trace("prefill"))
    prompt = engines.prefill.tokenize("Tell me a long story.")
    tokens = engines.prefill.metrics().get("vllm:generation_tokens", 0)
    request = engines.prefill.start(prompt, 500, dict(REMOTE_DECODE), ignore_eos=True)
    engines.wait_metric(engines.prefill, "vllm:generation_tokens", tokens + 2)
    request.abort()
    assert request.answer().finish_reason == "abort"
    assert engines.wait_trace("prefill", leases + 1)[-1]["outcome"] == "released"
    engines.prefill.wait_idle()


# Before, during or after the transfer: where it falls differs, and none may leak.
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.3])
def test_decode_aborted(engines: Engines, delay_s):
    leases = len(engines.trace("prefill"))
    prompt = engines.prefill.tokenize(f"Abort this after {delay_s} s. {QUESTIONS[2][1]}")
    request = engines.decode.start(prompt, 200, engines.hand_over(prompt), ignore_eos=True)
    time.sleep(delay_s)
    request.abort()
    assert request.answer().finish_reason == "abort"
    assert engines.wait_trace("prefill", leases + 1)[-1]["outcome"] == "fetched"
    engines.decode.wait_idle()


def test_decode_aborted_while_it_waits_for_kv(engines: Engines):
    engines.check_alive()  # So that a session is there, and none of it is set-up.
    prompt = engines.prefill.tokenize("This is going to be late.")
    params = engines.hand_over(prompt)
    fetches, leases = len(engines.trace("decode")), len(engines.trace("prefill"))
    with engines.prefill.paused():
        request = engines.decode.start(prompt, 4, params)
        engines.wait_metric(engines.decode, "vllm:kv_cache_usage_perc", 0)
        request.abort()
        assert request.answer().finish_reason == "abort"
        event = engines.wait_trace("decode", fetches + 1)[-1]
        assert not event["ok"] and "cancel" in event["error"].lower()
    assert engines.wait_trace("prefill", leases + 1)[-1]["outcome"] == "fetched"


def test_preempted_prompts_are_published_again(engines: Engines, reference):
    prompts = [engines.prefill.tokenize(f"{n}. {QUESTIONS[3][1]}")[:190] for n in range(6)]
    expected = [reference(prompt, 4).tokens for prompt in prompts]
    preemptions = engines.prefill.metrics().get("vllm:num_preemptions", 0)
    # Together they outgrow the cache while they generate, long after their prompts were published.
    requests = [
        engines.prefill.start(prompt, 44, dict(REMOTE_DECODE), ignore_eos=True)
        for prompt in prompts
    ]
    for prompt, request, tokens in zip(prompts, requests, expected, strict=True):
        assert engines.decode.generate(prompt, 4, request.answer().params).tokens == tokens
    assert engines.prefill.metrics()["vllm:num_preemptions"] > preemptions
    assert "preempted" in [event["outcome"] for event in engines.trace("prefill")]


@pytest.mark.parametrize(
    "model, dtype, word",
    [(MODEL.name, "bfloat16", "dtype"), ("another model", "float32", "model")],
    ids=["dtype", "model"],
)
def test_wrong_pairing_is_refused_when_they_meet(engines: Engines, model, dtype, word):
    if word == "dtype" and torch.cuda.is_available():
        pytest.skip("what lies on a GPU is cast")
    prompt = engines.prefill.tokenize("Who are you?")
    params = engines.hand_over(prompt)
    layout = kvferry.KvLayout(
        num_layers=30,
        page_size=BLOCK_TOKENS,
        dtype=dtype,
        page_format="vllm-cpu-vec-HND",
        tensors=[("kv", 3, 128)],
    )
    pool = kvferry.KvPool.create(layout, 4)
    endpoint = kvferry.DecodeEndpoint(pool, kvferry.Config.make(), model, "test")
    with pytest.raises(kvferry.Error, match=word):
        endpoint.fetch(params["kvferry_tickets"][0], 0, [1]).wait(20000)
    endpoint.close()
    engines.decode.reject(params)
