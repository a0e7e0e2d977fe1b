"""vLLM's KV cache in memory that decode engines on the same host read in place."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import kvferry
from kvferry.vllm.telemetry import logger

# Smaller ones are no KV caches.
_MIN_BYTES = 1 << 20


class SharedAllocation(TorchFunctionMode):
    """While it is entered, large torch.zeros() on the host lie in memory that can be shared.

    That is how vLLM allocates a KV cache, inside the context that a connector gives it
    (get_mem_pool_context()); torch has no other way to be told where host memory is to come from.
    What cannot be had there is allocated as ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memories: list[kvferry.SharedMemory] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            shared = self._zeros(*args, **kwargs)
            if shared is not None:
                return shared
        return func(*args, **kwargs)

    def _zeros(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        like = torch.zeros(*args, **kwargs | {"device": "meta"})
        if like.nbytes < _MIN_BYTES:
            return None
        try:
            memory = kvferry.SharedMemory.create(like.nbytes)
        except kvferry.Error as error:
            logger.warning("the KV cache is not shared with engines on this host: %s", error)
            return None
        self._memories.append(memory)
        return torch.from_numpy(memory.array()[: like.nbytes]).view(like.dtype).view(like.shape)

    def holding(self, tensors: list[torch.Tensor]) -> kvferry.SharedMemory | None:
        """What all of them lie in; None if there is no such memory."""
        for memory in self._memories:
            begin, end = memory.address, memory.address + memory.bytes
            if all(begin <= it.data_ptr() and it.data_ptr() + it.nbytes <= end for it in tensors):
                return memory
        return None
