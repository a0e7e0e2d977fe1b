"""kvferry moves the KV caches of LLM serving between prefill and decode processes."""

from kvferry._core import (
    Aborted,
    AlreadyExists,
    Cancelled,
    Config,
    DataLoss,
    DeadlineExceeded,
    DecodeEndpoint,
    Error,
    FailedPrecondition,
    FetchHandle,
    KvLayout,
    KvPool,
    NotFound,
    PageAllocator,
    PermissionDenied,
    PrefillEndpoint,
    ResourceExhausted,
    Ticket,
    Unavailable,
    random_id,
)

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "AlreadyExists",
    "Cancelled",
    "Config",
    "DataLoss",
    "DeadlineExceeded",
    "DecodeEndpoint",
    "Error",
    "FailedPrecondition",
    "FetchHandle",
    "KvLayout",
    "KvPool",
    "NotFound",
    "PageAllocator",
    "PermissionDenied",
    "PrefillEndpoint",
    "ResourceExhausted",
    "Ticket",
    "Unavailable",
    "random_id",
]
