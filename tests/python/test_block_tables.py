"""Block tables of a batch from Python."""

import gc

import kvferry
import numpy as np
import pytest


def make(num_blocks: int = 8, max_sequences: int = 4) -> kvferry.BlockTables:
    return kvferry.BlockTables(num_blocks, 4, max_sequences, bytes_per_token=10)


def test_sequences_come_grow_and_go():
    tables = make()
    a, b = tables.add(6), tables.add(0)
    assert (a, b) == (0, 1) and tables.num_sequences == 2 and tables.num_free == 6
    assert tables.last_positions([a, b]).tolist() == [5, -1]
    assert tables.fragmented_bytes == 2 * 10
    assert tables.grow([b, a], [1, 3]) is True
    assert tables.token_counts([a, b]).tolist() == [9, 1]
    assert tables.block_counts([b, a]).tolist() == [1, 3]
    tables.free([a])
    assert tables.num_free == 7
    with pytest.raises(ValueError, match="sequence 0 is not alive"):
        tables.free([a])
    tables.clear()
    assert tables.num_free == 8 and tables.num_sequences == 0


def test_block_0_may_be_padding():
    tables = kvferry.BlockTables(8, 4, 4, reserved_blocks=1)
    assert tables.num_free == 7
    assert tables.table([tables.add(28)]).tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    with pytest.raises(ValueError, match="reserved_blocks is 8"):
        kvferry.BlockTables(8, 4, 4, reserved_blocks=8)


def test_exhaustion_is_an_answer():
    tables = make(max_sequences=2)
    assert tables.add(33) is None
    a = tables.add(20)
    assert tables.grow([a], [13]) is False and tables.num_free == 3
    assert tables.preempt(9) is None
    assert tables.preempt(8, keep=[a]) is None
    assert tables.add(1) is not None
    assert tables.add(0) is None
    assert tables.token_counts([a]).tolist() == [20]


def test_the_table_is_an_array_of_its_own():
    tables = make()
    a, b = tables.add(12), tables.add(5)
    tables.free_blocks(a, [0])
    table = tables.table([b, a])
    assert table.dtype == np.int32 and table.shape == (2, 3)
    first = table[0, 0]
    assert table.tolist() == [[first, first + 1, -1], [-1, 1, 2]]
    assert tables.table(np.array([b], dtype=np.int64)).shape == (1, 2)
    assert tables.table([]).shape == (0, 0)
    assert tables.table([tables.add(0)]).shape == (1, 0)
    tables.clear()
    del tables
    gc.collect()
    assert table[1, 2] == 2


def test_a_table_may_be_wider_than_its_rows():
    tables = make()
    a, b = tables.add(12), tables.add(5)
    table = tables.table([a, b], width=6)
    assert table.shape == (2, 6) and table.tolist() == [
        [0, 1, 2, -1, -1, -1],
        [3, 4, -1, -1, -1, -1],
    ]
    assert tables.table([], width=6).shape == (0, 6)
    for width in (2, -1):
        with pytest.raises(ValueError, match=f"{width}"):
            tables.table([a, b], width=width)
    # Before there is a table of that size.
    for width in (2**31, 2**40, 2**62):
        with pytest.raises(ValueError, match=f"width is {width} but must lie in"):
            tables.table([a, b], width=width)


def test_how_free_blocks_lie():
    tables = make()
    ids = [tables.add(4) for _ in range(4)]
    tables.free([ids[1]])
    assert (tables.num_free, tables.num_free_runs, tables.longest_free_run) == (5, 2, 4)
    assert tables.free_run_histogram()[:3] == [1, 0, 1]


def test_threads_fill_the_same_table():
    tables = kvferry.BlockTables(num_blocks=1 << 18, block_size=16, max_sequences=64)
    ids = [tables.add(1000 * i) for i in range(64)]
    threads = kvferry.ThreadPool(num_workers=2)
    assert threads.num_workers == 2
    assert np.array_equal(tables.table(ids, threads), tables.table(ids))


def test_the_newest_are_preempted():
    tables = make()
    ids = [tables.add(tokens) for tokens in (4, 8, 3, 5)]
    assert tables.num_free == 2
    assert tables.preempt(2) == []
    assert tables.preempt(4, keep=[ids[2]]) == [(ids[3], 5)]
    assert tables.preempt(5) == [(ids[2], 3)]
    assert tables.num_sequences == 2


def test_bad_input_is_a_value_error():
    tables = make()
    a = tables.add(6)
    with pytest.raises(ValueError, match="block_size is 0"):
        kvferry.BlockTables(8, 0, 4)
    with pytest.raises(ValueError, match="num_workers is -1"):
        kvferry.ThreadPool(-1)
    with pytest.raises(ValueError, match="tokens is -1"):
        tables.add(-1)
    with pytest.raises(ValueError, match="1 ids and 2 tokens"):
        tables.grow([a], [1, 1])
    with pytest.raises(ValueError, match="sequence 0 stands twice"):
        tables.grow([a, a], [1, 1])
    with pytest.raises(ValueError, match="block 2 of sequence 0"):
        tables.free_blocks(a, [0, 2])
    with pytest.raises(ValueError, match="sequence 9"):
        tables.table([9])
    with pytest.raises(ValueError, match="num_blocks is -1"):
        tables.preempt(-1)
    assert tables.num_free == 6 and tables.token_counts([a]).tolist() == [6]
