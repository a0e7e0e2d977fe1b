"""Tensors as bytes that say what they are, without pickle.

In front of the tensor's own bytes stands a header, padded with zeros to a multiple of 64 bytes so
that what follows is aligned. Little-endian:

    offset  bytes
         0      4  "kvt1"
         4      1  what it was put as: 0 numpy, 1 torch, 2 bytes
         5      1  length of the dtype's name, n: 1 to 32
         6      1  number of dimensions, d: 0 to 16
         7      1  number of 64-byte units of this header
         8      n  name of the dtype, ASCII, one of ITEM_BYTES
     8 + n    8 d  sizes
"""

from __future__ import annotations

import math
import struct
import sys
from dataclasses import dataclass

import numpy as np

from kvferry import _core

MAGIC = b"kvt1"
NUMPY, TORCH, BYTES = range(3)
MAX_NDIM = 16
UNIT_BYTES = 64
FIRST = struct.Struct("<4sBBBB")
# Types by the name that numpy and torch both have for them, as far as they have them.
ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}


def _is_torch(value) -> bool:
    # Without importing it: where nobody has, nobody has a tensor.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _checked(dtype: str, ndim: int) -> None:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"store: dtype {dtype} is not one of {', '.join(ITEM_BYTES)}")
    if ndim > MAX_NDIM:
        raise ValueError(f"store: {ndim} dimensions but at most {MAX_NDIM} are allowed")


def _header(kind: int, dtype: str, shape: tuple[int, ...]) -> bytes:
    _checked(dtype, len(shape))
    name = dtype.encode("ascii")
    used = FIRST.size + len(name) + 8 * len(shape)
    units = -(-used // UNIT_BYTES)
    header = FIRST.pack(MAGIC, kind, len(name), len(shape), units) + name
    header += struct.pack(f"<{len(shape)}Q", *shape)
    return header.ljust(units * UNIT_BYTES, b"\0")


def _check_torch(tensor) -> None:
    import torch

    if tensor.device.type != "cpu":
        raise ValueError(f"store: the tensor is on {tensor.device}; copy it to the CPU first")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError("store: the tensor is sparse or quantized; only plain ones can be stored")


def _torch_bytes(tensor):
    """A contiguous tensor's memory as a 1-D uint8 tensor."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def encode(value) -> list:
    """Header and bytes, as a store's put() takes them. What is not contiguous is copied."""
    if isinstance(value, bytes | bytearray | memoryview):
        flat = np.frombuffer(value, np.uint8)
        return [_header(BYTES, "uint8", flat.shape), flat]
    if _is_torch(value):
        _check_torch(value)
        tensor = value.detach().resolve_conj().resolve_neg().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        return [_header(TORCH, dtype, tuple(tensor.shape)), _torch_bytes(tensor)]
    if isinstance(value, np.ndarray):
        if value.dtype.byteorder == ">":
            raise ValueError("store: the array is big-endian; convert it first")
        # Not ascontiguousarray(), which makes one dimension of none.
        array = value if value.flags.c_contiguous else value.copy(order="C")
        return [_header(NUMPY, array.dtype.name, array.shape), array.reshape(-1).view(np.uint8)]
    raise TypeError(f"store: {type(value).__name__} is no torch tensor, numpy array or bytes")


def _parse(data: np.ndarray) -> tuple[int, str, tuple[int, ...], np.ndarray]:
    def bad(what: str):
        return _core.DataLoss(f"store: the entry is not a tensor of KVStoreBuffer: {what}")

    if data.size < UNIT_BYTES:
        raise bad(f"{data.size} bytes")
    magic, kind, name_bytes, ndim, units = FIRST.unpack_from(data)
    used = FIRST.size + name_bytes + 8 * ndim
    if magic != MAGIC or kind > BYTES or ndim > MAX_NDIM or units != -(-used // UNIT_BYTES):
        raise bad("another header")
    if data.size < units * UNIT_BYTES:
        raise bad("a header that is cut short")
    dtype = bytes(data[FIRST.size : FIRST.size + name_bytes]).decode("ascii", "replace")
    if dtype not in ITEM_BYTES:
        raise bad(f"dtype {dtype!r}")
    shape = struct.unpack_from(f"<{ndim}Q", data, FIRST.size + name_bytes)
    payload = data[units * UNIT_BYTES :]
    if math.prod(shape) * ITEM_BYTES[dtype] != payload.size:
        raise bad(f"{payload.size} bytes for {dtype} of shape {shape}")
    return kind, dtype, shape, payload


def _as_numpy(dtype: str, payload: np.ndarray) -> np.ndarray:
    try:
        return payload.view(np.dtype(dtype))
    except TypeError:  # numpy has it from ml_dtypes alone, where that is imported.
        return payload.view(np.dtype(f"uint{8 * ITEM_BYTES[dtype]}"))


def decode(data: np.ndarray):
    """What encode() was given, in the memory of `data`. DataLoss for anything else.

    A torch tensor where there is no torch is an array of numpy; what numpy does not have either,
    bfloat16 and fp8, are its bits as uint16 and uint8.
    """
    kind, dtype, shape, payload = _parse(data)
    if kind == BYTES:
        return payload.tobytes()
    if kind == TORCH:
        try:
            import torch
        except ModuleNotFoundError:
            pass
        else:
            return torch.from_numpy(payload).view(getattr(torch, dtype)).reshape(shape)
    return _as_numpy(dtype, payload).reshape(shape)


@dataclass
class Fill:
    """Memory for a value that is to be exactly of this dtype and shape."""

    want: bytes
    got: bytearray
    data: object

    @property
    def parts(self) -> list:
        return [self.got, self.data]

    def check(self) -> None:
        # Torch's may be read as numpy's, and the other way round.
        if self.got[:4] + self.got[5:] == self.want[:4] + self.want[5:]:
            return
        what = "another header"
        if bytes(self.got[:4]) == MAGIC:
            _, _, name_bytes, ndim, _ = FIRST.unpack_from(self.got)
            name = bytes(self.got[FIRST.size : FIRST.size + name_bytes]).decode("ascii", "replace")
            what = f"{name} of {ndim} dimensions in another shape or dtype"
        raise _core.FailedPrecondition(f"store: the entry is not what `out` is: {what}")


def fill(out) -> Fill:
    """For a store's get_into(). `out` must be contiguous: a copy would be filled in its place."""
    if _is_torch(out):
        _check_torch(out)
        if not out.is_contiguous():
            raise ValueError("store: out is not contiguous")
        dtype, flat = str(out.dtype).removeprefix("torch."), _torch_bytes(out.detach())
    elif isinstance(out, np.ndarray):
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("store: out is not contiguous or cannot be written")
        dtype, flat = out.dtype.name, out.reshape(-1).view(np.uint8)
    else:
        raise TypeError(f"store: out is {type(out).__name__}, not a torch tensor or numpy array")
    want = _header(NUMPY, dtype, tuple(out.shape))
    return Fill(want, bytearray(len(want)), flat)
