"""The decode side of kvferry between SGLang's servers: asks for requests, fetches their pages."""

from __future__ import annotations

import ctypes
import logging
import queue
import time
from collections.abc import Callable
from typing import Any

import requests
import zmq
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import (
    AbortNotification,
    CommonKVReceiver,
    KVTransferError,
    PrefillServerInfo,
)
from sglang.srt.runtime_context import get_device
from sglang.srt.utils.network import NetworkAddress

import kvferry
from kvferry.errors import reason_of
from kvferry.sglang import pd_device
from kvferry.sglang.pd_fetches import Fetch, FetchQueues
from kvferry.sglang.pd_manager import SAME_ROOM, TURN_MS, Manager, indices, say
from kvferry.sglang.pd_messages import Chunk, Peer, Request, parse
from kvferry.sglang.pd_requests import (
    FromRank,
    Incoming,
)

_logger = logging.getLogger(__name__)
# What endpoints raise for bad input and for trouble; never a reason to stop the server.
_REFUSED = (kvferry.Error, ValueError)
_MAX_RANKS = 1024  # Of each kind, of a prefill server.
_FIRST_OF_DP_RANK = {"prefill_cp_rank": 0, "target_tp_rank": 0, "target_pp_rank": 0}
_PAST_ASKING = (KVPoll.Transferring, KVPoll.Success)
_NO_ROOM = "bootstrap_room 0 is what SGLang has in metadata that have not come: take another one"


class DecodeManager(Manager):
    def __init__(self, args: KVArgs, *of_sglang: Any):
        super().__init__(args, *of_sglang)
        self._incoming: dict[int, Incoming] = {}
        # How long a request may take is SGLang's to say, which ends it then.
        config = kvferry.Config.make()
        self._fetch_timeout_s = min(self.waiting_timeout, config.max_fetch_timeout_ms / 1e3)
        self._fetch_queues = FetchQueues(config.max_fetches_per_peer)
        self._fetchers = self._endpoints(kvferry.DecodeEndpoint)
        # Requests whose pages the device may write still, for those that had them before.
        self._wait_on_device = pd_device.wait_on(get_device().device, args.gpu_id)
        self._given_pages: queue.SimpleQueue[tuple[int, Incoming] | None] = queue.SimpleQueue()
        self._with_early_chunks: list[Incoming] = []
        if self._wait_on_device is not None:
            self._start("pages", self._free_pages)
        self._start("decode", self._serve, self._on_decode_message, self._advance_fetches)
        self._threads.append(self._start_heartbeat_checker_thread())

    def _end_transfers(self) -> None:
        self._heartbeat_shutdown.set()
        self._given_pages.put(None)
        if self._prefill_recompute_executor is not None:
            self._prefill_recompute_executor.shutdown(cancel_futures=True)
        for fetcher in self._fetchers:
            fetcher.close()

    def build_receiver_registration_message(self) -> list[bytes]:
        return Peer(self.local_ip, self.rank_port, list(self.kv_args.aux_item_lens)).frames()

    def build_receiver_metadata_message(
        self,
        *,
        bootstrap_room: int,
        required_dst_info_num: int,
        kv_indices,
        aux_index: int | None,
        state_indices: list | None,
        decode_prefix_len: int | None,
        is_dummy: bool,
        device_kv_indices=None,
    ) -> list[bytes]:
        return Request(
            room=bootstrap_room,
            ip=self.local_ip,
            port=self.rank_port,
            rank=self.attn_tp_rank,
            readers=required_dst_info_num,
            prefix=decode_prefix_len or 0,
            is_dummy=is_dummy,
        ).frames()

    def shares_of(self, asked: list[int], prefill_size: int) -> list[dict[int, tuple[int, int]]]:
        """Of each pool; see AdoptedPool."""
        return [it.shares_of(asked, prefill_size) for it in self._pools]

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """SGLang's own raises where the two servers do not fit, on the scheduler's thread, which
        ends this server with all its requests. Here the requests that name that server end."""
        try:
            return super().try_ensure_parallel_info(bootstrap_addr)
        except (RuntimeError, AssertionError) as error:
            reason = f"prefill server {bootstrap_addr}: {error}"
        _logger.error("kvferry: %s", reason)
        rooms = list(self.addr_to_rooms_tracker.get(bootstrap_addr, ()))
        for room in rooms:
            self._fail(room, reason)
        if rooms and self.attn_tp_rank == 0:
            pool = self._ensure_prefill_recompute_executor()  # Asking takes a while.
            pool.submit(self._abort_at_prefill, bootstrap_addr, rooms)
        return False

    def _resolve_rank_mapping(self, info: PrefillServerInfo) -> None:
        """Clients name the prefill server, so it may say anything: SGLang's own divides by no ranks
        and makes lists of many."""
        sizes = info.attn_tp_size, info.attn_cp_size, info.dp_size, info.pp_size
        if not all(1 <= size <= _MAX_RANKS for size in sizes):
            raise RuntimeError(
                f"it says that it has {sizes} ranks (tensor, context, data and pipeline parallel); "
                f"each has to be 1 to {_MAX_RANKS}"
            )
        super()._resolve_rank_mapping(info)

    def _fail_prefill_recompute(self, kv_receiver: KVReceiver, reason: str) -> None:
        """In a thread of SGLang's, whose own ends the receiver there, beside the scheduler, and
        keeps the reason for ever where the request had ended."""
        room, incoming = kv_receiver.bootstrap_room, kv_receiver._incoming
        with self._lock:
            if incoming is not None and self.expects(room, incoming):
                self._fail(room, reason)  # poll() tells the prefill side.

    def check_status(self, bootstrap_room: int) -> int:
        """SGLang's thread of heartbeats asks of rooms that the scheduler may just have ended: a
        KeyError would end that thread, and nobody would hear of servers that die any more."""
        return self.request_status.get(bootstrap_room, KVPoll.Success)

    def _on_heartbeat_success(self, bootstrap_addr: str) -> None:
        """SGLang's, in its thread. A server that was started again soon enough answers for the one
        before, whose ranks hear nothing any more: requests would wait for their time limits, and
        those that come would ask the same ranks."""
        prefix = f"{bootstrap_addr}_"
        with self.connection_lock:
            known = (
                (key.removeprefix(prefix).split("_"), infos[0])
                for key, infos in self.connection_pool.items()
                if key.startswith(prefix)
            )
            one = next(known, None)
        if one is not None and not self._is_still_there(bootstrap_addr, *one):
            _logger.error("kvferry: prefill server %s was started again", bootstrap_addr)
            self._handle_node_failure(bootstrap_addr)

    @staticmethod
    def _is_still_there(bootstrap_addr: str, ranks: list[str], rank: dict) -> bool:
        """ranks: data, context and tensor parallel ones, as SGLang's keys have them."""
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank")
        where = dict(zip(names, ranks, strict=True)) | {"target_pp_rank": rank["pp_rank"]}
        answer = requests.get(f"http://{bootstrap_addr}/route", where, timeout=(2, 3))
        if answer.status_code != 200:  # Not all ranks are there yet, or there are fewer now.
            return answer.status_code not in (503, 404)
        now = answer.json()
        return all(now[name] == rank[name] for name in ("rank_ip", "rank_port"))

    def _abort_at_prefill(self, bootstrap_addr: str, rooms: list[int]) -> None:
        """Of requests that have not asked there: it would wait for them until a time limit. Who has
        a request is not known yet, so each data-parallel rank hears of it; of tensor-parallel ranks
        the first one does, and SGLang ends it on the others."""
        try:
            for rank in range(_MAX_RANKS):
                where = {"prefill_dp_rank": rank} | _FIRST_OF_DP_RANK
                answer = requests.get(f"http://{bootstrap_addr}/route", where, timeout=5)
                if answer.status_code != 200:
                    return  # That was the last one.
                address = NetworkAddress(answer.json()["rank_ip"], answer.json()["rank_port"])
                for room in rooms:
                    abort = AbortNotification(room).to_zmq()
                    self._send_multipart_locked(address.to_tcp(), abort, address.is_ipv6)
        except Exception as error:  # Whatever it answers.
            _logger.warning("kvferry: %s was not told of aborts: %s", bootstrap_addr, error)

    def expect(self, room: int, incoming: Incoming) -> bool:
        """False: another request has that room, and nothing would know of its fetches any more."""
        with self._lock:
            if self._incoming.setdefault(room, incoming) is not incoming:
                return False
            incoming.may_be_written = self._wait_on_device is None
        if self._wait_on_device is not None:
            self._given_pages.put((room, incoming))
        return True

    def expects(self, room: int, incoming: Incoming | None) -> bool:
        return self._incoming.get(room) is incoming

    def is_anothers(self, room: int, mine: Incoming | None, knows_whom_to_ask: bool) -> bool:
        """Whether what is known of the room is of another request than the one that expects `mine`
        (None: nothing yet), or of none any more."""
        if not self.expects(room, mine):
            return True
        status = self.request_status.get(room)
        if mine is None and status == KVPoll.WaitingForInput:
            return not knows_whom_to_ask
        return status is None or (mine is None and status in _PAST_ASKING)

    def _free_pages(self) -> None:
        """In a thread of its own: it waits for the device.

        SGLang gives a request pages as soon as the one before has ended, whose last forward may be
        under way still and write to them. What SGLang does in them is behind that; a fetch would
        not be.
        """
        while True:
            given = [self._given_pages.get()]
            while not self._given_pages.empty():  # They wait for the same.
                given.append(self._given_pages.get())
            if None in given:
                return
            failure = ""
            try:
                self._wait_on_device()
            except Exception as error:  # Whatever has become of the device.
                failure = f"the device of the pages failed: {error}"
            with self._lock:
                for room, incoming in given:
                    self._note_freed(room, incoming, failure)

    def _note_freed(self, room: int, incoming: Incoming, failure: str) -> None:
        """Never raises: those behind it would wait for their time limits. Holds the lock."""
        incoming.may_be_written = not failure
        if not failure or incoming.is_closed:
            return
        incoming.is_closed = True  # What has come for it is of no use.
        try:
            self._fail(room, failure)
        except Exception as error:  # Memory that is out, say.
            say("room %s waits for its time limit: %s", room, error)

    def _on_decode_message(self, frames: list[bytes]) -> None:
        if frames[0] == self.kv_status_msg_tag:
            status = self.parse_kv_status_message(frames)
            if status is not None and status[1] == KVPoll.Failed:
                room, _, rank, reason = status
                self.apply_prefill_status(
                    bootstrap_room=room,
                    status=KVPoll.Failed,
                    prefill_rank=rank,
                    failure_reason=reason,
                )
            return
        chunk, aux = parse(frames)
        if not isinstance(chunk, Chunk):
            raise ValueError(f"{chunk.TYPE} at a decode server")
        with self._lock:
            incoming = self._incoming.get(chunk.room)
            if incoming is None or incoming.is_closed:
                return  # Given up meanwhile.
            if incoming.may_be_written and not incoming.early:
                self._or_fail(self._take, chunk, aux, incoming)
            else:
                self._or_fail(self._keep_early, chunk, aux, incoming)

    def _keep_early(self, chunk: Chunk, aux: list[bytes], incoming: Incoming) -> None:
        """Until the pages may be written. Holds the lock."""
        self._check_rank(chunk, incoming)
        self._check_rows(chunk, aux)
        if len(incoming.early) == incoming.most_chunks():
            raise ValueError("more chunks than pages")
        if not incoming.early:
            self._with_early_chunks.append(incoming)
        incoming.early.append((chunk, aux))

    def _take_early_chunks(self) -> None:
        """Of requests whose pages may be written by now. Holds the lock."""
        for incoming in self._with_early_chunks:
            if not incoming.may_be_written and not incoming.is_closed:
                continue
            early, incoming.early = incoming.early, []
            for chunk, aux in early if not incoming.is_closed else ():
                self._or_fail(self._take, chunk, aux, incoming)
        self._with_early_chunks = [it for it in self._with_early_chunks if it.early]

    def _or_fail(
        self,
        do: Callable[[Chunk, list[bytes], Incoming], None],
        chunk: Chunk,
        aux: list[bytes],
        incoming: Incoming,
    ) -> None:
        """Holds the lock."""
        try:
            do(chunk, aux, incoming)
        except Exception as error:  # Whatever a stranger has sent.
            self._fail(chunk.room, f"from prefill rank {chunk.rank}: {reason_of(error)}")

    @staticmethod
    def _check_rank(chunk: Chunk, incoming: Incoming) -> None:
        if chunk.rank not in incoming.prefill_ranks:
            raise ValueError(f"only ranks {incoming.prefill_ranks} were asked")

    def _check_rows(self, chunk: Chunk, aux: list[bytes]) -> None:
        """They may be kept for a while, so there must be no more of them than are of use."""
        expected = list(self.kv_args.aux_item_lens) if chunk.is_last else []
        if [len(row) for row in aux] != expected:
            here = "they have" if chunk.is_last else "a chunk before the last one has"
            raise ValueError(
                f"metadata rows of {[len(row) for row in aux]} bytes, here {here} {expected}: both "
                f"servers need the same options of SGLang"
            )

    def _take(self, chunk: Chunk, aux: list[bytes], incoming: Incoming) -> None:
        """Fetches a chunk, when it has its turn. Holds the lock."""
        self._check_rank(chunk, incoming)
        sender = incoming.senders.setdefault(chunk.rank, FromRank())
        end = chunk.first + chunk.pages
        if sender.aux is not None or chunk.first != sender.next_page or end > len(incoming.pages):
            raise ValueError(
                f"pages [{chunk.first}, {end}) of {len(incoming.pages)}, behind {sender.next_page}"
            )
        if chunk.is_last and end != len(incoming.pages):
            raise ValueError(f"{end} pages where {len(incoming.pages)} were expected")
        self._check_rows(chunk, aux)
        parts = [(chunk.ticket, incoming.pages[chunk.first : end])]
        if chunk.is_last:
            if len(chunk.states) != len(incoming.states):
                raise ValueError(
                    f"{len(chunk.states)} states beside the KV where this side has "
                    f"{len(incoming.states)}: both servers need the same model"
                )
            parts += zip(chunk.states, incoming.states, strict=True)
        for part, (ticket, pages) in enumerate(parts):
            self._fetch(chunk.rank, part, ticket, pages, incoming, sender)
        sender.next_page = end
        if chunk.is_last:
            sender.aux = aux

    def _fetch(
        self,
        rank: int,
        part: int,
        ticket: str,
        pages: list[int],
        incoming: Incoming,
        sender: FromRank,
    ) -> None:
        """Fetches pages of one pool from a prefill rank. Holds the lock."""
        parsed = kvferry.Ticket.parse(ticket) if ticket else None
        offered = parsed.num_pages if parsed else 0
        if offered != len(pages):
            raise ValueError(
                f"{offered} pages or rows where {len(pages)} were expected, of "
                f"{self._pools[part].identity}"
            )
        if not pages:
            return
        heads = incoming.heads[part].get(rank)

        def start(timeout_ms: int) -> kvferry.FetchHandle:
            return self._fetchers[part].fetch(
                ticket,
                0,
                [] if heads is None else pages,
                heads=heads or (0, 0),
                timeout_ms=timeout_ms,
                reader=(self.attn_tp_rank % incoming.readers, incoming.readers),
            )

        fetch = Fetch(rank, time.monotonic() + self._fetch_timeout_s, start)
        sender.fetches.append(fetch)
        self._fetch_queues.add((part, parsed.address), fetch)

    def _advance_fetches(self) -> int | None:
        with self._lock:
            self._take_early_chunks()
            waits = self._fetch_queues.advance() or bool(self._with_early_chunks)
            return TURN_MS if waits else None

    def advance_incoming(self, room: int) -> None:
        """Takes note of fetches that have ended."""
        with self._lock:
            incoming = self._incoming.get(room)
            if incoming is None or incoming.is_closed:
                return
            # Asked first: fetches end at any moment, and what fails in between is seen next time.
            has_all = incoming.has_all()
            for fetch in incoming.fetches():
                if fetch.failure:
                    self._fail(room, fetch.failure)
                    return
            if not has_all:
                return
            if incoming.aux_index is not None:
                self._write_aux(incoming.senders[min(incoming.senders)].aux, incoming.aux_index)
            incoming.is_closed = True
        self.update_status(room, KVPoll.Success)

    def _write_aux(self, rows: list[bytes], row: int) -> None:
        for address, content in zip(self.kv_args.aux_data_ptrs, rows, strict=True):
            ctypes.memmove(address + row * len(content), content, len(content))

    def cancel_incoming(self, room: int) -> bool:
        """Asks for the end. True: nothing is written for the request any more, nor will be."""
        with self._lock:
            incoming = self._incoming.get(room)
            if incoming is None:
                return True
            incoming.is_closed = True
            running = [fetch for fetch in incoming.fetches() if not fetch.cancel()]
        return not running

    def settle_incoming(self, room: int) -> None:
        """When it returns nothing is written for the request any more. Raises PagesInUse."""
        self._settle(room, lambda _: self.cancel_incoming(room), "written")
        with self._lock:
            self._incoming.pop(room, None)


class KVReceiver(CommonKVReceiver):
    """A request on a decode rank. The scheduler frees its pages when poll() says Failed and after
    clear(), so neither is before nothing is written to them."""

    kv_mgr: DecodeManager
    _incoming: Incoming | None = None  # Once it has asked.
    _is_over = False  # From then on what is known of the room may be another request's.
    _why_failed: str | None = None  # Where what the room knows is not this one's reason.

    @classmethod
    def _connect(cls, endpoint: str, is_ipv6: bool = False):
        """SGLang's waits for a second with each message to a prefill rank that does not read, on
        the scheduler's thread. So it fails at once, and the request with it."""
        socket, lock = super()._connect(endpoint, is_ipv6)
        with lock:
            socket.setsockopt(zmq.SNDTIMEO, 0)
        return socket, lock

    def abort(self) -> None:
        """Also of what has failed already: the first reason counts."""
        if self._is_over or self._was_ended():
            return
        if self.kv_mgr.request_status.get(self.bootstrap_room) == KVPoll.Failed:
            self.conclude_state = KVPoll.Failed
        super().abort()

    def send_metadata(
        self, kv_indices, aux_index=None, state_indices=None, *args, **kwargs
    ) -> None:
        if self.bootstrap_room == 0:  # SGLang would wait for ever for what has arrived.
            self.kv_mgr._fail(self.bootstrap_room, _NO_ROOM)
            return  # poll() tells the prefill side.
        if self.bootstrap_infos is not None:
            asked = list(self.target_tp_ranks)
            try:
                heads = self.kv_mgr.shares_of(asked, self.prefill_info.attn_tp_size)
            except _REFUSED as error:
                self.kv_mgr._fail(self.bootstrap_room, str(error))
                return  # poll() tells the prefill side.
            incoming = Incoming(
                indices(kv_indices),
                self.kv_mgr.rows_of_states(state_indices),
                aux_index,
                readers=self.required_dst_info_num,
                prefill_ranks=asked,
                num_senders=self.required_prefill_response_num,
                heads=heads,
            )
            if not self.kv_mgr.expect(self.bootstrap_room, incoming):
                # SGLang knows requests by their rooms, so that both end.
                self.kv_mgr._fail(self.bootstrap_room, SAME_ROOM)
                return
            self._incoming = incoming
        super().send_metadata(kv_indices, aux_index, state_indices, *args, **kwargs)

    def poll(self) -> int:
        if self.kv_mgr.is_anothers(self.bootstrap_room, self._incoming, self._knows_whom_to_ask()):
            # SGLang ends its server where a request seems to arrive that has not asked yet, or to
            # be ready to ask.
            if self.conclude_state is None:
                self.conclude_state = KVPoll.Failed
                self._why_failed = SAME_ROOM
            return self.conclude_state
        self.kv_mgr.advance_incoming(self.bootstrap_room)
        status = super().poll()
        if status == KVPoll.Failed:
            self.ensure_abort_notified()  # The prefill side need not wait for its time limit.
            if not self.kv_mgr.cancel_incoming(self.bootstrap_room):
                return KVPoll.Transferring
        return status

    def failure_exception(self) -> None:
        if self._why_failed is None:
            super().failure_exception()  # Raises.
        self.clear()
        raise KVTransferError(self.bootstrap_room, self._why_failed)

    def clear(self) -> None:
        """Also of failure_exception(), where another rank has failed and poll() does not say so. Of
        two requests of one room the first one that ends ends the other too."""
        if self._is_over:
            return
        if not self._was_ended():
            self._clear_room()
        self._is_over = True

    def _knows_whom_to_ask(self) -> bool:
        """SGLang has looked its prefill ranks up."""
        return getattr(self, "bootstrap_infos", None) is not None

    def _was_ended(self) -> bool:
        """By the other request of its room, which may have a third one by now."""
        mine = self._incoming
        return mine is not None and not self.kv_mgr.expects(self.bootstrap_room, mine)

    def _clear_room(self) -> None:
        try:
            if self.kv_mgr.request_status.get(self.bootstrap_room) not in (None, KVPoll.Success):
                self.ensure_abort_notified()  # It would keep its pages until the leases end.
        finally:  # SGLang frees the pages whatever is raised.
            self.kv_mgr.settle_incoming(self.bootstrap_room)
        super().clear()
        if self.conclude_state == KVPoll.Success or self._why_failed is not None:
            with self.kv_mgr.failure_lock:  # Of a prefill rank that gave up what had come, say.
                self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
