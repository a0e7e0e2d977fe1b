"""Which of our connectors are in one worker process: two, under vLLM's MultiConnector.

MultiConnector takes the address of one of its connectors, the first that has one, and gives it to
all of them in the scheduler process. So each of ours gives the addresses of all of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from kvferry.vllm.metadata import Addresses

if TYPE_CHECKING:
    from kvferry.vllm.store_worker import StoreWorker
    from kvferry.vllm.worker import PrefillWorker


class _Place(NamedTuple):
    engine_id: str
    tp_rank: int
    mode: str  # "pull" or "store"


_workers: WeakValueDictionary[_Place, PrefillWorker | StoreWorker] = WeakValueDictionary()


def check_alone(engine_id: str, tp_rank: int, mode: str) -> None:
    """Raises ValueError when the engine has one of this mode: nobody could tell them apart."""
    if _Place(engine_id, tp_rank, mode) in _workers:
        raise ValueError(
            f'engine {engine_id} has two KVFerryConnectors in mode "{mode}" that others reach: '
            f"MultiConnector can have one of each mode"
        )


def enrol(engine_id: str, tp_rank: int, mode: str, worker: PrefillWorker | StoreWorker) -> None:
    """From now on until the worker is gone its address is among addresses()."""
    _workers[_Place(engine_id, tp_rank, mode)] = worker


def addresses(engine_id: str, tp_rank: int) -> Addresses | None:
    """Of all of ours in this engine's worker; None when none listens."""
    pull = _workers.get(_Place(engine_id, tp_rank, "pull"))
    store = _workers.get(_Place(engine_id, tp_rank, "store"))
    if pull is None and store is None:
        return None
    return Addresses(pull and pull.address(), store and store.address())
