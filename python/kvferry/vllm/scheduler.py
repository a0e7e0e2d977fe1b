"""The half of the connector in vLLM's scheduler process: it decides, and moves nothing."""

import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

import kvferry
from kvferry.vllm.metadata import (
    BLOCK_SIZE,
    GROUP_TICKETS,
    PROMPT,
    TICKETS,
    AskedFor,
    Load,
    LoadPart,
    Publication,
    StepMetadata,
    WorkerAddress,
    parse_addresses,
    parse_block_size,
    parse_group_tickets,
    parse_prompt,
    parse_ticket,
    parse_tickets,
)
from kvferry.vllm.parts import (
    TRANSFER_ID,
    WHOLE,
    Part,
    Windows,
    adapter_of,
    blocks_of,
    check_transfer_id,
    cut,
    final_tokens,
    handed_over,
    has_states,
    in_groups,
    leases_of_all,
    most_blocks_computing,
    most_blocks_loading,
    not_final,
    places,
)
from kvferry.vllm.room import Room
from kvferry.vllm.telemetry import logger

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_ANSWERED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
_KEEPS_A_LEASE = 3  # So that one may be lost, and another one late.
_KEPT_PER_STEP = 64  # Requests; others are kept in the next one.
_MAX_TAKERS = 4096  # Requests with the same tickets come together.
_NULL_BLOCK = 0  # Stands for blocks that have left a window.


class _HeldBlocks:
    """Blocks of prompts that others may fetch, where the engine would give them back too early:
    those that have left a window, and, of models with states, any.

    vLLM zeroes blocks there, or copies states into them, for the next request that has them. Its V2
    model runner does so before it has the connector take back the leases of who had them before and
    was preempted. Blocks that are held until the leases are taken back are given to the next one
    only in a later step.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[tuple[BlockPool, list[KVCacheBlock]]]] = {}

    def hold(self, request_id: str, manager: "KVCacheManager", part: Part) -> None:
        blocks = manager.get_blocks(request_id).blocks[part.group]
        some = list(blocks[part.first_block : part.end_block])
        manager.block_pool.touch(some)
        self._held.setdefault(request_id, []).append((manager.block_pool, some))

    def let_go(self, request_id: str) -> None:
        for pool, blocks in self._held.pop(request_id, ()):
            pool.free_blocks(blocks)


@dataclass
class _Watched:
    """A request that another engine will decode."""

    request: Request
    parts: list[Part]  # In order.
    announced: bool  # The other engine knows their leases, and may be waiting for them.
    name: str  # With its tokens, of the leases of one that is not announced.
    published: list[Publication] = field(default_factory=list)  # Of the first of them.
    arrived: float = field(default_factory=time.monotonic)

    @property
    def unpublished(self) -> list[Part]:
        return self.parts[len(self.published) :]


class PrefillScheduler:
    """Publishes prompts that another engine will decode.

    A request is watched from its arrival, published in the step that computes the last token of its
    prompt, and turned into tickets when it ends with an answer. One with a transfer_id is published
    part by part, each in the step after which its KV is final, and the other engine needs no
    tickets. From publication on blocks stay allocated until the workers report that all leases of
    their request have ended.

    One with a transfer_id that no engine has asked for is computed if there is room for what nobody
    may fetch for a while, and none such waits that came before, and else when it is asked for. One
    for tickets waits for room where the engine loads prompts, too.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        block_size: int,
        windows: Windows,
        room: Room,
        fetch_timeout_ms: int,
    ):
        self._engine_id = vllm_config.kv_transfer_config.engine_id
        self._windows = windows
        self._held = _HeldBlocks()
        self._block_size = block_size
        self._room = room
        self._fetch_timeout_s = fetch_timeout_ms / 1e3
        self._not_final = not_final(vllm_config)
        self._workers: list[WorkerAddress] = []  # By tensor-parallel rank.
        self._watched: dict[str, _Watched] = {}
        self._ended: set[str] = set()  # The engine waits for their leases to be reported.
        self._withdrawn: list[str] = []  # For the next step, as the following one.
        self._given_up: list[int] = []
        # Requests with a transfer_id that nobody has asked for, until their blocks are free: the
        # lease of the last part. Whoever fetches asks for all parts at the same time.
        self._unasked: dict[str, int] = {}
        self._refused: str | None = None  # The first of them that had to wait in this step.

    def set_workers(self, workers: dict[int, WorkerAddress]) -> None:
        """Where the workers listen, by tensor-parallel rank."""
        self._workers = [workers[rank] for rank in sorted(workers)]

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or not self._stops_before_the_last_token(request):
            return
        parts, error = _announced_parts(
            request, request.prompt_token_ids, params, self._block_size, self._windows
        )
        if error:
            logger.warning("%s is handed over by tickets: %s", request.request_id, error)
        name = secrets.token_hex(16)
        self._watched[request.request_id] = _Watched(
            request, parts or self._whole(request, name), announced=bool(parts), name=name
        )
        if parts:
            self._unasked[request.request_id] = parts[-1].lease_id

    def _stops_before_the_last_token(self, request: Request) -> bool:
        """Where a model has states, lets this engine compute what is handed over and nothing more:
        what comes behind would be in them. False: nothing of the prompt can be handed over."""
        if not has_states(self._windows):
            return True
        # Whoever wants logprobs of the prompt computes all of it.
        if request.num_prompt_tokens < 2 or request.get_skip_reading_prefix_cache():
            return False
        for prompt in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
            if (of_all := getattr(request, prompt)) is not None:
                setattr(request, prompt, of_all[:-1])
        del request._all_token_ids[-1]
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
        return True

    def may_begin(self, request: Request) -> bool:
        """Whether a request that has no blocks is to be given some."""
        # It may have had some until now, for a load of another connector that has failed.
        self._gives_room_back(request.request_id)
        watched = self._watched.get(request.request_id)
        if watched is None:
            return True
        if request.request_id in self._unasked:
            return self._may_begin_unasked(watched)
        if self._waits_as_a_load(watched):
            return self._room.lets_in(request.request_id, self._blocks(watched))
        return True

    def _may_begin_unasked(self, watched: _Watched) -> bool:
        request_id = watched.request.request_id
        if self._refused not in (None, request_id):
            return False
        blocks, is_overdue = self._blocks(watched), self._is_overdue(watched)
        if self._room.lets_in_unasked(blocks, is_overdue):
            return True
        # One that is longer than the room is to be asked for first, and keeps nobody waiting
        # meanwhile.
        if is_overdue or self._room.holds_unasked(blocks):
            self._refused = request_id
        return False

    def _waits_as_a_load(self, watched: _Watched) -> bool:
        """Until another engine has its tickets and room for it, it holds blocks that other prompts
        may need there and here."""
        return self._room.both_ways and not watched.announced and bool(watched.parts)

    def _blocks(self, watched: _Watched) -> int:
        num_tokens = watched.request.num_prompt_tokens
        return most_blocks_computing(self._windows, num_tokens, self._block_size)

    def _is_overdue(self, watched: _Watched) -> bool:
        """The engine that was to ask for it has gone, or has too much to do."""
        return time.monotonic() - watched.arrived > self._fetch_timeout_s

    def update_state_after_alloc(self, request: Request) -> None:
        if (watched := self._watched.get(request.request_id)) is None:
            return
        blocks = self._blocks(watched)
        if request.request_id in self._unasked:
            if self._is_overdue(watched) and not self._room.lets_in_unasked(blocks, False):
                logger.warning(
                    "no engine has asked for %s within %.0f s: is it given to the decode engine at "
                    "the same time?",
                    request.request_id,
                    self._fetch_timeout_s,
                )
            self._room.unasked.take(request.request_id, blocks)
        elif self._waits_as_a_load(watched):
            self._room.loads.take(request.request_id, blocks)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        meta = output.kv_connector_worker_meta
        if isinstance(meta, AskedFor):
            asked = {it for it, lease_id in self._unasked.items() if lease_id in meta.lease_ids}
            for request_id in asked:
                self._is_asked_for(request_id)
        for request_id in output.finished_sending or ():
            self._ended.discard(request_id)
            self._waits_for_nobody(request_id)
            self._held.let_go(request_id)

    def _is_asked_for(self, request_id: str) -> None:
        self._unasked.pop(request_id, None)
        self._room.unasked.give_back(request_id)

    def _waits_for_nobody(self, request_id: str) -> None:
        """Its blocks are free, or are as soon as this engine is done with it."""
        self._is_asked_for(request_id)
        self._gives_room_back(request_id)

    def _gives_room_back(self, request_id: str) -> None:
        """If it holds any."""
        self._room.unasked.give_back(request_id)
        self._room.loads.give_back(request_id)

    def _whole(self, request: Request, name: str) -> list[Part]:
        """What there is to hand over, of each group of layers."""
        num_tokens, tokens = request.num_prompt_tokens, request.prompt_token_ids
        groups = len(self._windows)
        if tokens is None:
            leases = [kvferry.random_id() for _ in range(groups)]
        else:
            leases = leases_of_all(name, tokens, groups, adapter_of(request))
        parts = []
        for group, lease_id in enumerate(leases):
            blocks = blocks_of(self._windows, group, num_tokens, self._block_size)
            parts.append(Part(lease_id, blocks.start, blocks.stop, num_tokens, group))
        return parts

    def fill(
        self, meta: StepMetadata, step: SchedulerOutput, kv_cache_manager: "KVCacheManager"
    ) -> None:
        """Adds what the workers have to publish and to take back."""
        self._refused = None
        for request_id in step.preempted_req_ids or ():
            if (watched := self._watched.get(request_id)) and watched.published:
                meta.preempted.append(request_id)
                # They are published again when they are computed again. Whoever fetches parts that
                # were announced waits for that; nobody has heard of the other leases.
                watched.published.clear()
                self._held.let_go(request_id)  # The workers take their leases back in this step.
            elif request_id in self._ended:
                # Preempted by a reset of the prefix cache and ended since: its blocks are others'
                # from this step on, so that taking its leases back cannot wait.
                meta.preempted_ended.append(request_id)
            if not _has_blocks_again(request_id, watched, step):
                self._gives_room_back(request_id)
        meta.unasked = list(self._unasked.values())
        meta.withdrawn = [it for it in self._withdrawn if it not in meta.preempted_ended]
        self._withdrawn = []
        meta.given_up, self._given_up = self._given_up, []
        for request_id, watched in self._watched.items():
            scheduled = step.num_scheduled_tokens.get(request_id, 0)
            if scheduled == 0:
                continue
            final = final_tokens(watched.request, scheduled, self._not_final)
            due = [part for part in watched.unpublished if part.end_token <= final]
            publications = [self._publication(watched, part, kv_cache_manager) for part in due]
            if any(_NULL_BLOCK in it.block_ids for it in publications):
                logger.error("vLLM has given back a block of %s too early", request_id)
                self._hand_over_nothing(request_id, watched)
                continue
            for part in due:
                if self._windows[part.group] != WHOLE or has_states(self._windows):
                    self._held.hold(request_id, kv_cache_manager, part)
            watched.published += publications
            meta.publications += publications

    def _hand_over_nothing(self, request_id: str, watched: _Watched) -> None:
        if watched.announced:
            self._given_up += [part.lease_id for part in watched.unpublished]
        self._waits_for_nobody(request_id)
        watched.parts = []

    def _publication(
        self, watched: _Watched, part: Part, kv_cache_manager: "KVCacheManager"
    ) -> Publication:
        request_id = watched.request.request_id
        block_ids = kv_cache_manager.get_block_ids(request_id)[part.group]
        return Publication(
            request_id=request_id,
            lease_id=part.lease_id,
            block_ids=block_ids[part.first_block : part.end_block],
            num_tokens=watched.request.num_prompt_tokens,
            group=part.group,
        )

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """(whether the blocks stay until the leases have ended, kv_transfer_params of the
        answer)."""
        watched = self._watched.pop(request.request_id, None)
        if watched is None:
            return False, None
        if watched.announced:
            self._given_up += [part.lease_id for part in watched.unpublished]
        if not watched.published:
            self._waits_for_nobody(request.request_id)
            return False, None
        self._ended.add(request.request_id)
        if request.status not in _ANSWERED:
            self._withdrawn.append(request.request_id)
            return True, None
        return True, None if watched.announced else self._params(watched)

    def _tickets(self, publication: Publication) -> list[str]:
        tickets = [
            kvferry.Ticket(
                address=worker.address,
                epoch=worker.epoch,
                lease_id=publication.lease_id,
                num_pages=len(publication.block_ids),
                num_tokens=publication.num_tokens,
            )
            for worker in self._workers
        ]
        return [str(ticket) for ticket in tickets]

    def _params(self, watched: _Watched) -> dict[str, Any]:
        published = watched.published
        name = {} if watched.request.prompt_token_ids is None else {PROMPT: watched.name}
        tickets = [self._tickets(publication) for publication in published]
        host, _, port = self._workers[0].address.removeprefix("tcp://").rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": published[0].request_id,
            "remote_block_ids": [publication.block_ids for publication in published],
            "remote_num_tokens": published[0].num_tokens,
            "remote_host": host,
            "remote_port": int(port),
            "tp_size": len(self._workers),
            BLOCK_SIZE: self._block_size,
            **name,
            **({GROUP_TICKETS: tickets} if in_groups(self._windows) else {TICKETS: tickets[0]}),
        }


def _has_blocks_again(request_id: str, watched: _Watched | None, step: SchedulerOutput) -> bool:
    """Whether a preempted request was given some in the step that says so, to compute in them or
    for another connector to load into."""
    if request_id in step.num_scheduled_tokens:
        return True
    return watched is not None and watched.request.status == RequestStatus.WAITING_FOR_REMOTE_KVS


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
            error = "the load of these tickets has failed"
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
            if _NULL_BLOCK in into:
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
            parts, error = _announced_parts(
                request, tokens, params, self._block_size, self._windows
            )
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
    """The same for requests that would fetch the same leases, and for no others."""
    tickets = params.get(TICKETS, params.get(GROUP_TICKETS))
    if isinstance(tickets, list):
        return hash(str(tickets[:1]))
    prompt = tuple(request.prompt_token_ids or ())
    return hash((str(params.get(TRANSFER_ID)), adapter_of(request), prompt))


def _announced_parts(
    request: Request,
    tokens: list[int] | None,
    params: dict[str, Any],
    block_size: int,
    windows: Windows,
) -> tuple[list[Part], str]:
    """The parts of what is handed over of a prompt that both engines were given with a transfer_id,
    and what is wrong with that ("" if nothing). Neither: there is none."""
    transfer_id = params.get(TRANSFER_ID)
    if transfer_id is None:
        return [], ""
    if error := check_transfer_id(transfer_id):
        return [], error
    if tokens is None:
        return [], f"a prompt of embeddings cannot have a {TRANSFER_ID}"
    return cut(transfer_id, tokens, block_size, windows, adapter_of(request)), ""


def warn_wrong_role(request: Request, role: str | None) -> None:
    """Says so when a request asks for what an engine of this kv_role does not do."""
    params = request.kv_transfer_params or {}
    for key, wrong_role, consequence in (
        ("do_remote_decode", "kv_consumer", "it hands out no ticket"),
        ("do_remote_prefill", "kv_producer", "it computes the prompt itself"),
    ):
        if params.get(key) and role == wrong_role:
            logger.warning(
                "%s asks for %s, but this engine is a %s: %s",
                request.request_id,
                key,
                role,
                consequence,
            )
