"""SGLang's KV buffers, and what lies beside them, as kvferry pools, without copying them."""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from typing import Any, NamedTuple

from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.runtime_context import process_model_config

import kvferry

# Whose rows the two servers name one by one, in the same order. Others are refused: their indices
# mean something else, or nobody has looked at them.
_SERVED_STATES = (StateType.SWA, StateType.DSA, StateType.MAMBA)
# --kv-cache-dtype whose values are all there is to move. Others have scales of blocks beside them,
# of which SGLang tells a transfer backend nothing, or not in every model.
_SERVED_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
# And what becomes of those: of each pool, as the draft model's may have another.
_SERVED_VALUES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
_MAX_TENSORS = 16  # Of a layer, as the next one of a layout of kvferry.
_MAX_DIM = 1 << 20


class Rank(NamedTuple):
    """An attention tensor-parallel rank."""

    rank: int
    size: int


class Sharing(enum.Enum):
    """How ranks share out what is in a pool."""

    HEADS = enum.auto()  # Each has some of the model's heads.
    NONE = enum.auto()  # Each has all of it.
    OWN = enum.auto()  # Each has a share that cannot be put together anew for another number.


class _Buffers(NamedTuple):
    addresses: list[int]
    sizes: list[int]
    items: list[int]  # Bytes of a page, or of what else an index stands for, by buffer.


class _Part(NamedTuple):
    """What becomes a pool."""

    name: str  # Of the state; "" of the KV.
    values: str  # What its bytes are, by the pools themselves: options may say "auto".
    buffers: _Buffers
    layout: kvferry.KvLayout
    sharing: Sharing


class AdoptedPool:
    """Memory in which a request has pages or rows, and which of the model's heads they hold.

    Values are bytes to it: which dtype they are is a matter of `identity`, what both sides have to
    have in common. Two dtypes of one size would else be taken for each other.
    """

    def __init__(
        self, part: _Part, args: KVArgs, *, model: str, rank: Rank, total_heads: int, memory: str
    ):
        words = ["sglang", model, args.kv_layout or "", part.name, part.values]
        self.identity = " ".join(filter(None, words))
        self.rank, self.sharing, self.total_heads = rank, part.sharing, total_heads
        self.pool = kvferry.KvPool.adopt(
            part.layout, _whole_pages(part.buffers), args, memory=memory
        )

    @property
    def heads(self) -> tuple[int, int]:
        """(first, total), as endpoints are told."""
        if self.sharing is not Sharing.HEADS:
            return 0, 0
        return kvferry.heads_of_rank(self.total_heads, *self.rank)[0], self.total_heads

    def shares_of(self, asked: list[int], prefill_size: int) -> dict[int, tuple[int, int]]:
        """What this rank gets from each of the prefill ranks that SGLang has it ask, as fetch()
        takes it. One that is left out has nothing for it but leases, which it ends. Raises
        ValueError where they do not have all that this rank needs."""
        if self.sharing is Sharing.HEADS:
            return self._heads_of(asked, prefill_size)
        if self.sharing is Sharing.OWN and prefill_size != self.rank.size:
            raise ValueError(
                f"{self.identity}: kvferry moves it between servers of one tensor-parallel size, "
                f"not from {prefill_size} to {self.rank.size}"
            )
        # Each has all of it: the first one, as SGLang has it of MLA, where the others send nothing.
        return {min(asked): (0, 0)}

    def _heads_of(self, asked: list[int], prefill_size: int) -> dict[int, tuple[int, int]]:
        """Each head of this rank from the first one that has it. Not kvferry.shares_for(), which
        chooses among all prefill ranks with the same head: SGLang has chosen already."""
        first, count = kvferry.heads_of_rank(self.total_heads, *self.rank)
        shares, have, end = {}, first, first + count
        for rank in sorted(asked):
            held, holds = kvferry.heads_of_rank(self.total_heads, rank, prefill_size)
            until = min(held + holds, end)
            if held <= have < until:
                shares[rank] = have, until - have
                have = until
        if have != end:
            raise ValueError(
                f"{self.identity}: this rank has heads [{first}, {end}) and asks prefill ranks "
                f"{asked} of {prefill_size}, none of which has head {have}"
            )
        return shares


def adopt(args: KVArgs, *, is_mla: bool, rank: Rank, device: str, model: str) -> list[AdoptedPool]:
    """The KV, then each of args.state_types.

    device: SGLang's, "cpu", "cuda". Raises NotImplementedError, naming what it is, for buffers that
    would be served wrongly.
    """
    _check_served(args)
    is_mla = is_mla or _is_mla_in_windows(args)
    total_heads = 1 if is_mla else _total_heads(args)
    return [
        AdoptedPool(
            part,
            args,
            model=model,
            rank=rank,
            total_heads=total_heads,
            memory="host" if device == "cpu" else f"{device}:{args.gpu_id}",
        )
        for part in _parts(args, is_mla, kvferry.heads_of_rank(total_heads, *rank)[1])
    ]


def _check_served(args: KVArgs) -> None:
    if args.kv_cache_dtype_str not in _SERVED_DTYPES:
        raise NotImplementedError(
            f"kvferry does not serve --kv-cache-dtype {args.kv_cache_dtype_str} in SGLang, but "
            f"{', '.join(_SERVED_DTYPES)}: scales of blocks would not be moved"
        )
    unknown = [kind for kind in args.state_types if kind not in _SERVED_STATES]
    if unknown or len(set(args.state_types)) != len(args.state_types):
        names = ", ".join(sorted(str(kind.value) for kind in unknown or args.state_types))
        raise NotImplementedError(
            f"kvferry moves the KV of full attention and MLA in SGLang, and beside it "
            f"{', '.join(kind.value for kind in _SERVED_STATES)}, not this model's {names}"
        )


def _pools(args: KVArgs) -> tuple[Any, Any, Any]:
    """SGLang's own, a draft model's or None, and what has the slots of requests."""
    pools = getattr(args, "kvferry_pools", None)
    if pools is None:
        raise NotImplementedError(
            "kvferry was not told of SGLang's pools: its plug-in is for SGLang 0.5.23, and has to "
            "be loaded (SGLANG_PLUGINS)"
        )
    return pools


def _is_mla_in_windows(args: KVArgs) -> bool:
    """Of which SGLang tells a transfer backend that it is no MLA."""
    pool, *_ = _pools(args)
    return hasattr(pool, "is_mla") and pool.is_mla()


def _dtype(pool: Any) -> str:
    """Of the KV in a pool, which may be one of several."""
    name = _short(getattr(pool, "full_kv_pool", pool).dtype)
    if name not in _SERVED_VALUES:
        raise NotImplementedError(
            f"kvferry does not serve KV of {name} in SGLang, as in {type(pool).__name__}, but of "
            f"{', '.join(_SERVED_VALUES)}"
        )
    return name


def _dtypes_of_states(states: Any) -> str:
    """Of the buffers of a MambaPool, in their order: each kind of state has its own."""
    names = [_short(buffer.dtype) for _, buffer, *_ in states._iter_transfer_state_entries()]
    return ",".join(f"{len(list(same))}x{name}" for name, same in itertools.groupby(names))


def _values_of_state(kind: StateType, pool: Any, slots: Any) -> str:
    if kind == StateType.SWA:
        return _dtype(pool.swa_kv_pool)
    if kind == StateType.MAMBA:  # Beside windows SGLang has it with the slots of requests alone.
        return _dtypes_of_states(getattr(pool, "mamba_pool", None) or slots.mamba_pool)
    return ""  # Indexers have a format of their own.


def _empty(items: list[int]) -> str:
    """Which buffers are, as a number with a bit for each, short in an identity. Layers that take
    over another's choice of tokens have no keys, and a server may keep room for them nevertheless:
    the rows of its other buffers would not be those of the same layers."""
    bits = sum(1 << i for i, item in enumerate(items) if item == 0)
    return f"without:{bits:x}" if bits else ""


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _parts(args: KVArgs, is_mla: bool, heads: int) -> list[_Part]:
    """heads: that this rank has."""
    pool, draft_pool, slots = _pools(args)
    kinds = ["latent"] if is_mla else ["k", "v"]
    kv = _Buffers(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
    kv = _draft_as_layers(kv, args.num_draft_entries, len(kinds))
    layout = _kv_layout(kv, kinds, args.page_size, heads)
    sharing = Sharing.NONE if is_mla else Sharing.HEADS
    if args.num_draft_entries and not is_mla:
        sharing = Sharing.OWN  # Nobody says how many heads the draft model has.
    values = _dtype(pool) + (f" draft {_dtype(draft_pool)}" if draft_pool is not None else "")
    parts = [_Part("", values, kv, layout, sharing)]
    states = zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    for kind, state in zip(args.state_types, states, strict=True):
        buffers = _Buffers(*state)
        values = _values_of_state(kind, pool, slots)
        if kind == StateType.SWA and not is_mla:
            layout, sharing = _kv_layout(buffers, ["k", "v"], args.page_size, heads), Sharing.HEADS
        else:
            values = " ".join(filter(None, [values, _empty(buffers.items)]))
            buffers, layout = _as_rows(buffers)
            sharing = Sharing.OWN if kind == StateType.MAMBA else Sharing.NONE
        parts.append(_Part(kind.value, values, buffers, layout, sharing))
    return parts


def _total_heads(args: KVArgs) -> int:
    """Of the model. SGLang says so on prefill servers."""
    known = getattr(args, "total_kv_head_num", None)
    return known or process_model_config().get_total_num_kv_heads()


def _draft_as_layers(kv: _Buffers, draft: int, kinds: int) -> _Buffers:
    """The last `draft` of the buffers, a draft model's of the same pages, behind the others of
    their kind: its layers are as any other."""
    target = len(kv.items) - draft
    if target % kinds or draft % kinds:
        raise NotImplementedError(
            f"{target} KV buffers and {draft} of a draft model: kvferry needs as many of each kind"
        )
    order = [
        first + kind * count // kinds + layer
        for kind in range(kinds)
        for first, count in ((0, target), (target, draft))
        for layer in range(count // kinds)
    ]
    return _Buffers(*([of[i] for i in order] for of in kv))


def _kv_layout(buffers: _Buffers, names: list[str], page_size: int, heads: int) -> kvferry.KvLayout:
    """Of pages: the first name's of all layers, then the next one's."""
    layers, rest = divmod(len(buffers.items), len(names))
    if not layers or rest:
        raise NotImplementedError(
            f"{len(buffers.items)} KV buffers: kvferry needs as many of each of {names}"
        )
    tensors = []
    for kind, name in enumerate(names):
        sizes = set(buffers.items[kind * layers : (kind + 1) * layers])
        row_bytes, rest = divmod(min(sizes), page_size * heads)
        if len(sizes) != 1 or rest:
            raise NotImplementedError(
                f"pages of {sorted(sizes)} bytes for {page_size} tokens of {heads} heads: "
                f"kvferry needs the same in every layer, a draft model's too"
            )
        tensors.append((name, heads, row_bytes))
    # SGLang disaggregates no pool whose pages are HND.
    return kvferry.KvLayout(
        num_layers=layers,
        page_size=page_size,
        dtype="uint8",
        page_format="NHD",
        tensors=tensors,
    )


def _as_rows(buffers: _Buffers) -> tuple[_Buffers, kvferry.KvLayout]:
    """Of items that move whole, and their buffers as such a layout lists them: those with items of
    one size one after another. Without the empty ones, see _empty()."""
    counts = Counter(filter(None, buffers.items))  # In the order in which they come first.
    layers = math.gcd(*counts.values())
    order = [i for size in counts for i, item in enumerate(buffers.items) if item == size]
    sizes = [size for size, count in counts.items() for _ in range(count // layers)]
    if not sizes or len(sizes) > _MAX_TENSORS:
        raise NotImplementedError(
            f"{len(buffers.items)} buffers with items of {sorted(counts)} bytes: kvferry needs "
            f"some, and as many of each size in every layer"
        )
    layout = kvferry.KvLayout(
        num_layers=layers,
        page_size=1,
        dtype="uint8",
        page_format="NHD",
        tensors=[(f"state{i}", *_heads_and_dim(size)) for i, size in enumerate(sizes)],
    )
    return _Buffers(*([of[i] for i in order] for of in buffers)), layout


def _heads_and_dim(size: int) -> tuple[int, int]:
    """Bytes as a layout can have them."""
    heads = next(it for it in range(1, size + 1) if size % it == 0 and size // it <= _MAX_DIM)
    return heads, size // heads


def _whole_pages(buffers: _Buffers) -> list[tuple[int, int]]:
    """(address, bytes) of each, of as many whole pages as all of them have."""
    pages = min(total // page for _, total, page in zip(*buffers, strict=True))
    return [(address, pages * page) for address, _, page in zip(*buffers, strict=True)]
