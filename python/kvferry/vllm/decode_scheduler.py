"""The decode half of the connector in vLLM's scheduler process: it decides, and moves nothing."""

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.config import VllmConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

import kvferry
from kvferry.vllm.metadata import (
    GROUP_TICKETS,
    TICKETS,
    Load,
    LoadPart,
    StepMetadata,
    parse_addresses,
    parse_block_size,
    parse_group_tickets,
    parse_prompt,
    parse_ticket,
    parse_tickets,
)
from kvferry.vllm.parts import (
    NULL_BLOCK,
    TRANSFER_ID,
    Part,
    Windows,
    adapter_of,
    announced_parts,
    blocks_of,
    handed_over,
    in_groups,
    leases_of_all,
    most_blocks_loading,
    places,
)
from kvferry.vllm.room import Room

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

_KEEPS_A_LEASE = 3  # So that one may be lost, and another one late.
_KEPT_PER_STEP = 64  # Requests; others are kept in the next one.
_MAX_TAKERS = 4096  # Requests with the same tickets come together.


class _Offer(NamedTuple):
    """Blocks of a prompt that the prefill engine has, or will have, under one ticket."""

    tickets: list[str]  # By tensor-parallel rank.
    first_block: int
    end_block: int
    num_blocks: int  # As the prefill engine counts them, whose blocks may be of another size.
    group: int = 0  # Of layers.


class _Loading(NamedTuple):
    """A load that the workers have and have not reported back."""

    transfer: int
    block_ids: list[int]
    peer: str  # The prefill engine, if it counts there.
    aborted: bool = False  # Its request was.


@dataclass
class _Waiting:
    """A request to load that has no blocks yet."""

    request: Request
    kept: float  # time.monotonic(), when its leases were, or began.
    tickets: list[list[str]] | None = None  # By part; None: not needed so far.


class DecodeScheduler:
    """Loads prompts that another engine has computed, or is computing.

    A request with do_remote_prefill gets blocks for its whole prompt and waits while the workers
    fetch what the local prefix cache lacks. Parameters that cannot work make a load that fails, so
    that vLLM's kv_load_failure_policy decides what becomes of the request.

    It may have to wait for its blocks until its prefill engine takes as many fetches more, and one
    with a transfer_id until there is room for what is not computed yet. As long as it waits, for
    that or for its turn, the prefill engine is asked to keep what it has.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        block_size: int,
        windows: Windows,
        room: Room,
        max_fetches_per_peer: int,
        lease_ms: int,
    ):
        """max_fetches_per_peer, lease_ms: as of the prefill engines."""
        self._windows = windows
        self._keep_every_s = lease_ms / 1e3 / _KEEPS_A_LEASE
        self._tp_size = vllm_config.parallel_config.tensor_parallel_size
        self._block_size = block_size
        self._room = room
        self._max_fetches_per_peer = max_fetches_per_peer
        # How many parts may be under way from each prefill engine from which some are.
        self._peers: dict[str, Room] = {}
        self._loading: dict[str, _Loading] = {}
        self._loads: list[Load] = []  # For the next step, as the following two.
        self._cancelled: list[str] = []
        self._dismissed: list[list[str]] = []
        # Of the last loads: the request for which a prompt was fetched; "" if that has failed.
        self._takers: OrderedDict[int, str] = OrderedDict()
        # Requests that have no blocks yet, the longest kept first.
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        # Of those, which are looked at step after step.
        self._transfers: dict[str, int] = {}
        self._fetches: dict[str, tuple[str, int]] = {}  # From where, and how many.

    def on_new_request(self, request: Request) -> None:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            self._waiting[request.request_id] = _Waiting(request, time.monotonic())

    def _take_kept(self) -> list[list[str]]:
        """Tickets of requests that wait, those first of which nothing has been kept for longest."""
        now, kept = time.monotonic(), []
        for _ in range(min(_KEPT_PER_STEP, len(self._waiting))):
            request_id, waiting = next(iter(self._waiting.items()))
            if now - waiting.kept < self._keep_every_s:
                break
            if waiting.tickets is None:
                offers, _ = self._offers(waiting.request, waiting.request.kv_transfer_params or {})
                waiting.tickets = [offer.tickets for offer in offers if offer.tickets]
            waiting.kept = now
            self._waiting.move_to_end(request_id)
            kept += waiting.tickets
        return kept

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """(tokens that the prefill engine has and we lack, whether loading them takes a while).

        Requests of one prompt with several answers (n > 1) come with the same tickets, which serve
        once: the others wait for the first one's load (None tokens), and then find its blocks in
        the prefix cache and compute what is not there.
        """
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        taker = self._takers.get(self._transfer(request, params))
        if taker:
            return (None, False) if taker in self._loading else (0, False)
        missing = self._loadable(request) - num_computed_tokens
        if missing <= 0:
            return 0, False
        if not self._may_begin(request, params):
            return None, False
        return missing, True

    def _may_begin(self, request: Request, params: dict[str, Any]) -> bool:
        """Whether there is room here for a prompt that is not computed yet, and for more fetches
        where it is."""
        if _is_announced(params) and not self._room.lets_in(
            request.request_id, self._blocks(request)
        ):
            return False
        peer, fetches = self._fetches_of(request, params)
        there = self._peers.get(peer)
        return there is None or there.lets_in(request.request_id, fetches)

    def _fetches_of(self, request: Request, params: dict[str, Any]) -> tuple[str, int]:
        """(the prefill engine, how many fetches each of its ranks gets at most)"""
        if (found := self._fetches.get(request.request_id)) is None:
            if _is_announced(params):
                num_tokens = handed_over(self._windows, request.num_prompt_tokens)
                fetches = len(places(num_tokens, self._block_size, self._windows))
            else:
                fetches = len(self._windows)
            found = self._fetches[request.request_id] = self._peer(params), fetches
        return found

    def _peer(self, params: dict[str, Any]) -> str:
        """Where the first of the prefill engine's ranks listens; "" if nothing is asked for there,
        as nobody is."""
        if _is_announced(params):
            addresses, error = parse_addresses(params, self._tp_size)
            return "" if error else addresses[0]
        groups, error = self._tickets(params)
        ticket = None if error else parse_ticket(groups[0][0])
        return "" if ticket is None else ticket.address

    def _transfer(self, request: Request, params: dict[str, Any]) -> int:
        if (transfer := self._transfers.get(request.request_id)) is None:
            transfer = self._transfers[request.request_id] = _key_of(request, params)
        return transfer

    def _loadable(self, request: Request) -> int:
        """Tokens of the prompt. If all were loaded, vLLM would compute the last one again, but give
        back a block of a window that ends with the first token that one needs."""
        return request.num_prompt_tokens - in_groups(self._windows)

    def _blocks(self, request: Request) -> int:
        """Of all groups, at most, while they are loaded."""
        return most_blocks_loading(self._windows, request.num_prompt_tokens, self._block_size)

    def update_state_after_alloc(
        self, request: Request, blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # Once only: after a preemption we compute ourselves.
        transfer = self._transfer(request, params)
        peer, _ = self._fetches_of(request, params)
        self._forget_waiting(request.request_id)
        offers, error = self._offers(request, params)
        if self._takers.get(transfer) == "":  # The engine's policy is for this one too.
            error = "the load of these tickets has failed; prefill the request again"
        if num_external_tokens == 0:  # Everything is cached here, or another request's.
            self._dismiss(request.request_id, transfer, offers)
            return
        load = self._load(request, offers, blocks.get_block_ids(), num_external_tokens)
        # What is wrong with the tickets comes before what is with the blocks.
        load.error = error or load.error
        self._loads.append(load)
        self._begin_load(request, params, load, transfer, peer)
        if not error:
            self._take(transfer, request.request_id)

    def _take(self, transfer: int, request_id: str) -> None:
        self._takers[transfer] = request_id
        if len(self._takers) > _MAX_TAKERS:
            self._takers.popitem(last=False)

    def _load(
        self,
        request: Request,
        offers: list[_Offer],
        block_ids: tuple[list[int], ...],
        num_external_tokens: int,
    ) -> Load:
        """Of what is offered and not here yet, into blocks by group. What is here of an offer, all
        of it, is let go of."""
        # Local hits end at a block boundary, so the rest starts there.
        cached = (self._loadable(request) - num_external_tokens) // self._block_size
        num_tokens = handed_over(self._windows, request.num_prompt_tokens)
        load = Load(request.request_id, [], cached, num_tokens)
        for tickets, begin, end, num_blocks, group in offers:
            first = max(begin, cached)
            into = block_ids[group][first:end]
            if NULL_BLOCK in into:
                load.error = "vLLM has given back a block that the window still needs"
            if into:
                load.parts.append(LoadPart(tickets, first - begin, into, num_blocks))
            else:
                self._dismissed.append(tickets)
        return load

    def _begin_load(
        self, request: Request, params: dict[str, Any], load: Load, transfer: int, peer: str
    ) -> None:
        """Counts what the load takes until it is reported back."""
        self._loading[request.request_id] = _Loading(transfer, load.block_ids, peer)
        if _is_announced(params):
            self._room.loads.take(request.request_id, self._blocks(request))
        if peer:
            there = self._peers.setdefault(peer, Room(self._max_fetches_per_peer, 0))
            there.loads.take(request.request_id, len(load.parts))

    def _offers(
        self, request: Request, params: dict[str, Any], is_its_prompt: bool = True
    ) -> tuple[list[_Offer], str]:
        """What the prompt is to be had under, all of it, and why it is not ("" if it is).
        is_its_prompt: what the request has is the prompt of the tickets, or they are no use."""
        tokens = request.prompt_token_ids
        if tokens is not None:
            tokens = tokens[: handed_over(self._windows, len(tokens))]
        if _is_announced(params):
            parts, error = announced_parts(request, tokens, params, self._block_size, self._windows)
            if not error:
                addresses, error = parse_addresses(params, self._tp_size)
            if not error:
                return [self._offer(request, part, addresses) for part in parts], ""
            groups = []
        else:
            groups, error = self._tickets(params)
            if is_its_prompt:
                error = error or _check_prompt(request, params, groups, tokens)
        size, wrong_size = parse_block_size(params, self._block_size)
        error = error or wrong_size or self._check_block_size(size)
        num_tokens = handed_over(self._windows, request.num_prompt_tokens)
        offers = []
        for group in range(len(self._windows)):
            blocks = blocks_of(self._windows, group, num_tokens, self._block_size)
            theirs = blocks_of(self._windows, group, num_tokens, size)
            tickets = [] if error else groups[group]
            offers.append(_Offer(tickets, blocks.start, blocks.stop, len(theirs), group))
        return offers, error

    def _tickets(self, params: dict[str, Any]) -> tuple[list[list[str]], str]:
        """By group of layers, and what is wrong with them ("" if nothing)."""
        if in_groups(self._windows):
            return parse_group_tickets(params, len(self._windows))
        tickets, error = parse_tickets(params)
        return [tickets], error

    def _check_block_size(self, size: int) -> str:
        """Why tickets of blocks of that size are no use here ("" if they are)."""
        if size == self._block_size or not in_groups(self._windows):
            return ""
        return (
            f"the prefill engine has a block_size of {size} and this one of {self._block_size}: "
            f"what a layer with a sliding window keeps of a prompt begins at another token then, "
            f"and a recurrent state takes as much as a block. Give both the same (or, with windows "
            f"alone, --disable-hybrid-kv-cache-manager)"
        )

    def _offer(self, request: Request, part: Part, addresses: list[str]) -> _Offer:
        tickets = [
            kvferry.Ticket(
                address=address,
                epoch=0,  # Nobody has told us which process it is.
                lease_id=part.lease_id,
                num_pages=part.end_block - part.first_block,
                num_tokens=handed_over(self._windows, request.num_prompt_tokens),
            )
            for address in addresses
        ]
        texts = [str(ticket) for ticket in tickets]
        num_blocks = part.end_block - part.first_block
        return _Offer(texts, part.first_block, part.end_block, num_blocks, part.group)

    def fill(self, meta: StepMetadata) -> None:
        """Adds what the workers have to fetch, to stop fetching and to let go."""
        for room in (self._room, *self._peers.values()):
            room.end_step()
        meta.loads, self._loads = self._loads, []
        meta.cancelled, self._cancelled = self._cancelled, []
        meta.dismissed, self._dismissed = self._dismissed, []
        meta.kept = self._take_kept()

    def _dismiss(self, request_id: str, transfer: int, offers: list[_Offer]) -> None:
        """Unless another request has taken the tickets, whose load they end with. They have served
        then: whoever still comes with them computes the prompt."""
        if not self._takers.get(transfer):
            self._dismissed += [offer.tickets for offer in offers]
            has_tickets = any(offer.tickets for offer in offers)
            if has_tickets and transfer not in self._takers:  # "" stays: their load has failed.
                self._take(transfer, request_id)

    def request_finished(self, request: Request) -> None:
        request_id, params = request.request_id, request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):  # It ended before it was given blocks.
            params["do_remote_prefill"] = False
            # One that vLLM has turned down comes with a prompt of its own making.
            offers, _ = self._offers(request, params, is_its_prompt=False)
            self._dismiss(request_id, self._transfer(request, params), offers)
        elif (loading := self._loading.get(request_id)) is not None:
            # vLLM keeps the blocks until the load is reported.
            self._cancelled.append(request_id)
            # vLLM also ends one whose load has failed, before it reports that.
            aborted = request.status == RequestStatus.FINISHED_ABORTED
            self._loading[request_id] = loading._replace(aborted=aborted)
        self._forget_waiting(request_id)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if output.failed_recving or output.invalid_block_ids:  # All blocks of all loads are many.
            self._note_failed(output)
        for request_id in output.finished_recving or ():
            if (ended := self._loading.pop(request_id, None)) is not None:
                self._give_back(request_id, ended.peer)

    def _note_failed(self, output: KVConnectorOutput) -> None:
        for request_id, load in self._loading.items():
            failed = request_id in output.failed_recving
            failed = failed or not output.invalid_block_ids.isdisjoint(load.block_ids)
            # Who waits for a load that was aborted computes the prompt.
            if failed and not load.aborted and load.transfer in self._takers:
                self._takers[load.transfer] = ""

    def _give_back(self, request_id: str, peer: str) -> None:
        self._room.loads.give_back(request_id)
        if (there := self._peers.get(peer)) is not None:
            there.loads.give_back(request_id)
            if there.empty:
                del self._peers[peer]

    def _forget_waiting(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._transfers.pop(request_id, None)
        self._fetches.pop(request_id, None)


def _is_announced(params: dict[str, Any]) -> bool:
    """Whether a request to load was given to both engines at the same time."""
    tickets = TICKETS in params or GROUP_TICKETS in params
    return not tickets and params.get(TRANSFER_ID) is not None


def _check_prompt(
    request: Request, params: dict[str, Any], groups: list[list[str]], tokens: list[int] | None
) -> str:
    """Why the tickets are no use for these tokens ("" if they are, or may be)."""
    name, error = parse_prompt(params)
    if error or not name:
        return error
    expected_ids = [0] * len(groups)
    if tokens is not None:
        expected_ids = leases_of_all(name, tokens, len(groups), adapter_of(request))
    for tickets, expected in zip(groups, expected_ids, strict=True):
        for ticket in map(parse_ticket, tickets):
            if ticket is not None and ticket.lease_id != expected:
                return (
                    "the tickets are for a prompt of other tokens, or with another LoRA adapter: "
                    "both engines need the same prompt and model, and the decode engine the "
                    "kv_transfer_params of the prefill engine's answer to it, unchanged"
                )
    return ""


def _key_of(request: Request, params: dict[str, Any]) -> int:
    """The same for requests that would fetch the same leases, and for no others. Clients nest lists
    as deep as they like, so nothing but text is taken as what it says."""
    first = params.get(TICKETS, params.get(GROUP_TICKETS))
    for _ in ("of groups", "of ranks"):
        if isinstance(first, list) and first:
            first = first[0]
    if isinstance(first, str):
        return hash(first)
    transfer_id = params.get(TRANSFER_ID)
    if isinstance(transfer_id, str):
        return hash((transfer_id, adapter_of(request), tuple(request.prompt_token_ids or ())))
    return hash(request.request_id)  # Nothing can be fetched.
