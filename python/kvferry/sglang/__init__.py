"""kvferry in SGLang: a storage backend of its hierarchical cache (docs/stores.md), and a transfer
backend between its prefill and decode servers (docs/sglang.md).

--hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvferry", "module_path": "kvferry.sglang", "class_name": "HiCacheStore",
      "interface_v1": 1, "store": {"backend": "rocksdb", "path": "/var/cache/kv"}}'

--disaggregation-mode prefill --disaggregation-transfer-backend kvferry
"""

# SGLang loads only subclasses of its own classes, so there is nothing to offer without it.
try:
    import sglang.srt.environ  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"kvferry.sglang is a part of SGLang's server and needs SGLang 0.5.23, installed with "
        f"what it needs itself (pip install sglang==0.5.23): {error}"
    ) from error

__all__ = ["HiCacheStore"]


def __getattr__(name: str):
    # Not before it is asked for: SGLang loads its plugins before it has chosen a device.
    if name == "HiCacheStore":
        from kvferry.sglang.hicache import HiCacheStore

        return HiCacheStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
