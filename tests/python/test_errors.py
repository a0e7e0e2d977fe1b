"""Errors of endpoints, as Python sees them."""

import kvferry
import pytest
from endpoints import MODEL, make_config


def test_error_types():
    for name in (
        "Aborted AlreadyExists Cancelled DataLoss DeadlineExceeded FailedPrecondition NotFound "
        "PermissionDenied ResourceExhausted Unavailable"
    ).split():
        error = getattr(kvferry, name)
        assert issubclass(error, kvferry.Error)
        assert error.__module__ == "kvferry" and error.__name__ == name
    assert issubclass(kvferry.Error, RuntimeError)
    assert issubclass(kvferry.DeadlineExceeded, TimeoutError)


def test_an_index_that_is_outside_is_one_error_everywhere(peers):
    """Whether the bindings find it or what they call; older releases raised either of the two."""
    assert issubclass(kvferry.OutOfRange, (IndexError, ValueError))
    assert {IndexError, ValueError} < set(kvferry.OutOfRange.__mro__)
    assert kvferry.OutOfRange.__module__ == "kvferry"
    pool = kvferry.KvPool.create(kvferry.KvLayout.mha(1, 4, 1, 8, "float32"), 4)
    store = kvferry.HostStore(1 << 20)
    (of_a_page,) = store.put_pages(["a"], pool, [4])
    assert type(of_a_page) is kvferry.OutOfRange
    for call in (
        lambda: pool.layout.item_bytes(2),
        lambda: pool.page(1, 0, 0),
        lambda: peers.prefill.publish([16]),
        lambda: peers.prefill.layer_ready(1, 3),
    ):
        with pytest.raises(kvferry.OutOfRange):
            call()


def test_errors_name_what_python_calls_it():
    layout = kvferry.KvLayout
    for make, what in (
        (lambda: layout.mha(1, 4, 0, 8, "float32"), "num_kv_heads is 0"),
        (lambda: layout.fused(1, 4, 0, 8, "float32"), "num_kv_heads is 0"),
        (lambda: layout.fused(1, 4, 1, 1 << 19, "float32"), None),
        (lambda: layout.fused(1, 4, 1, (1 << 19) + 1, "float32"), "head_dim is 524289 but must"),
        (lambda: layout.fused(1, 4, 1, 0, "float32"), "head_dim is 0 but must"),
        (lambda: layout.mla(1, 4, 0, "float32"), "latent_dim is 0"),
    ):
        if what is None:
            make()
            continue
        with pytest.raises(ValueError, match=f"layout: {what}"):
            make()
    large = layout.mha(64, 16, 64, 128, "float32")  # 4 MiB a token.
    with pytest.raises(ValueError, match=r"token pool: num_tokens is 4194304 but must .* 4194288 "):
        kvferry.TokenKvPool.create(large, 1 << 22)
    device = kvferry.TokenKvPool.create(layout.mha(1, 4, 1, 8, "float32"), 16)
    for options in ({}, {"ratio": -1.0}):
        with pytest.raises(ValueError, match="ratio in Python"):
            kvferry.HostKvPool.create(device, **options)
    tables = kvferry.BlockTables(8, 4, 4)
    row = tables.add(4)
    with pytest.raises(MemoryError, match="a table of 1000 rows of width 536870912"):
        tables.table([row] * 1000, width=2**29)  # The most, with blocks of 4.


def test_errors_of_a_fetch(peers):
    ticket = kvferry.Ticket.parse(peers.prefill.publish([1, 2], ready_layers=1))

    def fetch(text, pages=(3, 4), first_page=0, timeout_ms=0):
        return peers.decode.fetch(str(text), first_page, list(pages), timeout_ms)

    with pytest.raises(kvferry.DeadlineExceeded):
        fetch(ticket, timeout_ms=100).wait(20000)
    handle = fetch(ticket)
    handle.wait_layer(0, 20000)
    handle.cancel()
    with pytest.raises(kvferry.Cancelled):
        handle.wait(20000)
    assert handle.done and not handle.ok and handle.error
    assert handle.missing_pages() == [3, 4]
    peers.prefill.release(ticket.lease_id)
    assert peers.prefill.take_ended() == [(ticket.lease_id, "released")]
    with pytest.raises(kvferry.FailedPrecondition, match="already been released"):
        fetch(ticket).wait(20000)
    with pytest.raises(kvferry.FailedPrecondition):
        peers.prefill.release(ticket.lease_id)
    unknown = kvferry.Ticket(
        address=ticket.address, epoch=ticket.epoch, lease_id=5, num_pages=2, num_tokens=0
    )
    with pytest.raises(kvferry.NotFound, match="unknown here"):
        fetch(unknown).wait(20000)
    elsewhere = str(ticket).replace("127.0.0.1", "192.0.2.1")
    with pytest.raises(kvferry.PermissionDenied, match="allowed_hosts"):
        fetch(elsewhere)
    with pytest.raises(ValueError, match="kvferry1"):
        fetch("no ticket at all")
    with pytest.raises(ValueError, match="16 pages"):
        fetch(ticket, pages=[16])
    with pytest.raises(ValueError):
        fetch(ticket, first_page=1)
    with pytest.raises(ValueError, match="timeout_ms"):
        fetch(ticket, timeout_ms=-1)


def test_errors_of_a_publish(peers):
    with pytest.raises(ValueError, match="no pages"):
        peers.prefill.publish([])
    with pytest.raises(ValueError, match="16 pages"):
        peers.prefill.publish([16])
    with pytest.raises(ValueError, match="-1"):
        peers.prefill.publish([-1])
    peers.prefill.publish([1], lease_id=7)
    with pytest.raises(kvferry.AlreadyExists):
        peers.prefill.publish([1], lease_id=7)
    with pytest.raises(ValueError, match="layer 3 of 3"):
        peers.prefill.layer_ready(7, 3)
    with pytest.raises(kvferry.NotFound):
        peers.prefill.layer_ready(8, 0)
    with pytest.raises(kvferry.NotFound):
        peers.prefill.release(8)


def test_another_model_is_refused(peers):
    other = kvferry.DecodeEndpoint(peers.target, peers.config, "other/model")
    handle = other.fetch(peers.prefill.publish([1]), 0, [1])
    with pytest.raises(kvferry.FailedPrecondition, match="model: 'test/model' here"):
        handle.wait(20000)
    other.close()


def test_an_error_keeps_the_context_it_was_raised_in(peers):
    with pytest.raises(kvferry.NotFound) as caught:
        try:
            raise KeyError("first")
        except KeyError:
            peers.prefill.release(12345)
    assert isinstance(caught.value.__context__, KeyError)
    assert "3039" in str(caught.value)


def test_port_taken(peers):
    port = int(peers.prefill.address.rsplit(":", 1)[1])
    with pytest.raises(kvferry.Unavailable, match="listen_port"):
        kvferry.PrefillEndpoint(peers.source, make_config(listen_port=port), MODEL)
