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

    def has(self, blocks: int) -> bool:
        return self._taken + blocks <= self._capacity

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
