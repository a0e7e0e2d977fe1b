"""Ranks of SGLang's prefill and decode servers, as far as disaggregation goes, and what their
schedulers do with them. SGLang's own classes on the CPU: pools, metadata rows, bootstrap server."""

import contextlib
import ctypes
import functools
import itertools
import os
import sys
import time
import urllib.request
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import sglang_pools  # Before all else of SGLang.
import torch
from servers import free_port
from waiting import wait_for

with sglang_pools.stand_in_for_triton():
    from kvferry.sglang.disaggregation import (
        KVBootstrapServer,
        KVManager,
        KVReceiver,
        KVSender,
    )
    from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
    from sglang.srt.disaggregation.common.conn import KVTransferError
    from sglang.srt.disaggregation.utils import (
        DisaggregationMode,
        MetadataBuffers,
        setup_state_kv_args,
    )
    from sglang.srt.mem_cache.memory_pool import (
        DSATokenToKVPool,
        HybridLinearKVPool,
        HybridReqToTokenPool,
        MambaPool,
        MHATokenToKVPool,
        MLATokenToKVPool,
    )
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import get_context, get_parallel

load_plugins()  # As SGLang's processes do: kvferry's tells it of pools.

PAGE, PAGES, LAYERS, HEADS, HEAD_DIM = 4, 64, 3, 4, 8
DSA_PAGE = 64  # SGLang's indexers have no other.
ROWS = 16  # Of metadata,
STATES = 24  # and of what lies beside the KV, at least.
ROW, TARGET_ROW = 3, 5  # Of the metadata of a request, on the prefill and the decode side.
CHILD_ROOM = 1 << 61
# Heads, and the ranks of a prefill and of a decode server: fewer and more of either than heads.
OTHER_SIZES = [
    (4, 1, 2), (4, 2, 1), (4, 2, 4), (4, 4, 2), (4, 8, 2), (4, 2, 8), (4, 8, 1), (4, 8, 16),
    (4, 16, 8), (2, 8, 4), (2, 4, 8), (1, 4, 2), (1, 2, 4),
]  # fmt: skip
SOURCE, TARGET = [9, 3, 40, 41, 42, 7], [20, 21, 5, 60, 6, 1]  # Pages of a request.
rooms = itertools.count(1 << 60)


class Deployment:
    """SGLang's configuration of this process, and a bootstrap server."""

    def __init__(self, port: int | None = None, *, has_server: bool = True):
        """port: of the bootstrap server, which another process may have."""
        os.environ["SGLANG_HOST_IP"] = "127.0.0.1"
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._override = get_context().override_server_args(
            host="127.0.0.1", disaggregation_bootstrap_port=self.port, device="cpu"
        )
        self.args = self._override.install()
        self._server = KVBootstrapServer("127.0.0.1", self.port) if has_server else None
        if has_server:
            # It begins in a thread of its own, and cannot be closed before it serves.
            wait_for(self._serves)

    def _serves(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._override.restore()


def _make_pool(
    kind: str, heads: int, *, dtype=torch.bfloat16, state_dtype=torch.float32, shared=(0, 0, 0)
):
    """SGLang's, for PAGES pages: it adds a page of padding itself. state_dtype: of the state of
    linear attention beside its convolutions. shared: layers that have no keys of indexers."""
    tokens = (PAGES - 1) * PAGE
    if kind == "mla":
        return MLATokenToKVPool(tokens, PAGE, dtype, 16, 4, LAYERS, "cpu", False)
    if kind == "dsa":
        tokens = (PAGES - 1) * DSA_PAGE
        return DSATokenToKVPool(
            tokens, DSA_PAGE, 16, dtype, 4, LAYERS, "cpu", 128, False, kv_cache_dim=20,
            skip_topk_layers=shared,
        )  # fmt: skip
    if kind in ("swa", "swa_mamba"):
        in_window, full = [0, 2], [1, 3, 4]
        return SWAKVPool(
            tokens, (STATES - 1) * PAGE, PAGE, dtype, heads, HEAD_DIM, in_window, full, "cpu"
        )
    if kind == "mla_swa":
        latent = {
            "page_size": PAGE, "device": "cpu", "enable_memory_saver": False,
            "kv_lora_rank": 24, "qk_rope_head_dim": 8,
        }  # fmt: skip
        return SWAKVPool(
            tokens, (STATES - 1) * PAGE, PAGE, dtype, 0, 0, [0, 2], [1, 3], "cpu",
            full_kv_pool_class=MLATokenToKVPool, swa_kv_pool_class=MLATokenToKVPool,
            full_kv_pool_kwargs=latent, swa_kv_pool_kwargs=latent,
        )  # fmt: skip
    if kind in ("mamba", "mla_mamba"):
        states = _make_states(heads, dtype, state_dtype)
        latent = {"use_mla": True, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
        return HybridLinearKVPool(
            tokens, dtype, PAGE, heads, HEAD_DIM, [1, 3, 4], "cpu", states,
            **latent if kind == "mla_mamba" else {},
        )  # fmt: skip
    return MHATokenToKVPool(tokens, PAGE, dtype, heads, HEAD_DIM, LAYERS, "cpu", False)


def _make_states(heads: int, dtype=torch.bfloat16, state_dtype=torch.float32) -> MambaPool:
    """SGLang's, of linear attention."""
    shape = SimpleNamespace(conv=[(3 * heads, 3), (2 * heads, 3)], temporal=(heads, 8, 8))
    dtypes = SimpleNamespace(conv=dtype, temporal=state_dtype)
    params = SimpleNamespace(shape=shape, dtype=dtypes, is_kda=False)
    return MambaPool(
        size=STATES, spec_state_size=0, cache_params=params, mamba_layer_ids=[0, 2], device="cpu"
    )


def _make_slots(kind: str, heads: int) -> HybridReqToTokenPool | None:
    """What SGLang has beside a pool that does not hold the states itself, as far as those go."""
    if kind != "swa_mamba":
        return None
    slots = HybridReqToTokenPool.__new__(HybridReqToTokenPool)
    slots.mamba_pool = _make_states(heads)
    return slots


def alone():
    """No other rank to agree with."""
    return patch("torch.distributed.get_world_size", lambda _: 1)


def _items(address: int, size: int, item: int) -> torch.Tensor:
    """[items, bytes] of what lies there."""
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.from_numpy(np.ctypeslib.as_array(memory)).view(-1, item)


class RankOf:
    """One rank of a server: a pool, metadata rows, and the manager of its transfers."""

    def __init__(
        self,
        deployment: Deployment,
        mode: str,
        rank: int = 0,
        size: int = 1,
        *,
        kind: str = "mha",
        has_draft: bool = False,
        pool: dict | None = None,
        draft_pool: dict | None = None,
        hidden: int = 16,
        heads: int = HEADS,
        model: str = "",
        **changes,
    ):
        """kind: of pool, mha, mla or, with something beside the KV, swa, mamba, mla_mamba,
        swa_mamba, mla_swa or dsa.
        has_draft: there is a draft model, with a pool of the same kind. pool, draft_pool: of
        _make_pool(). heads: of the model. model: its folder. changes: of KVArgs."""
        self.deployment = deployment
        self.num_heads = max(1, heads // size)
        self.first_head = rank * heads // size
        is_mla = kind in ("mla", "dsa")
        self.page_size = DSA_PAGE if kind == "dsa" else PAGE
        self.rows = MetadataBuffers(ROWS, hidden, torch.float32, 16)
        args = KVArgs()
        args.engine_rank, args.gpu_id, args.system_dp_rank, args.pp_rank = rank, 0, 0, 0
        with get_parallel().override(
            attn_tp_rank=rank, attn_tp_size=size, tp_size=size, dcp_rank=0, attn_cp_rank=0,
            attn_dp_rank=0, attn_dcp_rank=0, attn_dcp_size=1, pp_group=None, pp_rank=0, dp_rank=0,
            tp_rank=rank, moe_tp_size=size,
        ):  # fmt: skip
            self.pool = _make_pool(kind, self.num_heads, **pool or {})
            self.draft_pool = None
            if has_draft:
                self.draft_pool = _make_pool(kind, self.num_heads, **draft_pool or {})
            args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = (
                self.pool.get_contiguous_buf_infos()
            )
            if self.draft_pool is not None:
                draft = self.draft_pool.get_contiguous_buf_infos()
                args.num_draft_entries = len(draft[0])
                args.kv_data_ptrs += draft[0]
                args.kv_data_lens += draft[1]
                args.kv_item_lens += draft[2]
            args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.rows.get_buf_infos()
            args.kv_layer_ids = []
            args.kv_cache_dtype_str, args.page_size = "bfloat16", self.page_size
            args.total_kv_head_num = heads  # Of a decode server SGLang leaves it to the model.
            slots = _make_slots(kind, self.num_heads)
            setup_state_kv_args(args, self.pool, self.draft_pool, LAYERS, req_to_token_pool=slots)
            for name, value in changes.items():
                setattr(args, name, value)
            self.args = args
            server_args = SimpleNamespace(model_path=model) if model else deployment.args
            self.manager = KVManager(args, DisaggregationMode(mode), server_args, is_mla)

    def close(self) -> None:
        if not self.manager.__dict__:
            return
        self.manager.teardown()
        self.manager.__dict__.clear()  # Endpoints and pool go now, whatever SGLang's caches hold.

    def pages(self) -> list[torch.Tensor]:
        """[pages, page, ...] of each KV buffer, K of all layers first, a draft model's last."""
        pools = [getattr(it, "full_kv_pool", it) for it in (self.pool, self.draft_pool) if it]
        buffers = [
            kind
            for it in pools
            for kind in ([it.kv_buffer] if hasattr(it, "kv_buffer") else [it.k_buffer, it.v_buffer])
        ]
        return [
            layer.view(PAGES, self.page_size, *layer.shape[1:])
            for kind in buffers
            for layer in kind
        ]

    def states(self) -> list[torch.Tensor]:
        """[rows, bytes] of each buffer of what lies beside the KV."""
        args = self.args
        return [
            _items(*buffer)
            for of in zip(
                args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True
            )
            for buffer in zip(*of, strict=True)
            if buffer[2]
        ]

    def by_head(self) -> list[torch.Tensor]:
        """[pages, tokens, heads, bytes] of each KV buffer, and of those of windows."""
        return [
            it.view(torch.uint8).view(len(it), self.page_size, self.num_heads, -1)
            for it in self.pages() + self.states()
        ]

    def of_model(self, values: torch.Tensor) -> torch.Tensor:
        """This rank's part of what has all heads of the model."""
        return values[:, :, self.first_head : self.first_head + self.num_heads]

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.pages():
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        for buffer in self.states():
            buffer.copy_(torch.randint(256, buffer.shape, generator=generator))

    def sender(self, room: int) -> KVSender:
        return KVSender(self.manager, self.deployment.address, room)

    def receiver(self, room: int) -> KVReceiver:
        """One that is through with bootstrapping."""
        address = self.deployment.address
        wait_for(lambda: self.manager.try_ensure_parallel_info(address))
        receiver = KVReceiver(self.manager, address, room)
        receiver.init(0)
        assert receiver.poll() == KVPoll.WaitingForInput
        return receiver

    def receiver_beside(self, first: KVReceiver) -> KVReceiver:
        """Of another request of that room."""
        receiver = KVReceiver(self.manager, self.deployment.address, first.bootstrap_room)
        receiver.init(0)
        return receiver

    def begin_receiver(self, room: int) -> KVReceiver:
        """One whose prefill server SGLang's scheduler has just been told of, and has asked."""
        host, _, port = self.deployment.address.rpartition(":")
        receiver = KVReceiver(self.manager, self.deployment.address, room)
        request = SimpleNamespace(
            bootstrap_host=host, bootstrap_port=int(port), disagg_prefill_dp_rank=None
        )
        self._queue.pending_reqs = [SimpleNamespace(req=request, kv_receiver=receiver)]
        self._queue._resolve_pending_reqs()
        return receiver

    def look_at_unasked(self, receiver: KVReceiver) -> SimpleNamespace:
        """As SGLang's scheduler looks at a request that has no pages yet. Returns the request."""
        times = SimpleNamespace(set_bootstrap_done_time=lambda: None)
        request = SimpleNamespace(
            rid="", bootstrap_room=receiver.bootstrap_room, finished_reason=None,
            return_logprob=False, time_stats=times,
        )  # fmt: skip
        self._queue.queue = [SimpleNamespace(req=request, kv_receiver=receiver)]
        with alone():
            self._queue._update_handshake_waiters()
        return request

    def look_at_new(self, sender: KVSender) -> bool:
        """As SGLang's scheduler looks at a request that nobody has asked for yet. Whether it has
        ended it."""
        with sglang_pools.stand_in_for_triton():
            from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
        queue = PrefillBootstrapQueue.__new__(PrefillBootstrapQueue)
        queue.queue, queue.pp_size = [SimpleNamespace(disagg_kv_sender=sender, rid="")], 1
        failed = []
        queue.scheduler = SimpleNamespace(
            attn_cp_cpu_group=None, attn_tp_cpu_group=None, handle_bootstrap_failure=failed.append
        )
        queue.scheduler_stage_metrics = MagicMock()
        with alone():
            queue.pop_bootstrapped()
        return bool(failed)

    @functools.cached_property
    def _queue(self):
        """As far as it looks for prefill servers, and asking them as often as it is called, and at
        requests that wait for pages."""
        with sglang_pools.stand_in_for_triton():  # Its module takes seconds to load.
            from sglang.srt.disaggregation.decode import DecodePreallocQueue
        queue = DecodePreallocQueue.__new__(DecodePreallocQueue)
        queue.kv_manager = self.manager
        queue._ensure_last_attempt_time, queue._ensure_retry_count = {}, {}
        queue._ensure_retry_interval, queue._max_ensure_retries = 0, 15
        queue._prefill_dp_rank_queries = {}
        queue.pp_size, queue.tp_rank, queue.gloo_group = 1, 0, None
        metrics = SimpleNamespace(enable_metrics=False)
        queue.scheduler = SimpleNamespace(metrics_reporter=metrics)
        return queue

    def write_row(self, row: int, room: int, token: int) -> None:
        self.rows.output_ids[row, 0] = token
        self.rows.bootstrap_room[row, 0] = room

    def row(self, row: int) -> SimpleNamespace:
        return SimpleNamespace(
            token=int(self.rows.output_ids[row, 0]), room=int(self.rows.bootstrap_room[row, 0])
        )


def wait_status(of: list, status: int) -> None:
    """Polls all of them as schedulers do, until each says so."""
    names = {value: name for name, value in vars(KVPoll).items() if isinstance(value, int)}
    last: list[int] = []

    def all_are() -> bool:
        last[:] = [it.poll() for it in of]
        return all(it == status for it in last)

    try:
        wait_for(all_are)
    except AssertionError as error:
        raise AssertionError(f"{error} for {names[status]}: {[names[it] for it in last]}") from None


@contextlib.contextmanager
def make_ranks():
    """RankOf(...) of a deployment, that are closed at the end."""
    ranks = []
    with contextlib.closing(Deployment()) as deployment:

        def make(mode, *args, **kwargs):
            ranks.append(RankOf(deployment, mode, *args, **kwargs))
            return ranks[-1]

        yield make
        for rank in ranks:
            rank.close()


def make_sides(make, sizes, kind: str = "mha", **changes) -> list[list[RankOf]]:
    """All ranks of a prefill and of a decode server of these sizes."""
    return [
        [make(mode, rank, size, kind=kind, **changes) for rank in range(size)]
        for mode, size in zip(("prefill", "decode"), sizes, strict=True)
    ]


class Transfer:
    """One request through the schedulers of both servers: pages `source` to pages `target`."""

    def __init__(self, prefill, decode, source, target, prefix=0, states=(None, None), room=None):
        """Lists of ranks, and of pages. states: what SGLang says of what lies beside the KV, on
        either side. room: one that was another request's."""
        self.room, self.source, self.target = room or next(rooms), source, target
        self.prefill, self.decode, self.prefix = prefill, decode, prefix
        self.states = states
        self.senders = [it.sender(self.room) for it in prefill]
        self.receivers = [it.receiver(self.room) for it in decode]

    def ask(self):
        for receiver in self.receivers:
            receiver.send_metadata(
                np.array(self.target, np.int32),
                TARGET_ROW,
                self.states[1],
                decode_prefix_len=self.prefix,
            )
        return self

    def begin(self):
        self.ask()
        wait_status(self.senders, KVPoll.WaitingForInput)
        for sender, rank in zip(self.senders, self.prefill, strict=True):
            assert sender.pop_decode_prefix_len() == self.prefix
            rank.write_row(ROW, self.room, token=self.room % 1000)
            sender.init(len(self.source), ROW)
        return self

    def send(self, first, end):
        states = self.states[0] if end == len(self.source) else None
        for sender in self.senders:
            sender.send(np.array(self.source[first:end], np.int32), states)

    def end(self, status):
        wait_status(self.receivers, status)
        wait_status(self.senders, status)
        if status == KVPoll.Success:
            for rank in self.decode:
                row = rank.row(TARGET_ROW)
                assert (row.token, row.room) == (self.room % 1000, self.room)
        for it in self.receivers + self.senders:
            it.clear()

    def reasons(self):
        """Why it has failed, of receivers and senders."""
        reasons = []
        for it in self.receivers + self.senders:
            with pytest.raises(KVTransferError) as error:
                it.failure_exception()
            reasons.append(error.value.failure_reason)
        return reasons


def failed(transfer: Transfer) -> str:
    """Waits until it has, on both sides, with nothing left; says why."""
    wait_status(transfer.receivers, KVPoll.Failed)
    wait_status(transfer.senders, KVPoll.Failed)
    reasons = transfer.reasons()
    for rank in transfer.prefill:
        for publisher in rank.manager._publishers:
            assert publisher.metrics()["leases_live"] == 0
    return reasons[0]


def refused(prefill, decode, source, target, **more) -> str:
    """As whole(), of a request that fails; says why."""
    transfer = Transfer(prefill, decode, source, target, **more).begin()
    transfer.send(0, len(source))
    return failed(transfer)


def whole(prefill, decode, source, target, chunks=1, **more):
    """Returns its room."""
    transfer = Transfer(prefill, decode, source, target, **more).begin()
    ends = [len(source) * n // chunks for n in range(chunks + 1)]
    for first, end in itertools.pairwise(ends):
        transfer.send(first, end)
    transfer.end(KVPoll.Success)
    return transfer.room


def copies(rank):
    return [buffer.clone() for buffer in rank.pages()]


def check_pages(prefill, decode, before, source, target):
    """Of two ranks with the same heads: these pages have come, and no other has changed."""
    untouched = [page for page in range(PAGES) if page not in target]
    for sent, got, old in zip(prefill.pages(), decode.pages(), before, strict=True):
        assert torch.equal(got[target], sent[source])
        assert torch.equal(got[untouched], old[untouched])


def move_heads(make, kind, heads, sizes, pages, rows=((), ())):
    """A request of a model with that many heads: every decode rank has got its heads then,
    whichever ranks had them, and nothing else. pages, rows of windows: (source, target)."""
    prefill, decode = make_sides(make, sizes, kind, heads=heads)
    num_kv = len(prefill[0].pages())
    model = []
    for i, buffer in enumerate(prefill[0].by_head()):
        shape = (*buffer.shape[:2], heads, buffer.shape[3])
        model.append(torch.randint(256, shape, dtype=torch.uint8))
        for rank in prefill:
            rank.by_head()[i].copy_(rank.of_model(model[i]))
    for rank in decode:
        rank.fill(seed=2)
    expected = [[it.clone() for it in rank.by_head()] for rank in decode]
    for rank, its in zip(decode, expected, strict=True):
        for i, (buffer, values) in enumerate(zip(its, model, strict=True)):
            source, target = pages if i < num_kv else rows
            buffer[target] = rank.of_model(values)[source]
    states = [[np.array(it, np.int32)] if it else None for it in rows]
    whole(prefill, decode, *pages, chunks=2, states=states)
    for rank, its in zip(decode, expected, strict=True):
        for got, right in zip(rank.by_head(), its, strict=True):
            assert torch.equal(got, right), f"decode rank with head {rank.first_head}"


def _child_main(port: int) -> None:
    """A prefill server with half of a request, of sevens."""
    prefill = RankOf(Deployment(port), "prefill")
    for buffer in prefill.pages():
        buffer.fill_(7)
    sender = prefill.sender(CHILD_ROOM)
    print("ready", flush=True)
    wait_status([sender], KVPoll.WaitingForInput)
    sender.init(8, 1)
    sender.send(np.arange(1, 5, dtype=np.int32))
    time.sleep(60)


if __name__ == "__main__":
    _child_main(int(sys.argv[1]))
