"""Endpoints that wait, close, and end with what they are made of."""

import gc
import threading
import time

import kvferry
import pytest
from endpoints import MODEL, Owner, Peers, adopt, make_config, numpy_buffers
from servers import silent_server


@pytest.mark.parametrize("waiting", ["wait", "wait_layer"])
def test_waiting_lets_other_threads_run(peers, waiting):
    """The thread that makes the layers ready can run only while the waiting one holds no GIL."""
    ticket = peers.prefill.publish([1])
    lease = kvferry.Ticket.parse(ticket).lease_id
    handle = peers.decode.fetch(ticket, 0, [1])
    about_to_wait = threading.Event()

    def make_ready():
        about_to_wait.wait()
        peers.prefill.all_layers_ready(lease)

    thread = threading.Thread(target=make_ready)
    thread.start()
    about_to_wait.set()
    if waiting == "wait":
        handle.wait(20000)
    else:
        handle.wait_layer(2, 20000)
    thread.join()


def test_close_then_use(peers):
    ticket = peers.prefill.publish([1])
    lease = kvferry.Ticket.parse(ticket).lease_id
    peers.prefill.close()
    peers.prefill.close()
    peers.decode.close()
    peers.decode.close()
    for use in [
        lambda: peers.prefill.publish([1]),
        lambda: peers.prefill.layer_ready(lease, 0),
        lambda: peers.prefill.all_layers_ready(lease),
        lambda: peers.prefill.release(lease),
        lambda: peers.prefill.take_ended(),
        lambda: peers.prefill.metrics(),
        lambda: peers.prefill.address,
        lambda: peers.prefill.epoch,
        lambda: peers.decode.fetch(ticket, 0, [1]),
        lambda: peers.decode.metrics(),
    ]:
        with pytest.raises(kvferry.FailedPrecondition, match="closed"):
            use()


def test_close_ends_what_is_under_way(peers):
    ticket = peers.prefill.publish([1], ready_layers=1)
    handle = peers.decode.fetch(ticket, 0, [1])
    handle.wait_layer(0, 20000)
    peers.decode.close()
    assert handle.done and not handle.ok
    with pytest.raises(kvferry.Cancelled):
        handle.wait(0)
    handle.cancel()


def test_close_while_another_thread_waits(peers):
    handle = peers.decode.fetch(peers.prefill.publish([1]), 0, [1])
    errors = []

    def wait():
        try:
            handle.wait(60000)
        except kvferry.Error as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    peers.decode.close()
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(errors[0], kvferry.Cancelled)


def test_endpoints_are_closed_by_the_garbage_collector():
    made = Peers()
    handle = made.decode.fetch(made.prefill.publish([1]), 0, [1])
    del made
    gc.collect()
    assert handle.done and not handle.ok


class Closing(Owner):
    """Buffers whose end, when what has their pool is closed, takes as long as a test wants."""

    def __init__(self, arrays):
        super().__init__(arrays)
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.close = None

    def __del__(self):
        self.begun.set()
        self.go_on.wait(20)
        self.close()  # Again, on the thread that is closing it.


def make_closable(kind, pool):
    options = {"pool": pool, "config": make_config(), "model": MODEL}
    nobody = "tcp://127.0.0.1:1"
    if kind == "LookupProducer":
        return kvferry.LookupProducer(max_bytes=1 << 20, **options)
    if kind == "LookupConsumer":
        return kvferry.LookupConsumer(producers=[nobody], **options)
    if kind == "RemoteStore":
        return kvferry.RemoteStore(nobody, **options)
    return getattr(kvferry, kind)(**options)


# Whoever closed it takes the memory for its own again, and may have been the second to ask.
@pytest.mark.parametrize(
    "kind",
    ["PrefillEndpoint", "DecodeEndpoint", "LookupProducer", "LookupConsumer", "RemoteStore"],
)
def test_a_second_thread_that_closes_waits_for_the_first(kind):
    arrays = Closing(numpy_buffers())
    begun, go_on = arrays.begun, arrays.go_on
    pool = adopt(arrays)
    closable = make_closable(kind, pool)
    arrays.close = closable.close
    del arrays, pool
    closing = [threading.Thread(target=closable.close, daemon=True) for _ in range(2)]
    closing[0].start()
    assert begun.wait(20)
    closing[1].start()
    closing[1].join(0.3)
    assert closing[1].is_alive()
    go_on.set()
    for thread in closing:
        thread.join(20)
        assert not thread.is_alive()


def turns_while_a_store_ends() -> int:
    """Of this thread, behind the deadline of a store's last call, when it has been closed already:
    then it only takes leave of its server, which does not answer."""
    with silent_server() as silent:
        pool = kvferry.KvPool.create(kvferry.KvLayout.mha(1, 4, 1, 8, "float32"), 4)
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        store = kvferry.RemoteStore(address, pool, make_config(), MODEL)
        ended = threading.Event()

        def call():
            with pytest.raises(kvferry.DeadlineExceeded):
                store.exists(["a"], timeout_ms=500)
            ended.set()

        begin = time.monotonic()
        thread = threading.Thread(target=call)
        thread.start()
        assert silent.accept()  # It is under way.
        store.close()
        times = []
        while not ended.wait(0.001):
            times.append(time.monotonic())
        thread.join()
    assert time.monotonic() - begin > 0.6
    return sum(one > begin + 0.55 for one in times)


def test_a_closed_store_that_ends_with_its_last_call_keeps_no_thread_from_running():
    # One that does keeps this thread for all of that time, each time; so may a busy machine once.
    assert any(turns_while_a_store_ends() > 1 for _ in range(5))
