"""What vLLM's scheduler process tells our workers, and back. Plain data: vLLM pickles it."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

TICKETS = "kvferry_tickets"  # Key of kv_transfer_params: one ticket a tensor-parallel rank.


@dataclass
class WorkerAddress(KVConnectorHandshakeMetadata):
    """Where the prefill endpoint of one worker listens."""

    address: str  # "tcp://host:port"
    epoch: int


@dataclass
class Publication:
    """A prompt whose last token is computed in this step, for others to fetch."""

    request_id: str
    lease_id: int
    block_ids: list[int]
    num_tokens: int


@dataclass
class Load:
    """A prompt to fetch, from block `first_block` of it on, into `block_ids`."""

    request_id: str
    tickets: list[str]  # By tensor-parallel rank.
    first_block: int  # Blocks before it are in the local prefix cache.
    block_ids: list[int]
    num_tokens: int  # Of the prompt.
    error: str = ""  # Why the scheduler knows that it cannot work; nothing is fetched then.


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the workers do at the start of one engine step, in this order."""

    preempted: list[str] = field(default_factory=list)  # Their blocks are reused in this step.
    withdrawn: list[str] = field(default_factory=list)  # Published, then ended without an answer.
    publications: list[Publication] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)  # Loads of requests that were aborted.
    loads: list[Load] = field(default_factory=list)
    dismissed: list[list[str]] = field(default_factory=list)  # Tickets nobody will fetch.


def parse_tickets(params: dict[str, Any], tp_size: int) -> tuple[list[str], str]:
    """The tickets in kv_transfer_params, and what is wrong with the parameters ("" if nothing).

    Never raises: the parameters come from clients.
    """
    tickets = params.get(TICKETS)
    if not isinstance(tickets, list) or not all(isinstance(t, str) for t in tickets):
        return [], (
            f"kv_transfer_params has do_remote_prefill but no list of {TICKETS}: pass on what the "
            f"prefill engine returned, unchanged (it must run KVFerryConnector too)"
        )
    if len(tickets) != tp_size:
        return tickets, (
            f"the prefill engine has {len(tickets)} tensor-parallel ranks and this one {tp_size}: "
            f"both must have the same tensor_parallel_size"
        )
    return tickets, ""
