"""kvferry between SGLang's prefill and decode servers.

SGLang's other backends have the prefill rank write into the decode rank's memory. Here each rank
writes its own: the prefill rank publishes a request's pages, chunk by chunk as they are computed,
and tells the decode rank, which fetches them. So nothing arrives in pages that a decode rank has
given up, whatever the other side does, and pages of a prefill rank that gives up are not read any
more. Neither needs an answer of the other for that.

Bootstrapping, statuses, time limits, aborts and heartbeats are SGLang's own (common/conn.py).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import requests
import zmq
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import (
    AbortNotification,
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_device, get_memory
from sglang.srt.utils.network import NetworkAddress

import kvferry
from kvferry.errors import reason_of
from kvferry.sglang import pd_device
from kvferry.sglang.pd_fetches import Fetch, FetchQueues
from kvferry.sglang.pd_messages import Chunk, Peer, Request, parse
from kvferry.sglang.pd_pool import Rank, adopt
from kvferry.sglang.pd_requests import (
    Destination,
    FromRank,
    Incoming,
    Job,
    LeaseKey,
    Outgoing,
    RecentRooms,
)
from kvferry.sglang.pd_sockets import Sockets

_logger = logging.getLogger(__name__)
# What endpoints raise for bad input and for trouble; never a reason to stop the server.
_REFUSED = (kvferry.Error, ValueError)
# An endpoint's thread ends transfers as soon as it is asked to, so this time is not used up, but
# when all of the process stood still meanwhile: that thread has not had its turn then.
_SETTLE_TIMEOUT_MS = 5000
_SETTLE_ATTEMPTS = 3
_TURN_MS = 1  # How often fetches that wait are looked at.
_MAX_DP_RANKS = 1024  # Of a prefill server.
_FIRST_OF_DP_RANK = {"prefill_cp_rank": 0, "target_tp_rank": 0, "target_pp_rank": 0}
_SAME_ROOM = (
    "two requests have this bootstrap_room, as SGLang gives it to all samples of a request with n "
    "above 1: ask for each sample by itself"
)
_PAST_ASKING = (KVPoll.Transferring, KVPoll.Success)
_ABORTED_HERE = "Aborted by the prefill side"
_ABORTED_THERE = "Aborted by the decode side"
_ABORT = b"ABORT"  # SGLang's, decode to prefill.


def _indices(of: Any) -> list[int]:
    """Of pages or rows: an array, a list of arrays, or None."""
    return [] if of is None else np.asarray(of).reshape(-1).tolist()


def _is_readable(address: int) -> bool:
    """Whether this process may read there, as the kernel says: trying would end it."""
    read_end, write_end = os.pipe()
    try:
        return os.write(write_end, (ctypes.c_char * 1).from_address(address)) == 1
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        return False
    finally:
        os.close(read_end)
        os.close(write_end)


class PagesInUse(BaseException):
    """Ends the scheduler, and SGLang then the server: going on would give pages to other requests
    that may be read or written for the one before. No Exception, which SGLang takes for how a
    request has failed, and frees its pages."""


class KVManager(CommonKVManager):
    """One rank's. Methods are the scheduler's thread's, but for what its own threads call."""

    kv_status_msg_tag = b"KVFERRY_STATUS"
    kv_status_msg_carries_reason = True

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args,
        is_mla_backend: bool | None = False,
    ):
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self._check_supported()
        # SGLang says the latter of MLA beside linear attention, and that it is none.
        is_mla = is_mla_backend or getattr(args, "is_hybrid_mla_backend", False)
        self._pools = adopt(  # The KV's first. Each has an endpoint of its own.
            args,
            is_mla=bool(is_mla),
            rank=Rank(self.attn_tp_rank, self.attn_tp_size),
            device=get_device().device,
            model=os.path.basename(os.path.normpath(server_args.model_path)),
        )
        self._sockets = Sockets(self._zmq_ctx)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        name = f"{disaggregation_mode.value} tp {self.attn_tp_rank} dp {self.system_dp_rank}"
        if disaggregation_mode == DisaggregationMode.PREFILL:
            self._outgoing: dict[int, Outgoing] = {}
            self._by_lease: dict[LeaseKey, tuple[int, Outgoing]] = {}
            self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
            self._given_up = RecentRooms()  # Failed, and the decode side knows.
            self._live: set[int] = set()  # Those that have a sender now,
            self._begun = RecentRooms()  # and those that ever had one.
            self._aborted_early = RecentRooms()  # On the decode side, before they began here.
            self._publishers = self._endpoints(kvferry.PrefillEndpoint, name)
            for publisher in self._publishers:
                _logger.info("kvferry: %s listens on %s", name, publisher.address)
            self._start("publish", self._publish_chunks)
            self._start("prefill", self._serve, self._on_prefill_message)
        else:
            self._incoming: dict[int, Incoming] = {}
            # How long a request may take is SGLang's to say, which ends it then.
            config = kvferry.Config.make()
            self._fetch_timeout_s = min(self.waiting_timeout, config.max_fetch_timeout_ms / 1e3)
            self._fetch_queues = FetchQueues(config.max_fetches_per_peer)
            self._fetchers = self._endpoints(kvferry.DecodeEndpoint, name)
            # Requests whose pages the device may write still, for those that had them before.
            self._wait_on_device = pd_device.wait_on(get_device().device, args.gpu_id)
            self._given_pages: queue.SimpleQueue[tuple[int, Incoming] | None] = queue.SimpleQueue()
            self._with_early_chunks: list[Incoming] = []
            if self._wait_on_device is not None:
                self._start("pages", self._free_pages)
            self._start("decode", self._serve, self._on_decode_message, self._advance_fetches)
            self._threads.append(self._start_heartbeat_checker_thread())

    def _endpoints(self, kind: type, name: str) -> list[Any]:
        """One a pool. Messages here count pages, so the two servers' have to be of one size."""
        return [
            kind(
                it.pool,
                self._config(part),
                it.identity,
                name,
                heads=it.heads,
                converts_pages=False,
            )
            for part, it in enumerate(self._pools)
        ]

    def _config(self, part: int) -> kvferry.Config:
        """Of the endpoint of a pool. Ports that are given are the first rank's first endpoint's;
        the others take those behind them."""
        config = kvferry.Config.make()
        rank = (self.system_dp_rank or 0) * self.attn_tp_size + self.attn_tp_rank
        behind = rank * len(self._pools) + part
        ports = {"listen_port": config.listen_port, "data_port": config.data_port}
        return kvferry.Config.make(
            {name: port + behind for name, port in ports.items() if port != 0}
        )

    def _check_supported(self) -> None:
        sizes = {
            "pipeline parallelism": self.pp_size,
            "context parallelism of attention": self.attn_cp_size,
            "context parallelism of decoding": self.dcp_size,
            "sharding of KV pages": self.kv_shard_size,
        }
        for name, size in sizes.items():
            if size != 1:
                raise NotImplementedError(
                    f"kvferry does not serve {name} in SGLang, here of {size}"
                )
        if get_memory().enable_hisparse:  # KV in pages of the host, by indices of their own.
            raise NotImplementedError("kvferry does not serve --enable-hisparse in SGLang")
        if not all(_is_readable(address) for address in self.kv_args.aux_data_ptrs):
            raise NotImplementedError(
                "kvferry reads and writes SGLang's metadata rows in host memory, and they are not "
                "there (SGLANG_MOONCAKE_CUSTOM_MEM_POOL has to be unset)"
            )

    def _start(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, name=f"kvferry-{name}", args=args, daemon=True)
        thread.start()
        self._threads.append(thread)

    def teardown(self) -> None:
        """Ends all transfers, and what runs here. The pool stays. SGLang's name for what it calls
        when a server changes its role, but not here: supports_role_switch is False, as nobody has
        run that. So only tests end managers; a server's end with its process."""
        self._is_over.set()
        if self.disaggregation_mode == DisaggregationMode.PREFILL:
            self._jobs.put(None)
            for publisher in self._publishers:
                publisher.close()
        else:
            self._heartbeat_shutdown.set()
            self._given_pages.put(None)
            if self._prefill_recompute_executor is not None:
                self._prefill_recompute_executor.shutdown(cancel_futures=True)
            for fetcher in self._fetchers:
                fetcher.close()
        waker = self._zmq_ctx.socket(zmq.PUSH)
        waker.connect(NetworkAddress(self.local_ip, self.rank_port).to_tcp())
        waker.send(b"")
        for thread in self._threads:
            thread.join(_SETTLE_TIMEOUT_MS / 1e3)
        self._zmq_ctx.destroy(linger=0)

    def _send_multipart_locked(
        self, endpoint: str, parts: list[bytes], is_ipv6: bool = False
    ) -> None:
        """What SGLang's own code calls too."""
        self._sockets.send(endpoint, parts, is_ipv6)

    def _serve(
        self,
        on_message: Callable[[list[bytes]], None],
        advance: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Reads what the other side says. In a thread of its own, that nothing must end before
        teardown(): all requests would wait for their time limits. advance: is called in between;
        how long the next call may take, in ms."""
        while not self._is_over.is_set():
            try:
                if self.server_socket.poll(self._after(advance)):
                    frames = self.server_socket.recv_multipart()
                    if not self._is_over.is_set():
                        on_message(frames)
            except Exception as error:  # Whatever a stranger sends.
                _logger.warning("kvferry: a message was dropped: %s", reason_of(error))

    @staticmethod
    def _after(advance: Callable[[], int | None]) -> int | None:
        """What it returns; where it fails messages are read all the same."""
        try:
            return advance()
        except Exception as error:
            _logger.error("kvferry: what waits for its turn has to wait on: %s", reason_of(error))
            return _TURN_MS

    def _fail(self, room: int, reason: str) -> None:
        """Of a request that has not ended. The first reason counts."""
        if self.request_status.get(room) not in (None, KVPoll.Failed, KVPoll.Success):
            self.record_failure(room, reason)
            self.update_status(room, KVPoll.Failed)
            if room not in self.request_status:  # It has ended meanwhile, on another thread.
                with self.failure_lock:  # The next request of this room would have failed so.
                    self.failure_records.pop(room, None)

    def _settle(self, room: int, are_let_go: Callable[[float], bool], used: str) -> None:
        """Waits until nothing uses the request's pages. are_let_go: whether nothing does, asked
        again and again; it may wait until that time itself. Raises PagesInUse, and nothing else."""
        for _ in range(_SETTLE_ATTEMPTS):
            if self._is_in_time(are_let_go, time.monotonic() + _SETTLE_TIMEOUT_MS / 1e3):
                return
            _logger.error("kvferry: pages of room %s may be %s still", room, used)
        raise PagesInUse(f"pages of room {room} may be {used} still")

    @staticmethod
    def _is_in_time(are_let_go: Callable[[float], bool], deadline: float) -> bool:
        is_said = False
        while True:
            try:
                if are_let_go(deadline):
                    return True
            except Exception as error:  # Memory that is out, say. It tells nothing of the pages.
                if not is_said:
                    _logger.error("kvferry: asking again what uses pages: %s", reason_of(error))
                is_said = True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_TURN_MS / 1e3)

    # ---------------------------------------------------------------- the prefill side

    def _on_prefill_message(self, frames: list[bytes]) -> None:
        if frames[0] == _ABORT:
            self._abort_from_decode(int(frames[1]))
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
            _logger.error(
                "kvferry: decode rank %s:%d has metadata rows of %s bytes, this rank of %s: "
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
        infos = self.transfer_infos.setdefault(message.room, {})
        infos[message.rank] = Destination(
            message.ip, message.port, message.readers, message.prefix, message.is_dummy
        )
        if len(infos) == message.readers:
            self.resolve_kv_replica_factor(infos)
            self.req_to_decode_prefix_len[message.room] = max(
                info.decode_prefix_len for info in infos.values()
            )
            self.update_status(message.room, KVPoll.WaitingForInput)

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
        self.send_kv_status_message(
            targets=targets,
            bootstrap_room=room,
            status=KVPoll.Failed,
            failure_reason=self.failure_records.get(room, _ABORTED_HERE),
        )

    def _fail_outgoing(self, room: int, reason: str) -> None:
        """Does not wait for the scheduler's look at it."""
        if room in self.request_status:
            self._fail(room, reason)
            self.give_up(room)

    def begin(self, room: int) -> bool:
        """Before anything can come for it; a room may be used again once its request has ended.
        False: it has not."""
        with self._lock:
            if room in self._live:
                return False
            self._given_up.take(room)
            self._live.add(room)
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
            if room in self._live and room in self.request_status:
                self._given_up.add(room)
            else:
                if room not in self._begun:
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
        pages = [_indices(kv_indices)]
        if is_last_chunk:
            pages += self.rows_of_states(state_indices)
        aux = self._read_aux(aux_index) if is_last_chunk else None
        self._jobs.put(Job(bootstrap_room, request, index_slice.start, pages, aux, wait_event))

    def rows_of_states(self, state_indices: list | None) -> list[list[int]]:
        """As SGLang hands them over, one a state; none of some, or of all."""
        rows = [_indices(it) for it in state_indices or []]
        return rows + [[] for _ in range(len(self._pools) - 1 - len(rows))]

    def _read_aux(self, row: int) -> list[bytes]:
        args = self.kv_args
        return [
            ctypes.string_at(address + row * size, size)
            for address, size in zip(args.aux_data_ptrs, args.aux_item_lens, strict=True)
        ]

    def _publish_chunks(self) -> None:
        """In a thread of its own: it waits for the device."""
        while (job := self._jobs.get()) is not None:
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
        with self._lock:
            self._live.discard(room)
            self._outgoing.pop(room, None)

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

    # ---------------------------------------------------------------- the decode side

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

    def _abort_at_prefill(self, bootstrap_addr: str, rooms: list[int]) -> None:
        """Of requests that have not asked there: it would wait for them until a time limit. Who has
        a request is not known yet, so each data-parallel rank hears of it; of tensor-parallel ranks
        the first one does, and SGLang ends it on the others."""
        try:
            for rank in range(_MAX_DP_RANKS):
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

    def is_anothers(self, room: int, mine: Incoming | None) -> bool:
        """Whether what is known of the room is of another request than the one that expects `mine`
        (None: nothing yet), or of none any more."""
        if not self.expects(room, mine):
            return True
        status = self.request_status.get(room)
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
                    if failure and not incoming.is_closed:
                        self._fail(room, failure)
                        incoming.is_closed = True  # What has come for it is of no use.
                    incoming.may_be_written = not failure

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
            return _TURN_MS if waits else None

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


class KVSender(CommonKVSender):
    """A request on a prefill rank. The scheduler frees its pages after failure_exception() and
    abort(), on any rank's failure, so both wait until none is read."""

    kv_mgr: KVManager

    def __init__(self, mgr: KVManager, bootstrap_addr: str, bootstrap_room: int, *args, **kwargs):
        # From when it is over on, what is known of the room may be another request's.
        self._is_over = not mgr.begin(bootstrap_room)
        self._why_failed = _SAME_ROOM if self._is_over else None
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
            if self.kv_mgr.request_status.get(self.bootstrap_room) not in (None, KVPoll.Success):
                self.kv_mgr.give_up(self.bootstrap_room)
        finally:  # SGLang frees its pages whatever is raised.
            super().failure_exception()

    def clear(self) -> None:
        if self._is_over:
            return
        self.kv_mgr.settle_outgoing(self.bootstrap_room)
        self._is_over = True
        super().clear()


class KVReceiver(CommonKVReceiver):
    """A request on a decode rank. The scheduler frees its pages when poll() says Failed and after
    clear(), so neither is before nothing is written to them."""

    kv_mgr: KVManager
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
        if self.bootstrap_infos is not None:
            asked = list(self.target_tp_ranks)
            try:
                heads = self.kv_mgr.shares_of(asked, self.prefill_info.attn_tp_size)
            except _REFUSED as error:
                self.kv_mgr._fail(self.bootstrap_room, str(error))
                return  # poll() tells the prefill side.
            incoming = Incoming(
                _indices(kv_indices),
                self.kv_mgr.rows_of_states(state_indices),
                aux_index,
                readers=self.required_dst_info_num,
                prefill_ranks=asked,
                num_senders=self.required_prefill_response_num,
                heads=heads,
            )
            if not self.kv_mgr.expect(self.bootstrap_room, incoming):
                # SGLang knows requests by their rooms, so that both end.
                self.kv_mgr._fail(self.bootstrap_room, _SAME_ROOM)
                return
            self._incoming = incoming
        super().send_metadata(kv_indices, aux_index, state_indices, *args, **kwargs)

    def poll(self) -> int:
        if self.kv_mgr.is_anothers(self.bootstrap_room, self._incoming):
            # SGLang ends its server where a request seems to arrive that has not asked yet.
            if self.conclude_state is None:
                self.conclude_state = KVPoll.Failed
                self._why_failed = _SAME_ROOM
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


class KVBootstrapServer(CommonKVBootstrapServer):
    """SGLang's own."""
