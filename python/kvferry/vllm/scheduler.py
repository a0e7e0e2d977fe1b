"""The half of the connector in vLLM's scheduler process: it decides, and moves nothing."""

from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

import kvferry
from kvferry.vllm.metadata import (
    TICKETS,
    Load,
    Publication,
    StepMetadata,
    WorkerAddress,
    parse_tickets,
)
from kvferry.vllm.telemetry import logger

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager

_ANSWERED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class PrefillScheduler:
    """Publishes prompts that another engine will decode.

    A request is watched from its arrival, published in the step that computes the last token of its
    prompt, and turned into tickets when it ends with an answer. From publication on its blocks stay
    allocated until the workers report that its lease has ended.
    """

    def __init__(self, vllm_config: VllmConfig, block_size: int):
        self._engine_id = vllm_config.kv_transfer_config.engine_id
        self._block_size = block_size
        self._workers: list[WorkerAddress] = []  # By tensor-parallel rank.
        self._watched: dict[str, Request] = {}
        self._published: dict[str, Publication] = {}
        self._withdrawn: list[str] = []  # For the next step.

    def set_workers(self, workers: dict[int, WorkerAddress]) -> None:
        """Where the workers listen, by tensor-parallel rank."""
        self._workers = [workers[rank] for rank in sorted(workers)]

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self._watched[request.request_id] = request

    def fill(
        self, meta: StepMetadata, step: SchedulerOutput, kv_cache_manager: "KVCacheManager"
    ) -> None:
        """Adds what the workers have to publish and to take back."""
        for request_id in step.preempted_req_ids or ():
            if self._published.pop(request_id, None) is not None:
                meta.preempted.append(request_id)  # Published again when it is computed again.
        meta.withdrawn, self._withdrawn = self._withdrawn, []
        for request_id, request in self._watched.items():
            scheduled = step.num_scheduled_tokens.get(request_id, 0)
            computed = request.num_computed_tokens + scheduled
            if (
                scheduled == 0
                or request_id in self._published
                or computed < request.num_prompt_tokens
            ):
                continue
            block_ids = kv_cache_manager.get_block_ids(request_id)[0]
            publication = Publication(
                request_id=request_id,
                lease_id=kvferry.random_id(),
                block_ids=block_ids[: cdiv(request.num_prompt_tokens, self._block_size)],
                num_tokens=request.num_prompt_tokens,
            )
            self._published[request_id] = publication
            meta.publications.append(publication)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """(whether the blocks stay until the lease has ended, kv_transfer_params of the answer)."""
        self._watched.pop(request.request_id, None)
        publication = self._published.pop(request.request_id, None)
        if publication is None:
            return False, None
        if request.status not in _ANSWERED:
            self._withdrawn.append(request.request_id)
            return True, None
        return True, self._params(publication)

    def _params(self, publication: Publication) -> dict[str, Any]:
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
        host, _, port = self._workers[0].address.removeprefix("tcp://").rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": publication.request_id,
            "remote_block_ids": [publication.block_ids],
            "remote_num_tokens": publication.num_tokens,
            "remote_host": host,
            "remote_port": int(port),
            "tp_size": len(self._workers),
            TICKETS: [str(ticket) for ticket in tickets],
        }


class DecodeScheduler:
    """Loads prompts that another engine has computed.

    A request with do_remote_prefill gets blocks for its whole prompt and waits while the workers
    fetch what the local prefix cache lacks. Parameters that cannot work make a load that fails, so
    that vLLM's kv_load_failure_policy decides what becomes of the request.
    """

    def __init__(self, vllm_config: VllmConfig, block_size: int):
        self._tp_size = vllm_config.parallel_config.tensor_parallel_size
        self._block_size = block_size
        self._loading: set[str] = set()  # Handed to the workers and not yet reported back.
        self._loads: list[Load] = []  # For the next step, as the following two.
        self._cancelled: list[str] = []
        self._dismissed: list[list[str]] = []

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """(tokens that the prefill engine has and we lack, whether loading them takes a while)."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        missing = request.num_prompt_tokens - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(
        self, request: Request, blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # Once only: after a preemption we compute ourselves.
        tickets, error = parse_tickets(params, self._tp_size)
        if num_external_tokens == 0:
            self._dismissed.append(tickets)  # Everything is cached here.
            return
        # Local hits end at a block boundary, so the rest starts there.
        first_block = (request.num_prompt_tokens - num_external_tokens) // self._block_size
        last_block = cdiv(request.num_prompt_tokens, self._block_size)
        self._loading.add(request.request_id)
        self._loads.append(
            Load(
                request_id=request.request_id,
                tickets=tickets,
                first_block=first_block,
                block_ids=blocks.get_block_ids()[0][first_block:last_block],
                num_tokens=request.num_prompt_tokens,
                error=error,
            )
        )

    def fill(self, meta: StepMetadata) -> None:
        """Adds what the workers have to fetch, to stop fetching and to let go."""
        meta.loads, self._loads = self._loads, []
        meta.cancelled, self._cancelled = self._cancelled, []
        meta.dismissed, self._dismissed = self._dismissed, []

    def request_finished(self, request: Request) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):  # It ended before it was given blocks.
            params["do_remote_prefill"] = False
            self._dismissed.append(parse_tickets(params, self._tp_size)[0])
        elif request.request_id in self._loading:
            # vLLM keeps the blocks until the load is reported.
            self._cancelled.append(request.request_id)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._loading.difference_update(output.finished_recving or ())


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
