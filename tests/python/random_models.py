"""Pools beside naive models of them: calls at random, right ones and wrong ones, in every form in
which Python has their arguments.

Without more each model does as many calls as CI has time for, the same ones every time.
KVFERRY_RANDOM_SEED chooses others, and with KVFERRY_RANDOM_SECONDS each goes on for so long.
"""

import array
import contextlib
import ctypes
import itertools
import os
import random
import time
from collections import deque

import numpy as np
import pytest

torch = pytest.importorskip("torch")

SEED = int(os.environ.get("KVFERRY_RANDOM_SEED", "1"))
SECONDS = float(os.environ.get("KVFERRY_RANDOM_SECONDS", "0"))
# Slots and ids that no pool has.
FAR = [-1, -(2**31), 2**31 - 1, 2**31, 2**40, -(2**40)]
REFUSED = (TypeError, ValueError, IndexError)


class Model:
    """What a pool is compared with. Methods that begin with do_ are the calls, each as likely as
    another; a second name makes one likelier."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def seen(self) -> object:
        """All that the pool shows of its state, of plain values."""
        raise NotImplementedError

    def expected(self) -> object:
        """What it has to be."""
        raise NotImplementedError

    def check(self) -> None:
        assert self.seen() == self.expected()

    def one_in(self, count: int) -> bool:
        return self.rng.randrange(count) == 0

    @contextlib.contextmanager
    def refused(self, errors=REFUSED, match: str | None = None):
        """Of a call that is wrong: it says so, and changes nothing."""
        before = self.seen()
        with pytest.raises(errors, match=match):
            yield
        assert self.seen() == before


def run(model: type[Model], rounds: int, calls: int) -> None:
    """So many calls of each round, which has a pool of its own."""
    names = [name for name in dir(model) if name.startswith("do_")]
    end = time.monotonic() + SECONDS
    for number in itertools.count():
        rng = random.Random(f"{SEED} {model.__name__} {number}")
        last = deque(maxlen=20)
        try:
            it = model(rng)
            it.check()
            for _ in range(calls):
                last.append(rng.choice(names))
                getattr(it, last[-1])()
                it.check()
        except BaseException:
            print(f"KVFERRY_RANDOM_SEED={SEED}, round {number}, the last calls: {' '.join(last)}")
            raise
        if number + 1 >= rounds and time.monotonic() >= end:
            return


# ---------------------------------------------------------------- arguments


def integer(rng: random.Random, value: int) -> object:
    """An integer, as one of the things that are one."""
    forms = [int, int, np.int64, np.int32, np.array, torch.tensor]
    if value >= 2**31 or value < -(2**31):
        forms = [int]
    return rng.choice(forms)(value)


def no_integer(rng: random.Random) -> object:
    return rng.choice(
        [1.0, 1.5, np.float32(1), np.float64(2.5), "1", b"1", None, [1], 2**63, -(2**63) - 1, 1j]
        + [np.array([1, 2]), np.array(1.5), torch.tensor(1.0), object()]
    )


def integer_list(rng: random.Random, values) -> object:
    """A sequence of integers, for those who ask for one."""
    values = [int(value) for value in values]
    forms = [list, tuple, deque, lambda it: np.array(it, np.int64)]
    forms += [lambda it: array.array("q", it), lambda it: list(map(np.int64, it))]
    return rng.choice(forms)(values)


def _unaligned(plain: np.ndarray) -> np.ndarray:
    return np.frombuffer(b"\0" + plain.tobytes(), plain.dtype, offset=1)


def _of_a_column(plain: np.ndarray) -> np.ndarray:
    wide = np.full((plain.size, 3), 2**30, plain.dtype)
    wide[:, 1] = plain
    return wide[:, 1]


def _read_only(plain: np.ndarray) -> np.ndarray:
    plain.flags.writeable = False
    return plain


def _ctypes(plain: np.ndarray) -> object:
    kind = ctypes.c_int32 if plain.itemsize == 4 else ctypes.c_int64
    return (kind * plain.size)(*plain.tolist())


INTEGER_FORMS = {
    "plain": lambda it: it,
    "torch": torch.from_numpy,
    "every third": lambda it: np.repeat(it, 3)[::3],
    "backwards": lambda it: it[::-1].copy()[::-1],
    "column": _of_a_column,
    "torch column": lambda it: torch.from_numpy(_of_a_column(it)),
    "unaligned": _unaligned,
    "read only": _read_only,
    "memoryview": memoryview,
    "array": lambda it: array.array("i" if it.itemsize == 4 else "q", it.tolist()),
    "ctypes": _ctypes,
}


def integers(rng: random.Random, values, shape=None) -> object:
    """The values as an array, as one of the things that are one; of any dimensions with a shape."""
    plain = np.array([int(value) for value in values], rng.choice([np.int32, np.int64]))
    if shape is None:
        return INTEGER_FORMS[rng.choice(list(INTEGER_FORMS))](plain)
    plain = plain.reshape(shape)
    forms = [lambda it: it, torch.from_numpy, lambda it: np.asfortranarray(it), memoryview]
    return rng.choice(forms)(plain)


def no_integers(rng: random.Random, values, any_shape: bool = False) -> object:
    """What looks like them and is not."""
    plain = np.array([int(value) for value in values], np.int64)
    forms = [np.float64, np.float32, bool, np.uint64, np.int16, np.complex64, object, ">i4", ">i8"]
    wrong = [plain.astype(dtype) for dtype in forms]
    wrong += [np.array(list(map(str, values)) or ["1"]), torch.from_numpy(plain).double()]
    wrong += [None, "1", b"1234", 1, plain.tolist(), 1.5, {1: 2}]
    wrong += [] if any_shape else [plain.reshape(1, -1), np.array(1)]
    return rng.choice(wrong)


def mangled(rng: random.Random, values: list, outside: list) -> list:
    """The values, with one of those in a place of theirs, or twice one of their own."""
    values = list(values)
    if len(values) > 1 and rng.randrange(3) == 0:
        a, b = rng.sample(range(len(values)), 2)
        values[a] = values[b]
        return values
    values.insert(rng.randrange(len(values) + 1), rng.choice(outside))
    return values
