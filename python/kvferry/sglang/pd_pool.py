"""SGLang's KV buffers as a kvferry pool, without copying them."""

from __future__ import annotations

from typing import NamedTuple

from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.runtime_context import process_model_config

import kvferry


class Rank(NamedTuple):
    """An attention tensor-parallel rank."""

    rank: int
    size: int


class AdoptedPool:
    """The pages of a rank, and which of the model's heads they hold.

    Values are bytes to it: which dtype they are is a matter of `identity`, what both sides have to
    have in common.
    """

    def __init__(self, args: KVArgs, *, is_mla: bool, rank: Rank, device: str, model: str):
        """device: SGLang's, "cpu", "cuda". Raises NotImplementedError, naming what it is, for
        buffers that would be served wrongly."""
        if args.state_types:
            names = ", ".join(sorted(str(kind.value) for kind in args.state_types))
            raise NotImplementedError(
                f"kvferry moves the KV of full attention and MLA in SGLang, not what lies beside "
                f"it ({names})"
            )
        if args.num_draft_entries:
            raise NotImplementedError(
                "kvferry does not move the KV of a draft model (speculative decoding) in SGLang"
            )
        self.rank = rank
        self.is_mla = is_mla
        self.total_heads = 1 if is_mla else _total_heads(args)
        self.identity = f"sglang {model} {args.kv_cache_dtype_str} {args.kv_layout or ''}".strip()
        self.pool = kvferry.KvPool.adopt(
            _layout(args, ["latent"] if is_mla else ["k", "v"], self.num_heads),
            _buffers(args),
            args,
            memory="host" if device == "cpu" else f"{device}:{args.gpu_id}",
        )

    @property
    def num_heads(self) -> int:
        return kvferry.heads_of_rank(self.total_heads, *self.rank)[1]

    @property
    def heads(self) -> tuple[int, int]:
        """(first, total), as endpoints are told."""
        if self.is_mla:
            return 0, 0
        return kvferry.heads_of_rank(self.total_heads, *self.rank)[0], self.total_heads

    def heads_from(self, prefill: Rank) -> tuple[int, int] | None:
        """What this rank gets from that one, as fetch() takes it. None: nothing, it only ends that
        one's leases."""
        if self.is_mla or prefill.size == self.rank.size:
            return 0, 0
        for share in kvferry.shares_for(self.total_heads, *self.rank, prefill.size):
            if share.rank == prefill.rank and share.heads[1]:
                return share.heads
        return None


def _total_heads(args: KVArgs) -> int:
    """Of the model. SGLang says so on prefill servers."""
    known = getattr(args, "total_kv_head_num", None)
    return known or process_model_config().get_total_num_kv_heads()


def _layout(args: KVArgs, names: list[str], heads: int) -> kvferry.KvLayout:
    layers, rest = divmod(len(args.kv_item_lens), len(names))
    if not layers or rest:
        raise NotImplementedError(
            f"{len(args.kv_item_lens)} KV buffers: kvferry needs as many of each of {names}"
        )
    tensors = []
    for kind, name in enumerate(names):
        sizes = set(args.kv_item_lens[kind * layers : (kind + 1) * layers])
        row_bytes, rest = divmod(min(sizes), args.page_size * heads)
        if len(sizes) != 1 or rest:
            raise NotImplementedError(
                f"pages of {sorted(sizes)} bytes for {args.page_size} tokens of {heads} heads: "
                f"kvferry needs the same in every layer"
            )
        tensors.append((name, heads, row_bytes))
    # SGLang disaggregates no pool whose pages are HND.
    return kvferry.KvLayout(
        num_layers=layers,
        page_size=args.page_size,
        dtype="uint8",
        page_format="NHD",
        tensors=tensors,
    )


def _buffers(args: KVArgs) -> list[tuple[int, int]]:
    """(address, bytes) of each, of as many whole pages as all of them have."""
    pages = min(
        total // page for total, page in zip(args.kv_data_lens, args.kv_item_lens, strict=True)
    )
    return [
        (address, pages * page)
        for address, page in zip(args.kv_data_ptrs, args.kv_item_lens, strict=True)
    ]
