"""What a run moves: requests of several shapes, and where their pages lie."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One request, in a pool twice its size: `pages` pages in each of layers x tensors buffers."""

    layout: tuple
    layers: int
    tensors: int
    page_bytes: int
    pages: int

    @property
    def buffers(self):
        return self.layers * self.tensors

    @property
    def request_bytes(self):
        return self.buffers * self.page_bytes * self.pages

    @property
    def pool_pages(self):
        return 2 * self.pages + 1  # Page 0 is padding, as in SGLang.

    @property
    def pool_bytes(self):
        return self.buffers * self.page_bytes * self.pool_pages


def mha(page_size, pages):
    flags = f"--layout mha --layers 32 --kv-heads 8 --head-dim 128 --page-size {page_size}"
    return Shape(tuple(flags.split()), 32, 2, page_size * 8 * 128 * 2, pages)


def mla(page_size, pages):
    flags = f"--layout mla --layers 61 --latent-dim 576 --page-size {page_size}"
    return Shape(tuple(flags.split()), 61, 1, page_size * 576 * 2, pages)


SHAPES = {
    "llama8b-p16": mha(16, 256),  # Llama 3 8B, 4,096 tokens, vLLM's usual page size: 32 KiB items
    "llama8b-p1": mha(1, 4096),  # the same in SGLang's default page size: 2 KiB items
    "mla-p64": mla(64, 64),  # DeepSeek-V3's latent, 4,096 tokens: 72 KiB items
    "mla-p1": mla(1, 4096),  # the same at page size 1: 1,152-byte items
    "short-p16": mha(16, 8),  # a prompt of 128 tokens: 16 MiB
}
FRAGMENTATIONS = ["seq", "runs8", "rand"]


def choose_pages(shape, fragmentation, rng):
    """Page ids in [1, pool_pages): one run, runs of 8 in random places, or all at random."""
    ids = range(1, shape.pool_pages)
    if fragmentation == "seq":
        return list(ids[: shape.pages])
    if fragmentation == "rand":
        return rng.sample(ids, shape.pages)
    places = rng.sample(range(len(ids) // 8), shape.pages // 8)
    return [ids[place * 8 + i] for place in places for i in range(8)]


def format_runs(pages):
    runs = []
    for page in pages:
        if runs and runs[-1][0] + runs[-1][1] == page:
            runs[-1][1] += 1
        else:
            runs.append([page, 1])
    return ",".join(f"{first}+{count}" for first, count in runs)
