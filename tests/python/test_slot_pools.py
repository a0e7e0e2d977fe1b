"""Request slots and token slots from Python."""

import gc

import kvferry
import numpy as np
import pytest


def slots(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def counts(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_request_slots():
    pool = kvferry.ReqToTokenPool(num_requests=3, max_context_tokens=8)
    assert pool.alloc(2) == [0, 1]
    assert pool.alloc(2) is None and pool.available_size == 1
    pool.write(1, 2, slots(7, 8, 9))
    table = pool.req_to_token
    assert table.dtype == np.int32 and table.shape == (3, 8)
    assert table[1].tolist() == [0, 0, 7, 8, 9, 0, 0, 0]
    table[1, 0] = 5  # The same memory.
    assert pool.req_to_token[1, 0] == 5
    with pytest.raises(ValueError, match="positions 6 \\+ 3"):
        pool.write(1, 6, slots(1, 2, 3))
    with pytest.raises(ValueError, match="slot 2 is not allocated"):
        pool.free([0, 2])
    pool.free(1)
    pool.free([0])
    assert pool.available_size == 3
    del pool
    gc.collect()
    assert table[1, 4] == 9  # The view keeps the memory.


@pytest.mark.parametrize("windows", [False, True])
def test_token_slots_in_pages(windows):
    allocator = (
        kvferry.SlidingWindowAllocator(16, 16, page_size=4)
        if windows
        else kvferry.TokenSlotAllocator(num_tokens=16, page_size=4)
    )
    got = allocator.alloc(8)
    assert got.dtype == np.int32 and got.tolist() == list(range(4, 12))
    assert allocator.alloc(12) is None and allocator.available_size == 8
    with pytest.raises(ValueError, match="multiple of page_size = 4"):
        allocator.alloc(6)
    allocator.free_group_begin()
    allocator.free(got[:1])
    allocator.free(got[1:4])
    assert allocator.available_size == 8
    allocator.free_group_end()
    assert allocator.available_size == 12
    with pytest.raises(ValueError, match="slot 4 is not allocated"):
        allocator.free(slots(4))
    allocator.clear()
    assert allocator.available_size == 16


def test_batches_fill_the_last_page_first():
    allocator = kvferry.TokenSlotAllocator(num_tokens=16, page_size=4)
    prompt = allocator.alloc_extend(counts(0), counts(3), slots(-1))
    assert prompt.tolist() == [4, 5, 6]
    assert allocator.alloc_decode(counts(4), prompt[-1:]).tolist() == [7]
    assert allocator.alloc_decode(counts(5), slots(7)).tolist() == [8]
    assert allocator.alloc_extend(counts(5), counts(5 + 16), slots(8)) is None
    assert allocator.available_size == 8
    with pytest.raises(ValueError, match="sequence 0 of the batch"):
        allocator.alloc_decode(counts(7), slots(8))


def test_free_runs_can_be_seen():
    allocator = kvferry.TokenSlotAllocator(num_tokens=64, page_size=4)
    assert (allocator.num_free_pages, allocator.num_free_runs) == (16, 1)
    got = allocator.alloc(64)
    assert allocator.longest_free_run == 0 and allocator.free_run_histogram() == []
    allocator.free(np.concatenate([got[:4], got[8:20]]))  # One page, and three.
    assert (allocator.num_free_pages, allocator.num_free_runs) == (4, 2)
    assert allocator.longest_free_run == 3 and allocator.free_run_histogram() == [1, 1]


def test_torch_tensors_are_taken_as_they_are():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    allocator = kvferry.TokenSlotAllocator(num_tokens=8)
    got = torch.from_numpy(allocator.alloc(3))
    allocator.free(got)
    assert allocator.available_size == 8


def test_how_the_free_pages_of_both_windows_pools_lie():
    pool = kvferry.SlidingWindowAllocator(32, 16, page_size=4)
    first, second = pool.alloc(4), pool.alloc(4)
    pool.free_window(first)
    assert (pool.full_num_free_pages, pool.window_num_free_pages) == (6, 3)
    assert (pool.full_num_free_runs, pool.full_longest_free_run) == (1, 6)
    assert (pool.window_num_free_runs, pool.window_longest_free_run) == (2, 2)
    assert pool.full_free_run_histogram()[:3] == [0, 0, 1]
    assert pool.window_free_run_histogram()[:2] == [1, 1]
    pool.free(second)
    assert (pool.full_num_free_pages, pool.window_num_free_pages) == (7, 4)


@pytest.mark.parametrize("stride", [1, 3, -2])
def test_every_slot_of_a_list_is_taken_as_it_is(stride):
    """However the list lies; those that fit into no int32 are none of those that they wrap to."""
    allocator = kvferry.TokenSlotAllocator(num_tokens=1000)
    got = allocator.alloc(1000)
    for wrong in (2**31, -(2**31) - 1, 2**32 + 7, 2**62):
        for place in (0, 600, 999):
            several = got.astype(np.int64)
            several[place] = wrong
            several = np.repeat(several, abs(stride))[:: abs(stride)]
            with pytest.raises(ValueError, match=f"slot {wrong} does not fit in 32 bits"):
                allocator.free(several[::-1] if stride < 0 else several)
    assert allocator.available_size == 0
    for dtype in (np.int32, np.int64):
        every = np.repeat(got.astype(dtype), abs(stride))
        allocator.free(every[:: abs(stride)][::-1] if stride < 0 else every[::stride])
        assert allocator.available_size == 1000
        assert np.array_equal(allocator.alloc(1000), got)
