"""What the two sides of SGLang's disaggregation note of requests."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from kvferry.sglang.pd_fetches import Fetch
from kvferry.sglang.pd_messages import Chunk

MAX_RECENT = 65536

Item = TypeVar("Item", bound=Hashable)
LeaseKey = tuple[int, int]  # Which of the rank's pools it is of, and its id.


class Recent(Generic[Item]):
    """Things, of which the oldest are forgotten."""

    def __init__(self):
        self._items: OrderedDict[Item, bool] = OrderedDict()

    def add(self, item: Item) -> Item | None:
        """What is forgotten for it."""
        self._items[item] = True
        self._items.move_to_end(item)
        return self._items.popitem(last=False)[0] if len(self._items) > MAX_RECENT else None

    def take(self, item: Item) -> bool:
        """Takes it out. False: it was not in."""
        return self._items.pop(item, False)

    def __contains__(self, item: Item) -> bool:
        return item in self._items


@dataclasses.dataclass
class Outgoing:
    """A request on the prefill side."""

    leases: set[LeaseKey] = dataclasses.field(default_factory=set)  # Not fetched yet.
    is_whole: bool = False  # All chunks are published.
    is_closed: bool = False


@dataclasses.dataclass
class Job:
    """A chunk to be published."""

    room: int
    request: Outgoing
    first: int
    pages: list[list[int]]  # Of the KV and, of the last chunk, of each state.
    aux: list[bytes] | None  # Of the last chunk.
    wait_event: Any


@dataclasses.dataclass
class Destination:
    """A decode rank that has room for a request, as SGLang's own code looks at it."""

    endpoint: str
    dst_port: int
    required_dst_info_num: int
    decode_prefix_len: int
    is_dummy: bool


@dataclasses.dataclass
class FromRank:
    """What one prefill rank sends of a request."""

    fetches: list[Fetch] = dataclasses.field(default_factory=list)
    next_page: int = 0
    aux: list[bytes] | None = None  # Once the last chunk is known of.


@dataclasses.dataclass
class Incoming:
    """A request on the decode side."""

    pages: list[int]
    states: list[list[int]]  # Rows of each.
    aux_index: int | None
    readers: int  # Decode ranks that ask the same prefill rank.
    prefill_ranks: list[int]  # That this rank has asked,
    num_senders: int  # and how many of those send.
    heads: list[dict[int, tuple[int, int]]]  # Of each pool: what comes from which of them.
    # Chunks that came before the pages may be written, with their metadata rows.
    early: list[tuple[Chunk, list[bytes]]] = dataclasses.field(default_factory=list)
    may_be_written: bool = True
    senders: dict[int, FromRank] = dataclasses.field(default_factory=dict)
    is_closed: bool = False

    def most_chunks(self) -> int:
        """That can come for it: of each rank some with pages, and a last one."""
        return (len(self.pages) + 1) * len(self.prefill_ranks)

    def fetches(self) -> list[Fetch]:
        return [fetch for sender in self.senders.values() for fetch in sender.fetches]

    def has_all(self) -> bool:
        return (
            len(self.senders) == self.num_senders
            and all(sender.aux is not None for sender in self.senders.values())
            and all(fetch.is_over for fetch in self.fetches())
        )
