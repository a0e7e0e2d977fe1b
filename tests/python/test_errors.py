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
