"""vLLM engines without a model: its own schedulers, with our connectors and endpoints between them.

A worker plays the model. The KV of a token is a number that hangs on all tokens up to it, and
whoever computes the next one looks at all KV that it attends to. So a block that came late, or
from another request, or was given away too early, is seen where it is read.

Only for modules that have skipped themselves where vLLM is not installed.
"""

import dataclasses
import json
import pickle
import random
from collections import Counter, deque
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import vllm.v1.core.kv_cache_utils as kv_cache_utils
from kvferry.vllm import KVFerryConnector, connector
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
MAX_TOKENS = 512
VOCABULARY = 5000
LAYERS = 2  # Of each group.
_STATES = ("none", "align")  # mamba_cache_mode.
_PRIME = 2**31 - 1
_POWERS = np.array([pow(31337, n, _PRIME) for n in range(MAX_TOKENS)], np.int64)


def values(tokens: list[int]) -> np.ndarray:
    """Of each token, what its KV holds. A float32 has room for it."""
    of_each = (np.array(tokens, np.int64) + 1) * _POWERS[: len(tokens)] % _PRIME
    return np.cumsum(of_each) % 999_983 + 1


def next_token(known: np.ndarray) -> int:
    return int(known[-1]) % VOCABULARY


def answer(prompt: list[int], count: int) -> list[int]:
    """What an engine alone says."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(values(tokens)))
    return tokens[len(prompt) :]


def _sent(it: Any) -> Any:
    """As it arrives in another process."""
    return pickle.loads(pickle.dumps(it))


@dataclasses.dataclass
class Options:
    """Of an engine. groups: of layers, None for full attention, a window's tokens or the
    mamba_cache_mode of states. connectors: the kv_role and kv_connector_extra_config of one, or of
    several for MultiConnector."""

    connectors: list[tuple[str, dict[str, Any]]]
    groups: tuple[int | str | None, ...] = (None,)
    blocks: int = 70
    ranks: int = 1
    heads: int = 1
    asynchronous: bool = False
    priority: bool = False
    recomputes: bool = False  # What could not be loaded; or such a request fails.


def _transfer_config(name: str, options: Options) -> KVTransferConfig:
    ours = {"kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.vllm"}
    each = [
        ours | {"kv_role": role, "kv_connector_extra_config": extra}
        for role, extra in options.connectors
    ]
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": each},
    }
    policy = "recompute" if options.recomputes else "fail"
    fields = each[0] if len(each) == 1 else several
    return KVTransferConfig(**fields, engine_id=name, kv_load_failure_policy=policy)


def _vllm_config(name: str, options: Options, folder: Path) -> VllmConfig:
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 1}
    model |= {"hidden_size": options.heads, "num_hidden_layers": LAYERS}
    model |= {"num_attention_heads": options.heads, "num_key_value_heads": options.heads}
    model |= {"vocab_size": VOCABULARY, "max_position_embeddings": MAX_TOKENS}
    (folder / "config.json").write_text(json.dumps(model))
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        enforce_eager=True,
        scheduling_policy="priority" if options.priority else "fcfs",
        async_scheduling=options.asynchronous,
    ).create_engine_config()
    config.kv_transfer_config = _transfer_config(name, options)
    config.parallel_config.tensor_parallel_size = options.ranks
    config.scheduler_config.async_scheduling = options.asynchronous
    config.cache_config.num_gpu_blocks = options.blocks
    if mode := next((it for it in options.groups if it in _STATES), None):
        config.cache_config.mamba_cache_mode = mode
        config.cache_config.enable_prefix_caching = mode == "align"
    return config


def _block_bytes(heads: int) -> int:
    return heads * BLOCK * 2 * 4  # K and V of one number each, float32.


def _spec(group: int | str | None, heads: int):
    if group in _STATES:
        return MambaSpec(
            block_size=BLOCK if group == "align" else MAX_TOKENS,
            shapes=((2,),),
            dtypes=(torch.float32,),
            page_size_padded=_block_bytes(heads),
            mamba_cache_mode=group,
        )
    sizes = {"block_size": BLOCK, "num_kv_heads": heads, "head_size": 1, "dtype": torch.float32}
    if group is None:
        return FullAttentionSpec(**sizes)
    return SlidingWindowSpec(sliding_window=group, **sizes)


def _kv_cache_config(options: Options, heads: int) -> KVCacheConfig:
    """The layers of all groups share memory, each block of which is of one group at a time."""
    groups = [
        KVCacheGroupSpec([f"{number}.{layer}" for layer in range(LAYERS)], _spec(it, heads))
        for number, it in enumerate(options.groups)
    ]
    layer = _block_bytes(heads) * options.blocks
    tensors = [
        KVCacheTensor(
            size=LAYERS * layer,
            layers=group.layer_names,
            layer_stride=layer,
            block_stride=_block_bytes(heads),
        )
        for group in groups
    ]
    return KVCacheConfig(options.blocks, tensors, groups)


class _Planned(NamedTuple):
    """What a step computes of a request."""

    request_id: str
    blocks: list[list[int]]  # By group.
    begin: int
    end: int
    tokens: list[int] | None  # What is known of it, where the workers do not know that yet.

    def __str__(self) -> str:
        return f"{self.request_id}, tokens {self.begin} to {self.end}, blocks {self.blocks}"


@dataclasses.dataclass
class _Step:
    scheduled: Any  # vLLM's SchedulerOutput.
    plan: list[_Planned]
    meta: Any
    output: ModelRunnerOutput | None = None


class _Rank:
    """A worker: a rank's cache, its connector and what plays its part of the model."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, options: Options, rank: int):
        self._groups = options.groups
        heads = options.heads // options.ranks
        self._heads = np.arange(heads) + rank * heads
        memory = [torch.zeros(options.blocks, heads, BLOCK, 2) for _ in range(LAYERS)]
        self._layers = [it.numpy() for it in memory]
        caches = {
            name: memory[layer].view(options.blocks, -1)[:, :2]
            if kind in _STATES
            else memory[layer]
            for kind, group in zip(options.groups, cache.kv_cache_groups, strict=True)
            for layer, name in enumerate(group.layer_names)
        }
        self._names = list(caches)
        with (
            set_current_vllm_config(config),
            mock.patch.object(connector, "get_tensor_model_parallel_rank", lambda: rank),
        ):
            self.connector = KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, cache
            )
            self.connector.register_kv_caches(caches)

    def compute(self, step: _Step, known: dict[str, list[int]]) -> ModelRunnerOutput:
        # In the order of vLLM's V2 model runner, in which a preempted request's blocks are zeroed
        # before its leases are taken back.
        for block in step.scheduled.new_block_ids_to_zero or ():
            for layer in self._layers:
                layer[block] = 0
        meta = _sent(step.meta)
        self.connector.handle_preemptions(meta)
        self.connector.bind_connector_metadata(meta)
        tokens = [self._forward(it, known[it.request_id]) for it in step.plan]
        for name in self._names if step.plan else ():
            self.connector.save_kv_layer(name, None, None)
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        output = self._connector_output(step.scheduled.finished_req_ids)
        ids = [it.request_id for it in step.plan]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={it: index for index, it in enumerate(ids)},
            sampled_token_ids=tokens,
            kv_connector_output=_sent(output),
        )

    def _connector_output(self, finished: set[str]) -> KVConnectorOutput:
        results = self.connector.get_transfer_results(set(finished))
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_stats=self.connector.get_kv_connector_stats(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        return output

    def _forward(self, it: _Planned, tokens: list[int]) -> list[int]:
        """The next token, if all that are known are computed then."""
        assert it.end <= len(tokens), f"{it} computes what nobody has said"
        of_all = values(tokens)
        for group, kind in enumerate(self._groups):
            if kind in _STATES:
                self._advance_state(it, group, of_all)
            else:
                self._write(it, group, np.arange(it.begin, it.end), of_all)
        if it.end < len(tokens):
            return []
        for group, kind in enumerate(self._groups):
            if kind not in _STATES:
                self._attend(
                    it, group, np.arange(max(0, it.end - (kind or it.end)), it.end), of_all
                )
        return [next_token(of_all)]

    def _write(self, it: _Planned, group: int, at: np.ndarray, of_all: np.ndarray) -> None:
        blocks = np.array(it.blocks[group])[at // BLOCK]
        assert blocks.all(), f"{it} writes to the null block"
        for number, layer in enumerate(self._layers):
            layer[blocks, :, at % BLOCK] = self._kv(group, number, of_all[at])

    def _attend(self, it: _Planned, group: int, at: np.ndarray, of_all: np.ndarray) -> None:
        blocks = np.array(it.blocks[group])[at // BLOCK]
        for number, layer in enumerate(self._layers):
            right = layer[blocks, :, at % BLOCK] == self._kv(group, number, of_all[at])
            wrong = at[~right.all((1, 2))]
            assert not wrong.size, f"layer {number} of group {group}: wrong KV of {wrong} in {it}"

    def _kv(self, group: int, layer: int, of_tokens: np.ndarray) -> np.ndarray:
        """[tokens, heads, 2]: K tells tokens and heads, V layers."""
        k = of_tokens[:, None] + self._heads
        return np.stack([k, np.full(k.shape, 10 * group + layer)], axis=-1).astype(np.float32)

    def _advance_state(self, it: _Planned, group: int, of_all: np.ndarray) -> None:
        blocks = it.blocks[group]
        is_one = self._groups[group] == "none"
        for number, layer in enumerate(self._layers):
            states = layer.reshape(len(layer), -1)
            for tokens in (it.begin, it.end):
                if tokens == 0:
                    continue
                block = blocks[0 if is_one else (tokens - 1) // BLOCK]
                assert block != 0, f"{it} has no block for its state"
                right = of_all[tokens - 1], 10 * group + number
                if tokens == it.end:
                    states[block, :2] = right
                else:
                    assert tuple(states[block, :2]) == right, f"wrong state, group {group} of {it}"


class Engine:
    """Its scheduler and its workers, which take a step when the test says so."""

    def __init__(self, name: str, options: Options, folder: Path, rng: random.Random):
        self.name, self.options, self._rng = name, options, rng
        config = _vllm_config(f"{name}-{rng.getrandbits(64):x}", options, folder)
        cache = _kv_cache_config(options, options.heads // options.ranks)
        kv_cache_utils.init_none_hash(sha256)
        block_size, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)
        self._hasher = kv_cache_utils.get_request_block_hasher(hash_block_size, sha256)
        self._ranks = [_Rank(config, cache, options, rank) for rank in range(options.ranks)]
        self._aggregator = KVOutputAggregator(options.ranks)
        kind = AsyncScheduler if options.asynchronous else Scheduler
        self.scheduler = kind(
            config,
            cache,
            StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
        )
        addresses = {n: it.connector.get_handshake_metadata() for n, it in enumerate(self._ranks)}
        if addresses[0] is not None:
            self.scheduler.connector.set_xfer_handshake_metadata(_sent(addresses))
        self._known: dict[str, list[int]] = {}  # To the workers: tokens of requests.
        self._steps: deque[_Step] = deque()  # That the scheduler has not seen the output of.
        self._aborts: list[str] = []  # For the time while a step is computed.
        self.said: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}  # Why.
        self.params: dict[str, dict | None] = {}  # kv_transfer_params of answers.
        self.counts: Counter[str] = Counter()
        self._kept_before = self._kept()

    def add(
        self, name: str, prompt: list[int], count: int, params: dict | None, priority: int
    ) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        sampling.extra_args = {"kv_transfer_params": _sent(params)} if params else None
        self.said[name] = []
        self.scheduler.add_request(
            Request(
                name, list(prompt), sampling, None, block_hasher=self._hasher, priority=priority
            )
        )

    def abort(self, name: str) -> None:
        """Now, or while the next step is computed."""
        self._aborts.append(name)
        if self._rng.random() < 0.5:
            self._abort()

    def _abort(self) -> None:
        names, self._aborts = self._aborts, []
        open_ones = [it for it in names if it not in self.ended]
        if self.scheduler.finish_requests(open_ones, RequestStatus.FINISHED_ABORTED):
            self.ended.update(dict.fromkeys(open_ones, "abort"))

    def busy(self) -> bool:
        return self.scheduler.has_requests() or bool(self._steps)

    def step(self) -> None:
        """As vLLM's EngineCore. With asynchronous scheduling a second step is scheduled before the
        scheduler has seen the first one's output, and sometimes before that is computed."""
        if self.scheduler.has_requests():
            self._steps.append(self._schedule())
        ahead = self.options.asynchronous and self.scheduler.has_unfinished_requests()
        if ahead and len(self._steps) == 1 and self._rng.random() < 0.5:
            return
        for step in self._steps:
            step.output = step.output or self._compute(step)
        if len(self._steps) > ahead:
            self._update(self._steps.popleft())

    def _schedule(self) -> _Step:
        scheduled = self.scheduler.schedule()
        assert not scheduled.kv_cache_block_copies
        new = {it.req_id for it in scheduled.scheduled_new_reqs}
        new |= set(scheduled.scheduled_cached_reqs.resumed_req_ids)
        plan = []
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            blocks = [list(it) for it in self.scheduler.kv_cache_manager.get_block_ids(name)]
            end = request.num_computed_tokens
            tokens = list(request.all_token_ids) if name in new else None
            plan.append(_Planned(name, blocks, end - count, end, tokens))
        self.counts["preempted"] += len(scheduled.preempted_req_ids or ())
        return _Step(scheduled, plan, _sent(scheduled.kv_connector_metadata))

    def _compute(self, step: _Step) -> ModelRunnerOutput:
        for it in step.plan:
            if it.tokens is not None:
                self._known[it.request_id] = it.tokens
        outputs = [rank.compute(step, self._known) for rank in self._ranks]
        for it, tokens in zip(step.plan, outputs[0].sampled_token_ids, strict=True):
            self._known[it.request_id] += tokens
        for name in step.scheduled.finished_req_ids:
            self._known.pop(name, None)
        return self._aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]

    def _update(self, step: _Step) -> None:
        self._abort()
        self.counts["loaded"] += len(step.output.kv_connector_output.finished_recving or ())
        for outputs in self.scheduler.update_from_output(step.scheduled, step.output).values():
            for it in outputs.outputs:
                self.said[it.request_id] += it.new_token_ids
                if it.finish_reason is not None:
                    self.ended[it.request_id] = str(it.finish_reason)
                    self.params[it.request_id] = it.kv_transfer_params

    def reset(self, running: bool) -> None:
        """Of the prefix cache; with `running` all that run are preempted."""
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running)
        except RuntimeError:  # As vLLM's, where blocks cannot be had back now.
            self.counts["reset refused"] += 1

    def connectors(self) -> list[KVFerryConnector]:
        """Of the scheduler and of the workers."""
        tops = [self.scheduler.connector, *(it.connector for it in self._ranks)]
        return [ours for it in tops for ours in getattr(it, "sub_connectors", [it])]

    def left(self) -> dict[str, Any]:
        """What an engine keeps that has nothing to do. Nothing should be left."""
        pool = self.scheduler.kv_cache_manager.block_pool
        taken = self.options.blocks - 1 - pool.get_num_free_blocks()  # Block 0 is vLLM's own.
        found = {"blocks": taken, "requests": list(self.scheduler.requests)}
        kept = {name: it for name, it in self._kept().items() if self._kept_before.get(name) != it}
        return {name: it for name, it in (found | kept).items() if it}

    def _kept(self) -> dict[str, int]:
        return {
            name: size
            for number, it in enumerate(self.connectors())
            for name, size in _sizes(f"{number}", it)
        }

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.options}, {dict(self.counts)}, {len(self._steps)} steps ahead"
        ]
        for it in self.scheduler.requests.values():
            lines.append(
                f"  {it.request_id} {it.status.name}: {it.num_computed_tokens} of "
                f"{it.num_tokens} tokens, {it.num_preemptions} preemptions, priority {it.priority}"
            )
        return "\n".join(lines)

    def close(self) -> None:
        for it in self.connectors():
            it.shutdown()


# Of the last requests or of the last seconds, and what the next step looks at, if there is one.
_BOUNDED = ("_takers", "_saving", "_stats", "_dismissals")


def _sizes(name: str, of: Any) -> list[tuple[str, int]]:
    """Of all that a part of the connector keeps, and what it counts."""
    found = []
    for field, it in vars(of).items():
        if field in _BOUNDED:
            continue
        if isinstance(it, (dict, list, set, deque)):
            found.append((f"{name}.{field}", len(it)))
        elif type(it) is int:
            found.append((f"{name}.{field}", it))
        elif type(it).__module__.startswith("kvferry.vllm.") and hasattr(it, "__dict__"):
            found += _sizes(f"{name}.{field}", it)
    return found
