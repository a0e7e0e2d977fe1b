"""Keys and values by token slot, at random beside naive models of torch."""

import kvferry
import numpy as np
import pytest
from random_models import (
    FAR,
    REFUSED,
    Model,
    integer,
    integers,
    no_integer,
    no_integers,
    run,
    torch,
)

TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "uint8": torch.uint8,
}
NUMBERS = [name for name in TORCH if name != "uint8"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, as bytes."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.itemsize)
    if tensor.numel() == 0:
        return torch.zeros(shape, dtype=torch.uint8)
    packed = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return packed.view(torch.uint8).reshape(shape)


def seen(array, dtype: str) -> torch.Tensor:
    """A buffer of ours as a torch tensor of its dtype, which goes as bytes where it has one."""
    tensor = torch.from_dlpack(array)
    return tensor.view(TORCH[dtype]) if dtype.startswith("float8") else tensor


def cast(rows: torch.Tensor, dtype: str, scale: float = 1) -> torch.Tensor:
    """Divided in float32 and rounded once; fp8 saturates."""
    if rows.dtype == TORCH[dtype] and scale == 1:
        return rows
    values = rows.float() / torch.tensor(scale, dtype=torch.float32)
    if dtype.startswith("float8"):
        limit = torch.finfo(TORCH[dtype]).max
        values = values.clamp(-limit, limit)
    return values.to(TORCH[dtype])


class Tensors:
    """A naive pool: of each tensor and layer its rows, as bytes."""

    def __init__(self, layout, num_slots: int):
        self.layout, self.num_slots = layout, num_slots
        self.specs = [(*it, layout.dtype)[:4] for it in layout.tensors]
        self.of = [
            [
                torch.zeros(num_slots, heads, dim, dtype=TORCH[dtype])
                for _ in range(layout.num_layers)
            ]
            for _, heads, dim, dtype in self.specs
        ]

    def parts(self, layer: int) -> list:
        """What set_kv_buffer() writes, as views, and their dtypes."""
        tensors = [(self.of[i][layer], self.specs[i][3]) for i in range(len(self.specs))]
        if self.specs[0][0] != "kv":
            return tensors
        (fused, dtype), half = tensors[0], self.specs[0][2] // 2
        return [(fused[..., :half], dtype), (fused[..., half:], dtype), *tensors[1:]]

    def flat(self, slots: list, layers) -> bytes:
        rows = [bits(of[layer][slots]) for of in self.of for layer in layers]
        return b"".join(it.numpy().tobytes() for it in rows)

    def all_bytes(self) -> bytes:
        return self.flat(list(range(self.num_slots)), range(self.layout.num_layers))


def quantised(name: str, heads: int, dim: int, form: str = "mxfp4") -> list:
    return kvferry.quantized_tensors(form, name, heads, dim)


def some_layout(rng, page_size: int) -> tuple:
    """A layout, its latent_value_dim, and its quantised tensors: (format, index, heads, dim)."""
    layers, dtype = rng.randint(1, 3), rng.choice(list(TORCH))
    heads, dim, codes, value_dim = rng.choice([1, 2, 3]), rng.choice([2, 4, 16, 34]), [], 0
    kind = rng.choice(["mha", "mixed", "fused", "mla", "sparse", "indexed", "fp4", "index"])
    if kind == "mha":
        tensors = kvferry.KvLayout.mha(layers, page_size, heads, dim, dtype).tensors
    elif kind == "mixed":
        tensors = [("k", heads, dim), ("v", heads + 1, dim // 2, rng.choice(list(TORCH)))]
    elif kind == "fused":
        tensors = [("kv", heads, dim)]
    elif kind == "mla":
        tensors, value_dim = [("latent", 1, dim)], rng.choice([0, dim // 2, dim])
    elif kind == "sparse":
        tensors = [("k", heads, dim), ("v", heads, dim), ("label", 1, 5, "float32")]
    elif kind == "indexed":
        tensors = [("latent", 1, 80), *quantised("index_k", 1, 128, "fp8_block128")]
        codes = [("fp8_block128", 1, 1, 128)]
    elif kind == "fp4":
        tensors = [*quantised("k", heads, 16), *quantised("v", heads, 32)]
        codes = [("mxfp4", 0, heads, 16), ("mxfp4", 2, heads, 32)]
    else:
        tensors, codes = quantised("index_k", 2, 64, "fp8_block128"), [("fp8_block128", 0, 2, 64)]
    order = rng.choice(["NHD", "NHD", "HND"])
    layout = kvferry.KvLayout(
        num_layers=layers, page_size=page_size, dtype=dtype, page_format=order, tensors=tensors
    )
    return layout, value_dim, codes


def memory_of(rng, layout, num_pages: int) -> tuple:
    """A KvPool over tensors that are an engine's, and those."""
    tensors = []
    for i in range(len(layout.tensors)):
        for _ in range(layout.num_layers):
            plain = np.zeros(num_pages * layout.item_bytes(i), np.uint8)
            tensors.append(torch.from_numpy(plain) if rng.randrange(2) else plain)
    return kvferry.KvPool.adopt_tensors(layout, tensors), tensors


class Rows:
    """Values for rows, and an array of them."""

    def __init__(self, rng, shape: tuple, dtype: str):
        count = int(np.prod(shape))
        bytes_ = np.frombuffer(rng.randbytes(4 * count), np.uint8)
        if dtype == "uint8":
            self.values = torch.from_numpy(bytes_[:count].copy()).reshape(shape)
            return
        if rng.randrange(4) == 0:  # Any bits, with infinities, but of NaNs there are many.
            values = np.nan_to_num(bytes_.view(np.float32), nan=3, posinf=np.inf, neginf=-np.inf)
        else:
            values = bytes_.view(np.int32) * (rng.choice([1, 100, 1e-3]) / 2**30)
        self.values = torch.from_numpy(values.astype(np.float32)).to(TORCH[dtype]).reshape(shape)

    def given(self, rng, leading: tuple) -> object:
        """The same, as what an engine may have it as."""
        rows = self.values.clone().reshape(*leading, *self.values.shape[1:])
        form = rng.randrange(8)
        if form == 0:
            return rows
        if form == 1:  # One of several that lie side by side.
            return torch.stack([rows, rows, rows], dim=-2).select(-2, 1)
        if form == 2:
            return rows.transpose(0, -1).contiguous().transpose(0, -1)
        if form == 3:
            return rows.reshape(-1)
        if rows.dtype in (torch.float32, torch.float16, torch.uint8):
            plain = rows.numpy()
            if form == 4:
                return plain
            if form == 5:
                return np.flip(np.flip(plain, 0).copy(), 0)
            if form == 6 and plain.size:
                return np.frombuffer(b"\0" + plain.tobytes(), plain.dtype, offset=1).reshape(
                    rows.shape
                )
            plain.flags.writeable = False
            return plain
        return torch.cat([rows, rows], dim=-1)[..., : rows.shape[-1]]


def no_rows(rng, values: torch.Tensor) -> object:
    plain = values.float().numpy()
    wrong = [np.zeros(plain.shape, dtype) for dtype in ("f8", "i4", bool, object, ">f4")]
    wrong += [None, "rows", plain.tolist(), values[..., :-1], torch.cat([values, values])]
    wrong += [torch.zeros(values.shape, requires_grad=True), values.to("meta")]
    return rng.choice(wrong)


class Pool(Model):
    """TokenKvPool."""

    def __init__(self, rng):
        super().__init__(rng)
        self.make(*some_layout(rng, rng.choice([1, 2, 3, 8])))
        self.old = []  # Views of pools that are gone, their dtypes, and what they have.
        self.views = {}  # By layer and tensor.

    def make(self, layout, value_dim, codes):
        rng = self.rng
        self.layout, self.value_dim, self.codes = layout, value_dim, codes
        num_pages = rng.randint(2, 6)
        self.engines = None
        if rng.randrange(3):
            tokens = (num_pages - 1) * layout.page_size
            self.pool = kvferry.TokenKvPool.create(layout, integer(rng, tokens), value_dim)
        else:
            pages, self.engines = memory_of(rng, layout, num_pages)
            self.pool = kvferry.TokenKvPool.over(pages, value_dim)
        self.slots = num_pages * layout.page_size
        self.naive = Tensors(layout, self.slots)

    def seen(self):
        pool = self.pool
        assert (pool.num_slots, pool.num_tokens) == (self.slots, self.slots - self.layout.page_size)
        return pool.get_flat_data(np.arange(self.slots)).tobytes(), pool.layers.last_load

    def expected(self):
        return self.naive.all_bytes(), 0

    def check(self):
        super().check()
        for view, dtype, was in self.old:
            assert torch.equal(bits(seen(view, dtype)).flatten(), was.flatten())

    def some_slots(self, most: int = 9) -> list:
        """Each once."""
        return self.rng.sample(range(self.slots), self.rng.randint(0, min(most, self.slots)))

    def wrong_slots(self, slots: list, any_shape: bool = False) -> object:
        if self.one_in(3):
            return no_integers(self.rng, slots, any_shape)
        slots = [*slots, self.rng.choice([*FAR, self.slots])]
        self.rng.shuffle(slots)
        return np.array(slots, np.int64)

    def wrong_layer(self) -> object:
        return self.rng.choice([-1, self.layout.num_layers, 2**40, no_integer(self.rng)])

    def layer(self) -> int:
        return self.rng.randrange(self.layout.num_layers)

    def some_rows(self, layer: int, count: int) -> tuple:
        """For each part rows that it takes, their scales, and what they are in the pool."""
        rng = self.rng
        scales = None if self.one_in(2) else []
        rows, want = [], []
        for part, dtype in self.naive.parts(layer):
            of = dtype if dtype == "uint8" or self.one_in(3) else rng.choice(NUMBERS)
            scale = 1.0
            if scales is not None:
                scale = 1.0 if dtype == "uint8" else rng.choice([1.0, 0.37, 2.5, 1e-3])
                scales.append(rng.choice([float, np.float32, np.float64])(scale))
            rows.append(Rows(rng, (count, *part.shape[1:]), of))
            want.append(cast(rows[-1].values, dtype, scale))
        return rows, scales, want

    def leading(self, count: int) -> tuple:
        for first in (2, 3):
            if count % first == 0 and self.one_in(3):
                return (first, count // first)
        return (count,)

    def do_set_kv_buffer(self):
        layer, slots = self.layer(), self.some_slots()
        rows, scales, want = self.some_rows(layer, len(slots))
        shape = self.leading(len(slots))
        given = [it.given(self.rng, self.rng.choice([shape, (len(slots),)])) for it in rows]
        arguments = [given if self.one_in(2) else tuple(given)]
        if scales is not None:
            arguments.append(self.rng.choice([list, tuple, np.array])(scales))
        where = integers(self.rng, slots, shape if len(shape) > 1 else None)
        self.pool.set_kv_buffer(integer(self.rng, layer), where, *arguments)
        for (part, _), values in zip(self.naive.parts(layer), want, strict=True):
            bits_of(part)[slots] = bits(values)

    def do_set_a_slot_twice(self):
        """It keeps the later row."""
        slots = [self.rng.randrange(self.slots) for _ in range(4)]
        layer = self.layer()
        rows, _, _ = self.some_rows(layer, len(slots))
        self.pool.set_kv_buffer(layer, np.array(slots), [it.values for it in rows])
        for (part, dtype), it in zip(self.naive.parts(layer), rows, strict=True):
            for slot, row in zip(slots, cast(it.values, dtype), strict=True):
                bits_of(part)[slot] = bits(row)

    def do_set_wrong(self):
        layer, slots = self.layer(), self.some_slots()
        slots = slots or [0]
        rows, _, _ = self.some_rows(layer, len(slots))
        rows = [it.values for it in rows]
        right = np.array(slots)
        kind = self.rng.randrange(6)
        if kind == 0:
            call = (self.wrong_layer(), right, rows)
        elif kind == 1:
            call = (layer, self.wrong_slots(slots, any_shape=True), rows)
        elif kind == 2:
            call = (layer, right, self.rng.choice([rows[:-1], [*rows, rows[0]], None, 1]))
        elif kind == 3:
            at = self.rng.randrange(len(rows))
            rows[at] = no_rows(self.rng, rows[at])
            call = (layer, right, rows)
        elif kind == 4:
            wrong = [0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-50, "1", None]
            scales = [1.0] * len(rows)
            scales[self.rng.randrange(len(rows))] = self.rng.choice(wrong)
            call = (layer, right, rows, self.rng.choice([scales, [*scales[1:], 1.0, 1.0], 2.0]))
        else:
            call = (layer, self.rng.choice([right[:-1], [0], None]), rows)
            call = call if len(slots) > 1 or call[1] is None else (layer, None, rows)
        with self.refused():
            self.pool.set_kv_buffer(*call)

    def do_set_its_own_rows(self):
        """All are read before one is written."""
        layer, unit = self.layer(), self.layout.page_size
        unit = unit if self.layout.page_format == "HND" else 1
        first = self.rng.randint(0, self.slots // unit) * unit
        end = self.rng.randint(first // unit, self.slots // unit) * unit
        to = self.rng.sample(range(self.slots), end - first)
        rows = []
        for (part, dtype), (i, half) in zip(self.naive.parts(layer), self.parts_of(), strict=True):
            own = seen(self.pool.buffer(layer, i), dtype)
            at = slice(first // unit, end // unit) if own.ndim == 4 else slice(first, end)
            rows.append(own[at][..., half])
            assert torch.equal(bits(rows[-1]).reshape(-1), bits(part[first:end]).reshape(-1))
        self.pool.set_kv_buffer(layer, integers(self.rng, to), rows)
        for part, _ in self.naive.parts(layer):
            bits_of(part)[to] = bits_of(part)[first:end].clone()

    def do_set_its_own_page(self):
        """The same of flat data."""
        if len(self.naive.specs) > 1 or self.layout.page_format == "HND":
            return
        layer, count = self.layer(), self.layout.page_size
        page = self.rng.randrange(self.slots // count)
        to = self.rng.sample(range(self.slots), count)
        self.pool.set_flat_data(np.array(to), self.pool.pages.page(layer, 0, page), layer)
        of = bits_of(self.naive.of[0][layer])
        of[to] = of[page * count : (page + 1) * count].clone()

    def parts_of(self) -> list:
        """Of each part its tensor, and which of its values."""
        rest = [(i, slice(None)) for i in range(len(self.naive.specs))]
        if self.naive.specs[0][0] != "kv":
            return rest
        half = self.naive.specs[0][2] // 2
        return [(0, slice(None, half)), (0, slice(half, None)), *rest[1:]]

    def do_get_flat(self):
        slots = [self.rng.randrange(self.slots) for _ in range(self.rng.randint(0, 9))]
        layer = self.rng.choice([None, self.layer()])
        layers = range(self.layout.num_layers) if layer is None else [layer]
        flat = self.pool.get_flat_data(integers(self.rng, slots), layer)
        assert flat.dtype == np.uint8 and flat.flags.writeable
        assert flat.tobytes() == self.naive.flat(slots, layers)
        flat[:] = 0xFF  # It is the caller's.
        with self.refused():
            self.pool.get_flat_data(self.wrong_slots(slots), layer)
        with self.refused():
            layer = self.wrong_layer()
            self.pool.get_flat_data(np.array(slots, np.int32), 2**63 if layer is None else layer)

    def do_set_flat(self):
        slots, layer = self.some_slots(), self.rng.choice([None, self.layer()])
        layers = range(self.layout.num_layers) if layer is None else [layer]
        flat = self.rng.randbytes(len(self.naive.flat(slots, layers)))
        forms = [bytes, bytearray, memoryview, lambda it: np.frombuffer(it, np.uint8)]
        forms += [lambda it: torch.from_numpy(np.frombuffer(it, np.uint8).copy())]
        self.pool.set_flat_data(integers(self.rng, slots), self.rng.choice(forms)(flat), layer)
        at = 0
        for of in self.naive.of:
            for it in (of[layer] for layer in layers):
                size = bits(it[slots]).numel()
                rows = np.frombuffer(flat, np.uint8)[at : at + size].copy()
                if size:
                    bits_of(it)[slots] = torch.from_numpy(rows).reshape(bits_of(it)[slots].shape)
                at += size
        wrong = [flat + b"1", flat[:-1] if flat else b"1", None, list(flat), 1, "1"]
        wrong += [np.frombuffer(flat, np.int8), np.frombuffer(flat, np.uint8).astype(np.float32)]
        wrong += [np.frombuffer(flat + flat, np.uint8)[::2]] if len(flat) > 1 else []
        with self.refused():
            wrong = self.rng.choice(wrong if flat else wrong[:6])
            self.pool.set_flat_data(np.array(slots, np.int32), wrong, layer)
        with self.refused():
            self.pool.set_flat_data(self.wrong_slots(slots), flat, layer)

    def do_write_through_a_view(self):
        """Of the tensors, or of the pages."""
        layer, i = self.layer(), self.rng.randrange(len(self.naive.specs))
        of = bits_of(self.naive.of[i][layer])
        value = self.rng.randrange(256)
        if self.one_in(2):
            buffer = self.pool.buffer(integer(self.rng, layer), i)
            seen(buffer, self.naive.specs[i][3]).view(torch.uint8)[:] = value
            of[:] = value
            return
        page = self.rng.randrange(self.slots // self.layout.page_size)
        bytes_ = self.pool.pages.page(layer, i, integer(self.rng, page))
        assert bytes_.dtype == np.uint8 and len(bytes_) == self.layout.item_bytes(i)
        bytes_[:] = value
        of[page * self.layout.page_size : (page + 1) * self.layout.page_size] = value
        for at, end in enumerate((self.layout.num_layers, len(self.naive.specs), self.slots)):
            call = [layer, i, page]
            call[at] = self.rng.choice([-1, end, 2**40, no_integer(self.rng)])
            with self.refused():
                self.pool.pages.page(*call)

    def do_look(self):
        """Buffers are the memory, in the shapes that they are said to have."""
        layer, i = self.layer(), self.rng.randrange(len(self.naive.specs))
        _, heads, dim, dtype = self.naive.specs[i]
        view = self.pool.buffer(layer, i)
        tensor = seen(view, dtype)
        paged = self.layout.page_format == "HND" and self.layout.page_size > 1 and heads > 1
        pages = (self.slots // self.layout.page_size, self.layout.page_size)
        assert tensor.shape == ((*pages, heads, dim) if paged else (self.slots, heads, dim))
        flat = bits(tensor).numpy().tobytes()
        assert flat == bits(self.naive.of[i][layer]).numpy().tobytes()
        for (layer, i), view in self.views.items():  # The old ones still are.
            now = bits(seen(view, self.naive.specs[i][3])).numpy().tobytes()
            assert now == bits(self.naive.of[i][layer]).numpy().tobytes()
        self.views.setdefault((layer, i), view)
        size = bits(self.naive.of[i][layer]).numel()
        assert self.pool.tensor_bytes(integer(self.rng, i)) == size * self.layout.num_layers
        address, bytes_, item = self.pool.pages.buffer_infos()[i * self.layout.num_layers + layer]
        assert (bytes_, item) == (size, self.layout.item_bytes(i))
        assert address == torch.from_dlpack(view).data_ptr()
        tensors = [-1, len(self.naive.specs), 2**62, no_integer(self.rng)]
        for call in (
            lambda: self.pool.buffer(self.wrong_layer(), i),
            lambda: self.pool.buffer(layer, self.rng.choice(tensors)),
            lambda: self.pool.tensor_bytes(self.rng.choice(tensors)),
        ):
            with self.refused():
                call()

    def do_keys_and_values(self):
        layer = self.layer()
        (first, dtype), *more = self.naive.parts(layer)
        names = [it[0] for it in self.naive.specs]
        if names[0] == "latent":
            value, of = first[..., : self.value_dim or first.shape[-1]], dtype
        elif names[0] == "kv":
            value, of = more[0]
        elif "v" in names:
            value, of = (
                self.naive.of[names.index("v")][layer],
                self.naive.specs[names.index("v")][3],
            )
        else:
            value, of = more[0]
        timeout = self.rng.choice([0, 1, 30000, 2**63 - 1, -(2**63)])
        for got, want, dtype_ in (
            (self.pool.key_buffer(layer, timeout), first, dtype),
            (self.pool.value_buffer(layer, timeout_ms=timeout), value, of),
        ):
            tensor = seen(got, dtype_).contiguous().reshape(want.shape)
            assert torch.equal(bits(tensor), bits(want))
        call = self.rng.choice([self.pool.key_buffer, self.pool.value_buffer])
        with self.refused():
            call(self.wrong_layer())
        with self.refused():
            call(layer, self.rng.choice(["1", None, 1.5, 2**63]))

    def do_copy_within(self):
        count = self.rng.randint(0, self.slots)
        to = self.rng.sample(range(self.slots), count)
        from_ = [self.rng.randrange(self.slots) for _ in range(count)]
        self.copy_from(self.pool, self.naive, from_, to)

    def copy_from(self, pool, naive, from_, to):
        layer = self.rng.choice([None, self.layer()])
        self.pool.copy_from(pool, integers(self.rng, from_), integers(self.rng, to), layer)
        for mine, theirs, spec in zip(self.naive.of, naive.of, self.naive.specs, strict=True):
            for at in range(self.layout.num_layers) if layer is None else [layer]:
                bits_of(mine[at])[to] = bits(cast(theirs[at][from_], spec[3])).clone()

    def do_copy_between(self):
        """From a pool of the same tensors, in pages and dtypes of its own."""
        tensors = list(self.layout.tensors)
        dtype = "uint8" if self.layout.dtype == "uint8" else self.rng.choice(NUMBERS)
        page_size = self.rng.choice([1, 2, 4])
        layout = kvferry.KvLayout(
            num_layers=self.layout.num_layers, page_size=page_size, dtype=dtype, tensors=tensors,
            page_format=self.rng.choice(["NHD", "HND"]),
        )  # fmt: skip
        pool = kvferry.TokenKvPool.create(layout, 8, self.value_dim)
        naive = Tensors(layout, 8 + page_size)
        slots = list(range(naive.num_slots))
        for i, (_, heads, dim, of) in enumerate(naive.specs):
            for layer in range(layout.num_layers):
                naive.of[i][layer] = Rows(
                    self.rng, (len(slots), heads, dim), of
                ).values.contiguous()
        flat = naive.all_bytes()
        pool.set_flat_data(np.array(slots), flat)
        to = self.some_slots()
        from_ = [self.rng.choice(slots) for _ in to]
        self.copy_from(pool, naive, from_, to)
        with self.refused():
            self.pool.copy_from(pool, np.array([*from_, 0]), np.array(to, np.int32))
        with self.refused():
            wrong = self.wrong_slots(to)
            self.pool.copy_from(pool, np.arange(np.size(wrong)) % 8, wrong)
        with self.refused():
            self.pool.copy_from(pool, np.array([naive.num_slots]), np.array([0]))
        with self.refused():
            layer = self.wrong_layer()
            self.pool.copy_from(
                pool, np.array([0]), np.array([0]), 2**63 if layer is None else layer
            )
        other = kvferry.KvLayout.mha(5, 1, 1, 4, "float32")
        with self.refused():
            self.pool.copy_from(
                self.rng.choice([kvferry.TokenKvPool.create(other, 8), None, self.layout]),
                np.array([0]), np.array([0]),
            )  # fmt: skip
        assert pool.get_flat_data(np.array(slots)).tobytes() == flat

    def do_quantise(self):
        if not self.codes:
            return
        form, i, heads, dim = self.rng.choice(self.codes)
        layer, slots = self.layer(), self.some_slots()
        rows = Rows(self.rng, (len(slots), heads, dim), self.rng.choice(NUMBERS))
        finite = rows.values.float().isfinite()
        rows.values = rows.values.float().where(finite, torch.tensor(7.0)).to(rows.values.dtype)
        if slots and self.one_in(4):
            rows.values[:, 0] = 0
        shape = self.leading(len(slots))
        where = integers(self.rng, slots, shape if len(shape) > 1 else None)
        self.pool.set_quantized(
            form, integer(self.rng, layer), i, where, rows.given(self.rng, shape)
        )
        codes, scales, back = naive_blocks(
            form, rows.values.float().reshape(len(slots), heads * dim)
        )
        for at, want in ((i, codes), (i + 1, scales)):
            if slots:
                of = bits_of(self.naive.of[at][layer])
                of[slots] = torch.from_numpy(want).view(torch.uint8).reshape(of[slots].shape)
        got = self.pool.get_quantized(form, layer, i, integers(self.rng, slots))
        assert got.dtype == np.float32 and got.shape == (len(slots), heads, dim)
        assert got.tobytes() == back.tobytes()

    def do_quantise_wrong(self):
        form, i, heads, dim = self.rng.choice(self.codes or [("mxfp4", 0, 1, 16)])
        slots = self.some_slots() or [0]
        right = [form, self.layer(), i, np.array(slots), torch.zeros(len(slots), heads, dim)]
        at = self.rng.randrange(5)
        last = len(self.naive.specs) - 1
        right[at] = [
            self.rng.choice(["fp4", "", None, 1, "MXFP4"]),
            self.wrong_layer(),
            self.rng.choice([-1, last, last + 1, 2**62, no_integer(self.rng)]),
            self.wrong_slots(slots, any_shape=True),
            no_rows(self.rng, right[4]),
        ][at]
        with self.refused():
            self.pool.set_quantized(*right)
        if at < 4:
            with self.refused():
                self.pool.get_quantized(*right[:4])

    def do_threads(self):
        self.pool.use_threads(self.rng.choice([None, THREADS, kvferry.ThreadPool(1)]))
        with self.refused(TypeError):
            self.pool.use_threads(self.rng.choice([1, self.layout, "2"]))

    def do_make_another(self):
        """What is left of the old one is what views have."""
        if not self.one_in(6):
            return
        self.old = [
            (view, self.naive.specs[i][3], bits(self.naive.of[i][layer]))
            for (layer, i), view in self.views.items()
        ]
        layers, self.views = self.pool.layers, {}
        self.make(*some_layout(self.rng, self.rng.choice([1, 2, 3, 8])))
        assert layers.num_ready > 0 and layers.last_load == 0

    def do_write_what_is_left(self):
        for view, dtype, was in self.old:
            was[:] = self.rng.randrange(256)
            seen(view, dtype).view(torch.uint8)[:] = was.flatten()[0]


THREADS = kvferry.ThreadPool(2)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Not a copy, whatever its strides."""
    return tensor.view(torch.uint8)


def naive_blocks(form: str, rows: torch.Tensor) -> tuple:
    """Codes, scales and what they stand for, of finite rows [slots, values]."""
    if form == "fp8_block128":
        blocks = rows.reshape(len(rows), rows.shape[1] // 128, 128)
        scales = blocks.abs().amax(-1) / 448
        divided = torch.where(scales[..., None] == 0, torch.zeros(()), blocks / scales[..., None])
        codes = cast(divided, "float8_e4m3fn")
        back = codes.float() * scales[..., None]
        return bits(codes).numpy(), scales.numpy(), back.numpy()
    blocks = rows.double().numpy().reshape(len(rows), rows.shape[1] // 16, 16)
    largest = np.abs(blocks).max(-1, initial=0)
    with np.errstate(divide="ignore"):
        exponents = np.where(largest == 0, -127, np.ceil(np.log2(largest / 6)))
    exponents = np.clip(exponents, -127, 127)
    scaled = blocks / np.exp2(exponents)[..., None]
    steps = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    # Ties go to the even code, which is even in this list, too.
    middles = (steps[1:] + steps[:-1]) / 2
    magnitude = np.abs(scaled)
    codes = np.zeros(magnitude.shape, np.uint8)
    for i, middle in enumerate(middles):
        codes += (magnitude > middle) | ((magnitude == middle) & (i % 2 == 1))
    back = np.where(np.signbit(scaled), -1, 1) * steps[codes] * np.exp2(exponents)[..., None]
    codes |= np.signbit(scaled).astype(np.uint8) << 3
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    with np.errstate(over="ignore"):  # It rounds to infinity.
        return packed, (exponents + 127).astype(np.uint8), back.astype(np.float32)


@pytest.mark.parametrize("model", [Pool])
def test_calls_at_random(model):
    run(model, rounds=40, calls=40)


def test_wrong_sizes():
    layout = kvferry.KvLayout.mha(1, 4, 1, 4, "float32")
    for tokens in (0, -4, 3, 5, 2**31, 2**62, 1.5, None, "8"):
        with pytest.raises(REFUSED):
            kvferry.TokenKvPool.create(layout, tokens)
    for dim in (-1, 1, 2**40, None):  # Without a latent.
        with pytest.raises(REFUSED):
            kvferry.TokenKvPool.create(layout, 8, dim)
