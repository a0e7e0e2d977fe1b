"""The scheduler's half of store mode without an engine, and pages that the worker's half can save.

Only for modules that have skipped themselves where vLLM is not installed.
"""

from types import SimpleNamespace

import kvferry
from kvferry.vllm.metadata import StepMetadata, StoreAddress
from kvferry.vllm.store_scheduler import StoreScheduler
from kvferry.vllm.stores import StoreOptions, open_store, rank_key
from vllm_steps import Blocks, step

BLOCK = 16
BLOCKS = 8
LAYOUT = kvferry.KvLayout.mha(2, BLOCK, 1, 8, "float32")
HOST = StoreOptions({"backend": "host", "capacity_bytes": 1 << 20})
WAIT_S = 20.0


def request(request_id: str, blocks: int, **more) -> SimpleNamespace:
    tokens = list(range(blocks * BLOCK))
    fields = {
        "request_id": request_id,
        "prompt_token_ids": tokens,
        "all_token_ids": tokens,
        "num_prompt_tokens": len(tokens),
        "num_tokens": len(tokens),
        "num_computed_tokens": 0,
        "lora_request": None,
        "cache_salt": None,
        "prompt_embeds": None,
    }
    return SimpleNamespace(**fields | more)


# Block n of a request is block n of the pool.
TABLE = Blocks(list(range(BLOCKS)))


class Scheduler:
    """The scheduler half, over a store of its own in which `put` is what others have saved."""

    def __init__(self, namespace: str = "", not_final: int = 0):
        config = kvferry.Config.make({})
        self.pool = kvferry.KvPool.create(LAYOUT, BLOCKS)
        self.opened = open_store(HOST, self.pool, config, "m", "n", 0)
        self.half = StoreScheduler(BLOCK, HOST, namespace, config, not_final)
        self.half.set_workers({0: StoreAddress.of(self.opened.address, "m", LAYOUT)})

    def use(self, stores: list) -> None:
        """Asks these, one a rank."""
        self.half.close()
        self.half._workers *= len(stores)
        self.half._stores = stores

    def put(self, keys: list[bytes]) -> None:
        stored = self.opened.store.put_pages(
            [rank_key(key, 0) for key in keys], self.pool, list(range(len(keys)))
        )
        assert stored == [None] * len(keys)

    def compute(self, it: SimpleNamespace, blocks: int) -> StepMetadata:
        """A step that computes so many blocks of the request."""
        meta = self.step({it.request_id: blocks * BLOCK})
        it.num_computed_tokens += blocks * BLOCK
        return meta

    def step(self, scheduled: dict[str, int], preempted: set[str] = frozenset()) -> StepMetadata:
        meta = StepMetadata()
        self.half.fill(meta, step(scheduled, preempted), TABLE)
        return meta

    def close(self) -> None:
        self.half.close()
        self.opened.close()


def fill(pool: kvferry.KvPool, block: int, value: int) -> None:
    for layer in range(LAYOUT.num_layers):
        for tensor in range(2):
            pool.page(layer, tensor, block)[:] = value


def holds(pool: kvferry.KvPool, block: int, value: int) -> bool:
    return all(
        (pool.page(layer, tensor, block) == value).all()
        for layer in range(LAYOUT.num_layers)
        for tensor in range(2)
    )


def keys_of(scheduler: Scheduler, it: SimpleNamespace) -> list[bytes]:
    """What the request's blocks are saved under."""
    scheduler.half.on_new_request(it)
    (save,) = scheduler.compute(it, len(it.all_token_ids) // BLOCK).store_saves
    scheduler.half.request_finished(it)
    return save.keys


def saved_of(it: SimpleNamespace, meta: StepMetadata) -> list[int]:
    """Which blocks of the request are saved: block n is block n of the pool."""
    return [block for save in meta.store_saves for block in save.block_ids]


def begin(scheduler: Scheduler, it: SimpleNamespace, local: int) -> int:
    """A request of whose prompt the engine has so many blocks: how many more the store has."""
    scheduler.half.on_new_request(it)
    return begin_again(scheduler, it, local)


def begin_again(scheduler: Scheduler, it: SimpleNamespace, local: int) -> int:
    count = scheduler.half.get_num_new_matched_tokens(it, local * BLOCK)[0] // BLOCK
    it.num_computed_tokens = (local + count) * BLOCK
    return count


class Rank:
    """What the scheduler asks: a store that has so many blocks, or does not answer."""

    def __init__(self, blocks: int | None):
        self.blocks = blocks

    def exists(self, keys: list[bytes], timeout_ms: int) -> int:
        if self.blocks is None:
            raise kvferry.DeadlineExceeded("slow")
        return min(self.blocks, len(keys))

    def close(self) -> None:
        pass
