"""Who has which slots, pages and blocks, at random beside naive models."""

import itertools

import kvferry
import numpy as np
import pytest
from random_models import (
    FAR,
    REFUSED,
    Model,
    integer,
    integer_list,
    integers,
    mangled,
    no_integer,
    no_integers,
    run,
    torch,
)


def runs_of(free: set) -> list[int]:
    """Lengths of the runs of neighbours."""
    lengths = []
    for place in sorted(free):
        if place - 1 in free:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def histogram_of(lengths: list[int]) -> list[int]:
    histogram = [0] * max((length.bit_length() for length in lengths), default=0)
    for length in lengths:
        histogram[length.bit_length() - 1] += 1
    return histogram


def free_runs(pool, prefix: str = "") -> tuple:
    names = ("num_free_runs", "longest_free_run", "free_run_histogram")
    runs, longest, histogram = (getattr(pool, prefix + name) for name in names)
    return runs, longest, histogram()


def naive_free_runs(free: set) -> tuple:
    lengths = runs_of(free)
    return len(lengths), max(lengths, default=0), histogram_of(lengths)


class Pages(Model):
    """PageAllocator."""

    def __init__(self, rng):
        super().__init__(rng)
        self.num_pages = rng.choice([1, 2, 40, 200])
        self.reserved = rng.randrange(min(self.num_pages, 4))
        self.pool = kvferry.PageAllocator(self.num_pages, self.reserved)
        self.free = set(range(self.reserved, self.num_pages))

    def seen(self):
        return self.pool.num_free, *free_runs(self.pool)

    def expected(self):
        return len(self.free), *naive_free_runs(self.free)

    def held(self) -> list:
        return sorted(set(range(self.reserved, self.num_pages)) - self.free)

    def took(self, pages, count):
        assert len(pages) == len(set(pages)) == count
        assert set(pages) <= self.free
        self.free -= set(pages)

    def do_allocate(self):
        count = self.rng.randint(1, max(1, self.num_pages // 4))
        if count > len(self.free):
            with self.refused(kvferry.ResourceExhausted, f"{count} pages"):
                self.pool.allocate(integer(self.rng, count))
            return
        self.took(self.pool.allocate(integer(self.rng, count)), count)

    def do_extend(self):
        held, count = self.held(), self.rng.randint(1, 3)
        last = self.rng.choice([*held, *FAR, *self.free]) if self.one_in(3) or not held else held[0]
        if count > len(self.free):
            with self.refused(kvferry.ResourceExhausted):
                self.pool.extend(last, count)
        elif last not in held:
            with self.refused(ValueError, str(last)):
                self.pool.extend(last, count)
        else:
            pages = self.pool.extend(integer(self.rng, last), count)
            behind = next(i for i in itertools.count(1) if last + i not in self.free)
            together = list(range(last + 1, last + min(count + 1, behind)))
            assert pages[: len(together)] == together
            self.took(pages, count)

    def do_free(self):
        held = self.held()
        pages = self.rng.sample(held, self.rng.randint(0, min(len(held), 8)))
        self.pool.free(integer_list(self.rng, pages))
        self.free |= set(pages)

    def do_wrong(self):
        held = self.held()
        pages = self.rng.sample(held, self.rng.randint(0, min(len(held), 8)))
        with self.refused(ValueError):
            wrong = mangled(self.rng, pages, [*FAR, *range(self.reserved), *self.free])
            self.pool.free(integer_list(self.rng, wrong))
        with self.refused():
            self.pool.allocate(self.rng.choice([0, -1, no_integer(self.rng)]))
        with self.refused(TypeError):
            self.pool.free([no_integer(self.rng)])


class Requests(Model):
    """ReqToTokenPool."""

    def __init__(self, rng):
        super().__init__(rng)
        self.size, self.context = rng.choice([1, 3, 17]), rng.choice([1, 8, 100])
        self.pool = kvferry.ReqToTokenPool(self.size, self.context)
        self.table = np.zeros((self.size, self.context), np.int32)
        self.held = set()
        self.views = [self.pool.req_to_token]

    def seen(self):
        return self.pool.available_size, self.pool.req_to_token.tolist()

    def expected(self):
        return self.size - len(self.held), self.table.tolist()

    def check(self):
        super().check()
        for view in self.views:
            assert view.dtype == np.int32 and view.flags.writeable
            assert (view == self.table).all()

    def do_alloc(self):
        count = self.rng.randint(1, self.size)
        slots = self.pool.alloc() if count == 1 else self.pool.alloc(integer(self.rng, count))
        if count > self.size - len(self.held):
            assert slots is None
            return
        assert len(set(slots)) == count and not set(slots) & self.held
        assert all(type(slot) is int and 0 <= slot < self.size for slot in slots)
        self.held |= set(slots)

    def do_free(self):
        if self.held and self.one_in(2):
            one = self.rng.choice(sorted(self.held))
            self.pool.free(integer(self.rng, one))
            self.held.remove(one)
            return
        slots = self.rng.sample(sorted(self.held), self.rng.randint(0, len(self.held)))
        self.pool.free(integer_list(self.rng, slots))
        self.held -= set(slots)

    def do_clear(self):
        if self.one_in(4):
            self.pool.clear()
            self.held.clear()

    def some_write(self) -> tuple:
        slot = self.rng.choice(sorted(self.held))
        first = self.rng.randint(0, self.context)
        values = [
            self.rng.randint(-(2**31), 2**31 - 1)
            for _ in range(self.rng.randint(0, min(9, self.context - first)))
        ]
        return slot, first, values

    def wrote(self, slot, first, values):
        self.table[slot, first : first + len(values)] = values

    def do_write(self):
        if not self.held:
            return
        slot, first, values = self.some_write()
        self.pool.write(integer(self.rng, slot), first, integers(self.rng, values))
        self.wrote(slot, first, values)

    def batch(self) -> tuple:
        writes = {}  # One a slot: of two that write one position either may be left.
        for _ in range(self.rng.randint(0, 4) if self.held else 0):
            slot, first, values = self.some_write()
            writes[slot] = (first, values)
        slots = list(writes)
        firsts, values = [list(it) for it in zip(*writes.values(), strict=True)] or ([], [])
        return slots, firsts, [len(it) for it in values], [one for it in values for one in it]

    def do_write_batch(self):
        slots, firsts, counts, values = self.batch()
        self.pool.write_batch(*(integers(self.rng, it) for it in (slots, firsts, counts, values)))
        for slot, first, count in zip(slots, firsts, counts, strict=True):
            self.wrote(slot, first, values[:count])
            values = values[count:]

    def do_write_into_the_view(self):
        row = self.rng.randrange(self.size)
        self.rng.choice(self.views)[row] = self.table[row] = self.rng.randint(-5, 2**31 - 1)

    def do_look(self):
        view = self.pool.req_to_token
        self.views = [*self.views[-3:], torch.from_numpy(view).numpy() if self.one_in(2) else view]

    def do_make_another(self):
        """The views of the old one live on, as what they were."""
        if not self.one_in(8):
            return
        old, left = self.views, self.table.copy()
        self.__init__(self.rng)
        for view in old:
            assert (view == left).all()
        old[0][:] = -1  # Nobody else has that memory.

    def do_wrong(self):
        free = sorted(set(range(self.size)) - self.held)
        outside = [self.size, *FAR, *free]
        with self.refused(ValueError):
            some = self.rng.sample(sorted(self.held), self.rng.randint(0, len(self.held)))
            self.pool.free(integer_list(self.rng, mangled(self.rng, some, outside)))
        with self.refused():
            self.pool.free([no_integer(self.rng)])
        with self.refused():
            self.pool.alloc(self.rng.choice([0, -1, -(2**63), no_integer(self.rng)]))
        with self.refused(ValueError):
            self.pool.write(self.rng.choice(outside), 0, integers(self.rng, []))
        if not self.held:
            return
        slot, first, values = self.some_write()
        with self.refused():
            self.pool.write(slot, first, no_integers(self.rng, values))
        with self.refused(ValueError, "outside|32 bits"):
            values = [1] * (self.context - first + 1) if self.one_in(2) else [2**31]
            self.pool.write(slot, first, np.array(values))
        with self.refused(ValueError):
            self.pool.write(slot, self.rng.choice([-1, self.context + 1, 2**63 - 1]), np.array([1]))

    def do_wrong_batch(self):
        slots, firsts, counts, values = self.batch()
        if not slots:
            return
        wrong = [list(slots), list(firsts), list(counts), list(values)]
        at, place = self.rng.randrange(4), self.rng.randrange(len(slots))
        if at == 0:
            free = sorted(set(range(self.size)) - self.held)
            wrong[0][place] = self.rng.choice([self.size, -1, 2**40, *free])
        elif at == 1:
            wrong[1][place] = self.rng.choice([-1, self.context + 1, 2**62])
        elif at == 2:
            wrong[2][place] += self.rng.choice([-1, 1, 2**62])
        else:
            wrong[3].append(1)
        with self.refused(ValueError):
            self.pool.write_batch(*(np.array(it, np.int64) for it in wrong))
        short = [slots, firsts, counts]
        short[self.rng.randrange(3)] = []
        with self.refused(ValueError):
            self.pool.write_batch(*(integers(self.rng, it) for it in [*short, values]))
        forms = [slots, firsts, counts, values]
        bad = self.rng.randrange(4)
        with self.refused():
            self.pool.write_batch(
                *(
                    no_integers(self.rng, it) if i == bad else integers(self.rng, it)
                    for i, it in enumerate(forms)
                )
            )


class Sequence:
    def __init__(self, slots: list):
        self.slots = slots


class Tokens(Model):
    """TokenSlotAllocator."""

    def make(self, page_size):
        self.page_size = page_size
        self.num_pages = self.rng.choice([1, 5, 40])
        self.pool = kvferry.TokenSlotAllocator(self.num_pages * page_size, page_size)

    def __init__(self, rng):
        super().__init__(rng)
        self.make(rng.choice([1, 2, 3, 4, 16]))
        self.sequences = []
        self.grouped = None  # Pages that an open group has noted.
        self.noted_of_one = set()

    def pages_of(self, slots) -> set:
        return {slot // self.page_size for slot in slots}

    def held_pages(self) -> set:
        return {page for it in self.sequences for page in self.pages_of(it.slots)}

    def taken(self) -> set:
        return self.held_pages() | (self.grouped or set())

    def free_pages(self) -> set:
        return set(range(1, self.num_pages + 1)) - self.taken()

    def seen(self):
        pool = self.pool
        return pool.page_size, pool.available_size, pool.num_free_pages, *free_runs(pool)

    def expected(self):
        free = self.free_pages()
        count = len(free)
        return self.page_size, count * self.page_size, count, *naive_free_runs(free)

    def room(self) -> int:
        return len(self.free_pages())

    def took(self, pages: set):
        """Of a call that took these."""

    def got(self, slots, count: int) -> list:
        assert isinstance(slots, np.ndarray) and slots.dtype == np.int32 and slots.ndim == 1
        assert slots.flags.writeable and len(slots) == len(set(slots.tolist())) == count
        return slots.tolist()

    def do_alloc(self):
        pages = self.rng.randint(1, max(1, self.num_pages // 3))
        count = pages * self.page_size
        before = self.free_pages()
        slots = self.pool.alloc(integer(self.rng, count))
        if pages > self.room():
            assert slots is None
            return
        slots = self.got(slots, count)
        got = self.pages_of(slots)
        assert got <= before and len(got) == pages
        at = range(self.page_size)
        firsts = slots[:: self.page_size]
        assert slots == [first + i for first in firsts for i in at]
        self.sequences.append(Sequence(slots))
        self.took(got)

    def growing(self) -> list:
        """Sequences that may grow, each once."""
        some = [it for it in self.sequences if self.may_grow(it)]
        return self.rng.sample(some, self.rng.randint(0, min(len(some), 4)))

    def may_grow(self, sequence) -> bool:
        last = sequence.slots[-1] // self.page_size
        return last not in (self.grouped or ())

    def new_pages(self, have: int, want: int) -> int:
        return -(-want // self.page_size) - -(-have // self.page_size)

    def grown(self, batch, slots) -> None:
        """Of (sequence, length) with the new slots of all."""
        before = self.free_pages()
        slots = self.got(slots, sum(want - len(it.slots) for it, want in batch))
        new = set()
        for it, want in batch:
            more = [slots.pop(0) for _ in range(want - len(it.slots))]
            for slot in more:
                if len(it.slots) % self.page_size:
                    assert slot == it.slots[-1] + 1
                else:
                    assert slot % self.page_size == 0 and slot // self.page_size in before - new
                    new.add(slot // self.page_size)
                it.slots.append(slot)
            if it not in self.sequences and it.slots:
                self.sequences.append(it)
        self.took(new)

    def do_alloc_extend(self):
        old = self.growing()
        batch = [(it, len(it.slots) + self.rng.randint(0, 2 * self.page_size)) for it in old]
        batch += [(Sequence([]), self.rng.randint(0, 9)) for _ in range(self.rng.randint(0, 2))]
        self.rng.shuffle(batch)
        lasts = [
            it.slots[-1] if it.slots else self.rng.choice([0, -1, 2**31 - 1]) for it, _ in batch
        ]
        given = [len(it.slots) for it, _ in batch], [want for _, want in batch], lasts
        self.grow(self.pool.alloc_extend, given, batch)

    def do_alloc_decode(self):
        batch = [(it, len(it.slots) + 1) for it in self.growing()]
        given = [want for _, want in batch], [it.slots[-1] for it, _ in batch]
        self.grow(self.pool.alloc_decode, given, batch)

    def grow(self, call, given, batch):
        need = sum(self.new_pages(len(it.slots), want) for it, want in batch)
        slots = call(*(integers(self.rng, it) for it in given))
        if need > self.room():
            assert slots is None
        else:
            self.grown(batch, slots)

    def freed(self, pages: set):
        """Of pages that are free again."""

    def do_free(self):
        gone = self.rng.sample(self.sequences, self.rng.randint(0, min(len(self.sequences), 3)))
        slots = [slot for it in gone for slot in it.slots]
        if self.page_size > 1 and self.one_in(3):  # Several slots of a page count once.
            slots += self.rng.choices(slots, k=3) if slots else []
        if self.one_in(2):
            self.rng.shuffle(slots)
        self.pool.free(integers(self.rng, slots))
        pages = self.pages_of(slots)
        self.sequences = [it for it in self.sequences if it not in gone]
        if self.grouped is not None:
            self.grouped |= pages
        else:
            self.freed(pages)

    def do_group(self):
        if self.grouped is None:
            self.pool.free_group_begin()
            self.grouped = set()
        elif self.one_in(3):
            self.pool.free_group_begin()  # A second one changes nothing.
        else:
            self.end_group()

    def end_group(self):
        self.pool.free_group_end()
        pages, self.grouped = self.grouped, None
        if pages is not None:
            self.freed(pages)
        if self.one_in(2):
            self.pool.free_group_end()  # Without a group neither.

    def do_clear(self):
        if self.one_in(6):
            self.pool.clear()
            self.sequences, self.grouped = [], None
            self.freed(set(range(1, self.num_pages + 1)))

    def not_allocated(self) -> list:
        """Slots that a free() refuses."""
        end = (self.num_pages + 1) * self.page_size
        free = [page * self.page_size for page in self.free_pages()]
        noted = [page for page in self.grouped or () if self.page_size == 1]
        return [0, self.page_size - 1, end, end + 1, *FAR, *free, *noted]

    def do_wrong_free(self):
        some = self.rng.choice([it.slots for it in self.sequences] or [[]])
        if self.page_size == 1:
            wrong = mangled(self.rng, some, self.not_allocated())
        else:
            wrong = [*some, self.rng.choice(self.not_allocated())]
            self.rng.shuffle(wrong)
        with self.refused(ValueError):
            self.pool.free(np.array(wrong, np.int64))
        with self.refused():
            self.pool.free(no_integers(self.rng, some))

    def do_wrong_alloc(self):
        wrong = [0, -self.page_size, -(2**62), no_integer(self.rng)]
        wrong += [self.page_size + 1] if self.page_size > 1 else []
        with self.refused():
            self.pool.alloc(self.rng.choice(wrong))
        assert self.pool.alloc((2**40 + self.num_pages) * self.page_size) is None

    def do_wrong_growth(self):
        batch = self.growing()
        if not batch:
            return
        prefix = [len(it.slots) for it in batch]
        tokens = [count + 1 for count in prefix]
        lasts = [it.slots[-1] for it in batch]
        at = self.rng.randrange(len(batch))
        kind = self.rng.randrange(5)
        if kind == 0:
            lasts[at] = self.rng.choice(self.not_allocated())
        elif kind == 1:
            tokens[at] = self.rng.choice([-1, 0, 2**31, 2**62, prefix[at] - 1])
        elif kind == 2 and self.page_size > 1:
            lasts[at] += 1 if lasts[at] % self.page_size == 0 else -1
        elif kind == 3:
            tokens.append(1)
        else:
            prefix[at] = self.rng.choice([-1, tokens[at] + 1, 2**40])
        wrong = (ValueError, kvferry.FailedPrecondition)
        if kind in (0, 1, 2, 3) and (kind != 2 or self.page_size > 1):
            with self.refused(wrong):
                self.pool.alloc_decode(
                    np.array(tokens if kind != 1 else [*tokens[:at], 0, *tokens[at + 1 :]]),
                    np.array(lasts, np.int64),
                )
        with self.refused(wrong):
            self.pool.alloc_extend(np.array(prefix), np.array(tokens), np.array(lasts, np.int64))
        right = [len(it.slots) for it in batch], [len(it.slots) + 1 for it in batch]
        right = [*right, [it.slots[-1] for it in batch]]
        bad = self.rng.randrange(3)
        with self.refused():
            self.pool.alloc_extend(
                *(no_integers(self.rng, it) if i == bad else it for i, it in enumerate(right))
            )


class Windows(Tokens):
    """SlidingWindowAllocator."""

    def make(self, page_size):
        self.page_size = page_size
        self.num_pages = self.rng.choice([2, 6, 40])
        self.num_window = self.rng.randint(1, self.num_pages)
        self.pool = kvferry.SlidingWindowAllocator(
            self.num_pages * page_size, self.num_window * page_size, page_size
        )
        self.in_window = set()  # Full pages that have a window page.
        self.old_maps = []

    def seen(self):
        pool, map_ = self.pool, self.pool.window_pages
        used = map_[map_ != 0]
        assert map_.dtype == np.int32 and len(set(used.tolist())) == len(used)
        assert (map_ >= 0).all() and (map_ <= self.num_window).all()
        sizes = pool.page_size, pool.available_size
        both = pool.full_num_free_pages, pool.window_num_free_pages
        tokens = pool.full_available_size, pool.window_available_size
        runs = (*free_runs(pool, "full_"), *free_runs(pool, "window_"))
        return *sizes, *both, *tokens, *runs, np.flatnonzero(map_).tolist(), map_.tolist()

    def expected(self):
        full = self.free_pages()
        map_ = self.pool.window_pages
        window = set(range(1, self.num_window + 1)) - set(map_.tolist())
        n, count = self.page_size, (len(full), self.num_window - len(self.in_window))
        runs = (*naive_free_runs(full), *naive_free_runs(window))
        places = sorted(self.in_window)
        return n, min(count) * n, *count, count[0] * n, count[1] * n, *runs, places, map_.tolist()

    def check(self):
        super().check()
        for map_, was in self.old_maps:
            assert map_.tolist() == was  # A copy.

    def room(self):
        return min(len(self.free_pages()), self.num_window - len(self.in_window))

    def took(self, pages):
        self.in_window |= pages

    def freed(self, pages):
        self.in_window -= pages

    def may_grow(self, sequence):
        last = sequence.slots[-1] // self.page_size
        return super().may_grow(sequence) and last in self.in_window

    def do_free_window(self):
        allocated = [slot for it in self.sequences for slot in it.slots]
        if self.grouped:  # Noted ones are allocated still.
            allocated += [
                p * self.page_size + i for p in self.grouped for i in range(self.page_size)
            ]
        slots = self.rng.sample(allocated, self.rng.randint(0, len(allocated)))
        if slots and self.one_in(2):
            slots += self.rng.choices(slots, k=4)
        self.pool.free_window(integers(self.rng, slots))
        for page in self.pages_of(slots):
            if all(page * self.page_size + i in slots for i in range(self.page_size)):
                self.in_window.discard(page)

    def do_to_window(self):
        end = (self.num_pages + 1) * self.page_size
        slots = [self.rng.randrange(end) for _ in range(self.rng.randint(0, 20))]
        map_ = self.pool.window_pages
        window = self.pool.to_window(integers(self.rng, slots))
        assert window.dtype == np.int32
        n = self.page_size
        want = [map_[it // n] * n + it % n if map_[it // n] else 0 for it in slots]
        assert window.tolist() == want
        with self.refused(ValueError):
            self.pool.to_window(np.array([*slots, self.rng.choice([*FAR, end])], np.int64))
        with self.refused():
            self.pool.to_window(no_integers(self.rng, slots))

    def do_keep_a_map(self):
        map_ = self.pool.window_pages
        self.old_maps = [*self.old_maps[-2:], (map_, map_.tolist())]

    def do_wrong_free_window(self):
        end = (self.num_pages + 1) * self.page_size
        free = [page * self.page_size for page in self.free_pages()]
        some = self.rng.choice([it.slots for it in self.sequences] or [[]])
        with self.refused(ValueError):
            wrong = [*some, self.rng.choice([0, end, *FAR, *free])]
            self.pool.free_window(np.array(wrong, np.int64))
        left = [it for it in self.sequences if it.slots[-1] // self.page_size not in self.in_window]
        left = [it for it in left if it.slots[-1] // self.page_size not in (self.grouped or ())]
        for it in left[:1]:
            count = len(it.slots)
            with self.refused(kvferry.FailedPrecondition, "has left the window"):
                self.pool.alloc_decode(np.array([count + 1]), np.array(it.slots[-1:]))


class Tables(Model):
    """BlockTables."""

    def __init__(self, rng):
        super().__init__(rng)
        self.num_blocks, self.size = rng.choice([1, 6, 50]), rng.choice([1, 3, 16])
        self.most, self.bytes = rng.choice([1, 3, 12]), rng.choice([0, 7])
        self.reserved = rng.randrange(min(self.num_blocks, 3))
        self.pool = kvferry.BlockTables(
            self.num_blocks, self.size, self.most, self.bytes, reserved_blocks=self.reserved
        )
        self.rows = {}  # By id: the row.
        self.tokens = {}  # In the order in which they were added.
        self.threads = kvferry.ThreadPool(1)
        self.old_tables = []

    def free_blocks(self) -> set:
        held = {block for row in self.rows.values() for block in row}
        return set(range(self.reserved, self.num_blocks)) - held

    def seen(self):
        pool, ids = self.pool, list(self.rows)
        facts = pool.block_size, pool.num_sequences, pool.num_free, pool.fragmented_bytes
        counts = [
            it(ids).tolist() for it in (pool.token_counts, pool.last_positions, pool.block_counts)
        ]
        return *facts, *free_runs(pool), *counts, pool.table(ids).tolist()

    def fragmented(self) -> int:
        places = 0
        for id_, row in self.rows.items():
            if row and row[-1] >= 0:
                places += len(row) * self.size - self.tokens[id_]
        return places * self.bytes

    def expected(self):
        free, tokens = self.free_blocks(), [self.tokens[id_] for id_ in self.rows]
        facts = self.size, len(self.rows), len(free), self.fragmented()
        held = [sum(block >= 0 for block in row) for row in self.rows.values()]
        width = max(map(len, self.rows.values()), default=0)
        table = [row + [-1] * (width - len(row)) for row in self.rows.values()]
        return *facts, *naive_free_runs(free), tokens, [it - 1 for it in tokens], held, table

    def check(self):
        super().check()
        for table, was in self.old_tables:
            assert table.tolist() == was

    def blocks_for(self, tokens) -> int:
        return -(-tokens // self.size)

    def lost_its_tail(self, id_) -> bool:
        return self.tokens[id_] % self.size != 0 and self.rows[id_][-1] < 0

    def take_row(self, id_, tokens):
        """Of a sequence that has come to so many tokens."""
        old, free = self.rows.get(id_, []), self.free_blocks()
        row = self.pool.table([id_])[0].tolist()
        kept = len(old) - (
            1 if id_ in self.tokens and tokens > self.tokens[id_] and self.lost_its_tail(id_) else 0
        )
        assert row[:kept] == old[:kept] and len(row) == self.blocks_for(tokens)
        new = row[kept:]
        assert set(new) <= free and len(set(new)) == len(new)
        self.rows[id_], self.tokens[id_] = row, tokens

    def do_add(self):
        tokens = self.rng.choice([0, self.rng.randint(0, 4 * self.size)])
        id_ = self.pool.add(integer(self.rng, tokens))
        if len(self.rows) == self.most or self.blocks_for(tokens) > len(self.free_blocks()):
            assert id_ is None
        else:
            assert id_ not in self.rows and 0 <= id_ < self.most
            self.take_row(id_, tokens)

    def some(self) -> list:
        return self.rng.sample(list(self.rows), self.rng.randint(0, min(len(self.rows), 4)))

    def new_blocks(self, id_, more) -> int:
        if more == 0:
            return 0
        want = self.blocks_for(self.tokens[id_] + more) - len(self.rows[id_])
        return want + self.lost_its_tail(id_)

    def do_grow(self):
        ids = self.some()
        more = [self.rng.choice([0, 1, self.rng.randint(0, 2 * self.size)]) for _ in ids]
        need = sum(map(self.new_blocks, ids, more))
        grew = self.pool.grow(integer_list(self.rng, ids), integer_list(self.rng, more))
        assert grew is (need <= len(self.free_blocks()))
        if grew:
            rows = self.pool.table(ids).tolist()
            new = [block for row in rows for block in row if block >= 0]
            assert len(new) == len(set(new))
            for id_, count in zip(ids, more, strict=True):
                self.take_row(id_, self.tokens[id_] + count)

    def ended(self, id_):
        del self.rows[id_], self.tokens[id_]

    def do_free(self):
        ids = self.some()
        self.pool.free(integer_list(self.rng, ids))
        for id_ in ids:
            self.ended(id_)

    def do_free_blocks(self):
        if not self.rows:
            return
        id_ = self.rng.choice(list(self.rows))
        row = self.rows[id_]
        held = [place for place, block in enumerate(row) if block >= 0]
        places = self.rng.sample(held, self.rng.randint(0, len(held)))
        self.pool.free_blocks(integer(self.rng, id_), integer_list(self.rng, places))
        for place in places:
            row[place] = -1
        gone = [place for place, block in enumerate(row) if block < 0]
        some = self.rng.sample(held, self.rng.randint(0, len(held)))
        with self.refused(ValueError):
            held_now = [place for place in some if row[place] >= 0]
            wrong = mangled(self.rng, held_now, [-1, len(row), 2**40, *gone])
            self.pool.free_blocks(id_, integer_list(self.rng, wrong))

    def do_preempt(self):
        want, keep = self.rng.randint(0, self.num_blocks + 1), self.some()
        free = len(self.free_blocks())
        victims = []
        for id_ in reversed(list(self.tokens)):
            held = sum(block >= 0 for block in self.rows[id_])
            if free >= want:
                break
            if id_ not in keep and held:
                victims.append((id_, self.tokens[id_]))
                free += held
        got = self.pool.preempt(integer(self.rng, want), integer_list(self.rng, keep))
        if free < want:
            assert got is None
            return
        assert got == victims
        for id_, _ in victims:
            self.ended(id_)

    def do_clear(self):
        if self.one_in(6):
            self.pool.clear()
            self.rows, self.tokens = {}, {}

    def do_table(self):
        ids = self.rng.choices(list(self.rows), k=self.rng.randint(0, 4)) if self.rows else []
        least = max((len(self.rows[id_]) for id_ in ids), default=0)
        width = self.rng.choice([None, least, least + 3])
        threads = self.rng.choice([None, self.threads])
        table = self.pool.table(integer_list(self.rng, ids), threads, width)
        columns = least if width is None else width
        want = [self.rows[id_] + [-1] * (columns - len(self.rows[id_])) for id_ in ids]
        assert table.shape == (len(ids), columns) and table.dtype == np.int32
        assert table.tolist() == want and table.flags.writeable
        table[:] = 5  # It is the caller's.
        self.old_tables = [*self.old_tables[-2:], (table, table.tolist())]
        wrong = self.rng.choice([least - 1, -1, 2**31, 2**62, no_integer(self.rng)])
        if wrong is not None:
            with self.refused():
                self.pool.table(ids, width=wrong)

    def do_wrong(self):
        dead = [id_ for id_ in range(self.most) if id_ not in self.rows]
        outside = [-1, self.most, *FAR, *dead]
        ids = self.some()
        wrong = mangled(self.rng, ids, outside)
        with self.refused(ValueError):
            self.pool.free(integer_list(self.rng, wrong))
        with self.refused(ValueError):
            self.pool.grow(wrong, [0] * len(wrong))
        stranger = [*ids, self.rng.choice(outside)]
        pool = self.pool
        calls = [pool.token_counts, pool.last_positions, pool.block_counts, pool.table]
        with self.refused(ValueError):
            self.rng.choice(calls)(stranger)
        with self.refused():
            self.rng.choice(calls)([*ids, no_integer(self.rng)])
        with self.refused(ValueError):
            pool.preempt(0, stranger)
        with self.refused(ValueError):
            pool.preempt(-1)
        with self.refused(ValueError):
            pool.grow(ids, [0] * (len(ids) + 1))
        with self.refused():
            pool.add(self.rng.choice([-1, 2**31, no_integer(self.rng)]))
        if ids:
            with self.refused():
                too_many = 2**31 - self.tokens[ids[0]]
                pool.grow(ids[:1], [self.rng.choice([-1, too_many, no_integer(self.rng)])])


@pytest.mark.parametrize("model", [Pages, Requests, Tokens, Windows, Tables])
def test_calls_at_random(model):
    run(model, rounds=25, calls=60)


SIZES = [0, -1, -(2**63), 2**24 + 1, 2**28 + 1, 2**31, 2**62, 2**63 - 1, 1.5, "4", None]


@pytest.mark.parametrize(
    ("make", "arguments", "right"),
    [
        (kvferry.ReqToTokenPool, (2, 8), [2**24 + 1]),
        (kvferry.TokenSlotAllocator, (8, 4), []),
        (kvferry.SlidingWindowAllocator, (8, 4, 2), []),
        # Sizes that are right for them.
        (kvferry.BlockTables, (4, 2, 3), [2**24 + 1, 2**28 + 1]),
        (kvferry.PageAllocator, (8, 2), [0, 2**24 + 1, 2**28 + 1]),
    ],
)
def test_wrong_sizes(make, arguments, right):
    make(*arguments)
    for at in range(len(arguments)):
        for size in SIZES:
            if size not in right:
                with pytest.raises(REFUSED):
                    make(*arguments[:at], size, *arguments[at + 1 :])
