"""The prefill side of kvferry between SGLang's servers: publishes the pages of requests, chunk by
chunk, and tells the decode ranks that have asked for them."""

from __future__ import annotations

import ctypes
import logging
import queue
import time
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVSender,
    KVTransferError,
)
from sglang.srt.utils.network import NetworkAddress

import kvferry
from kvferry.errors import reason_of
from kvferry.sglang.pd_manager import SAME_ROOM, Manager, indices, say
from kvferry.sglang.pd_messages import Chunk, Peer, Request, parse, room_of
from kvferry.sglang.pd_requests import (
    MAX_RECENT,
    Destination,
    Job,
    LeaseKey,
    Outgoing,
    Recent,
)

_logger = logging.getLogger(__name__)
_ABORTED_HERE = "Aborted by the prefill side"
_ABORTED_THERE = "Aborted by the decode side"
_ABORT = b"ABORT"  # SGLang's, decode to prefill.


class PrefillManager(Manager):
    def __init__(self, args: KVArgs, *of_sglang: Any):
        super().__init__(args, *of_sglang)
        self._outgoing: dict[int, Outgoing] = {}
        self._by_lease: dict[LeaseKey, tuple[int, Outgoing]] = {}
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._given_up = Recent[int]()  # Rooms that failed, and the decode side knows.
        self._live: dict[int, KVSender] = {}  # Those that have a sender now,
        self._begun = Recent[int]()  # and those that ever had one.
        self._aborted_early = Recent[int]()  # On the decode side, before they began here.
        # (room, rank) that have asked: anybody may, for rooms that never begin.
        self._asked = Recent[tuple[int, int]]()
        # By rank, of rooms whose sender has not ended here but is through for who asks: SGLang
        # gives what it computes again, of a request that it has retracted, the same room.
        self._asked_again: dict[int, dict[int, Request]] = {}
        self._publishers = self._endpoints(kvferry.PrefillEndpoint)
        for publisher in self._publishers:
            _logger.info("kvferry: %s listens on %s", self._name(), publisher.address)
        self._start("publish", self._publish_chunks)
        self._start("prefill", self._serve, self._on_prefill_message)

    def _end_transfers(self) -> None:
        self._jobs.put(None)
        for publisher in self._publishers:
            publisher.close()

    def _on_prefill_message(self, frames: list[bytes]) -> None:
        if frames[0] == _ABORT:
            self._abort_from_decode(room_of(frames[1]))
            return
        message, _ = parse(frames)
        if isinstance(message, Peer):
            self._check_aux(message)
        elif isinstance(message, Request):
            self._add_destination(message)
        else:
            raise ValueError(f"{message.TYPE} at a prefill server")

    def _check_aux(self, peer: Peer) -> None:
        mine = list(self.kv_args.aux_item_lens)
        if peer.aux_bytes != mine:
            self._of_strangers.warn(
                "decode rank %s:%d has metadata rows of %s bytes, this rank of %s: "
                "both servers need the same release and options of SGLang. Its requests will fail",
                peer.ip,
                peer.port,
                peer.aux_bytes,
                mine,
            )

    def _add_destination(self, message: Request) -> None:
        with self._lock:  # Either give_up() tells this one, or it is refused.
            is_given_up = message.room in self._given_up
            if not is_given_up:
                self._note_destination(message)
        if is_given_up:
            self._refuse(message)

    def _note_destination(self, message: Request) -> None:
        """Holds the lock."""
        infos = self.transfer_infos.get(message.room, {})
        if message.room in self._live and message.rank in infos:
            self._asked_again.setdefault(message.room, {})[message.rank] = message
            return
        if message.rank not in infos and len(infos) >= message.readers:
            self._of_strangers.warn(
                "a message was dropped: more than %d ranks ask for room %d",
                message.readers,
                message.room,
            )
            return
        infos[message.rank] = Destination(
            message.ip, message.port, message.readers, message.prefix, message.is_dummy
        )
        self.transfer_infos[message.room] = infos
        if len(infos) == message.readers:
            self.resolve_kv_replica_factor(infos)
            self.req_to_decode_prefix_len[message.room] = max(
                info.decode_prefix_len for info in infos.values()
            )
            self.update_status(message.room, KVPoll.WaitingForInput)
        forgotten = self._asked.add((message.room, message.rank))
        if forgotten is not None:
            self._forget_unbegun(*forgotten)

    def _forget_unbegun(self, room: int, rank: int) -> None:
        """Holds the lock."""
        if room in self._live or room not in self.transfer_infos:
            return
        self._forget(room)
        self._of_strangers.warn(
            "room %d, which decode rank %d asked for, is forgotten, since no request here has it "
            "and %d ranks have asked for others after it",
            room,
            rank,
            MAX_RECENT,
        )

    def _refuse(self, message: Request) -> None:
        self.send_kv_status_message(
            targets=[(message.ip, message.port)],
            bootstrap_room=message.room,
            status=KVPoll.Failed,
            failure_reason=_ABORTED_HERE,
        )

    def give_up(self, room: int) -> None:
        """Tells the decode side, once, and who asks later: they would wait for a time limit."""
        with self._lock:
            if room in self._given_up:
                return
            self._given_up.add(room)
            targets = self._room_notify_targets(room)
            # Before the scheduler, which comes through here too, takes it out.
            reason = self.failure_records.get(room, _ABORTED_HERE)
        self.send_kv_status_message(
            targets=targets,
            bootstrap_room=room,
            status=KVPoll.Failed,
            failure_reason=reason,
        )

    def _fail_outgoing(self, room: int, reason: str) -> None:
        """Does not wait for the scheduler's look at it."""
        if room in self.request_status:
            self._fail(room, reason)
            self.give_up(room)

    def begin(self, room: int, sender: KVSender) -> bool:
        """Before anything can come for it; a room may be used again once its request has ended.
        False: it has not."""
        before = self._live.get(room) if room in self._asked_again else None
        if before is not None and before.poll() == KVPoll.Success:
            before.clear()  # The scheduler would when it looks at it next.
        with self._lock:
            if room in self._live:
                return False
            self._given_up.take(room)
            self._live[room] = sender
            return True

    def begun(self, room: int) -> None:
        """It has a status: from here on an abort of the decode side finds it."""
        with self._lock:
            self._begun.add(room)
            was_aborted = self._aborted_early.take(room)
            if was_aborted:
                self._given_up.add(room)
        if was_aborted:
            self.update_status(room, KVPoll.Bootstrapping)  # The abort may have taken it away.
            self._fail(room, _ABORTED_THERE)

    def _abort_from_decode(self, room: int) -> None:
        """The router gives a request to both sides at once, so this may come before the request
        itself, which would then wait for its time limit (SGLang's, minutes). It may also come
        when the request has ended, and must not end the next one of that room."""
        with self._lock:
            if room in self._asked_again:  # It is of that one. Each rank that has asked aborts.
                self._asked_again[room].clear()
                self._aborted_early.add(room)
                return
            if room in self._live and room in self.request_status:
                self._given_up.add(room)
            else:
                if room not in self._begun or room in self.transfer_infos:
                    self._aborted_early.add(room)
                self._forget(room)  # The request may never come.
        self._fail(room, _ABORTED_THERE)  # The scheduler cleans up.

    def _forget(self, room: int) -> None:
        """What SGLang's classes note of a request that has asked."""
        self.request_status.pop(room, None)
        self.transfer_infos.pop(room, None)
        self.req_to_decode_prefix_len.pop(room, None)

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: list | None = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event=None,
        indices_event=None,
        trace_ctx=None,
    ) -> None:
        """Of pages that are written, or will be when wait_event is done."""
        infos = self.transfer_infos.get(bootstrap_room)
        if infos is None:
            return  # It has ended.
        with self._lock:
            request = self._outgoing.setdefault(bootstrap_room, Outgoing())
            if all(info.is_dummy for info in infos.values()):
                request.is_whole = is_last_chunk
                return
        if indices_event is not None:
            indices_event.synchronize()
        pages = [indices(kv_indices)]
        if is_last_chunk:
            pages += self.rows_of_states(state_indices)
        aux = self._read_aux(aux_index) if is_last_chunk else None
        self._jobs.put(Job(bootstrap_room, request, index_slice.start, pages, aux, wait_event))

    def _read_aux(self, row: int) -> list[bytes]:
        args = self.kv_args
        return [
            ctypes.string_at(address + row * size, size)
            for address, size in zip(args.aux_data_ptrs, args.aux_item_lens, strict=True)
        ]

    def _publish_chunks(self) -> None:
        """In a thread of its own: it waits for the device. Nothing must end it before teardown():
        all requests would wait for their time limits."""
        while (job := self._jobs.get()) is not None:
            try:
                self._publish_or_fail(job)
            except Exception as error:  # Memory that is out, say.
                say("room %s waits for its time limit: %s", job.room, error)

    def _publish_or_fail(self, job: Job) -> None:
        try:
            self._publish(job)
        except Exception as error:
            self._fail_outgoing(job.room, f"publishing pages: {reason_of(error)}")

    def _publish(self, job: Job) -> None:
        if job.wait_event is not None:
            job.wait_event.synchronize()
        with self._lock:
            if job.request.is_closed:
                return
            tickets = [self._lease(job, part, pages) for part, pages in enumerate(job.pages)]
            targets = self._room_notify_targets(job.room)
        chunk = Chunk(
            room=job.room,
            rank=self.attn_tp_rank,
            first=job.first,
            pages=len(job.pages[0]),
            ticket=tickets[0],
            is_last=job.aux is not None,
            states=tickets[1:],
        )
        for host, port in targets:
            address = NetworkAddress(host, port)
            self._send_multipart_locked(
                address.to_tcp(), chunk.frames(*(job.aux or [])), is_ipv6=address.is_ipv6
            )
        if job.aux is not None:
            with self._lock:
                job.request.is_whole = True

    def _lease(self, job: Job, part: int, pages: list[int]) -> str:
        """The ticket; none without pages. Holds the lock."""
        if not pages:
            return ""
        layers = self._pools[part].pool.layout.num_layers
        ticket = self._publishers[part].publish(pages, ready_layers=layers)
        key = part, kvferry.Ticket.parse(ticket).lease_id
        job.request.leases.add(key)
        self._by_lease[key] = job.room, job.request
        return ticket

    def advance_outgoing(self, room: int) -> None:
        """Takes note of leases that have ended, anybody's, and of whether this request has."""
        expired: list[int] = []
        with self._lock:
            ended = [
                ((part, lease_id), how)
                for part, publisher in enumerate(self._publishers)
                for lease_id, how in publisher.take_ended()
            ]
            for key, how in ended:
                ended_room, request = self._by_lease.pop(key, (0, None))
                if request is None:
                    continue  # settle_outgoing() took it back.
                request.leases.discard(key)
                if how != "fetched":
                    expired.append(ended_room)
            request = self._outgoing.get(room)
            is_done = request is not None and request.is_whole and not request.leases
        for other in expired:
            self._fail_outgoing(other, "the decode side did not fetch in time")
        if is_done:
            self.update_status(room, KVPoll.Success)

    def settle_outgoing(self, room: int) -> None:
        """When it returns nothing of the request is read any more, nor will be. Raises
        PagesInUse."""
        self._settle(room, lambda deadline: self._are_taken_back(room, deadline), "read")

    def end(self, room: int, forget: Callable[[], None]) -> None:
        """Of a request that has settled. In one step, as messages see it: what asks for the room
        meanwhile is of its next request."""
        with self._lock:
            self._live.pop(room, None)
            self._outgoing.pop(room, None)
            again = self._asked_again.pop(room, {})
            forget()
            for message in again.values():
                self._note_destination(message)

    def _are_taken_back(self, room: int, deadline: float) -> bool:
        """Ends the request, and its leases; who is not through with them may be asked again."""
        with self._lock:
            request = self._outgoing.get(room)
            if request is None:
                return True
            request.is_closed = True
        for key in list(request.leases):  # Closed: nobody adds to them.
            if self._is_released(key, deadline):
                with self._lock:
                    request.leases.discard(key)
                    self._by_lease.pop(key, None)
        return not request.leases

    def _is_released(self, key: LeaseKey, deadline: float) -> bool:
        """Waits until that time for the end of the lease."""
        part, lease_id = key
        left_ms = max(0, int((deadline - time.monotonic()) * 1e3))
        try:
            self._publishers[part].release(lease_id, left_ms)
        except (kvferry.DeadlineExceeded, MemoryError):
            return False
        except kvferry.Error:
            pass  # It has ended by itself, or since the attempt before.
        return True


class KVSender(CommonKVSender):
    """A request on a prefill rank. The scheduler frees its pages after failure_exception() and
    abort(), on any rank's failure, so both wait until none is read."""

    kv_mgr: PrefillManager

    def __init__(
        self, mgr: PrefillManager, bootstrap_addr: str, bootstrap_room: int, *args, **kwargs
    ):
        # From when it is over on, what is known of the room may be another request's.
        self._is_over = not mgr.begin(bootstrap_room, self)
        self._why_failed = SAME_ROOM if self._is_over else None
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **kwargs)
        if self._is_over:  # The other one goes on.
            self.conclude_state = KVPoll.Failed
        else:
            mgr.begun(bootstrap_room)

    def poll(self) -> int:
        if not self._is_over:
            self.kv_mgr.advance_outgoing(self.bootstrap_room)
        return super().poll()

    def abort(self) -> None:
        """SGLang forgets some requests right behind it, so it has to leave nothing."""
        if self._is_over:
            return
        try:
            self.kv_mgr.give_up(self.bootstrap_room)
            super().abort()
            self._why_failed = self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
        finally:  # SGLang frees its pages whatever is raised.
            self.clear()

    def failure_exception(self) -> None:
        if self._why_failed is not None:
            self.clear()  # abort() may not have been through with it.
            raise KVTransferError(self.bootstrap_room, self._why_failed)
        try:
            # A time limit, or another rank's failure: nobody has told those that have asked this
            # one.
            status = self.kv_mgr.request_status.get(self.bootstrap_room)
            if not self._is_over and status not in (None, KVPoll.Success):
                self.kv_mgr.give_up(self.bootstrap_room)
        finally:  # SGLang frees its pages whatever is raised.
            super().failure_exception()

    def clear(self) -> None:
        if self._is_over:
            return
        self.kv_mgr.settle_outgoing(self.bootstrap_room)
        self._is_over = True
        self.kv_mgr.end(self.bootstrap_room, super().clear)
