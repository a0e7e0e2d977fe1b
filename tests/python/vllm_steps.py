"""What vLLM's scheduler shows the connector's, and a worker's device, without an engine."""

import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

DEADLINE_S = 10.0


def step(scheduled: dict[str, int], preempted: set[str] = frozenset()) -> SimpleNamespace:
    return SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=preempted)


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
