"""Where an engine's KV cache lies, and what has to be waited for before its bytes are final."""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

# Waits for what the engine had asked its device for.
Point = Callable[[], None]


class Device(Protocol):
    """What the cache lies on."""

    memory: str  # As KvPool.adopt() takes it.

    def point(self) -> Point | None:
        """All that the calling thread, the engine's, has asked for so far. None: it is done."""


class Host:
    """The processor, which returns from a call when the work is done."""

    memory = "host"

    def point(self) -> None:
        return None


class Gpu:
    """A CUDA device, which works through the current stream behind the engine's back."""

    def __init__(self, index: int):
        self.memory = f"cuda:{index}"
        self._index = index

    def point(self) -> Point:
        # One that is slept for: who waits for it must not take a core of the engine's.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._index))
        return event.synchronize


def device_of(tensors: Iterable[torch.Tensor]) -> Device:
    """Raises NotImplementedError for tensors that lie elsewhere, or not all on one device."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) == 1:
        (device,) = devices
        if device.type == "cpu":
            return Host()
        if device.type == "cuda" and device.index is not None:
            return Gpu(device.index)
    raise NotImplementedError(
        f"KVFerryConnector moves KV in host memory or on one CUDA device, not on "
        f"{', '.join(sorted(map(str, devices)))}"
    )
