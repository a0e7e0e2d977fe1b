"""What vLLM's scheduler shows the connector's, in tests without an engine."""

from types import SimpleNamespace


def step(scheduled: dict[str, int], preempted: set[str] = frozenset()) -> SimpleNamespace:
    return SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=preempted)


class Blocks:
    """Block table of a request, as the cache manager and update_state_after_alloc() show it."""

    def __init__(self, ids: list[int]):
        self._ids = ids

    def get_block_ids(self, request_id: str = "") -> tuple[list[int]]:
        return (self._ids,)
