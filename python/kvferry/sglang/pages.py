"""The pages of one of SGLang's host pools: their memory, and the keys they are stored under."""

from __future__ import annotations

import ctypes
import hashlib
import json

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

_MAX_HASH_CHARS = 128


class Pages:
    """One host pool, of one rank.

    The value of a page is the memory that the pool lends for it, part after part. Pools of another
    layout order these bytes differently, which is why all that says what they are is in the keys.
    """

    def __init__(self, pool, name: str, config, namespace: str, *, zero_copy: bool):
        """Raises ValueError when the pool cannot lend its pages."""
        self._pool = pool
        self._page_size = getattr(pool, "logical_page_size", pool.page_size) or 1
        self.zero_copy = zero_copy
        self.page_bytes = self._measure(name)
        self._prefix = _prefix(self._describe(str(name), config, namespace))

    def _measure(self, name: str) -> int:
        if not self.zero_copy:
            page = self._pool.get_dummy_flat_data_page()
            return page.numel() * page.element_size()
        try:
            (parts,) = self.memory(torch.arange(self._page_size), 1)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise ValueError(
                f"hicache: pool {str(name)!r} ({type(self._pool).__name__}, layout "
                f"{self._pool.layout}) has no pages that can be stored in place: {error}"
            ) from error
        return sum(part.nbytes for part in parts)

    def _describe(self, name: str, config, namespace: str) -> dict:
        pool = self._pool
        described = {
            "namespace": namespace,
            "model": config.model_name or "",
            "pool": name,
            "class": type(pool).__name__,
            "form": "parts" if self.zero_copy else "flat",
            "layout": pool.layout,
            "dtype": str(pool.dtype),
            "page_size": self._page_size,
            "page_bytes": self.page_bytes,
            "layers": [getattr(pool, "start_layer", 0), getattr(pool, "end_layer", 0)],
            "pp": [config.pp_rank, config.pp_size],
            "cp": [config.attn_cp_rank, config.attn_cp_size],
            "dcp": [getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)],
        }
        if not _is_replicated(pool, name, config):
            described["tp"] = [config.tp_rank, config.tp_size]
        return described

    def keys(self, hashes: list[str]) -> list[str]:
        """Of at most 256 bytes, whatever the hashes are."""
        return [self._prefix + _bounded(page_hash) for page_hash in hashes]

    def memory(self, indices: torch.Tensor, num_pages: int) -> list[list[np.ndarray]]:
        """For each page the pool's own memory, to read or to fill.

        ValueError unless `indices` are the token slots of `num_pages` whole pages of the pool:
        nothing else may be turned into addresses.
        """
        self._check(indices, num_pages)
        found = self._pool.get_page_buffer_meta(indices)
        if found is None:
            raise ValueError("it has no memory of its own")
        if num_pages == 0:
            return []
        pointers, sizes = found
        parts, rest = divmod(len(pointers), num_pages)
        if rest != 0 or parts == 0 or len(sizes) != len(pointers):
            raise ValueError(f"{len(pointers)} parts for {num_pages} pages")
        arrays = [_array(*part) for part in zip(pointers, sizes, strict=True)]
        return [arrays[i : i + parts] for i in range(0, len(arrays), parts)]

    def flat(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """The bytes of a tensor that holds a page, without a copy."""
        if tensor is None or not tensor.is_contiguous() or tensor.nbytes != self.page_bytes:
            got = None if tensor is None else f"{tensor.nbytes} bytes of {tuple(tensor.shape)}"
            raise ValueError(f"a page is {self.page_bytes} contiguous bytes, not {got}")
        return tensor.detach().reshape(-1).view(torch.uint8)

    def _check(self, indices: torch.Tensor, num_pages: int) -> None:
        size = self._page_size
        if indices.numel() != num_pages * size:
            raise ValueError(
                f"{indices.numel()} host indices for {num_pages} pages of {size} tokens"
            )
        rows = indices.reshape(num_pages, size)
        first = rows[:, :1]
        slots = getattr(self._pool, "logical_size", self._pool.size)
        whole = (first % size == 0) & (first >= 0) & (first + size <= slots)
        if not bool((whole & (rows == first + torch.arange(size))).all()):
            raise ValueError(f"host indices are not whole pages of a pool of {slots} tokens")


def _array(pointer: int, size: int) -> np.ndarray:
    if size == 0:
        return np.empty(0, np.uint8)
    # Through numpy, since a ctypes array does not say what its strides are.
    return np.frombuffer((ctypes.c_uint8 * size).from_address(pointer), np.uint8)


def _is_replicated(pool, name: str, config) -> bool:
    """Whether all tensor-parallel ranks hold the same, so that one of them writes it for all.

    That is the KV of MLA and what belongs to it, but neither Mamba's states nor the KV of a draft
    model with heads, which are another rank's own.
    """
    if not config.is_mla_model or name == str(PoolName.MAMBA):
        return False
    return name == str(PoolName.KV) or not hasattr(pool, "head_num")


def _prefix(described: dict) -> str:
    text = json.dumps(described, sort_keys=True)
    return f"sglang/{hashlib.sha256(text.encode()).hexdigest()}/"


def _bounded(page_hash: str) -> str:
    if len(page_hash) <= _MAX_HASH_CHARS and page_hash.isascii():
        return page_hash
    return "sha256-" + hashlib.sha256(page_hash.encode()).hexdigest()
