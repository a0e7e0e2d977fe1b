"""What the engine's device does behind the scheduler's back."""

from __future__ import annotations

import functools
from collections.abc import Callable

# Waits for all that the device has been asked for so far, in whichever stream.
Wait = Callable[[], None]


def wait_on(device: str, index: int) -> Wait | None:
    """device: SGLang's, "cpu", "cuda". None: its work is done when the call for it returns."""
    if device != "cuda":
        return None
    import torch

    return functools.partial(torch.cuda.synchronize, index)
