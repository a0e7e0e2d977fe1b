"""Push from Python: what the bindings add; the transfer has tests in C++."""

import threading

import kvferry
import numpy as np
import pytest
from endpoints import MODEL, NUM_PAGES, make_config
from pressing import PressedError, heeding, pressing

LAYERS = 3


@pytest.fixture
def pools():
    layout = kvferry.KvLayout.mha(LAYERS, 4, 2, 8, "float16")
    source, target = (kvferry.KvPool.create(layout, NUM_PAGES) for _ in range(2))
    random = np.random.default_rng(1)
    for layer in range(LAYERS):
        for tensor in range(2):
            for page in range(NUM_PAGES):
                view = source.page(layer, tensor, page)
                view[:] = random.integers(1, 256, view.size, dtype=np.uint8)
    return source, target


@pytest.fixture
def ends(pools):
    config = make_config()
    prefill = kvferry.PrefillEndpoint(pools[0], config, MODEL, "p")
    decode = kvferry.DecodeEndpoint(pools[1], config, MODEL, "d", accept_pushes=True)
    yield prefill, decode
    prefill.close()
    decode.close()


def holds(pools, local, remote, layers=range(LAYERS)):
    source, target = pools
    return all(
        target.page(layer, tensor, to).tobytes() == source.page(layer, tensor, page).tobytes()
        for layer in layers
        for tensor in range(2)
        for to, page in zip(local, remote, strict=True)
    )


def test_layer_by_layer(pools, ends):
    prefill, decode = ends
    ticket, handle = decode.receive(1, [8, 2], num_tokens=11)
    parsed = kvferry.ReceiveTicket.parse(ticket)
    assert str(parsed) == ticket
    assert (parsed.address, parsed.epoch) == (decode.address, decode.epoch)
    assert (parsed.num_pages, parsed.num_tokens) == (3, 11) and parsed.receive_id != 0
    assert decode.metrics()["receives_waiting"] == 1
    push = prefill.push(ticket, [3, 4, 9], num_tokens=11)
    for layer in range(LAYERS):
        assert handle.layers_done == layer and not handle.done
        assert not push.done and not push.ok and push.error == ""
        prefill.layer_ready(push.lease_id, layer)
        handle.wait_layer(layer, 20000)
        assert holds(pools, [8, 2], [4, 9], [layer])
    handle.wait(20000)
    push.wait(20000)
    assert push.done and push.ok and push.error == ""
    assert handle.missing_pages() == []
    assert not pools[1].page(0, 0, 3).any()
    assert prefill.take_ended() == [(push.lease_id, "fetched")]
    assert decode.metrics()["receives_waiting"] == 0


def test_errors_have_their_types(pools, ends):
    prefill, decode = ends
    ticket, handle = decode.receive(0, [1, 2], num_tokens=5)
    with pytest.raises(kvferry.FailedPrecondition, match="of 2 pages, the push of 1"):
        prefill.push(ticket, [1]).wait(20000)
    with pytest.raises(ValueError, match="not of the form kvferrypush1"):
        prefill.push(prefill.publish([1]), [1])
    with pytest.raises(ValueError, match="not of the form kvferry1"):
        decode.fetch(ticket, 0, [1])
    with pytest.raises(kvferry.FailedPrecondition, match="5 tokens, the push of 6"):
        prefill.push(ticket, [1, 2], num_tokens=6, ready_layers=LAYERS).wait(20000)
    with pytest.raises(kvferry.DeadlineExceeded, match="still under way"):
        handle.wait(0)
    push = prefill.push(ticket, [1, 2], num_tokens=5, ready_layers=LAYERS)
    push.wait(20000)
    with pytest.raises(kvferry.FailedPrecondition, match="already ended: OK"):
        prefill.push(ticket, [1, 2], ready_layers=LAYERS).wait(20000)
    with pytest.raises(ValueError, match="timeout_ms"):
        decode.receive(0, [1], timeout_ms=-1)


def test_either_side_ends_it(pools, ends):
    prefill, decode = ends
    ticket, handle = decode.receive(0, [1, 2])
    push = prefill.push(ticket, [1, 2], ready_layers=1)
    handle.wait_layer(0, 20000)
    push.cancel()
    with pytest.raises(kvferry.Cancelled):
        push.wait(20000)
    with pytest.raises(kvferry.Aborted, match="gave the push up"):
        handle.wait(20000)
    assert sorted(handle.missing_pages()) == [1, 2]
    assert prefill.take_ended() == [(push.lease_id, "released")]

    ticket, handle = decode.receive(0, [1, 2])
    push = prefill.push(ticket, [1, 2])
    handle.cancel()
    with pytest.raises(kvferry.Cancelled):
        handle.wait(20000)
    # The push may have come before or after that.
    with pytest.raises((kvferry.Cancelled, kvferry.FailedPrecondition)):
        push.wait(20000)
    assert not push.ok and push.error

    ticket, handle = decode.receive(0, [1, 2], timeout_ms=50)
    with pytest.raises(kvferry.DeadlineExceeded, match="nobody has pushed"):
        handle.wait(20000)


def test_a_decode_endpoint_accepts_no_pushes_unless_told_to(pools):
    decode = kvferry.DecodeEndpoint(pools[1], kvferry.Config.make(), MODEL)
    assert decode.address == ""
    with pytest.raises(kvferry.FailedPrecondition, match="accept_pushes"):
        decode.receive(0, [1])
    decode.close()
    with pytest.raises(kvferry.FailedPrecondition, match="closed"):
        decode.receive(0, [1])


@pytest.mark.parametrize("which", ["fetch", "layer", "push"])
def test_ctrl_c_ends_a_wait_and_nothing_else(which, ends):
    prefill, decode = ends
    ticket, handle = decode.receive(0, [8])
    push = prefill.push(ticket, [3])
    waits = {
        "fetch": lambda: handle.wait(60000),
        "layer": lambda: handle.wait_layer(0, 60000),
        "push": lambda: push.wait(60000),
    }

    too_late = threading.Timer(15, handle.cancel)
    too_late.start()
    with heeding(3) as heard, pressing(heard, 3), pytest.raises(PressedError):
        waits[which]()
    too_late.cancel()
    assert not handle.done and not push.done
    for layer in range(LAYERS):
        prefill.layer_ready(push.lease_id, layer)
    handle.wait(20000)
    push.wait(20000)
