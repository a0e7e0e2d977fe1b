"""What ranks of SGLang's prefill and decode servers have in common: the pools, threads that hear
messages, and how requests fail and let go of their pages."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_device, get_memory
from sglang.srt.utils.network import NetworkAddress

import kvferry
from kvferry.errors import reason_of
from kvferry.seldom_log import SeldomLog
from kvferry.sglang.pd_pool import Rank, adopt
from kvferry.sglang.pd_sockets import Sockets

_logger = logging.getLogger(__name__)
# An endpoint's thread ends transfers as soon as it is asked to, so this time is not used up, but
# when all of the process stood still meanwhile: that thread has not had its turn then.
_SETTLE_TIMEOUT_MS = 5000
_SETTLE_ATTEMPTS = 3
TURN_MS = 1  # How often what waits is looked at.
SAME_ROOM = (
    "two requests have this bootstrap_room, as SGLang gives it to all samples of a request with n "
    "above 1: ask for each sample by itself"
)


def indices(of: Any) -> list[int]:
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


def say(text: str, *of: Any) -> None:
    """Where there is memory for that: who waits for pages, or has other requests to look after,
    has to go on in any case."""
    try:  # contextlib.suppress() would need memory, too.
        words = [reason_of(it) if isinstance(it, Exception) else it for it in of]
        _logger.error(f"kvferry: {text}", *words)
    except Exception:
        pass


class PagesInUse(BaseException):
    """Ends the scheduler, and SGLang then the server: going on would give pages to other requests
    that may be read or written for the one before. No Exception, which SGLang takes for how a
    request has failed, and frees its pages."""


class Manager(CommonKVManager):
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
        self._of_strangers = SeldomLog(_logger)  # And of ranks that do not fit.
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def teardown(self) -> None:
        """Ends all transfers, and what runs here. The pool stays. SGLang's name for what it calls
        when a server changes its role, but not here: supports_role_switch is False, as nobody has
        run that. So only tests end managers; a server's end with its process."""
        self._is_over.set()
        self._end_transfers()
        waker = self._zmq_ctx.socket(zmq.PUSH)
        waker.connect(NetworkAddress(self.local_ip, self.rank_port).to_tcp())
        waker.send(b"")
        for thread in self._threads:
            thread.join(_SETTLE_TIMEOUT_MS / 1e3)
        self._zmq_ctx.destroy(linger=0)

    def _end_transfers(self) -> None:
        """And whatever this side's threads wait for."""
        raise NotImplementedError

    def _name(self) -> str:
        mode = self.disaggregation_mode.value
        return f"{mode} tp {self.attn_tp_rank} dp {self.system_dp_rank}"

    def _endpoints(self, kind: type) -> list[Any]:
        """One a pool. Messages here count pages, so the two servers' have to be of one size."""
        return [
            kind(
                it.pool,
                self._config(part),
                it.identity,
                self._name(),
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
                self._of_strangers.warn("a message was dropped: %s", reason_of(error))

    @staticmethod
    def _after(advance: Callable[[], int | None]) -> int | None:
        """What it returns; where it fails messages are read all the same."""
        try:
            return advance()
        except Exception as error:
            _logger.error("kvferry: what waits for its turn has to wait on: %s", reason_of(error))
            return TURN_MS

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
        in_use = PagesInUse(f"pages of room {room} may be {used} still")  # While there is memory.
        for _ in range(_SETTLE_ATTEMPTS):
            if self._is_in_time(are_let_go, time.monotonic() + _SETTLE_TIMEOUT_MS / 1e3):
                return
            say("pages of room %s may be %s still", room, used)
        raise in_use

    @staticmethod
    def _is_in_time(are_let_go: Callable[[float], bool], deadline: float) -> bool:
        is_said = False
        while True:
            try:
                if are_let_go(deadline):
                    return True
            except Exception as error:  # Memory that is out, say. It tells nothing of the pages.
                if not is_said:
                    say("asking again what uses pages: %s", error)
                is_said = True
            if time.monotonic() >= deadline:
                return False
            time.sleep(TURN_MS / 1e3)

    def rows_of_states(self, state_indices: list | None) -> list[list[int]]:
        """As SGLang hands them over, one a state; none of some, or of all."""
        rows = [indices(it) for it in state_indices or []]
        return rows + [[] for _ in range(len(self._pools) - 1 - len(rows))]
