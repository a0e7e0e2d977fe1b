"""The prefill half of the connector in vLLM's scheduler process: it decides, and moves nothing."""

import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    Publication,
    StepMetadata,
    WorkerAddress,
)
from kvferry.vllm.parts import (
    NULL_BLOCK,
    WHOLE,
    Part,
    Windows,
    adapter_of,
    announced_parts,
    blocks_of,
    final_tokens,
    has_states,
    in_groups,
    leases_of_all,
    most_blocks_computing,
    not_final,
)
from kvferry.vllm.room import Room
from kvferry.vllm.telemetry import logger

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_ANSWERED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


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
        parts, error = announced_parts(
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
            if any(NULL_BLOCK in it.block_ids for it in publications):
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
