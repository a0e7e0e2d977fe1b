"""For all processes of SGLang's: where ./dev puts it, behind this Python's own packages, and a mend
of its attention on a CPU."""

import importlib.abc
import importlib.util
import os
import sys

sys.path += filter(None, [os.environ.get("KVFERRY_TEST_SGLANG")])

_BACKEND = "sglang.srt.layers.attention.torch_native_backend"


class _OnceLoaded(importlib.abc.MetaPathFinder):
    """Mends the backend when it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != _BACKEND:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_mend(module) -> None:
            load(module)
            _mend(module.TorchNativeAttnBackend)

        spec.loader.exec_module = load_and_mend
        return spec


def _mend(backend: type) -> None:
    """SGLang 0.5.23 reads the pool of windows by the tokens' places in the other pool. They are the
    same ones in a server that computes its prompts itself, and others where they are fetched."""

    def with_own_places(read):
        def mended(self, query, output, k_cache, v_cache, req_to_token, *args, **kwargs):
            if self.use_sliding_window_kv_pool:
                pool = self.token_to_kv_pool
                windows = [it.data_ptr() for it in pool.swa_kv_pool.k_buffer]
                if k_cache.data_ptr() in windows:
                    req_to_token = pool.translate_loc_from_full_to_swa(req_to_token)
            return read(self, query, output, k_cache, v_cache, req_to_token, *args, **kwargs)

        return mended

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(backend, name, with_own_places(getattr(backend, name)))


sys.meta_path.insert(0, _OnceLoaded())
