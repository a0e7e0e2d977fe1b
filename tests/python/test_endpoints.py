"""What Python's endpoints move: the bindings' part of it, as the core has tests of its own."""

import kvferry
import numpy as np
import pytest
from endpoints import MODEL, NUM_PAGES, fill, make_config, small_layout
from waiting import wait_for


def test_round_trip(peers):
    source = fill(peers.source, 1)
    target = fill(peers.target, 2)
    from_pages, to_pages = [3, 4, 5, 9, 0], [8, 1, 15, 2, 3]
    ticket = peers.prefill.publish(from_pages, num_tokens=17, ready_layers=3)
    handle = peers.decode.fetch(ticket, 0, to_pages)
    handle.wait(20000)
    assert handle.done and handle.ok and handle.error == ""
    assert handle.missing_pages() == []
    assert handle.layers_done == 3
    report = handle.report()
    assert report["total_bytes"] == report["bytes_done"] == 5 * small_layout().page_bytes
    assert report["wait_seconds"] >= 0 and report["move_seconds"] > 0
    moved = dict(zip(to_pages, from_pages, strict=True))
    for (layer, tensor, page), before in target.items():
        want = source[layer, tensor, moved[page]] if page in moved else before
        assert peers.target.page(layer, tensor, page).tobytes() == want

    lease = kvferry.Ticket.parse(ticket).lease_id
    ended = []
    wait_for(lambda: ended.extend(peers.prefill.take_ended()) or ended)
    assert ended == [(lease, "fetched")]
    assert peers.prefill.take_ended() == []
    assert peers.prefill.metrics()["transfers_ok"] == 1
    assert peers.decode.metrics()["fetches_ok"] == 1


def test_layer_by_layer_and_first_page(peers):
    source = fill(peers.source, 1)
    lease = kvferry.random_id()
    ticket = peers.prefill.publish([1, 2, 3], lease_id=lease)
    handle = peers.decode.fetch(ticket, 2, [7])
    for layer in range(3):
        assert handle.layers_done == layer and not handle.done
        with pytest.raises(kvferry.DeadlineExceeded):
            handle.wait_layer(layer, 0)
        peers.prefill.layer_ready(lease, layer)
        handle.wait_layer(layer, 20000)
        assert peers.target.page(layer, 0, 7).tobytes() == source[layer, 0, 3]
    handle.wait(20000)


def test_ticket_made_before_the_publish(peers):
    """A scheduler chooses the lease id and writes the ticket; the worker publishes later."""
    lease = kvferry.random_id()
    ticket = kvferry.Ticket(
        address=peers.prefill.address,
        epoch=peers.prefill.epoch,
        lease_id=lease,
        num_pages=2,
        num_tokens=8,
    )
    text = peers.prefill.publish([1, 2], num_tokens=8, lease_id=lease)
    assert str(ticket) == text
    assert kvferry.Ticket.parse(text) == ticket
    peers.prefill.all_layers_ready(lease)
    peers.decode.fetch(str(ticket), 0, [5, 6]).wait(20000)


def test_fetch_of_nothing_ends_the_lease(peers):
    ticket = peers.prefill.publish([1, 2])
    peers.decode.fetch(ticket, 2, []).wait(20000)
    ended = []
    wait_for(lambda: ended.extend(peers.prefill.take_ended()) or ended)
    assert ended[0][1] == "fetched"


def torch_pages(pages):
    return pytest.importorskip("torch").from_numpy(pages)


@pytest.mark.parametrize("make", [list, tuple, np.array, np.int32, torch_pages], ids=str)
def test_pages_come_as_lists_and_arrays(peers, make):
    pages, local = np.array([1, 2]), np.array([3, 4])
    source, target = fill(peers.source, 1), peers.target
    ticket = peers.prefill.publish(make(pages))
    fetch = peers.decode.fetch(ticket, 0, make(local))
    peers.prefill.all_layers_ready(kvferry.Ticket.parse(ticket).lease_id)
    fetch.wait(20000)
    assert bytes(target.page(1, 0, 4)) == source[1, 0, 2]
    with pytest.raises(ValueError, match=r"integers \(pages\) is neither int32 nor int64"):
        peers.prefill.publish(np.array([1.0]))


def test_values_are_cast():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    source = kvferry.KvPool.create(small_layout(dtype="float8_e5m2"), NUM_PAGES)
    target = kvferry.KvPool.create(small_layout(dtype="float32"), NUM_PAGES)
    fill(source, 1)
    theirs, ours = [1, 2, 3, 4, 5, 6], [0.5] * 6
    prefill = kvferry.PrefillEndpoint(source, make_config(), MODEL, scales=theirs)
    decode = kvferry.DecodeEndpoint(target, make_config(), MODEL, scales=ours)
    decode.fetch(prefill.publish([3, 4], ready_layers=3), 0, [8, 1]).wait(20000)
    for page, into in ((3, 8), (4, 1)):
        for layer in range(3):
            for tensor in range(2):
                stored = torch.from_numpy(source.page(layer, tensor, page))
                want = stored.view(torch.float8_e5m2).float() * theirs[3 * tensor + layer] / 0.5
                got = torch.from_numpy(target.page(layer, tensor, into)).view(torch.float32)
                assert torch.equal(got.nan_to_num(1e30), want.nan_to_num(1e30))
    assert prefill.metrics()["transfers_cast"] == 1
    with pytest.raises(ValueError, match="the scale of buffer 1 is 0"):
        kvferry.PrefillEndpoint(source, make_config(), MODEL, scales=[1, 0, 1, 1, 1, 1])
    prefill.close()
    decode.close()


def test_ranks_share_heads_out():
    assert kvferry.heads_of_rank(8, 3, 4) == (6, 2)
    shares = kvferry.shares_for(4, 0, 1, 2)
    assert [(it.rank, it.heads, it.reader) for it in shares] == [
        (0, (0, 2), (0, 1)),
        (1, (2, 2), (0, 1)),
    ]
    with pytest.raises(ValueError, match="of 3 with 8"):
        kvferry.shares_for(8, 0, 2, 3)
    pool = kvferry.KvPool.create(kvferry.KvLayout.mha(1, 4, 2, 8, "float16"), 4)
    config = kvferry.Config.make({})
    with pytest.raises(ValueError, match="heads .3, 3 . 2. are not within the model's 4"):
        kvferry.PrefillEndpoint(pool, config, "m", heads=(3, 4))
    decode = kvferry.DecodeEndpoint(pool, config, "m", heads=(2, 4))
    with pytest.raises(ValueError, match="heads .1, 1 . 2. asked"):
        decode.fetch("kvferry1|tcp://127.0.0.1:1|1|1|4|0", 0, [1], heads=(1, 2))
    decode.close()
