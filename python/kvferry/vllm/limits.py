"""Which engines the connector serves, and which it refuses at start."""

from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvferry.vllm.layout import attention_specs, windows
from kvferry.vllm.parts import has_states, in_groups


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises NotImplementedError, naming the setting, for engines we would serve wrongly."""
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if (size := getattr(parallel, name, 1)) != 1:
            raise NotImplementedError(f"KVFerryConnector needs {name} 1, not {size}")
    if vllm_config.model_config.enable_sleep_mode:
        raise NotImplementedError(
            "KVFerryConnector does not serve engines with enable_sleep_mode: one that sleeps takes "
            "the memory of blocks away that another engine may still be reading"
        )
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec):
            _check_state(spec, kv_cache_config)
            continue
        known = isinstance(spec, (FullAttentionSpec, SlidingWindowSpec))
        if not known or isinstance(spec, SlidingWindowMLASpec):
            raise NotImplementedError(
                f"KVFerryConnector serves models with full attention, sliding windows and "
                f"recurrent states, not {type(spec).__name__}"
            )
    sizes = {spec.block_size for spec in attention_specs(kv_cache_config)}
    if len(sizes) != 1:
        raise NotImplementedError(
            f"KVFerryConnector needs layers with attention, and blocks of one size in all of them, "
            f"not of {sorted(sizes)} tokens"
        )


def _check_state(spec: MambaSpec, kv_cache_config: KVCacheConfig) -> None:
    # align, with prefix caching: a state for each block that has one, in the block's place.
    if spec.mamba_cache_mode not in ("none", "align"):
        raise NotImplementedError(
            f"KVFerryConnector serves models with recurrent states in mamba_cache_mode none and "
            f"align, not {spec.mamba_cache_mode}"
        )
    sizes = {of_attention.block_size for of_attention in attention_specs(kv_cache_config)}
    if spec.mamba_cache_mode == "align" and not sizes <= {spec.block_size}:
        raise NotImplementedError(
            f"KVFerryConnector needs states of as many tokens as blocks have, {sorted(sizes)}, not "
            f"of {spec.block_size} (--mamba-block-size), or --no-enable-prefix-caching"
        )
    if spec.num_speculative_blocks != 0:
        raise NotImplementedError(
            "KVFerryConnector does not serve models with recurrent states while tokens are "
            "speculated on"
        )


def check_engine_role(vllm_config: VllmConfig, role: KVConnectorRole) -> None:
    """Raises ValueError for a connector that loads in an engine that does not expect it: under
    MultiConnector vLLM looks at the outer kv_role for whether a block that has been given back may
    be loaded into while a step that runs still writes to it."""
    if role != KVConnectorRole.WORKER:
        return  # Only workers can see the outer configuration.
    loads = vllm_config.kv_transfer_config.is_kv_consumer
    if loads and not _engine(vllm_config).kv_transfer_config.is_kv_consumer:
        raise ValueError(
            'KVFerryConnector loads blocks with "kv_role": "kv_consumer" and "kv_both", and vLLM '
            "then needs one of these for the whole engine (under MultiConnector: beside the outer "
            "kv_connector_extra_config)"
        )


# Whose managers keep a request's blocks until it ends. Others of full attention may not, as R-SWA's
# does not: a block that is given back would be saved with what comes into it.
_KEPT_TO_THE_END = (FullAttentionSpec, MLAAttentionSpec, SinkFullAttentionSpec)


def check_store_supported(
    vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
) -> None:
    """Raises, naming the setting, for engines that a store would fail: ValueError, or
    NotImplementedError for a model that it does not serve."""
    kept = windows(vllm_config, kv_cache_config)
    if in_groups(kept):
        hint = (
            ""
            if has_states(kept)
            else ". --disable-hybrid-kv-cache-manager lets models that have other layers too keep "
            "all blocks of all of them"
        )
        raise NotImplementedError(
            f'KVFerryConnector in mode "store" serves models with full attention alone{hint}'
        )
    for spec in attention_specs(kv_cache_config):
        if type(spec) not in _KEPT_TO_THE_END:
            raise NotImplementedError(
                f'KVFerryConnector in mode "store" serves models whose blocks are kept until a '
                f"request ends, not those of {type(spec).__name__}"
            )
    transfer = vllm_config.kv_transfer_config
    if role == KVConnectorRole.WORKER and not _recomputes(vllm_config):
        raise ValueError(
            'KVFerryConnector in mode "store" needs "kv_load_failure_policy": "recompute", of the '
            "whole engine (under MultiConnector: beside the outer kv_connector_extra_config): a "
            "store may drop a block after it has promised it, and such a request should not fail"
        )
    if transfer.kv_role != "kv_both":
        raise ValueError(
            f'KVFerryConnector in mode "store" needs "kv_role": "kv_both", not {transfer.kv_role!r}'
        )


def _recomputes(vllm_config: VllmConfig) -> bool:
    return _engine(vllm_config).kv_transfer_config.kv_load_failure_policy == "recompute"


def _engine(vllm_config: VllmConfig) -> VllmConfig:
    """Of the engine: under MultiConnector a connector is given a configuration of its own, and
    vLLM heeds the outer one, which only workers can see."""
    return get_current_vllm_config_or_none() or vllm_config
