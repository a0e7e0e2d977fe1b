"""kvferry between SGLang's prefill and decode servers.

SGLang's other backends have the prefill rank write into the decode rank's memory. Here each rank
writes its own: the prefill rank publishes a request's pages, chunk by chunk as they are computed,
and tells the decode rank, which fetches them. So nothing arrives in pages that a decode rank has
given up, whatever the other side does, and pages of a prefill rank that gives up are not read any
more. Neither needs an answer of the other for that.

Bootstrapping, statuses, time limits, aborts and heartbeats are SGLang's own (common/conn.py).
"""

from __future__ import annotations

from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
from sglang.srt.disaggregation.utils import DisaggregationMode

from kvferry.sglang.pd_decode import DecodeManager, KVReceiver
from kvferry.sglang.pd_prefill import KVSender, PrefillManager

__all__ = ["KVBootstrapServer", "KVManager", "KVReceiver", "KVSender"]


def KVManager(  # noqa: N802  # SGLang takes it for a class.
    args: KVArgs,
    disaggregation_mode: DisaggregationMode,
    server_args,
    is_mla_backend: bool | None = False,
) -> PrefillManager | DecodeManager:
    is_prefill = disaggregation_mode == DisaggregationMode.PREFILL
    kind = PrefillManager if is_prefill else DecodeManager
    return kind(args, disaggregation_mode, server_args, is_mla_backend)


class KVBootstrapServer(CommonKVBootstrapServer):
    """SGLang's own."""
