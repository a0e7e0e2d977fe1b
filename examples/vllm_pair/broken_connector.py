"""KVFerryConnector with a fault on purpose: it reports success and zeroes the KV that it fetched.

Only to show that the checks of the demo and the tests can fail. With an environment variable
KVFERRY_BREAK_FILE it does so only while that file exists.
"""

import os

import torch
from kvferry.vllm import KVFerryConnector
from kvferry.vllm.metadata import Load
from kvferry.vllm.worker import DecodeWorker


class _ZeroingWorker(DecodeWorker):
    kv_caches: list[torch.Tensor]

    def load(self, loads: list[Load]) -> None:
        self.blocks = getattr(self, "blocks", {}) | {it.request_id: it.block_ids for it in loads}
        super().load(loads)

    def take_finished(self) -> set[str]:
        finished = super().take_finished()
        switch = os.environ.get("KVFERRY_BREAK_FILE")
        for request_id in finished:
            blocks = self.blocks.pop(request_id)
            if switch is None or os.path.exists(switch):
                for cache in self.kv_caches:
                    cache[blocks] = 0
        return finished


class BrokenKVConnector(KVFerryConnector):
    decode_worker_class = _ZeroingWorker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._decode_worker.kv_caches = list(kv_caches.values())
