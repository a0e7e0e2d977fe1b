"""What vLLM's scheduler shows the connector's, in tests without an engine."""

from collections import Counter
from types import SimpleNamespace


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
