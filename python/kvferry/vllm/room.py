"""Keeps engines from waiting for each other's blocks."""

from collections.abc import Hashable


class Room:
    """How much of its KV cache an engine may let wait for other engines.

    Blocks wait when only another engine can free them: those of a prompt that is computed before
    anybody has asked for it, and those that a decode engine holds while the prompt is computed
    elsewhere. When they fill two caches, each engine may be waiting for the other one. So they
    never take the last blocks, as many as a prompt of the greatest length needs, and whatever does
    not depend on others goes on there.
    """

    def __init__(self, num_blocks: int, longest: int):
        """longest: blocks of the longest prompt that the engine takes."""
        self._capacity = num_blocks - longest
        self._waiting: dict[Hashable, int] = {}
        self._taken = 0  # Their sum: it is asked for at every step, of every request that waits.
        # The first load that lets_in() refused in this step. The engine asks for all that wait in
        # every step, the oldest first, so that nothing has to be remembered any longer: a request
        # that has gone, or that the engine itself holds back, is in nobody's way.
        self.refused: Hashable | None = None

    def lets_in(self, key: Hashable, blocks: int) -> bool:
        """Whether a load gets the room: none does before one that was refused, or a long prompt
        would be overtaken for as long as short ones come."""
        if self.refused not in (None, key):
            return False
        if self.empty or self.has(blocks):
            return True
        self.refused = key
        return False

    def has(self, blocks: int) -> bool:
        return self._taken + blocks <= self._capacity

    def holds(self, blocks: int) -> bool:
        """Whether it has that much when nothing waits."""
        return blocks <= self._capacity

    @property
    def empty(self) -> bool:
        """A prompt that is longer than the room gets it when nothing else waits."""
        return not self._waiting

    def take(self, key: Hashable, blocks: int) -> None:
        self.give_back(key)
        self._waiting[key] = blocks
        self._taken += blocks

    def give_back(self, key: Hashable) -> None:
        """If it has any."""
        self._taken -= self._waiting.pop(key, 0)
