"""kvferry as a storage backend of SGLang's hierarchical cache: docs/stores.md says how to load it.

--hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvferry", "module_path": "kvferry.sglang", "class_name": "HiCacheStore",
      "interface_v1": 1, "store": {"backend": "rocksdb", "path": "/var/cache/kv"}}'
"""

# SGLang loads only subclasses of its HiCacheStorage, so there is nothing to offer without it.
try:
    import sglang.srt.mem_cache.hicache_storage  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"kvferry.sglang is a part of SGLang's server and needs SGLang 0.5.23 or later, installed "
        f"with what it needs itself (pip install sglang): {error}"
    ) from error

from kvferry.sglang.hicache import HiCacheStore

__all__ = ["HiCacheStore"]
