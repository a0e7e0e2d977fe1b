"""Small pools, of kvferry's own memory or of an engine's arrays, and endpoints that have them."""

import kvferry
import numpy as np

MODEL = "test/model"
NUM_PAGES = 16


def small_layout(**changes):
    options = dict(
        num_layers=3,
        page_size=4,
        dtype="float16",
        page_format="NHD",
        tensors=[("k", 2, 8), ("v", 2, 4)],
    )
    return kvferry.KvLayout(**(options | changes))


def make_config(**options):
    return kvferry.Config.make({"chunk_bytes": 4096, "arena_bytes": 1 << 20} | options)


def fill(pool, seed):
    """Random bytes in every page; returns them as {(layer, tensor, page): bytes}."""
    random = np.random.default_rng(seed)
    content = {}
    for layer in range(pool.layout.num_layers):
        for tensor in range(len(pool.layout.tensors)):
            for page in range(pool.num_pages):
                view = pool.page(layer, tensor, page)
                view[:] = random.integers(0, 256, view.size, dtype=np.uint8)
                content[layer, tensor, page] = view.tobytes()
    return content


class Peers:
    """A prefill and a decode endpoint."""

    def __init__(self, **options):
        self.source = kvferry.KvPool.create(small_layout(), NUM_PAGES)
        self.target = kvferry.KvPool.create(small_layout(), NUM_PAGES)
        self.config = make_config(**options)
        self.prefill = kvferry.PrefillEndpoint(self.source, self.config, MODEL, "p")
        self.decode = kvferry.DecodeEndpoint(self.target, self.config, MODEL, name="d")

    def close(self):
        self.prefill.close()
        self.decode.close()


class Owner(list):
    """A list that can be referred to weakly."""


def numpy_buffers():
    """Memory as an engine has it: an array of each layer, K first."""
    layout = small_layout()
    return Owner(
        np.zeros((NUM_PAGES, layout.item_bytes(tensor)), dtype=np.uint8)
        for tensor in range(2)
        for _ in range(layout.num_layers)
    )


def adopt(arrays):
    return kvferry.KvPool.adopt(small_layout(), [(a.ctypes.data, a.nbytes) for a in arrays], arrays)
