"""What models have beside the KV of full attention, between SGLang's prefill and decode servers:
windows in pools of their own, states of linear attention, indexers. SGLang's own pools on a CPU."""

import ctypes

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang_pools", reason="SGLang is not installed", exc_type=ImportError)

import torch  # noqa: E402
from kvferry.sglang import pd_pool  # noqa: E402
from servers import free_ports  # noqa: E402
from sglang.srt.disaggregation.base.conn import StateType  # noqa: E402
from sglang_pd import (  # noqa: E402
    OTHER_SIZES,
    KVPoll,
    Transfer,
    check_pages,
    copies,
    failed,
    make_sides,
    move_heads,
    refused,
    whole,
)

SOURCE, TARGET = [9, 3, 40, 41], [20, 21, 5, 60]
ROWS, TARGET_ROWS = [7, 8, 2], [1, 11, 12]
KINDS = ["swa", "mamba", "mla_mamba", "swa_mamba", "mla_swa", "dsa"]


def indices(kind, rows):
    """As SGLang's schedulers hand them over: of a state of linear attention one, in a list."""
    rows_of_others = [np.array(rows, np.int32)] if "swa" in kind or "mamba" not in kind else []
    return rows_of_others + ([[np.array(rows[0])]] if "mamba" in kind else [])


def test_a_pool_ends_where_the_shortest_of_its_buffers_does():
    buffers = pd_pool._Buffers([1000, 2000], [64, 56], [16, 16])
    assert pd_pool._whole_pages(buffers) == [(1000, 48), (2000, 48)]


def rows_by_buffer(rank, rows):
    """Of each of its states()."""
    return [
        rows[:1] if kind == StateType.MAMBA else rows
        for kind, items in zip(rank.args.state_types, rank.args.state_item_lens, strict=True)
        for item in items
        if item
    ]


def pair_of(make, kind, **changes):
    prefill, decode = (make(mode, kind=kind, **changes) for mode in ("prefill", "decode"))
    prefill.fill(seed=1)
    decode.fill(seed=2)
    return prefill, decode


def check_states(prefill, decode, before, source, target):
    """These rows have come, and no other has changed."""
    assert prefill.states() and len(before) == len(prefill.states())
    sides = prefill.states(), decode.states(), before
    rows = rows_by_buffer(prefill, source), rows_by_buffer(decode, target)
    for sent, got, old, source, target in zip(*sides, *rows, strict=True):
        others = [row for row in range(len(got)) if row not in target]
        assert torch.equal(got[target], sent[source])
        assert torch.equal(got[others], old[others])


def check_unchanged(rank, before):
    for now, then in zip(rank.states(), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("kind", "has_draft"), [*((it, False) for it in KINDS), ("dsa", True)])
def test_they_come_with_the_last_chunk(make, kind, has_draft, chunks):
    """Of a draft model's indexers too."""
    prefill, decode = pair_of(make, kind, has_draft=has_draft)
    pages, states = copies(decode), [it.clone() for it in decode.states()]
    both = indices(kind, ROWS), indices(kind, TARGET_ROWS)
    whole([prefill], [decode], SOURCE, TARGET, chunks, states=both)
    check_pages(prefill, decode, pages, SOURCE, TARGET)
    check_states(prefill, decode, states, ROWS, TARGET_ROWS)
    for publisher in prefill.manager._publishers:
        assert publisher.metrics()["leases_live"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_they_come_where_all_pages_are_cached(make, kind):
    prefill, decode = pair_of(make, kind)
    states = [it.clone() for it in decode.states()]
    both = indices(kind, ROWS), indices(kind, TARGET_ROWS)
    transfer = Transfer([prefill], [decode], [], [], prefix=prefill.page_size, states=both).begin()
    transfer.send(0, 0)
    transfer.end(KVPoll.Success)
    check_states(prefill, decode, states, ROWS, TARGET_ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_may_have_none(make, kind):
    prefill, decode = pair_of(make, kind)
    states = [it.clone() for it in decode.states()]
    whole([prefill], [decode], SOURCE, TARGET, states=([[]], None))
    check_unchanged(decode, states)


@pytest.mark.parametrize(("heads", "prefill", "decode"), OTHER_SIZES)
def test_windows_with_other_numbers_of_ranks(make, heads, prefill, decode):
    sizes = prefill, decode
    move_heads(make, "swa", heads, sizes, (SOURCE, TARGET), (ROWS, TARGET_ROWS))


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("kind", ["dsa", "mla_swa"])
def test_what_every_rank_has_with_other_numbers_of_ranks(make, kind, sizes):
    """Of MLA, its windows and indexers. SGLang takes MLA beside windows for none, and has all
    ranks of the prefill side send: the first one's is taken."""
    prefill, decode = make_sides(make, sizes, kind)
    for it in prefill:
        it.fill(seed=1)
    pages = [copies(it) for it in decode]
    states = [[buffer.clone() for buffer in it.states()] for it in decode]
    both = indices(kind, ROWS), indices(kind, TARGET_ROWS)
    whole(prefill, decode, SOURCE, TARGET, chunks=2, states=both)
    for it, old_pages, old in zip(decode, pages, states, strict=True):
        check_pages(prefill[0], it, old_pages, SOURCE, TARGET)
        check_states(prefill[0], it, old, ROWS, TARGET_ROWS)
    sent = [sum(p.metrics()["bytes_sent"] for p in it.manager._publishers) > 0 for it in prefill]
    assert sent == [rank % max(1, sizes[0] // sizes[1]) == 0 for rank in range(sizes[0])]


@pytest.mark.parametrize("has_draft", [False, True])
def test_indexers_that_some_layers_share(make, has_draft):
    """These have no keys of their own; a draft model's have."""
    shared = {"pool": {"shared": (0, 1, 0)}, "has_draft": has_draft}
    prefill, decode = pair_of(make, "dsa", **shared)
    assert len(decode.states()) == (5 if has_draft else 2)
    states = [it.clone() for it in decode.states()]
    both = indices("dsa", ROWS), indices("dsa", TARGET_ROWS)
    whole([prefill], [decode], SOURCE, TARGET, states=both)
    check_states(prefill, decode, states, ROWS, TARGET_ROWS)


@pytest.mark.parametrize("other", [(0, 0, 0), (0, 0, 1)])
def test_indexers_that_other_layers_share_are_refused(make, other):
    prefill, decode = (
        make(mode, kind="dsa", pool={"shared": shared})
        for mode, shared in (("prefill", (0, 1, 0)), ("decode", other))
    )
    states = [it.clone() for it in decode.states()]
    both = indices("dsa", ROWS), indices("dsa", TARGET_ROWS)
    assert "dsa without:2" in refused([prefill], [decode], SOURCE, TARGET, states=both)
    check_unchanged(decode, states)


@pytest.mark.parametrize("kind", ["mamba", "mla_mamba"])
def test_linear_attention_with_other_numbers_of_ranks_fails(make, kind):
    prefill = [make("prefill", rank, 2, kind=kind) for rank in range(2)]
    decode = make("decode", kind=kind)
    both = indices(kind, ROWS), indices(kind, TARGET_ROWS)
    transfer = Transfer(prefill, [decode], SOURCE, TARGET, states=both).ask()
    assert "one tensor-parallel size, not from 2 to 1" in failed(transfer)


def test_another_number_of_rows_fails(make):
    prefill, decode = pair_of(make, "swa")
    states = [it.clone() for it in decode.states()]
    both = indices("swa", ROWS[:2]), indices("swa", TARGET_ROWS)
    assert "2 pages or rows where 3 were expected" in refused(
        [prefill], [decode], SOURCE, TARGET, states=both
    )
    check_unchanged(decode, states)


def test_a_model_without_them_on_the_other_side_fails(make):
    prefill, decode = make("prefill"), make("decode", kind="swa")
    assert "0 states beside the KV where this side has 1" in refused(
        [prefill], [decode], SOURCE, TARGET
    )


def test_states_of_another_size_are_refused(make):
    prefill, decode = pair_of(make, "mamba")
    decode.close()
    lens = [item // 2 for item in decode.args.state_item_lens[0]]
    decode = make("decode", kind="mamba", state_item_lens=[lens])
    both = indices("mamba", ROWS), indices("mamba", TARGET_ROWS)
    assert "KV layout: tensors" in refused([prefill], [decode], SOURCE, TARGET, states=both)


def test_states_of_another_dtype_are_refused(make):
    """Of one size, where the KV's is the same."""
    prefill, decode = (
        make(mode, kind="mamba", pool={"state_dtype": dtype})
        for mode, dtype in (("prefill", torch.bfloat16), ("decode", torch.float16))
    )
    states = [it.clone() for it in decode.states()]
    both = indices("mamba", ROWS), indices("mamba", TARGET_ROWS)
    reason = refused([prefill], [decode], SOURCE, TARGET, states=both)
    assert "4xbfloat16,2xfloat16" in reason and "6xbfloat16" in reason
    check_unchanged(decode, states)


def test_fixed_ports_are_the_first_ones(make, monkeypatch):
    """Each rank has an endpoint for the KV and one for each state."""
    first = free_ports(4)
    monkeypatch.setenv("KVFERRY_LISTEN_PORT", str(first))
    ranks = [make("prefill", rank, 2, kind="swa") for rank in range(2)]
    publishers = [it for rank in ranks for it in rank.manager._publishers]
    ports = [int(it.address.rpartition(":")[2]) for it in publishers]
    assert ports == list(range(first, first + 4))


# ---------------------------------------------------------------- layouts


def layout_of(items):
    memory = (ctypes.c_uint8 * 64)()
    address = ctypes.addressof(memory)
    rows = pd_pool._Buffers([address + i for i in range(len(items))], [64] * len(items), items)
    ordered, layout = pd_pool._as_rows(rows)
    assert sorted(ordered.addresses) == [address + i for i, item in enumerate(items) if item]
    assert ordered.items == [items[at - address] for at in ordered.addresses]
    return layout.num_layers, [heads * dim for _, heads, dim in layout.tensors], ordered.items


@pytest.mark.parametrize(
    ("items", "layers", "tensors"),
    [
        ([8], 1, [8]),
        ([8, 8, 8], 3, [8]),
        ([6, 6, 4, 4, 16, 16], 2, [6, 4, 16]),
        ([6, 16, 6, 16], 2, [6, 16]),  # Layer by layer.
        ([6, 6, 6, 6, 16, 16], 2, [6, 6, 16]),
        ([6, 0, 6, 0, 16, 0, 16], 2, [6, 16]),
        ([3 << 20, 3 << 20], 2, [3 << 20]),  # Longer than a dimension may be.
    ],
)
def test_buffers_with_items_of_several_sizes(items, layers, tensors):
    assert layout_of(items)[:2] == (layers, tensors)
    by_layer = [size for size in tensors for _ in range(layers)]
    assert layout_of(items)[2] == by_layer


def test_too_many_sizes():
    with pytest.raises(NotImplementedError, match="as many of each size"):
        layout_of(list(range(1, 18)))
    with pytest.raises(NotImplementedError, match="kvferry needs some"):
        layout_of([])
    with pytest.raises(NotImplementedError, match="kvferry needs some"):
        layout_of([0, 0])


def test_rows_are_pages_of_bytes():
    layout = pd_pool._as_rows(pd_pool._Buffers([0], [8], [8]))[1]
    assert (layout.page_size, layout.dtype) == (1, "uint8")
