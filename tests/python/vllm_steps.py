"""What vLLM's scheduler shows the connector's, and a worker's device, without an engine.

Only for modules that have skipped themselves where vLLM is not installed.
"""

import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

from kvferry.vllm.decode_scheduler import DecodeScheduler
from kvferry.vllm.metadata import AskedFor, StepMetadata, WorkerAddress
from kvferry.vllm.parts import WHOLE, Kind, Window
from kvferry.vllm.prefill_scheduler import PrefillScheduler
from kvferry.vllm.room import Room
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

DEADLINE_S = 10.0
BLOCK = 16
FETCH_TIMEOUT_MS = 60_000
LEASE_MS = 30_000
TRANSFER = {"transfer_id": "0123456789abcdef"}
FROM = {"do_remote_prefill": True, "remote_host": "::1", "remote_port": 5000} | TRANSFER
ANNOUNCED = {"do_remote_decode": True} | TRANSFER


def step(scheduled: dict[str, int], preempted: set[str] = frozenset()) -> SimpleNamespace:
    return SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=preempted)


def window(tokens: int, most_blocks: int = 1000) -> Window:
    return Window(Kind.WINDOW, tokens, most_blocks)


class Blocks:
    """Block tables of a request, one a group of layers, as the cache manager and
    update_state_after_alloc() show them. As a manager it has also a pool of blocks."""

    def __init__(self, *ids: list[int]):
        self._ids = ids
        self.held: Counter[int] = Counter()  # Of the pool, by id: how often.
        self.block_pool = self
        self.blocks = ids

    def get_block_ids(self, request_id: str = "") -> tuple[list[int], ...]:
        return self._ids

    def get_blocks(self, request_id: str) -> "Blocks":
        return self

    def touch(self, blocks: list[int]) -> None:
        self.held.update(blocks)

    def free_blocks(self, blocks: list[int]) -> None:
        self.held.subtract(blocks)

    def none_held(self) -> bool:
        """Nor freed more often than held, which would be another request's block."""
        return not any(self.held.values())


class SlowDevice:
    """Does what it is asked for when the test says so, in order."""

    memory = "host"

    def __init__(self) -> None:
        self.points: list[threading.Event] = []
        self.fails = False

    def point(self) -> Callable[[], None]:
        done = threading.Event()
        self.points.append(done)

        def wait_until_done() -> None:
            assert done.wait(DEADLINE_S)
            if self.fails:
                raise RuntimeError("an illegal memory access")

        return wait_until_done

    def finish(self, points: int) -> None:
        for done in self.points[:points]:
            done.set()


def vllm_config(tp_size: int = 1, drafts: int = 0) -> SimpleNamespace:
    """drafts: tokens that a model with as many MTP modules drafts."""
    return SimpleNamespace(
        num_prefill_lookahead_tokens=drafts,
        kv_transfer_config=SimpleNamespace(engine_id="engine"),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
    )


def request(request_id: str, prompt: int, params: dict | None = None, computed: int = 0):
    return SimpleNamespace(
        request_id=request_id,
        num_prompt_tokens=prompt,
        num_tokens=prompt,
        prompt_token_ids=list(range(prompt)),
        num_computed_tokens=computed,
        kv_transfer_params=params,
        lora_request=None,
        status=RequestStatus.RUNNING,
    )


class Prefill:
    def __init__(
        self, tp_size: int = 1, room: Room | None = None, windows=(WHOLE,), drafts: int = 0
    ):
        room = room or Room(1000, 10)
        self.blocks = Blocks(*[[4, 9, 2, 7, *range(100, 300)]] * len(windows))
        self.scheduler = PrefillScheduler(
            vllm_config(tp_size, drafts), BLOCK, list(windows), room, FETCH_TIMEOUT_MS
        )
        self.scheduler.set_workers(
            {
                rank: WorkerAddress(f"tcp://127.0.0.1:{5000 + rank}", 7 + rank)
                for rank in range(tp_size)
            }
        )

    def arrive(self, prompt: int, params: dict | None = None, name: str = "r"):
        arrived = request(name, prompt, {"do_remote_decode": True} if params is None else params)
        self.scheduler.on_new_request(arrived)
        return arrived

    def begin(self, it) -> bool:
        """As the scheduler does that has blocks for it."""
        begins = self.scheduler.may_begin(it)
        if begins:
            self.scheduler.update_state_after_alloc(it)
        return begins

    def report(self, asked_for: set[int] | None = None, **output) -> None:
        """As workers do at the end of a step."""
        if asked_for:
            output["kv_connector_worker_meta"] = AskedFor(asked_for)
        self.scheduler.update_connector_output(KVConnectorOutput(**output))

    def step(self, scheduled: dict[str, int], preempted: set[str] = frozenset()) -> StepMetadata:
        meta = StepMetadata()
        self.scheduler.fill(meta, step(scheduled, preempted), self.blocks)
        return meta


class Decode:
    def __init__(
        self, tp_size: int = 1, room: Room | None = None, windows=(WHOLE,), max_fetches: int = 1024
    ):
        self.scheduler = DecodeScheduler(
            vllm_config(tp_size),
            BLOCK,
            list(windows),
            room or Room(1000, 10),
            max_fetches,
            LEASE_MS,
        )

    def allocate(self, it, cached: int, *block_ids: list[int]):
        missing, later = self.scheduler.get_num_new_matched_tokens(it, cached)
        assert later == (missing > 0)
        self.scheduler.update_state_after_alloc(it, Blocks(*block_ids), missing)
        return self.step()

    def step(self) -> StepMetadata:
        meta = StepMetadata()
        self.scheduler.fill(meta)
        return meta


def remote(**changes) -> dict:
    return {"do_remote_prefill": True, "kvferry_tickets": ["t"]} | changes
