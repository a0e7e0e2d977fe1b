"""Requests between SGLang's prefill and decode servers at random, with SGLang's own classes."""

import random
import time

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang_pools", reason="SGLang is not installed", exc_type=ImportError)

import torch  # noqa: E402
from sglang.srt.disaggregation.common.conn import KVTransferError  # noqa: E402
from sglang_pd import ROWS, KVPoll, make_ranks, rooms  # noqa: E402


class Free:
    """Free pages, or rows of states, of a rank. What is in them must stay as it was left."""

    def __init__(self, buffers):
        self.buffers = buffers
        self.free = list(range(1, min((len(it) for it in buffers), default=1)))
        self.left = {}

    def contents(self, pages):
        return [buffer[pages].clone() for buffer in self.buffers]

    def take(self, count, rng):
        rng.shuffle(self.free)
        pages = [self.free.pop() for _ in range(count)]
        for page in pages:
            for now, then in zip(self.contents([page]), self.left.pop(page, []), strict=False):
                assert torch.equal(now, then), "a page was written after it was given back"
        return pages

    def give(self, pages):
        for page in pages:
            self.left[page] = self.contents([page])
        self.free += pages

    def scramble(self, pages):
        for buffer in self.buffers:
            buffer[pages] = torch.randint(256, buffer[pages].shape).to(buffer.dtype)


class Scheduler:
    def __init__(self, rank):
        self.kinds = [Free(rank.pages()), Free(rank.states())]
        self.rows = list(range(1, ROWS))


class Held:
    """What a request has of a scheduler."""

    def __init__(self, scheduler, counts, rng):
        self.scheduler = scheduler
        kinds = scheduler.kinds
        self.taken = [it.take(n, rng) for it, n in zip(kinds, counts, strict=True)]
        self.pages, states = self.taken
        self.states = [np.array(states, np.int32)] if scheduler.kinds[1].buffers else None
        self.row = scheduler.rows.pop()

    def scramble(self):
        for kind, taken in zip(self.scheduler.kinds, self.taken, strict=True):
            kind.scramble(taken)

    def contents(self):
        kinds = zip(self.scheduler.kinds, self.taken, strict=True)
        return [it for kind, taken in kinds for it in kind.contents(taken)]

    def give(self):
        for kind, taken in zip(self.scheduler.kinds, self.taken, strict=True):
            kind.give(taken)
        self.scheduler.rows.append(self.row)


class RandomRequest:
    def __init__(self, prefill, decode, source, target, rng):
        most = [12, 3]
        counts = [
            rng.randint(0, min(n, len(a.free), len(b.free)))
            for n, a, b in zip(most, source.kinds, target.kinds, strict=True)
        ]
        self.rng = rng
        self.source, self.target = Held(source, counts, rng), Held(target, counts, rng)
        self.source.scramble()
        self.expected = self.source.contents()
        self.room = next(rooms)
        prefill.write_row(self.source.row, self.room, self.room % 997)
        self.decode = decode
        self.sender, self.receiver = prefill.sender(self.room), decode.receiver(self.room)
        self.has_asked = self.is_begun = False
        self.sent = 0
        self.outcomes = {}

    def step(self):
        """Whether it is over on both sides."""
        if not self.has_asked and self.rng.random() < 0.5:
            self.has_asked = True
            target = self.target
            self.receiver.send_metadata(np.array(target.pages, np.int32), target.row, target.states)
        for side in (self.sender, self.receiver):
            if side not in self.outcomes and self.rng.random() < 0.01:
                side.abort()
        if self.receiver not in self.outcomes:
            self.look_at_receiver()
        if self.sender not in self.outcomes:
            self.look_at_sender()
        return len(self.outcomes) == 2

    def look_at_sender(self):
        status = self.sender.poll()
        pages = self.source.pages
        if status == KVPoll.WaitingForInput and not self.is_begun:
            self.is_begun = True
            self.sender.init(len(pages), self.source.row)
            if not pages:
                self.send(0)
        elif status == KVPoll.WaitingForInput and self.sent < len(pages):
            self.send(self.rng.randint(self.sent + 1, len(pages)))
        elif status in (KVPoll.Success, KVPoll.Failed):
            self.outcomes[self.sender] = status
            self.finish(self.sender, status)
            self.source.scramble()  # Whoever still reads it reads something else.
            self.source.give()

    def send(self, end):
        pages = self.source.pages
        states = self.source.states if end == len(pages) else None
        self.sender.send(np.array(pages[self.sent : end], np.int32), states)
        self.sent = end

    def look_at_receiver(self):
        status = self.receiver.poll()
        if status == KVPoll.Success:
            for got, sent in zip(self.target.contents(), self.expected, strict=True):
                assert torch.equal(got, sent)
            row = self.decode.row(self.target.row)
            assert (row.room, row.token) == (self.room, self.room % 997)
        if status in (KVPoll.Success, KVPoll.Failed):
            self.outcomes[self.receiver] = status
            self.finish(self.receiver, status)
            self.target.give()

    def finish(self, side, status):
        if status == KVPoll.Success:
            side.clear()
            return
        with pytest.raises(KVTransferError):
            side.failure_exception()


@pytest.mark.parametrize(
    ("kind", "seed", "fetches"),
    [("mha", 1, 1024), ("mha", 2, 2), ("swa", 3, 1024), ("mamba", 4, 1024)],
)
def test_requests_at_random(kind, seed, fetches, monkeypatch):
    """Aborts on either side at any moment: what arrives is right, and nothing arrives late."""
    monkeypatch.setenv("KVFERRY_MAX_FETCHES_PER_PEER", str(fetches))
    with make_ranks() as make:
        run(make("prefill", kind=kind), make("decode", kind=kind), seed)


def run(prefill, decode, seed):
    prefill.fill(seed=1)
    decode.fill(seed=2)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    source, target = Scheduler(prefill), Scheduler(decode)
    running, outcomes = [], []
    deadline = time.monotonic() + 200
    both_ended = [KVPoll.Success, KVPoll.Success]
    # On a busy machine more are aborted before they are through.
    while len(outcomes) < 300 or outcomes.count(both_ended) <= 50:
        assert time.monotonic() < deadline, f"{len(outcomes)} requests, {len(running)} running"
        if len(running) < ROWS - 1 and rng.random() < 0.5:
            running.append(RandomRequest(prefill, decode, source, target, rng))
        for request in list(running):
            if request.step():
                running.remove(request)
                outcomes.append(sorted(request.outcomes.values()))
    assert outcomes.count([KVPoll.Failed, KVPoll.Failed]) > 20
    for kind in target.kinds:
        kind.take(len(kind.free), rng)  # Looks at what is in them.
