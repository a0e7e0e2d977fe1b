"""What vLLM's scheduler process tells our workers, and back. Plain data: vLLM pickles it."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

import kvferry

# Of an engine. Each gets a fetch for each part of a prompt, and clients say how many there are.
_MAX_RANKS = 128
TICKETS = "kvferry_tickets"  # Key of kv_transfer_params: one ticket a tensor-parallel rank.


# The same of a model whose layers come in groups: such a list for each.
GROUP_TICKETS = "kvferry_group_tickets"

# Key of kv_transfer_params: a random string which, with the prompt's tokens, names the leases of
# the tickets, so that those of another prompt are seen to be so.
PROMPT = "kvferry_prompt"
_MAX_PROMPT_CHARACTERS = 128

# Key of kv_transfer_params: tokens in a block of the engine that gave out the tickets.
BLOCK_SIZE = "kvferry_block_size"
_MAX_BLOCK_SIZE = 1 << 20  # Of a page.


@dataclass
class WorkerAddress(KVConnectorHandshakeMetadata):
    """Where the prefill endpoint of one worker listens."""

    address: str  # "tcp://host:port"
    epoch: int


@dataclass
class Publication:
    """A prompt, or a part of it, whose last token is computed in this step: for others to fetch."""

    request_id: str
    lease_id: int
    block_ids: list[int]
    num_tokens: int  # Of the prompt.
    group: int = 0  # Of layers, that the blocks belong to.


@dataclass
class LoadPart:
    """What is under one ticket, from block `first_block` of it on, goes into `block_ids`."""

    tickets: list[str]  # By tensor-parallel rank of the prefill engine.
    first_block: int  # In blocks of this engine.
    block_ids: list[int]
    num_blocks: int  # In all, as the prefill engine counts them.


@dataclass
class Load:
    """A prompt to fetch."""

    request_id: str
    parts: list[LoadPart]  # In order.
    blocks_skipped: int  # Blocks before them are in the local prefix cache.
    num_tokens: int  # Of the prompt.
    error: str = ""  # Why the scheduler knows that it cannot work; nothing is fetched then.

    @property
    def block_ids(self) -> list[int]:
        return [block for part in self.parts for block in part.block_ids]


@dataclass
class StoreAddress(KVConnectorHandshakeMetadata):
    """What a worker's store holds, and where others of the same engine reach it."""

    address: str  # "tcp://host:port"; "" when everybody goes to the backend.
    model: str
    layout: dict[str, Any]  # Of a block, as KvLayout's arguments.

    @staticmethod
    def of(address: str, model: str, layout: kvferry.KvLayout) -> "StoreAddress":
        fields = {
            "num_layers": layout.num_layers,
            "page_size": layout.page_size,
            "dtype": layout.dtype,
            "page_format": layout.page_format,
            "tensors": [tuple(tensor) for tensor in layout.tensors],
        }
        return StoreAddress(address, model, fields)

    def kv_layout(self) -> kvferry.KvLayout:
        return kvferry.KvLayout(**self.layout)


@dataclass
class Addresses(KVConnectorHandshakeMetadata):
    """What the connectors of ours in one worker tell theirs in the scheduler process."""

    pull: WorkerAddress | None = None
    store: StoreAddress | None = None


@dataclass
class StoreLoad:
    """Blocks that the store is expected to have."""

    request_id: str
    keys: list[bytes]  # One a block, without the rank.
    block_ids: list[int]
    blocks_skipped: int  # Blocks before them are in the local prefix cache.


@dataclass
class StoreSave:
    """Blocks whose last token is computed in this step."""

    request_id: str
    keys: list[bytes]
    block_ids: list[int]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the workers do at the start of one engine step, in this order."""

    preempted: list[str] = field(default_factory=list)  # Their blocks are reused in this step.
    preempted_ended: list[str] = field(default_factory=list)  # The same, and they have ended.
    withdrawn: list[str] = field(default_factory=list)  # Published, then ended without an answer.
    given_up: list[int] = field(default_factory=list)  # Leases that will not be published.
    publications: list[Publication] = field(default_factory=list)
    unasked: list[int] = field(default_factory=list)  # Leases nobody was known to have asked for.
    cancelled: list[str] = field(default_factory=list)  # Loads of requests that were aborted.
    loads: list[Load] = field(default_factory=list)
    dismissed: list[list[str]] = field(default_factory=list)  # Tickets nobody will fetch.
    kept: list[list[str]] = field(default_factory=list)  # Those that wait for their turn here.
    idle: bool = False  # Nothing is computed in this step.
    # Of store mode.
    store_preempted: list[str] = field(default_factory=list)  # Their blocks are reused.
    store_preempted_ended: list[str] = field(default_factory=list)  # The same, and they have ended.
    store_loads: list[StoreLoad] = field(default_factory=list)
    store_cancelled: list[str] = field(default_factory=list)  # Loads of aborted requests.
    store_saves: list[StoreSave] = field(default_factory=list)  # When the step is computed.


@dataclass
class AskedFor(KVConnectorWorkerMetadata):
    """Those of StepMetadata.unasked that another engine has asked for, at one rank or more."""

    lease_ids: set[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "AskedFor":
        assert isinstance(other, AskedFor)
        return AskedFor(self.lease_ids | other.lease_ids)


def parse_tickets(params: dict[str, Any]) -> tuple[list[str], str]:
    """The tickets in kv_transfer_params, one a tensor-parallel rank of the prefill engine, and what
    is wrong with the parameters ("" if nothing).

    Never raises: the parameters come from clients.
    """
    tickets = params.get(TICKETS)
    return (tickets, "") if _are_tickets(tickets) else ([], _no_list_of(TICKETS))


def parse_group_tickets(params: dict[str, Any], groups: int) -> tuple[list[list[str]], str]:
    """The same for each group of layers."""
    tickets = params.get(GROUP_TICKETS)
    if not isinstance(tickets, list) or not all(_are_tickets(it) for it in tickets):
        return [], _no_list_of(GROUP_TICKETS)
    if len(tickets) != groups:
        return tickets, (
            f"the prefill engine keeps its KV in {len(tickets)} groups of layers and this one in "
            f"{groups}: both need the same model, and the same --disable-hybrid-kv-cache-manager"
        )
    return tickets, ""


def parse_prompt(params: dict[str, Any]) -> tuple[str, str]:
    """What names the leases with the tokens, "" where the prefill engine says nothing (one from
    before there were such names, or of a prompt without tokens), and what is wrong with it. Never
    raises, as parse_tickets()."""
    prompt = params.get(PROMPT, "")
    if isinstance(prompt, str) and len(prompt) <= _MAX_PROMPT_CHARACTERS and prompt.isascii():
        return prompt, ""
    return "", f"kv_transfer_params has another {PROMPT} than the prefill engine returned"


def parse_block_size(params: dict[str, Any], own: int) -> tuple[int, str]:
    """Tokens in a block of the prefill engine, `own` if it does not say, and what is wrong with the
    parameters. Never raises, as parse_tickets()."""
    size = params.get(BLOCK_SIZE, own)
    if type(size) is int and 1 <= size <= _MAX_BLOCK_SIZE:
        return size, ""
    return own, (
        f"kv_transfer_params has a {BLOCK_SIZE} of {_shown(size)}: the prefill engine's "
        f"block_size, 1 to {_MAX_BLOCK_SIZE}"
    )


def _shown(value: object) -> str:
    """The beginning of what a client has sent. Some numbers are too long for a text, and some lists
    too deep."""
    try:
        return str(value)[:32]
    except (ValueError, RecursionError):
        return type(value).__name__


def _are_tickets(tickets: object) -> bool:
    return (
        isinstance(tickets, list)
        and all(isinstance(it, str) for it in tickets)
        and 1 <= len(tickets) <= _MAX_RANKS
    )


def _no_list_of(key: str) -> str:
    return (
        f"kv_transfer_params has do_remote_prefill but no list of {key}: pass on what the prefill "
        f"engine returned, unchanged (it must run KVFerryConnector too, with the same model)"
    )


def parse_ticket(ticket: str) -> kvferry.Ticket | None:
    """None if it is none. Never raises, as parse_tickets()."""
    try:
        return kvferry.Ticket.parse(ticket)
    except (kvferry.Error, ValueError, TypeError):  # The last of text that is no Unicode.
        return None


def parse_addresses(params: dict[str, Any], tp_size: int) -> tuple[list[str], str]:
    """Where the prefill engine's workers listen, by rank, and what is wrong with the parameters.

    tp_size: how many they are if the parameters do not say. Never raises, as parse_tickets().
    """
    host, port = params.get("remote_host"), params.get("remote_port")
    if not isinstance(host, str) or type(port) is not int:
        return [], (
            "kv_transfer_params has do_remote_prefill and a transfer_id but no remote_host and "
            "remote_port: where the prefill engine listens (its listen_host, and a fixed "
            "listen_port)"
        )
    size = params.get("tp_size", tp_size)
    if type(size) is not int or not 1 <= size <= _MAX_RANKS:
        return [], (
            f"kv_transfer_params has a tp_size of {_shown(size)}: the prefill engine's "
            f"tensor_parallel_size, 1 to {_MAX_RANKS}"
        )
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    try:
        addresses = [f"tcp://{host}:{port + rank}" for rank in range(size)]
        for address in addresses:
            kvferry.Ticket(address=address, epoch=0, lease_id=1, num_pages=0, num_tokens=0)
    except (ValueError, TypeError) as error:  # TypeError: of text that is no Unicode.
        return [], f"remote_host and remote_port: {error}"
    return addresses, ""
