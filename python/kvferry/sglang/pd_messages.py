"""What the two sides of SGLang's disaggregation tell each other beside SGLang's own messages.

Frames of ZeroMQ messages over SGLang's sockets: a tag, a JSON object, and bytes behind it. Nothing
in them is an address of memory or a page. They come from whoever reaches the port, so each field is
bounded here, and what they name is checked against what this side has asked for.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

TAG = b"KVFERRY"
_VERSION = 1
_MAX_HEADER_BYTES = 4096
_MAX_COUNT = 1 << 30
_MAX_OF = {
    "room": (1 << 64) - 1,  # SGLang's, of 63 bits.
    "readers": 4096,
}
_MAX_ADDRESS_CHARS = 255  # Of which a prefill rank keeps as many as of requests.


@dataclasses.dataclass(frozen=True)
class _Message:
    TYPE: ClassVar[str] = ""

    def frames(self, *behind: bytes) -> list[bytes]:
        header = {"v": _VERSION, "t": self.TYPE} | dataclasses.asdict(self)
        return [TAG, json.dumps(header).encode(), *behind]


@dataclasses.dataclass(frozen=True)
class Peer(_Message):
    """Decode to prefill, once: a rank that will ask for KV."""

    TYPE = "peer"
    ip: str
    port: int
    aux_bytes: list[int]  # Of a row of each metadata buffer.


@dataclasses.dataclass(frozen=True)
class Request(_Message):
    """Decode to prefill: I have room for that request's pages."""

    TYPE = "request"
    room: int
    ip: str  # Where messages for me go.
    port: int
    rank: int
    readers: int  # How many ranks ask this prefill rank for the request.
    prefix: int  # Tokens that I have already.
    is_dummy: bool  # I need nothing of this rank.


@dataclasses.dataclass(frozen=True)
class Chunk(_Message):
    """Prefill to decode: fetch these pages of a request, and with the last of them what lies beside
    the KV. Behind the last one's header stands a row of each metadata buffer."""

    TYPE = "chunk"
    room: int
    rank: int
    first: int  # Page of the request, from the prefix on.
    pages: int
    ticket: str  # Empty without pages.
    is_last: bool
    states: list[str] = dataclasses.field(default_factory=list)  # Tickets, as the one above.


def parse(frames: list[bytes]) -> tuple[Peer | Request | Chunk, list[bytes]]:
    """The message, and what stands behind it. ValueError says what is wrong."""
    if len(frames) < 2 or frames[0] != TAG or len(frames[1]) > _MAX_HEADER_BYTES:
        raise ValueError("not a message of kvferry")
    header = json.loads(frames[1])
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    if header.get("v") != _VERSION:
        raise ValueError(
            f"version {header.get('v')!r}, where this side has {_VERSION}: both servers need the "
            f"same release of kvferry"
        )
    for message in (Peer, Request, Chunk):
        if header.get("t") == message.TYPE:
            values = {
                field.name: _checked(field.name, field.type, header.get(field.name))
                for field in dataclasses.fields(message)
                if field.name in header or field.default_factory is dataclasses.MISSING
            }
            return message(**values), frames[2:]
    raise ValueError(f"unknown type {header.get('t')!r}")


def room_of(frame: bytes) -> int:
    """As SGLang's own messages have it: a number in decimal. ValueError says what is wrong."""
    return _checked("room", "int", int(frame))


def _checked(name: str, kind: Any, value: Any) -> Any:
    if kind == "str":
        right = isinstance(value, str) and (name != "ip" or len(value) <= _MAX_ADDRESS_CHARS)
    elif kind == "bool":
        right = isinstance(value, bool)
    elif kind == "list[int]":
        right = isinstance(value, list) and all(_is_count(it, _MAX_COUNT) for it in value)
    elif kind == "list[str]":
        right = isinstance(value, list) and all(isinstance(it, str) for it in value)
    else:
        right = _is_count(value, _MAX_OF.get(name, _MAX_COUNT))
    if not right:
        raise ValueError(f"{name} is {value!r}")
    return value


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most
