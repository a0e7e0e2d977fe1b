"""Keeps engines from waiting for each other's blocks."""

from collections.abc import Hashable

from kvferry.vllm.telemetry import logger


class Held:
    """Blocks by who holds them, and their sum: it is asked for at every step, of every request that
    waits."""

    def __init__(self) -> None:
        self._blocks: dict[Hashable, int] = {}
        self.sum = 0

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def take(self, key: Hashable, blocks: int) -> None:
        self.give_back(key)
        self._blocks[key] = blocks
        self.sum += blocks

    def give_back(self, key: Hashable) -> None:
        """If it has any."""
        self.sum -= self._blocks.pop(key, 0)


class Room:
    """How much of its KV cache an engine may let wait for other engines.

    Blocks wait when only another engine can free them: those of a prompt that is computed before
    anybody has asked for it, and those that a decode engine holds while the prompt is computed
    elsewhere. When they fill two caches, each engine may be waiting for the other one. So they
    never take the last blocks, as many as a prompt of the greatest length needs, and whatever does
    not depend on others goes on there.

    In an engine that works both ways prompts for tickets are counted too: nobody can ask for one
    before it is computed, so that they wait for room as loads do. What nobody has asked for leaves
    room for such a prompt or a load there, since it waits itself for a load in the other engine,
    which may be kept out by the same.
    """

    def __init__(self, num_blocks: int, longest: int, both_ways: bool = False):
        """longest: blocks of the longest prompt that the engine takes. both_ways: it loads prompts
        and computes some for others."""
        self.both_ways = both_ways
        self._capacity = num_blocks - longest
        if self._capacity < longest:
            logger.warning(
                "the KV cache has %d blocks, and a prompt of max_model_len takes %d: long prompts "
                "that wait for another engine (those given to both at once, and in a kv_both "
                "engine any) wait for each other too. Twice as many blocks let them overlap: "
                "lower max_model_len, or give the cache more memory",
                num_blocks,
                longest,
            )
        self._most_unasked = self._capacity - longest if both_ways else self._capacity
        self.loads = Held()  # And prompts for tickets.
        self.unasked = Held()  # Prompts that nobody has asked for.
        # The first load that lets_in() refused in this step. The engine asks for all that wait in
        # every step, the oldest first, so that nothing has to be remembered any longer: a request
        # that has gone, or that the engine itself holds back, is in nobody's way.
        self.refused: Hashable | None = None
        self._refused_before = False  # One was, in the step before.

    def end_step(self) -> None:
        self._refused_before = self.refused is not None
        self.refused = None

    def lets_in(self, key: Hashable, blocks: int) -> bool:
        """Whether a load gets the room: none does before one that was refused, or a long prompt
        would be overtaken for as long as short ones come. One that is longer than the room gets it
        when no other does."""
        if self.refused not in (None, key):
            return False
        if self._has(blocks) or not self.loads:
            return True
        self.refused = key
        return False

    def lets_in_unasked(self, blocks: int, is_overdue: bool) -> bool:
        """Whether a prompt gets the room that nobody has asked for. An overdue one does in any case
        when nothing else has any, nor waits for it as a load: the step before tells, since a prompt
        may come before that in the engine's queue."""
        if self.refused is not None:
            return False
        if self._has(blocks) and self.unasked.sum + blocks <= self._most_unasked:
            return True
        return is_overdue and self.empty and not self._refused_before

    def holds_unasked(self, blocks: int) -> bool:
        """Whether it has that much for them when nothing waits."""
        return blocks <= self._most_unasked

    def _has(self, blocks: int) -> bool:
        return self.loads.sum + self.unasked.sum + blocks <= self._capacity

    @property
    def empty(self) -> bool:
        return not self.loads and not self.unasked
