"""Free lists of token slots as engines keep them in torch tensors, for allocators.py.

Written from a description of what such allocators do, not of how: slots come from the front of an
index tensor and go back to its end, so that taking n is a slice and giving back copies the list.
Everything is on the CPU.
"""

import torch


def ceil_div(a, b):
    return (a + b - 1) // b


class TorchFreeList:
    """Slots [page_size, page_size + num_tokens) in whole pages; page 0 is padding.

    Without `merge_and_sort` freed pages go straight to the end of the list. With it they wait in a
    list of their own until the first one is too short, and are sorted into it then.
    """

    def __init__(self, num_tokens, page_size=1, merge_and_sort=False):
        self.page_size, self.merge_and_sort = page_size, merge_and_sort
        self.free_pages = torch.arange(1, num_tokens // page_size + 1)
        self.waiting = torch.empty(0, dtype=torch.int64)
        self.places = torch.arange(page_size)

    @property
    def available_size(self):
        return (len(self.free_pages) + len(self.waiting)) * self.page_size

    def merge(self):
        self.free_pages = torch.cat((self.free_pages, self.waiting)).sort().values
        self.waiting = self.waiting[:0]

    def take(self, count):
        if count > len(self.free_pages) and len(self.waiting):
            self.merge()
        if count > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return taken

    def alloc(self, num_tokens):
        pages = self.take(num_tokens // self.page_size)
        if pages is None or self.page_size == 1:
            return pages
        return (pages[:, None] * self.page_size + self.places).flatten()

    def free(self, slots):
        pages = slots if self.page_size == 1 else torch.unique(slots // self.page_size)
        if self.merge_and_sort:
            self.waiting = torch.cat((self.waiting, pages))
        else:
            self.free_pages = torch.cat((self.free_pages, pages))

    def alloc_decode(self, tokens, last_slots):
        """The next slot of each sequence, behind its last one or the first of a new page."""
        if self.page_size == 1:
            return self.take(len(tokens))
        opens_page = tokens % self.page_size == (1 % self.page_size)
        pages = self.take(int(opens_page.sum()))
        if pages is None:
            return None
        slots = last_slots + 1
        slots[opens_page] = pages * self.page_size
        return slots

    def alloc_extend(self, prefix_tokens, tokens, last_slots):
        """The new slots of sequences that grow from prefix_tokens to tokens, one after another."""
        size = self.page_size
        old_pages, new_tokens = ceil_div(prefix_tokens, size), tokens - prefix_tokens
        new_pages = ceil_div(tokens, size) - old_pages
        pages = self.take(int(new_pages.sum()))
        if pages is None:
            return None
        # Of each new token: its sequence and its position there.
        sequence = torch.repeat_interleave(torch.arange(len(tokens)), new_tokens)
        before = (new_tokens.cumsum(0) - new_tokens)[sequence]
        position = torch.arange(len(sequence)) - before + prefix_tokens[sequence]
        page = position // size - old_pages[sequence] + (new_pages.cumsum(0) - new_pages)[sequence]
        in_old_page = position < (old_pages * size)[sequence]
        behind = last_slots[sequence] + 1 + position - prefix_tokens[sequence]
        if not len(pages):
            return behind
        fresh = pages[page.clamp(min=0)] * size + position % size
        return torch.where(in_old_page, behind, fresh)
