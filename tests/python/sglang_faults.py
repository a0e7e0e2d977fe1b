"""What goes wrong between ranks of SGLang's prefill and decode servers, in tests: devices,
endpoints and processes that are late, or out of memory."""

import threading
import time

from kvferry.sglang import pd_device, pd_manager, pd_prefill
from sglang_pd import SOURCE, TARGET, Transfer
from waiting import wait_for


class Hold:
    """What SGLang gives a chunk to wait for: a device's event."""

    def __init__(self):
        self._let_go = threading.Event()
        self.is_awaited = threading.Event()

    def synchronize(self):
        self.is_awaited.set()
        assert self._let_go.wait(20)

    def let_go(self):
        self._let_go.set()


def held(prefill, decode):
    """A transfer whose only chunk waits to be let go."""
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    hold = transfer.senders[0]._early_send_wait_event = Hold()
    transfer.send(0, len(SOURCE))
    assert hold.is_awaited.wait(20)
    return transfer, hold


class SlowDevice:
    """What a decode server's device is still at, for requests that had the pages before."""

    def __init__(self, monkeypatch):
        self._let_go, self.is_awaited = threading.Event(), threading.Event()
        self.waits, self.error = 0, None
        monkeypatch.setattr(pd_device, "wait_on", lambda device, index: self._wait)

    def _wait(self):
        self.waits += 1
        self.is_awaited.set()
        assert self._let_go.wait(20)
        if self.error:
            raise self.error

    def let_go(self, error=None):
        self.error = error
        self._let_go.set()


def sent_early(prefill, decode, target=TARGET):
    """A request of which all has been sent before its pages may be written."""
    transfer = Transfer([prefill], [decode], SOURCE, target).begin()
    transfer.send(0, 1)
    transfer.send(1, len(SOURCE))
    wait_for(lambda: len(decode.manager._incoming[transfer.room].early) == 2)
    return transfer


def handles(incoming):
    """Of its fetches that are under way, or have been."""
    return [fetch.handle for fetch in incoming.fetches() if fetch.handle is not None]


class WithoutLayers:
    """A prefill endpoint none of whose layers is ready: fetches wait."""

    def __init__(self, endpoint):
        self.endpoint = endpoint
        self.tickets = []

    def publish(self, pages, ready_layers):
        self.tickets.append(self.endpoint.publish(pages))
        return self.tickets[-1]

    def __getattr__(self, name):
        return getattr(self.endpoint, name)


def left_of(manager):
    """What a prefill rank keeps of requests, without bound."""
    return [
        manager.request_status, manager.transfer_infos, manager.req_to_decode_prefix_len,
        manager.failure_records, manager._outgoing, manager._by_lease,
    ]  # fmt: skip


class Clock:
    """Of modules, and of what tests move it on by."""

    def __init__(self, monkeypatch, modules=(pd_manager, pd_prefill)):
        self.now = time.monotonic()
        self.sleep = time.sleep
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self):
        return self.now


def under_way(prefill, decode, chunks=1):
    """A transfer of which nothing arrives, and the handles of its fetches."""
    prefill.manager._publishers = [WithoutLayers(prefill.manager._publishers[0])]
    transfer = Transfer([prefill], [decode], SOURCE, TARGET).begin()
    for n in range(chunks):
        transfer.send(n * len(SOURCE) // chunks, (n + 1) * len(SOURCE) // chunks)
    incoming = decode.manager._incoming[transfer.room]
    wait_for(lambda: len(handles(incoming)) == chunks)
    return transfer, handles(incoming)


class OutOfMemory:
    """A decode endpoint, or what else is called, that finds no memory the n-th time."""

    def __init__(self, of, name, n):
        self._of, self._name, self._left = of, name, n

    def __getattr__(self, name):
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                raise MemoryError
        return getattr(self._of, name)


class WithoutMemory:
    """A fetch, an endpoint or what else is called, that finds no memory the first `times` times."""

    def __init__(self, of, name, times):
        self._of, self._name, self.times = of, name, times

    def __getattr__(self, name):
        if name == self._name and self.times > 0:
            self.times -= 1
            raise MemoryError
        return getattr(self._of, name)
