"""A stand-in for triton, whose wheel has a gigabyte: SGLang's modules decorate GPU kernels as they
load, and a server on the CPU launches none. It is a package, and not a mock in sys.modules, because
SGLang's processes are spawned."""

import sys
from unittest.mock import MagicMock


def _hide_from_torch() -> None:
    """Torch would take this for the real one: it has to have looked for that before."""
    frame = sys._getframe()
    while frame:
        if frame.f_globals.get("__name__", "").startswith("torch."):
            raise ImportError("this triton is a stand-in")
        frame = frame.f_back
    here = sys.modules[__name__]
    sys.modules[__name__] = None
    import torch._inductor.compile_fx  # noqa: F401

    sys.modules[__name__] = here


_hide_from_torch()

__version__ = "3.9.0"
runtime = MagicMock()
# SGLang falls back to the CPU then.
runtime.driver.active.get_current_target.side_effect = RuntimeError("no GPU")
runtime.driver.active.utils.get_device_properties.side_effect = RuntimeError("no GPU")


class _Kernel:
    def __init__(self, function):
        self.fn = self.__wrapped__ = function
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self.__module__ = function.__module__
        self.arg_names = []

    def __getitem__(self, grid):
        raise NotImplementedError(f"a GPU kernel on the CPU: {self.__name__}")

    def __call__(self, *args, **kwargs):
        return self[None]


def jit(function=None, **_):
    return jit if function is None else _Kernel(function)


def autotune(*_, **__):
    return lambda function: function


heuristics = autotune


def cdiv(a, b):
    return -(-a // b)


def next_power_of_2(n):
    return 1 << (n - 1).bit_length() if n > 0 else 0


def Config(*_, **__):
    return None


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
