"""States, host tiers, block caches and the pools of models, at random beside naive models."""

import json
import random
import threading

import kvferry
import numpy as np
import pytest
from random_models import (
    FAR,
    REFUSED,
    SEED,
    Model,
    integer,
    integers,
    no_integer,
    no_integers,
    run,
    torch,
)
from test_model_pools import DEEPSEEK_V3_2, GEMMA, QWEN3_NEXT
from test_random_token_pools import some_layout

FAILED = kvferry.FailedPrecondition


def fill(rng, tensor: torch.Tensor) -> None:
    """With any bytes. Strides may be any of whole values."""
    size = tensor.numel() * tensor.itemsize
    values = torch.from_numpy(np.frombuffer(rng.randbytes(size), np.uint8).copy())
    tensor.copy_(values.view(tensor.dtype).reshape(tensor.shape))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaNs included."""
    packed = [it.clone(memory_format=torch.contiguous_format).flatten() for it in (a, b)]
    return a.shape == b.shape and torch.equal(*(it.view(torch.uint8) for it in packed))


class States(Model):
    """GdnPool."""

    def __init__(self, rng):
        super().__init__(rng)
        self.make()
        self.old = []

    def make(self):
        rng = self.rng
        self.layers, self.requests, self.tracks = (
            rng.randint(1, 3),
            rng.randint(1, 5),
            rng.randint(0, 4),
        )
        self.num = 1 + self.requests + self.tracks
        dtype = rng.choice(["bfloat16", "float16", "float32"])
        heads, k, v = rng.randint(1, 2), rng.randint(1, 4), rng.randint(1, 4)
        conv, kernel = rng.randint(1, 5), rng.randint(2, 4)
        self.recurrent = torch.zeros(self.layers, self.num, heads, k, v)
        self.conv = torch.zeros(
            self.layers, self.num, conv, kernel - 1, dtype=getattr(torch, dtype)
        )
        if rng.randrange(2):
            self.pool = kvferry.GdnPool(
                max_requests=integer(rng, self.requests),
                num_layers=self.layers,
                num_v_heads=heads,
                head_k_dim=k,
                head_v_dim=v,
                conv_dim=conv,
                conv_kernel_size=kernel,
                dtype=dtype,
                max_track_slots=self.tracks,
            )
        else:
            fill(rng, self.recurrent)
            fill(rng, self.conv)
            self.pool = kvferry.GdnPool.adopt_tensors(
                self.recurrent.clone(), self.conv.clone(), max_requests=self.requests
            )
        self.held = set()  # Track slots.
        self.views = self.look()

    def look(self) -> tuple:
        return tuple(map(torch.from_dlpack, (self.pool.recurrent_state, self.pool.conv_state)))

    def seen(self):
        pool, views = self.pool, self.look()
        assert all(map(same, views, self.views))
        infos = [
            (it.data_ptr(), it.numel() * it.itemsize, it[0].numel() * it.itemsize)
            for view in views
            for it in view
        ]
        assert pool.buffer_infos() == infos
        counts = pool.max_requests, pool.max_track_slots, pool.num_slots
        bytes_ = [bytes(it.contiguous().flatten().view(torch.uint8).numpy()) for it in views]
        return *counts, pool.available_track_slots, pool.bytes, *bytes_

    def expected(self):
        counts = self.requests, self.tracks, self.num, self.tracks - len(self.held)
        both = [bytes(it.flatten().view(torch.uint8).numpy()) for it in (self.recurrent, self.conv)]
        return *counts, sum(map(len, both)), *both

    def check(self):
        super().check()
        for view, was in self.old:
            assert same(view, was)

    def usable(self) -> list:
        return [*range(1, self.requests + 1), *sorted(self.held)]

    def wrong_slots(self) -> list:
        tracks = set(range(self.requests + 1, self.num)) - self.held
        return [self.num, *FAR, *tracks]

    def given(self, slots) -> object:
        """As an array, or as a list of Python's own."""
        if self.one_in(2):
            return integers(self.rng, slots)
        return self.rng.choice([list, tuple])(slots)

    def not_given(self, slots) -> object:
        """Sequences of Python's integers are right, and so is one of nothing."""
        slots = slots or [1]
        wrong = no_integers(self.rng, slots)
        while isinstance(wrong, list) or (isinstance(wrong, np.ndarray) and wrong.dtype.hasobject):
            wrong = no_integers(self.rng, slots)
        return self.rng.choice([wrong, [*slots, 1.5], [*slots, "1"], [*slots, None]])

    def do_write(self):
        for tensor, view in zip((self.recurrent, self.conv), self.views, strict=True):
            fill(self.rng, tensor)
            view.copy_(tensor)

    def do_reset(self):
        slots = self.rng.choices([0, *self.usable()], k=self.rng.randint(0, 4))
        self.pool.reset_states(self.given(slots))
        for tensor in (self.recurrent, self.conv):
            tensor[:, slots] = 0
        with self.refused(ValueError, "slot"):
            self.pool.reset_states(self.given_any([*slots, self.rng.choice(self.wrong_slots())]))
        with self.refused():
            self.pool.reset_states(self.not_given(slots))

    def given_any(self, slots) -> object:
        return self.rng.choice([list, tuple, lambda it: np.array(it, np.int64)])(slots)

    def some_copies(self) -> tuple:
        usable = self.usable()
        to = self.rng.sample(usable, self.rng.randint(0, len(usable)))
        if self.one_in(3):  # Circles.
            from_ = self.rng.sample(to, len(to))
        else:
            from_ = [self.rng.choice(usable) for _ in to]
        for _ in range(self.rng.randint(0, 2)):  # Padding copies nothing.
            at = self.rng.randint(0, len(to))
            to.insert(at, 0)
            from_.insert(at, self.rng.choice([0, *usable]))
        return from_, to

    def do_copy(self):
        from_, to = self.some_copies()
        self.pool.copy_states(self.given(from_), self.given(to))
        pairs = [(a, b) for a, b in zip(from_, to, strict=True) if b != 0]
        for tensor in (self.recurrent, self.conv):
            tensor[:, [b for _, b in pairs]] = tensor[:, [a for a, _ in pairs]].clone()

    def do_copy_wrong(self):
        from_, to = self.some_copies()
        usable = self.usable()
        wrong = self.rng.choice(
            [
                ([*from_, 1], to),
                ([*from_, self.rng.choice(self.wrong_slots())], [*to, 0]),
                ([*from_, 1], [*to, self.rng.choice(self.wrong_slots())]),
                ([*from_, 0], [*to, next((it for it in usable if it not in to), usable[0])]),
                ([*from_, usable[0], usable[-1]], [*to, usable[0], usable[0]]),
            ]
        )
        with self.refused(ValueError):
            self.pool.copy_states(*map(self.given_any, wrong))
        with self.refused():
            pair = [from_, self.not_given(to)]
            self.rng.shuffle(pair)
            self.pool.copy_states(*pair)

    def do_alloc(self):
        slot = self.pool.alloc_track_slot()
        if len(self.held) == self.tracks:
            assert slot is None
        else:
            assert self.requests < slot < self.num and slot not in self.held
            self.held.add(slot)

    def do_free(self):
        if self.held:
            slot = self.rng.choice(sorted(self.held))
            self.pool.free_track_slot(integer(self.rng, slot))
            self.held.remove(slot)
        with self.refused():
            no_track = [0, 1, self.requests, no_integer(self.rng), *self.wrong_slots()]
            self.pool.free_track_slot(self.rng.choice(no_track))

    def do_clear(self):
        if self.one_in(4):
            self.pool.clear()
            self.held.clear()

    def do_make_another(self):
        if not self.one_in(6):
            return
        self.old = list(zip(self.views, (self.recurrent, self.conv), strict=True))
        del self.pool, self.views
        self.make()


class Host(Model):
    """HostKvPool, over a pool whose layers are waited for."""

    def __init__(self, rng):
        super().__init__(rng)
        self.page = rng.choice([1, 2, 4])
        layout, value_dim, _ = some_layout(rng, self.page)
        self.layers = layout.num_layers
        self.device = kvferry.TokenKvPool.create(layout, 8 * self.page, value_dim)
        # Bytes of a slot in each buffer, as flat data has them.
        widths = [layout.item_bytes(i) // self.page for i in range(len(layout.tensors))]
        self.widths = [width for width in widths for _ in range(self.layers)]
        self.num = rng.randint(2, 12) * self.page
        if rng.randrange(2):
            size = {"ratio": self.num / (8 * self.page)}
        else:  # Both are rounded down to whole pages.
            size = {"bytes": self.num * sum(self.widths) + rng.randrange(sum(self.widths))}
        self.pool = kvferry.HostKvPool.create(self.device, **size, keep_free_bytes=0)
        self.row_bytes = row = sum(self.widths)
        # Rows as bytes, of all layers.
        self.on_device = np.zeros((self.device.num_slots, row), np.uint8)
        self.on_host = np.zeros((self.num + self.page, row), np.uint8)
        self.state = ["idle"] * (self.num + self.page)
        self.loads, self.failed = 0, False
        self.under_way = None

    def rows(self, pool) -> np.ndarray:
        """[slots, bytes of a slot], buffer after buffer."""
        ends = np.cumsum([width * pool.num_slots for width in self.widths])
        buffers = np.split(pool.get_flat_data(np.arange(pool.num_slots)), ends[:-1])
        return np.concatenate([it.reshape(pool.num_slots, -1) for it in buffers], axis=1)

    def seen(self):
        states = [self.pool.state_of(np.array([slot])) for slot in range(len(self.state))]
        pool = self.pool
        facts = pool.num_tokens, pool.available_size, pool.bytes_per_token
        layers = self.device.layers.last_load, self.device.layers.num_ready
        bytes_ = [self.rows(it).tobytes() for it in (self.device, self.pool.host)]
        return states, *facts, *layers, *bytes_

    def expected(self):
        idle = sum(it == "idle" for it in self.state[self.page :])
        ready = self.layers if self.under_way is None else self.under_way
        facts = self.num, idle, self.row_bytes, self.loads, ready
        return self.state, *facts, self.on_device.tobytes(), self.on_host.tobytes()

    def those(self, *states) -> list:
        return [slot for slot, state in enumerate(self.state) if state in states]

    def whole(self, slots: list) -> list:
        """Of the pages of these slots, those that are among them whole."""
        pages = {slot // self.page for slot in slots}
        pages = [p for p in pages if all(p * self.page + i in slots for i in range(self.page))]
        return [p * self.page + i for p in sorted(pages) for i in range(self.page)]

    def some(self, slots: list) -> list:
        return self.rng.sample(slots, self.rng.randint(0, min(len(slots), 6)))

    def do_alloc(self):
        pages = self.rng.randint(1, 4)
        slots = self.pool.alloc(integer(self.rng, pages * self.page))
        if pages * self.page > len(self.those("idle")) - self.page:
            assert slots is None
            return
        assert slots.dtype == np.int32 and len(slots) == pages * self.page
        assert self.whole(slots.tolist()) == sorted(slots.tolist())
        for slot in slots.tolist():
            assert slot >= self.page and self.state[slot] == "idle"
            self.state[slot] = "reserved"
        with self.refused():
            wrong = [0, -1, no_integer(self.rng)] + ([self.page + 1] if self.page > 1 else [])
            self.pool.alloc(self.rng.choice(wrong))

    def do_free(self):
        whole = self.whole(self.those("reserved", "synced", "backup"))
        pages = self.some(sorted({slot // self.page for slot in whole}))
        slots = [page * self.page + i for page in pages for i in range(self.page)]
        self.rng.shuffle(slots)
        self.pool.free(integers(self.rng, slots))
        for slot in slots:
            self.state[slot] = "idle"
        wrong = [*FAR, *self.those("protected"), *self.those("idle"), *slots]
        if whole and not slots:
            wrong += [whole[0]] if self.page > 1 else []
        with self.refused((*REFUSED, FAILED)):
            self.pool.free(np.array([*slots, self.rng.choice(wrong)], np.int64))
        with self.refused():
            self.pool.free(no_integers(self.rng, slots))

    MOVES = {
        "protect_write": (("reserved",), "protected"),
        "protect_load": (("backup",), "protected"),
        "complete_io": (("protected",), "synced"),
        "mark_backup": (("synced",), "backup"),
        "mark_synced": (("backup",), "synced"),
    }

    def do_move(self):
        name, (before, after) = self.rng.choice(list(self.MOVES.items()))
        call, slots = getattr(self.pool, name), self.some(self.those(*before))
        wrong = [slot for slot in range(len(self.state)) if self.state[slot] not in before]
        with self.refused((ValueError, FAILED)):
            bad = [*slots, self.rng.choice([*FAR, *wrong, *slots])]
            self.rng.shuffle(bad)
            call(np.array(bad, np.int64))
        with self.refused():
            call(no_integers(self.rng, slots))
        call(integers(self.rng, slots))
        for slot in slots:
            self.state[slot] = after

    do_move_too = do_more_moves = do_move

    def do_state_of(self):
        slots = self.rng.choices(range(len(self.state)), k=self.rng.randint(0, 3))
        states = {self.state[slot] for slot in slots}
        if len(states) == 1:
            assert self.pool.state_of(integers(self.rng, slots)) == states.pop()
        else:
            with self.refused(ValueError):
                self.pool.state_of(integers(self.rng, slots))
        with self.refused():
            self.pool.state_of(no_integers(self.rng, slots))

    def do_write_the_device(self):
        slots = self.rng.sample(range(len(self.on_device)), self.rng.randint(0, 5))
        rows = np.frombuffer(self.rng.randbytes(len(slots) * self.row_bytes), np.uint8)
        rows = rows.reshape(len(slots), self.row_bytes)
        buffers = np.split(rows, np.cumsum(self.widths)[:-1], axis=1)
        flat = b"".join(it.tobytes() for it in buffers)
        self.device.set_flat_data(integers(self.rng, slots), flat)
        self.on_device[slots] = rows

    def do_back_up(self):
        host = self.some(self.those("reserved"))
        device = self.rng.choices(range(len(self.on_device)), k=len(host))
        self.pool.back_up(integers(self.rng, device), integers(self.rng, host))
        self.on_host[host] = self.on_device[device]
        for slot in host:
            self.state[slot] = "synced"
        host = self.some(self.those("reserved"))
        device = self.rng.choices(range(len(self.on_device)), k=len(host))
        wrong = [
            (device, [*host, self.rng.choice(FAR)]),
            ([*device, 1], host),
            ([*device, len(self.on_device)], [*host, *self.those("reserved")[:1]]),
            ([*device, 1], [*host, self.rng.choice(self.those("idle"))]),
        ]
        wrong = [tuple(np.array(it, np.int64) for it in pair) for pair in wrong]
        wrong += [(np.array(device), no_integers(self.rng, host))]
        wrong += [(no_integers(self.rng, device), np.array(host))]
        device, host = self.rng.choice(wrong)
        with self.refused((*REFUSED, FAILED)):
            self.pool.back_up(device, host)

    def do_load(self):
        host = self.some(self.those("backup"))
        device = self.rng.sample(range(len(self.on_device)), len(host))
        call = integers(self.rng, host), integers(self.rng, device)
        if self.under_way is not None and not self.failed:
            with self.refused(FAILED, "under way"):
                self.pool.load(*call)
            return
        self.pool.load(*call)
        self.loads, self.under_way, self.failed = self.loads + 1, None, False
        self.on_device[device] = self.on_host[host]
        for slot in host:
            self.state[slot] = "synced"
        host = self.some(self.those("backup"))
        device = self.rng.sample(range(len(self.on_device)), len(host))
        wrong = [
            ([*host, self.rng.choice([*FAR, *self.those("idle")])], [*device, 0]),
            (host, [*device, 1]),
            ([*host, *self.those("synced")[:1]], [*device, len(self.on_device)]),
        ]
        with self.refused((ValueError, FAILED)):
            self.pool.load(*(np.array(it, np.int64) for it in self.rng.choice(wrong)))

    def do_begin(self):
        layers = self.device.layers
        if self.under_way is not None and not self.failed:
            with self.refused(FAILED, f"load {self.loads} is under way"):
                layers.begin()
            return
        assert layers.begin() == self.loads + 1
        self.loads, self.under_way, self.failed = self.loads + 1, 0, False

    def do_ready(self):
        layers, load = self.device.layers, self.rng.randint(-1, self.loads + 1)
        count = self.rng.choice([self.rng.randint(0, self.layers), -1, self.layers + 1, 2**40])
        if count not in range(self.layers + 1) or not 1 <= load <= self.loads:
            with self.refused(ValueError):
                layers.ready(load, count)
        elif load != self.loads or self.failed:
            with self.refused(FAILED, f"load {load} was given up"):
                layers.ready(load, count)
        else:
            layers.ready(integer(self.rng, load), integer(self.rng, count))
            if self.under_way is not None:
                self.under_way = max(self.under_way, count)
            if self.under_way == self.layers:
                self.under_way = None
        with self.refused(TypeError):
            layers.ready(load, no_integer(self.rng))

    do_ready_too = do_ready

    def do_fail(self):
        load = self.rng.randint(-1, self.loads + 1)
        self.device.layers.fail(load, "why not")
        if load == self.loads and self.under_way is not None:
            self.failed = True

    def do_wait(self):
        layer = self.rng.randrange(self.layers)
        ready = self.layers if self.under_way is None else self.under_way
        pool = self.device
        calls = [pool.layers.wait, pool.key_buffer, lambda at, ms: pool.value_buffer(at, ms)]
        timeout = self.rng.choice([0, -1, 1, -(2**63)])
        if ready > layer:
            self.rng.choice(calls)(layer, timeout)
        elif self.failed:
            with self.refused(kvferry.Aborted, "why not"):
                self.rng.choice(calls)(layer, timeout)
        else:
            with self.refused(kvferry.DeadlineExceeded, f"layer {layer}"):
                self.rng.choice(calls)(layer, timeout)
        with self.refused(ValueError):
            self.rng.choice(calls)(self.rng.choice([-1, self.layers, 2**62]), 0)

    def do_clear(self):
        if not self.one_in(4):
            return
        if self.those("protected"):
            with self.refused(FAILED, "protected"):
                self.pool.clear()
            return
        self.pool.clear()
        self.state = ["idle"] * len(self.state)


class Blocks(Model):
    """Two BlockCaches of one shape."""

    def __init__(self, rng):
        super().__init__(rng)
        self.dtype = rng.choice(
            ["bfloat16", "float32", "float16", "uint8", "float8_e4m3fn", "float8_e5m2"]
        )
        self.mla = rng.randrange(3) == 0
        self.order = rng.sample(["kv", "block", "token", "head", "value"], 5)
        self.layers = rng.randint(1, 3)
        self.of_block = rng.choice([1, 2, 4]), rng.choice([1, 2, 3]), rng.choice([1, 4, 7])
        self.caches, self.naive, self.keep = [], [], []
        for _ in range(2):
            self.add(rng.randint(1, 6))
        self.old = []

    def shape(self, blocks) -> tuple:
        return (1 if self.mla else 2, blocks, *self.of_block)

    def options(self) -> dict:
        size, heads, dim = self.of_block
        return {"num_layers": self.layers, "block_size": size, "num_kv_heads": heads,
                "head_dim": dim, "dtype": self.dtype, "mla": self.mla}  # fmt: skip

    def engines_layer(self, blocks) -> torch.Tensor:
        names = ["kv", "block", "token", "head", "value"]
        at = [names.index(name) for name in self.order]
        shape = self.shape(blocks)
        dtype = torch.uint8 if "8" in self.dtype else getattr(torch, self.dtype)
        lies = torch.zeros([shape[i] for i in at], dtype=dtype)
        layer = lies.permute([at.index(i) for i in range(5)])
        return layer[0] if self.mla else layer

    def add(self, blocks):
        if self.rng.randrange(2):
            cache = kvferry.BlockCache.create(
                num_blocks=integer(self.rng, blocks), order=self.order, **self.options()
            )
        else:
            layers = [self.engines_layer(blocks) for _ in range(self.layers)]
            given = layers
            if self.dtype.startswith("float8") and self.rng.randrange(2):
                given = [it.view(getattr(torch, self.dtype)) for it in layers]
            cache = kvferry.BlockCache.adopt_tensors(
                given, dtype=self.dtype, mla=self.mla, order=tuple(self.order)
            )
        self.caches.append(cache)
        dtype = torch.uint8 if "8" in self.dtype else getattr(torch, self.dtype)
        self.naive.append(torch.zeros(self.layers, *self.shape(blocks), dtype=dtype))

    def layer_of(self, cache, layer) -> torch.Tensor:
        tensor = torch.from_dlpack(cache.layer(layer))
        return tensor[None] if self.mla else tensor

    def seen(self):
        whole = []
        for cache, naive in zip(self.caches, self.naive, strict=True):
            blocks = naive.shape[2]
            assert (cache.num_blocks, cache.dtype, cache.memory) == (blocks, self.dtype, "host")
            assert cache.bytes == naive.numel() * naive.itemsize == blocks * cache.block_bytes
            assert cache.block_bytes == kvferry.BlockCache.block_bytes_of(**self.options())
            infos = cache.buffer_infos
            assert sum(bytes_ for _, bytes_, _ in infos) == cache.bytes
            assert all(bytes_ == item * blocks for _, bytes_, item in infos)
            whole.append([self.layer_of(cache, at) for at in range(self.layers)])
        return [
            [it.flatten().contiguous().view(torch.uint8).tolist() for it in one] for one in whole
        ]

    def expected(self):
        return [[it.flatten().view(torch.uint8).tolist() for it in naive] for naive in self.naive]

    def check(self):
        super().check()
        for view, was in self.old:
            assert same(view, was)

    def pick(self) -> tuple:
        at = self.rng.randrange(2)
        return self.caches[at], self.naive[at]

    def do_write(self):
        cache, naive = self.pick()
        layer = self.rng.randrange(self.layers)
        if self.one_in(2):
            fill(self.rng, naive[layer])
            self.layer_of(cache, layer).copy_(naive[layer])
        else:
            kv = self.rng.randrange(naive.shape[1])
            fill(self.rng, naive[layer, kv])
            view = torch.from_dlpack(cache.view(layer, integer(self.rng, kv)))
            size, heads, dim = self.of_block
            assert view.shape in (
                (naive.shape[2], *self.of_block),
                (naive.shape[2] * size, heads, dim),
            )
            view.copy_(naive[layer, kv].reshape(view.shape))

    do_write_more = do_write

    def pairs(self, from_, to) -> list:
        """Each block written once; within a cache none both read and written."""
        targets = self.rng.sample(range(to.shape[2]), self.rng.randint(0, to.shape[2]))
        sources = list(range(from_.shape[2]))
        if from_ is to:
            targets = targets[: from_.shape[2] - 1]
            sources = [block for block in sources if block not in targets]
        return [(self.rng.choice(sources), block) for block in targets]

    def given(self, pairs) -> object:
        flat = [block for pair in pairs for block in pair]
        return integers(self.rng, flat, (len(pairs), 2))

    def do_copy(self):
        (a, from_), (b, to) = self.pick(), self.pick()
        pairs = self.pairs(from_, to)
        threads = self.rng.choice([(), (None,), (THREADS,)])
        kvferry.copy_blocks(a, b, self.given(pairs), *threads)
        for source, target in pairs:
            to[:, :, target] = from_[:, :, source].clone()

    do_copy_more = do_copy

    def do_copy_wrong(self):
        (a, from_), (b, to) = self.pick(), self.pick()
        pairs = self.pairs(from_, to)
        wrong = [
            [*pairs, (from_.shape[2], 0)],
            [*pairs, (0, to.shape[2])],
            [*pairs, (self.rng.choice(FAR), 0)],
            [*pairs, (0, self.rng.choice(FAR))],
        ]
        wrong += [[*pairs, pairs[0]]] if pairs else []
        wrong += [[*pairs, (pairs[0][1], pairs[0][1])]] if pairs and a is b else []
        with self.refused(ValueError):
            kvferry.copy_blocks(a, b, np.array(self.rng.choice(wrong), np.int64))
        right = np.array(pairs, np.int64).reshape(-1, 2)
        wrong = [
            right.astype(float),
            right.astype(np.int16),
            right.tolist(),
            None,
            right.astype(">i8"),
        ]
        wrong += [right.reshape(-1, 2, 1), np.zeros((2, 3), np.int64), right.flatten()]
        with self.refused():
            kvferry.copy_blocks(a, b, self.rng.choice(wrong))
        options = self.options()
        options[self.rng.choice(["num_layers", "block_size", "num_kv_heads", "head_dim"])] += 1
        other = kvferry.BlockCache.create(num_blocks=4, order=self.order, **options)
        with self.refused():
            kvferry.copy_blocks(a, self.rng.choice([other, None, 1]), right)

    def do_views_wrong(self):
        cache, naive = self.pick()
        with self.refused():
            cache.layer(self.rng.choice([-1, self.layers, 2**40, no_integer(self.rng)]))
        with self.refused():
            cache.view(0, self.rng.choice([-1, naive.shape[1], no_integer(self.rng)]))
        layer = self.engines_layer(3)
        other = torch.zeros(layer.shape, dtype=torch.float64)
        wrong = [
            [],
            [layer, other],
            [layer.flatten()],
            [layer[..., :0]],
            [layer, None],
        ]
        wrong += [layer, None, [layer, self.engines_layer(4)]]
        with self.refused():
            kvferry.BlockCache.adopt_tensors(
                self.rng.choice(wrong), dtype=self.dtype, mla=self.mla, order=self.order
            )
        order = self.rng.choice(
            [["kv"] * 5, self.order[:-1], [*self.order, "kv"], "kv", None, [1] * 5]
        )
        with self.refused():
            kvferry.BlockCache.create(num_blocks=2, order=order, **self.options())
        for name in ("num_blocks", "num_layers", "block_size", "num_kv_heads", "head_dim"):
            sizes = {"num_blocks": 1, **self.options()}
            sizes[name] = self.rng.choice([0, -1, 2**62, no_integer(self.rng)])
            with self.refused():
                kvferry.BlockCache.create(**sizes)

    def do_make_another(self):
        if not self.one_in(6):
            return
        at, layer = self.rng.randrange(2), self.rng.randrange(self.layers)
        self.old = [(self.layer_of(self.caches[at], layer), self.naive[at][layer].clone())]
        del self.caches[at], self.naive[at]
        self.add(self.rng.randint(1, 6))


THREADS = kvferry.ThreadPool(1)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "torch_dtype": "float16",
}
# [heads, dim] of what a layer keeps of each token.
MODELS = {
    "llama": (LLAMA, [(2, 32), (2, 32)]),
    "gemma": (GEMMA, [(1, 16), (1, 16)]),
    "qwen3_next": (QWEN3_NEXT, [(2, 32), (2, 32)]),
    "deepseek": (DEEPSEEK_V3_2, [(1, 80)]),
}
KV_DTYPES = {
    "auto": None,
    "fp8": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "bf16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "fp4": None,
}


class Models(Model):
    """ModelPools."""

    def __init__(self, rng):
        super().__init__(rng)
        name = rng.choice(list(MODELS))
        self.config, self.parts = MODELS[name]
        self.kv_dtype = rng.choice(list(KV_DTYPES))
        self.page, self.requests = rng.choice([1, 2, 4, 16]), rng.randint(1, 4)
        self.model = kvferry.ModelConfig.from_json(json.dumps(self.config))
        self.sizes = {"page_size": self.page, "max_requests": self.requests}
        self.ratio = rng.choice([0.3, 0.5, 0.8, 1.0])
        if rng.randrange(2):
            self.sizes["num_tokens"] = rng.randint(4 * self.page, 6 * self.page + self.page - 1)
        else:
            self.sizes["kv_bytes"] = rng.randint(1 << 17, 1 << 18)
        self.pools = kvferry.ModelPools.create(
            self.model, window_ratio=self.ratio, kv_cache_dtype=self.kv_dtype, **self.sizes
        )
        self.slots = self.pools.slots or self.pools.window_slots
        self.held = []
        self.check_sizes()

    def check_sizes(self):
        pools, page = self.pools, self.page
        both = [it for it in (pools.kv, pools.window_kv) if it is not None]
        if "num_tokens" in self.sizes:
            tokens = self.sizes["num_tokens"]
            assert pools.kv.num_tokens == tokens // page * page
            if pools.window_kv:
                assert pools.window_kv.num_tokens == int(tokens * self.ratio) // page * page
        else:
            taken = sum(it.pages.num_pages * it.layout.page_bytes for it in both)
            one_more = sum(it.layout.page_bytes for it in both)
            assert taken <= self.sizes["kv_bytes"] < taken + 2 * one_more
        states = pools.states.bytes if pools.states else 0
        table = pools.requests.req_to_token
        assert table.shape == (self.requests, self.config["max_position_embeddings"])
        kv = sum(it.pages.num_pages * it.layout.page_bytes for it in both)
        assert pools.bytes == kv + states + table.nbytes
        assert pools.states is None or pools.states.max_requests == self.requests
        assert (pools.slots is None) == (pools.window_kv is not None)
        kinds = pools.model.layers
        for layer in range(len(kinds)):
            kind = kinds[layer]
            pool = {"full": pools.kv, "sliding": pools.window_kv, "linear": None}[kind]
            assert pools.place_of(layer) == (kind, kinds[:layer].count(kind))
            assert pool is None or kinds[:layer].count(kind) < pool.layout.num_layers

    def seen(self):
        pools = [it for it in (self.pools.kv, self.pools.window_kv) if it is not None]
        flat = [it.get_flat_data(np.arange(it.num_slots)).tobytes() for it in pools]
        return self.slots.available_size, *flat

    def check(self):
        """What is in the pools is looked at where it is stored."""

    def do_alloc(self):
        slots = self.slots.alloc(self.page * self.rng.randint(1, 2))
        if slots is not None:
            self.held.append(slots)

    def do_free(self):
        if self.held and self.one_in(2):
            self.slots.free(self.held.pop())
        elif self.held and self.pools.window_slots:
            self.pools.window_slots.free_window(self.held[0])

    def place(self, layer) -> tuple:
        kind, at = self.pools.place_of(layer)
        return {"full": self.pools.kv, "sliding": self.pools.window_kv, "linear": None}[kind], at

    def some_rows(self, count) -> list:
        rows = [torch.from_numpy(np.frombuffer(self.rng.randbytes(4 * count * h * d), np.int32)
                                 .astype(np.float32) / 2**28).reshape(count, h, d)
                for h, d in self.parts]  # fmt: skip
        if self.config is DEEPSEEK_V3_2:
            codes = np.frombuffer(self.rng.randbytes(128 * count), np.uint8).copy()
            codes = torch.from_numpy(codes).reshape(count, 1, 128).view(torch.float8_e4m3fn)
            rows += [codes, torch.rand(count, 1, 1)]
        return rows

    def do_set(self):
        layer = self.rng.randrange(len(self.pools.model.layers))
        pool, at = self.place(layer)
        if not self.held:
            return
        slots = self.rng.choice(self.held)
        rows = self.some_rows(len(slots))
        if pool is None:
            with self.refused(ValueError, "linear"):
                self.pools.set_kv_buffer(layer, slots, rows)
            return
        before = self.seen()
        self.pools.set_kv_buffer(integer(self.rng, layer), integers(self.rng, slots), rows)
        where = slots
        if pool is self.pools.window_kv or (self.pools.window_kv and pool is not self.pools.kv):
            where = self.pools.window_slots.to_window(slots)
        # As that pool itself stores them.
        twin = kvferry.TokenKvPool.create(pool.layout, pool.num_tokens, self.value_dim(pool))
        twin.set_flat_data(np.arange(pool.num_slots), pool.get_flat_data(np.arange(pool.num_slots)))
        names = [tensor[0] for tensor in pool.layout.tensors]
        if self.pools.model.kv_blocks:
            for i, part in enumerate(rows[: len(self.parts)]):
                twin.set_quantized("mxfp4", at, 2 * i, where, part)
        else:
            twin.set_kv_buffer(at, where, rows)
        for i in range(len(names)):
            mine, theirs = (torch.from_dlpack(it.buffer(at, i)) for it in (pool, twin))
            assert same(mine[torch.from_numpy(where)], theirs[torch.from_numpy(where)])
        # And nothing else.
        after = self.seen()
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert len(changed) <= 1
        rest = np.setdiff1d(np.arange(pool.num_slots), where)
        was = before[1 if pool is self.pools_list()[0] else 2]
        twin.set_flat_data(np.arange(pool.num_slots), np.frombuffer(was, np.uint8))
        assert (twin.get_flat_data(rest) == pool.get_flat_data(rest)).all()

    def pools_list(self) -> list:
        return [it for it in (self.pools.kv, self.pools.window_kv) if it is not None]

    def value_dim(self, pool) -> int:
        return 0

    def do_wrong(self):
        layers = len(self.pools.model.layers)
        rows, slots = self.some_rows(2), np.array([self.page, self.page])
        full = self.pools.model.layers.index("full")
        with self.refused():
            layer = self.rng.choice([-1, layers, 2**40, no_integer(self.rng)])
            self.pools.set_kv_buffer(layer, slots, rows)
        with self.refused():
            self.pools.place_of(self.rng.choice([-1, layers, no_integer(self.rng)]))
        with self.refused():
            self.pools.set_kv_buffer(full, no_integers(self.rng, [1, 2], any_shape=True), rows)
        with self.refused():
            wrong = np.array([self.page, self.rng.choice([*FAR, 2**20])], np.int64)
            self.pools.set_kv_buffer(self.rng.randrange(layers), wrong, rows)
        with self.refused():
            wrong = self.rng.choice(
                [rows[:-1], [*rows, rows[0]], [], None, [it[:1] for it in rows]]
            )
            self.pools.set_kv_buffer(full, slots, wrong)
        with self.refused():
            scales = [1.0] * len(rows) if self.kv_dtype == "fp4" else [1.0] * (len(rows) + 1)
            self.pools.set_kv_buffer(full, slots, rows, scales)
        sizes = {"window_ratio": self.ratio, **self.sizes}
        name, value = self.rng.choice(
            [("window_ratio", 0.0), ("window_ratio", 1.01), ("window_ratio", float("nan"))]
            + [("page_size", it) for it in (0, -1, 2**21, 2**62)]
            + [("max_requests", it) for it in (0, -1, 2**24 + 1, 2**62)]
            + [("max_track_slots", it) for it in (-1, 2**24 + 1)]
            + [("max_context_tokens", it) for it in (-1, 2**28 + 1, 2**62)]
            + [("kv_cache_dtype", it) for it in ("", "fp5", None, "FP8")]
            + [("num_tokens", it) for it in (-1, 2**31, 2**62)]
            + [("memory", it) for it in ("", "cuda", "cpu", None)]
        )
        if name == "num_tokens":
            sizes.pop("kv_bytes", None)
        with self.refused():
            kvferry.ModelPools.create(self.model, **{**sizes, name: value})
        with self.refused():
            both = self.rng.choice([{}, {"num_tokens": 64, "kv_bytes": 1 << 20}])
            kvferry.ModelPools.create(self.model, **both)

    def do_let_go(self):
        """Parts of the pools outlive them."""
        if not self.one_in(5):
            return
        parts = [self.pools.requests, self.pools.kv, self.slots, self.pools.kv.layers]
        buffer, table = self.pools.kv.key_buffer(0), self.pools.requests.req_to_token
        self.__init__(self.rng)
        requests, kv, slots, layers = parts
        table[:] = 7
        torch.from_dlpack(buffer).view(torch.uint8).fill_(3)
        assert (requests.req_to_token == 7).all() and requests.alloc(1) is not None
        assert (torch.from_dlpack(kv.buffer(0, 0)).view(torch.uint8) == 3).all()
        assert layers.num_ready == kv.layout.num_layers
        assert slots.available_size % slots.page_size == 0

    do_set_more = do_set_much = do_alloc_more = do_set


@pytest.mark.parametrize(
    ("model", "rounds"), [(States, 25), (Host, 25), (Blocks, 25), (Models, 25)]
)
def test_calls_at_random(model, rounds):
    run(model, rounds=rounds, calls=40)


def use_a_tier(rng, host, device, mine: np.ndarray, failed: list) -> None:
    """Pages come and go by way of device slots that no other thread has."""
    try:
        for _ in range(60):
            slots = host.alloc(int(rng.choice([2, 4])))
            if slots is None:
                continue
            some = mine[: len(slots)]
            rows = rng.randbytes(len(device.get_flat_data(some)))
            device.set_flat_data(some, rows)
            host.back_up(some, slots)
            host.mark_backup(slots)
            device.set_flat_data(some, bytes(len(rows)))
            while True:  # There is one load at a time, and who has it needs no other thread.
                try:
                    host.load(slots, some)
                    break
                except kvferry.FailedPrecondition as error:
                    assert "under way" in str(error)
            assert device.get_flat_data(some).tobytes() == rows
            assert host.state_of(slots) == "synced"
            host.free(slots)
    except BaseException as error:
        failed.append(error)


def test_threads_share_a_host_tier():
    layout = kvferry.KvLayout.mha(3, 2, 2, 64, "bfloat16")
    device = kvferry.TokenKvPool.create(layout, 16)
    host = kvferry.HostKvPool.create(device, ratio=1.0, keep_free_bytes=0)
    failed = []
    threads = [
        threading.Thread(
            target=use_a_tier,
            args=(random.Random(SEED + i), host, device, np.arange(2 + 4 * i, 6 + 4 * i), failed),
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert host.available_size == host.num_tokens == 16
