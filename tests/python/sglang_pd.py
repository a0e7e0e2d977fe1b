"""Ranks of SGLang's prefill and decode servers, as far as disaggregation goes, and what their
schedulers do with them. SGLang's own classes on the CPU: pools, metadata rows, bootstrap server."""

import os
import sys
import time
import urllib.request
from types import SimpleNamespace

import numpy as np
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
    from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.runtime_context import get_context, get_parallel

PAGE, PAGES, LAYERS, HEADS, HEAD_DIM = 4, 64, 3, 4, 8
ROWS = 16
CHILD_ROOM = 1 << 61


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


class RankOf:
    """One rank of a server: a pool, metadata rows, and the manager of its transfers."""

    def __init__(
        self,
        deployment: Deployment,
        mode: str,
        rank: int = 0,
        size: int = 1,
        *,
        is_mla: bool = False,
        hidden: int = 16,
        **changes,
    ):
        """changes: of KVArgs."""
        self.deployment, self.is_mla = deployment, is_mla
        tokens = (PAGES - 1) * PAGE  # SGLang adds a page of padding.
        if is_mla:
            self.pool = MLATokenToKVPool(tokens, PAGE, torch.bfloat16, 16, 4, LAYERS, "cpu", False)
        else:
            heads = max(1, HEADS // size)
            self.pool = MHATokenToKVPool(
                tokens, PAGE, torch.bfloat16, heads, HEAD_DIM, LAYERS, "cpu", False
            )
        self.rows = MetadataBuffers(ROWS, hidden, torch.float32, 16)
        args = KVArgs()
        args.engine_rank, args.gpu_id, args.system_dp_rank, args.pp_rank = rank, 0, 0, 0
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = (
            self.pool.get_contiguous_buf_infos()
        )
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.rows.get_buf_infos()
        args.kv_layer_ids = []
        args.kv_cache_dtype_str, args.page_size = "bfloat16", PAGE
        args.total_kv_head_num = HEADS  # Of a decode server SGLang leaves it to the configuration.
        args.state_types, args.state_item_lens = [], []
        for name, value in changes.items():
            setattr(args, name, value)
        self.args = args
        with get_parallel().override(
            attn_tp_rank=rank, attn_tp_size=size, tp_size=size, dcp_rank=0, attn_cp_rank=0,
            attn_dp_rank=0, attn_dcp_rank=0, pp_group=None, pp_rank=0, dp_rank=0,
            tp_rank=rank, moe_tp_size=size,
        ):  # fmt: skip
            self.manager = KVManager(args, DisaggregationMode(mode), deployment.args, is_mla)

    def close(self) -> None:
        if not self.manager.__dict__:
            return
        self.manager.teardown()
        self.manager.__dict__.clear()  # Endpoints and pool go now, whatever SGLang's caches hold.

    def pages(self) -> list[torch.Tensor]:
        """[pages, page, ...] of each buffer, K of all layers first."""
        buffers = [self.pool.kv_buffer] if self.is_mla else [self.pool.k_buffer, self.pool.v_buffer]
        return [layer.view(PAGES, PAGE, *layer.shape[1:]) for kind in buffers for layer in kind]

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.pages():
            buffer.copy_(torch.randn(buffer.shape, generator=generator))

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
