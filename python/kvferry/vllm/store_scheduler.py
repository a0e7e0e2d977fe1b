"""Store mode, the half in vLLM's scheduler process: which blocks to load and which to save."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kvferry
from kvferry.vllm.metadata import StepMetadata, StoreAddress, StoreLoad, StoreSave
from kvferry.vllm.parts import final_tokens
from kvferry.vllm.stores import SILENCE_S, StoreOptions, rank_key, scheduler_stores
from kvferry.vllm.telemetry import logger

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# The scheduler, and with it the engine, waits so long in a step for the answers of all ranks'
# stores. What is left to ask then waits for the next step. A store that does not answer one prompt
# in that time is not asked again for a while.
_ASK_TIMEOUT_MS = 200
# For the first questions, which make connections and sessions, it waits so long when it starts.
_WARM_UP_MS = 5000


@dataclass
class _Tracked:
    """A request whose blocks have keys."""

    request: Request
    salt: str
    keys: list[bytes] = field(default_factory=list)  # Of full blocks, as far as they were needed.
    found: tuple[int, int] | None = None  # (first block to load, blocks found from there on)
    put_off: float | None = None  # Since when it waits for its turn to be asked about.
    lost: range = range(0)  # Blocks that the engine has and the store has not (any more).
    saved: int | None = None  # Blocks that need no saving (any more); None: not scheduled yet.
    has_saves: bool = False  # The workers know it, and report when its saves have ended.
    has_begun: bool = False  # It was given blocks, and has not been computed since.


def _is_of_tokens(request: Request) -> bool:
    """Keys are made from tokens, and pictures and embeddings are in none of those. A prompt may be
    of tokens and embeddings, and a session with streaming input get a picture later."""
    return (
        request.prompt_token_ids is not None
        and not getattr(request, "mm_features", None)
        and getattr(request, "prompt_embeds", None) is None
    )


def _in_unicode(salt: str) -> str:
    """What a client's JSON may hold beside that, as another text, which no salt of ours is."""
    try:
        salt.encode()
    except UnicodeEncodeError:
        return "\0" + salt.encode("utf-8", "surrogatepass").hex()
    return salt


class StoreScheduler:
    """Loads blocks that the store has, and saves the blocks that are computed here.

    A block is saved as soon as the KV of all its tokens is final, prompt or not, and once, but for
    what the store has lost by the time that another request begins with it. Blocks of a finished
    request stay allocated until the workers report that its saves have ended.
    """

    def __init__(
        self,
        block_size: int,
        options: StoreOptions,
        namespace: str,
        config: kvferry.Config,
        not_final: int = 0,
    ):
        """not_final: as parts.not_final()."""
        self._block_size = block_size
        self._not_final = not_final
        self._namespace = namespace
        self._options = options
        self._config = config
        self._workers: list[StoreAddress] = []  # By tensor-parallel rank.
        self._stores: list[Any] = []  # As many, or one for all.
        self._layout: kvferry.KvLayout | None = None
        self._requests: dict[str, _Tracked] = {}
        self._ended: set[str] = set()  # The engine waits for their saves to be reported.
        self._loads: list[StoreLoad] = []
        self._loading: set[str] = set()  # Handed to the workers and not reported back.
        self._cancelled: list[str] = []  # For the next step.
        self._silent_until = 0.0
        self._asked_s = 0.0  # For so long, in this step.
        # Keys of blocks that are being saved, and until when that may take: in order of that time.
        self._saving: OrderedDict[bytes, float] = OrderedDict()
        self._save_s = config.fetch_timeout_ms / 1e3

    def set_workers(self, workers: dict[int, StoreAddress]) -> None:
        """Where the workers' stores are, by tensor-parallel rank. From 0.33 on vLLM says so again
        when it is told to wake up, asleep or not."""
        by_rank = [workers[rank] for rank in sorted(workers)]
        if by_rank == self._workers:
            return
        self._layout = by_rank[0].kv_layout()
        self._stores = scheduler_stores(self._options, by_rank, self._config)
        self._workers = by_rank
        self._warm_up()

    def _warm_up(self) -> None:
        """A question to each rank's store. One that does not answer is asked again when needed."""
        deadline = time.monotonic() + _WARM_UP_MS / 1e3
        for rank, store in enumerate(self._stores):
            left_ms = max(1, int((deadline - time.monotonic()) * 1e3))
            try:
                store.exists([rank_key(b"warm", rank)], timeout_ms=left_ms)
            except (kvferry.Error, ValueError) as error:
                logger.warning("the KV store of rank %d does not answer yet: %s", rank, error)

    def on_new_request(self, request: Request) -> None:
        if not _is_of_tokens(request):
            return
        lora = request.lora_request
        # As in vLLM's own hash of a block: a name may be given to another adapter later. No path
        # has a NUL in it, nor is one empty.
        adapter = f"{lora.lora_name}\0{lora.lora_path}" if lora else ""
        salt = f"{request.cache_salt or ''}\0{adapter}"
        self._requests[request.request_id] = _Tracked(request, _in_unicode(salt))

    # ---- Loading

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """(tokens that the store has and the local prefix cache has not, whether that takes a
        while). None: they are asked for in the next step."""
        tracked = self._requests.get(request.request_id)
        if (
            tracked is None
            or not _is_of_tokens(request)
            or getattr(request, "skip_reading_prefix_cache", False)
        ):
            return 0, False
        # What has just failed to load is computed: a store that promises a block and cannot give it
        # would otherwise be asked for it for ever. So it is if another connector was to load it:
        # vLLM still counts its blocks as some that it needs, and a second load has to fit in beside
        # them. It may wait for ever then, and every other request behind it.
        if tracked.has_begun:
            return 0, False
        first = num_computed_tokens // self._block_size
        if tracked.found is None or tracked.found[0] != first:
            count = self._ask_in_turn(tracked, first)
            if count is None:
                return None, False
            tracked.found = (first, count)
        count = tracked.found[1]
        return (count * self._block_size, True) if count > 0 else (0, False)

    def _ask_in_turn(self, tracked: _Tracked, first: int) -> int | None:
        """As _ask(), but what has been put off for too long is computed: a store that takes longer
        than prompts take to come would have ever more of them wait."""
        if tracked.put_off is not None and time.monotonic() - tracked.put_off > SILENCE_S:
            tracked.put_off, tracked.lost = None, range(0)
            return 0
        count = self._ask(tracked, first)
        if count is not None:
            tracked.put_off = None
        elif tracked.put_off is None:
            tracked.put_off = time.monotonic()
        return count

    def _ask(self, tracked: _Tracked, first: int) -> int | None:
        """How many blocks the store has from the given one on. None: that takes longer than there
        is left of this step's time."""
        tracked.lost = range(0)
        if time.monotonic() < self._silent_until:
            return 0
        left_s = _ASK_TIMEOUT_MS / 1e3 - self._asked_s
        if left_s < 1e-3:  # Stores are given whole milliseconds.
            return None
        keys = self._keys(tracked, tracked.request.num_prompt_tokens // self._block_size)
        begin = time.monotonic()
        try:
            return self._look(tracked, keys, first, begin + left_s)
        except (kvferry.Error, ValueError) as error:
            if isinstance(error, kvferry.DeadlineExceeded) and self._asked_s > 0:
                return None  # It has not had all of a step's time.
            logger.warning("the KV store is not asked for %.0f s: %s", SILENCE_S, error)
            self._silent_until = time.monotonic() + SILENCE_S
            return 0
        finally:
            self._asked_s += time.monotonic() - begin

    def _look(self, tracked: _Tracked, keys: list[bytes], first: int, deadline: float) -> int:
        # Also for what the engine has itself: what nobody asks for ages and is dropped, and what is
        # behind it is of no use to others then.
        there = self._count(keys, deadline)
        if there >= first:
            return there - first
        tracked.lost = range(there, first)
        return self._count(keys[first:], deadline)

    def _count(self, keys: list[bytes], deadline: float) -> int:
        """How many blocks, from the first on, the stores of all ranks have."""
        found = len(keys)
        for rank in range(len(self._workers)):
            if found == 0:
                break
            left_ms = int((deadline - time.monotonic()) * 1e3)
            if left_ms <= 0:
                raise kvferry.DeadlineExceeded(
                    f"it took the ranks before {rank} more than {_ASK_TIMEOUT_MS} ms to answer"
                )
            store = self._stores[rank % len(self._stores)]
            found = store.exists([rank_key(key, rank) for key in keys[:found]], timeout_ms=left_ms)
        return found

    def _keys(self, tracked: _Tracked, num_blocks: int) -> list[bytes]:
        """Keys of the request's first blocks, whose tokens must be known."""
        begin = len(tracked.keys)
        if num_blocks > begin:
            size = self._block_size
            tokens = list(tracked.request.all_token_ids[begin * size : num_blocks * size])
            model = self._workers[0].model
            tracked.keys += kvferry.block_keys(
                tokens,
                size,
                model=f"{model} namespace {self._namespace}" if self._namespace else model,
                layout=self._layout,
                salt=tracked.salt,
                parent=tracked.keys[-1] if tracked.keys else None,
            )
        return tracked.keys[:num_blocks]

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        tracked.has_begun = True
        if num_external_tokens == 0 or tracked.found is None:
            return
        first, _ = tracked.found
        last = first + num_external_tokens // self._block_size
        self._loads.append(
            StoreLoad(
                request_id=request.request_id,
                keys=tracked.keys[first:last],
                block_ids=blocks.get_block_ids()[0][first:last],
                blocks_skipped=first,
            )
        )
        self._loading.add(request.request_id)
        tracked.found = None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._ended.difference_update(output.finished_sending or ())
        self._loading.difference_update(output.finished_recving or ())

    # ---- Saving

    def fill(
        self, meta: StepMetadata, step: SchedulerOutput, kv_cache_manager: KVCacheManager
    ) -> None:
        """Adds what the workers have to load, and to save once the step is computed."""
        self._asked_s = 0.0
        meta.store_loads, self._loads = self._loads, []
        meta.store_cancelled, self._cancelled = self._cancelled, []
        for request_id in step.preempted_req_ids or ():
            tracked = self._requests.get(request_id)
            if tracked is not None and tracked.has_saves:
                tracked.has_saves = False  # They end before the step, and are not reported.
                meta.store_preempted.append(request_id)
            elif request_id in self._ended:
                meta.store_preempted_ended.append(request_id)
        for request_id, scheduled in step.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                self._save(meta, tracked, scheduled, kv_cache_manager)

    def _save(
        self,
        meta: StepMetadata,
        tracked: _Tracked,
        scheduled: int,
        kv_cache_manager: KVCacheManager,
    ) -> None:
        request = tracked.request
        tracked.has_begun = False
        if not _is_of_tokens(request):
            return
        before = request.num_computed_tokens // self._block_size
        full = final_tokens(request, scheduled, self._not_final) // self._block_size
        # What it begins with was saved when it was computed, or came out of the store.
        begin = before if tracked.saved is None else tracked.saved
        # Drafts of speculative decoding are scheduled too and may be wrong.
        full = min(full, request.num_tokens // self._block_size)
        blocks = [*self._lost(tracked, before), *range(begin, full)]
        tracked.saved = max(begin, full)
        if not blocks:
            return
        tracked.has_saves = True
        keys = self._keys(tracked, blocks[-1] + 1)
        block_ids = kv_cache_manager.get_block_ids(request.request_id)[0]
        save = StoreSave(
            request_id=request.request_id,
            keys=[keys[block] for block in blocks],
            block_ids=[block_ids[block] for block in blocks],
        )
        self._note_saving(save.keys)
        meta.store_saves.append(save)

    def _lost(self, tracked: _Tracked, computed: int) -> list[int]:
        """Blocks to save again, of a request that begins with so many computed ones."""
        lost, tracked.lost = tracked.lost, range(0)
        if tracked.saved is not None:
            return []
        lost = range(lost.start, min(lost.stop, computed))
        keys = self._keys(tracked, lost.stop)
        now = time.monotonic()
        # Of many requests with one beginning not each is to save it.
        return [block for block in lost if self._saving.get(keys[block], 0.0) <= now]

    def _note_saving(self, keys: list[bytes]) -> None:
        now = time.monotonic()
        while self._saving and next(iter(self._saving.values())) <= now:
            self._saving.popitem(last=False)
        for key in keys:
            self._saving[key] = now + self._save_s
            self._saving.move_to_end(key)

    def request_finished(self, request: Request) -> bool:
        """Whether its blocks have to stay until the workers report it."""
        tracked = self._requests.pop(request.request_id, None)
        if request.request_id in self._loading:  # The engine keeps its blocks until that has ended.
            self._cancelled.append(request.request_id)
        if tracked is None or not tracked.has_saves:
            return False
        self._ended.add(request.request_id)
        return True

    def reset_cache(self) -> bool:
        """False: what a store holds under a model's name stays, and would be loaded again."""
        logger.error(
            "a KV store is not emptied by a reset of the engine's caches: if the weights have "
            "changed, empty it, or start the engines with another namespace"
        )
        return False

    def close(self) -> None:
        for store in self._stores:
            store.close()
