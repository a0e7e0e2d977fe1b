"""SGLang servers that do not fit each other, or that kvferry does not serve."""

import contextlib
import mmap
import re
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang_pools", reason="SGLang is not installed", exc_type=ImportError)

from kvferry.sglang import pd_manager  # noqa: E402
from sglang.srt.disaggregation.base.conn import StateType  # noqa: E402
from sglang.srt.disaggregation.common.conn import KVTransferError  # noqa: E402
from sglang_faults import (  # noqa: E402
    left_of,
)
from sglang_pd import (  # noqa: E402
    SOURCE,
    TARGET,
    KVPoll,
    Transfer,
    check_pages,
    copies,
    failed,
    make_sides,
    refused,
    rooms,
    wait_status,
    whole,
)


def ends_with(prefill, decode):
    """Why a request ends that SGLang's schedulers have just got. It does on both sides."""
    senders = [it.sender(room := next(rooms)) for it in prefill[:1]]
    senders += [it.sender(room) for it in prefill[1:]]
    receiver = decode.begin_receiver(room)
    wait_status([receiver], KVPoll.Failed)
    with pytest.raises(KVTransferError) as error:
        receiver.failure_exception()
    wait_status(senders[:1], KVPoll.Failed)  # SGLang ends it on the others.
    for it in senders:
        with pytest.raises(KVTransferError):
            it.failure_exception()
    return error.value.failure_reason


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"page_size": 8}, "prefill server has page_size=4, but decode server has page_size=8"),
        ({"kv_cache_dtype_str": "fp8_e4m3"}, "kv_cache_dtype=bfloat16, .* kv_cache_dtype=fp8_e4m3"),
    ],
)
def test_a_server_with_other_pages_ends_its_requests_and_nothing_else(make, changes, says):
    """Each of them, with the same reason, however often: SGLang gives up after 15 times, with a
    reason of its own."""
    prefill, decode = make("prefill"), make("decode", **changes)
    for _ in range(17):
        reason = ends_with([prefill], decode)
        assert re.search(says, reason), reason
        assert decode.deployment.address in reason
    assert not decode.manager.failure_records and not decode.manager.request_status
    assert not any(left_of(prefill.manager))


def test_a_server_whose_ranks_do_not_fit_ends_its_requests_and_nothing_else(make):
    (prefill,), decode = make_sides(make, (1, 2), "mla")
    prefill.deployment._server.enable_kv_cache_sharding = True
    assert "requires equal prefill/decode attn TP sizes" in ends_with([prefill], decode[0])


@pytest.mark.parametrize("changes", [{"attn_tp_size": 0}, {"dp_size": 0}, {"pp_size": 1025}])
def test_a_server_that_says_impossible_numbers_of_ranks_ends_its_requests_and_nothing_else(
    pair, changes
):
    """Clients name it. SGLang's own class divides by them, which ends the server."""
    prefill, decode = pair
    server = prefill.deployment._server
    right = {name: getattr(server, name) for name in changes}
    vars(server).update(changes)
    server._registered_count = 1 << 20
    receiver = decode.begin_receiver(next(rooms))
    wait_status([receiver], KVPoll.Failed)
    with pytest.raises(KVTransferError, match=r"each has to be 1 to 1024"):
        receiver.failure_exception()
    vars(server).update(right)
    whole([prefill], [decode], SOURCE, TARGET)


def test_a_server_that_is_started_again_with_the_right_pages_is_used(make):
    prefill, decode = make("prefill"), make("decode")
    server = prefill.deployment._server
    server.page_size, right = 32, server.page_size
    assert "page_size=32" in ends_with([prefill], decode)
    server.page_size = right
    whole([prefill], [decode], SOURCE, TARGET)


def test_all_data_parallel_ranks_of_a_server_hear_that_it_does_not_fit(make, monkeypatch):
    """It is not known yet which of them has the request."""
    prefill, decode = make("prefill"), make("decode", page_size=8)
    server = prefill.deployment._server
    second = make("prefill")  # Registered in the place of the first one.
    with_second = server.prefill_port_table.pop(0)
    prefill.manager.register_to_bootstrap()
    server.prefill_port_table[1] = with_second
    room = next(rooms)
    senders = [it.sender(room) for it in (prefill, second)]
    receiver = decode.begin_receiver(room)
    wait_status([receiver, *senders], KVPoll.Failed)
    for it in (receiver, *senders):
        with pytest.raises(KVTransferError):
            it.failure_exception()


def test_another_model_is_refused(make):
    prefill = make("prefill", model="/here/Llama-1B")
    there, other = (make("decode", model=it) for it in ("/there/Llama-1B/", "/here/Llama-3B"))
    whole([prefill], [there], SOURCE, TARGET)
    reason = refused([prefill], [other], SOURCE, TARGET)
    assert "Llama-1B" in reason and "Llama-3B" in reason


def test_hierarchical_sparse_attention_is_refused_at_the_start(make, monkeypatch):
    options = SimpleNamespace(enable_hisparse=True)
    monkeypatch.setattr(pd_manager, "get_memory", lambda: options, raising=False)
    for mode in ("prefill", "decode"):
        with pytest.raises(NotImplementedError, match="--enable-hisparse"):
            make(mode)


@contextlib.contextmanager
def memory_of_a_device():
    """The address of what this process has, and cannot read."""
    with mmap.mmap(-1, 1 << 16, prot=0) as memory:
        yield np.frombuffer(memory, np.uint8).ctypes.data


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_metadata_rows_on_a_device_are_refused_at_the_start(make, mode):
    """The first request would end the server with a segmentation fault."""
    rows = make(mode).args.aux_data_ptrs
    says = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
    with memory_of_a_device() as address, pytest.raises(NotImplementedError, match=says):
        make(mode, aux_data_ptrs=[*rows[:-1], address])


BF16, FP16 = {"dtype": torch.bfloat16}, {"dtype": torch.float16}


@pytest.mark.parametrize("kind", ["mha", "mla", "swa"])
def test_values_of_another_dtype_are_refused(make, kind):
    """Of one size, which the two servers' options both call "auto"."""
    prefill, decode = (
        make(mode, kind=kind, pool=pool, kv_cache_dtype_str="auto")
        for mode, pool in (("prefill", BF16), ("decode", FP16))
    )
    before = copies(decode)
    reason = refused([prefill], [decode], SOURCE, TARGET)
    assert " bfloat16" in reason and " float16" in reason
    check_pages(prefill, decode, before, [], [])


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_draft_models_values_of_another_dtype_are_refused(make, kind):
    prefill, decode = (
        make(mode, kind=kind, has_draft=True, draft_pool=pool)
        for mode, pool in (("prefill", BF16), ("decode", FP16))
    )
    reason = refused([prefill], [decode], SOURCE, TARGET)
    assert "bfloat16 draft bfloat16" in reason and "bfloat16 draft float16" in reason


@pytest.mark.parametrize(
    "of",
    [{"pool": {"dtype": torch.int16}}, {"has_draft": True, "draft_pool": {"dtype": torch.int16}}],
)
def test_pools_of_other_values_are_refused_at_the_start(make, of):
    with pytest.raises(NotImplementedError, match="KV of int16 in SGLang, as in MHATokenToKVPool"):
        make("decode", **of)


def test_pools_that_nobody_tells_of_are_refused_at_the_start(make):
    with pytest.raises(NotImplementedError, match="its plug-in is for SGLang 0.5.23"):
        make("decode", kvferry_pools=None)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_draft_model_on_one_side_alone_is_refused(make, kind):
    prefill, decode = make("prefill", kind=kind), make("decode", kind=kind, has_draft=True)
    assert "bfloat16 draft bfloat16" in refused([prefill], [decode], SOURCE, TARGET)


def test_draft_models_of_mla_with_other_numbers_of_ranks(make):
    """Every rank has all of it."""
    prefill, decode = make_sides(make, (2, 1), "mla", has_draft=True)
    for rank in prefill + decode:
        rank.fill(seed=1)
    before = copies(decode[0])
    whole(prefill, decode, SOURCE, TARGET)
    check_pages(prefill[0], decode[0], before, SOURCE, TARGET)


def test_draft_models_of_mha_with_other_numbers_of_ranks_fail(make):
    """Nobody knows how the draft model's heads lie."""
    transfer = Transfer(*make_sides(make, (2, 1), has_draft=True), SOURCE, TARGET).ask()
    assert "between servers of one tensor-parallel size" in failed(transfer)


def test_other_metadata_rows_are_refused(make):
    prefill, decode = make("prefill", hidden=16), make("decode", hidden=32)
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    transfer.send(0, len(SOURCE))
    wait_status(transfer.receivers, KVPoll.Failed)
    wait_status(transfer.senders, KVPoll.Failed)
    assert "the same options of SGLang" in transfer.reasons()[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"state_types": [StateType.SWA_RING, StateType.SWA]}, "not this model's swa_ring"),
        ({"state_types": [StateType.SWA, StateType.SWA]}, "not this model's swa, swa"),
        ({"num_draft_entries": 3}, "and 3 of a draft model"),
        ({"num_draft_entries": 2, "kv_item_lens": [256] * 4 + [512, 512]}, "a draft model's too"),
        ({"kv_item_lens": [256, 256, 128] * 2}, "needs the same in every layer"),
        ({"total_kv_head_num": 3}, "needs the same in every layer"),
        ({"kv_item_lens": [256] * 5, "kv_data_lens": [256] * 5}, "as many of each"),
        ({"kv_cache_dtype_str": "fp4_mx_block16"}, "--kv-cache-dtype fp4_mx_block16"),
        ({"kv_cache_dtype_str": "nvfp4"}, "--kv-cache-dtype nvfp4"),
        ({"kv_cache_dtype_str": "of a later release"}, "--kv-cache-dtype of a later release"),
    ],
)
def test_what_is_not_served_is_refused_at_the_start(make, changes, says):
    if "state_types" in changes:
        changes = changes | {"state_item_lens": [[8], [8]]}
    with pytest.raises(NotImplementedError, match=says):
        make("decode", **changes)


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ("pp_size", "pipeline parallelism in SGLang, here of 2"),
        ("attn_cp_size", "context parallelism of attention in SGLang"),
        ("dcp_size", "context parallelism of decoding in SGLang"),
        ("kv_shard_size", "sharding of KV pages in SGLang"),
    ],
)
def test_other_ways_to_share_a_model_out_are_refused(make, monkeypatch, size, says):
    manager = make("decode").manager
    monkeypatch.setattr(manager, size, 2)
    with pytest.raises(NotImplementedError, match=says):
        manager._check_supported()


def test_data_parallel_ranks_of_a_host_have_ports_of_their_own(make, monkeypatch):
    manager = make("prefill").manager
    monkeypatch.setenv("KVFERRY_LISTEN_PORT", "23450")
    monkeypatch.setattr(manager, "attn_tp_size", 4)
    monkeypatch.setattr(manager, "system_dp_rank", 2)
    assert manager._config(0).listen_port == 23450 + 2 * 4
