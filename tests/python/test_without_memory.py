"""Calls that find no memory for what they return have done nothing."""

import os
import subprocess
import sys

import pytest

WITHOUT_MEMORY = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import _testcapi
import kvferry
import numpy as np
from endpoints import Peers, make_config, MODEL
from waiting import wait_for

def without_memory(number, call, *arguments):
    _testcapi.set_nomemory(number, number + 1)
    try:
        call(*arguments)
    except MemoryError:
        _testcapi.remove_mem_hooks()
        return True
    finally:
        _testcapi.remove_mem_hooks()
"""


# Those that found memory are under way. What nanobind makes behind the last ends the process
# where it cannot.
FETCHES = """
made, under_way = Peers(publish_grace_ms=50), 0
for number in range(7):
    lease = kvferry.random_id()
    ticket = made.prefill.publish([1, 2], lease_id=lease)
    failed = without_memory(number, made.decode.fetch, ticket, 0, [3, 4])
    wait_for(lambda: made.decode.metrics()["fetches_started"] == number + 1)
    under_way += not failed
    if failed:
        print("none", made.decode.metrics()["fetches_active"] - under_way)
made.close()
"""
PUSHES = """
made, under_way = Peers(), 0
decode = kvferry.DecodeEndpoint(made.target, make_config(), MODEL, accept_pushes=True)
for number in range(8):
    ticket, _ = decode.receive(0, [3, 4])
    lease = kvferry.random_id()
    failed = without_memory(number, made.prefill.push, ticket, [1, 2], 0, lease)
    under_way += not failed
    if failed:
        print("none", made.prefill.metrics()["leases_live"] - under_way)
decode.close()
made.close()
"""
FIRST_ARRAY = """
slots = kvferry.TokenSlotAllocator(16, 1)
rows = np.array([1])
for number in range(3):
    try:
        without_memory(number, slots.free, rows)
    except (TypeError, ValueError):  # Nothing of it was allocated.
        pass
print(slots.alloc(3).tolist())
"""


def told_by(program: str) -> list[str]:
    pytest.importorskip("_testcapi")
    command = [sys.executable, "-c", WITHOUT_MEMORY + program]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    return told.stdout.splitlines()


def test_a_fetch_whose_handle_finds_no_memory_has_ended():
    """Its pages are the caller's again, who could not wait for it."""
    told = told_by(FETCHES)
    assert len(told) >= 2 and set(told) == {"none 0"}


def test_a_push_whose_handle_finds_no_memory_has_ended():
    told = told_by(PUSHES)
    assert len(told) >= 2 and set(told) == {"none 0"}


def test_the_first_array_may_find_no_memory():
    assert told_by(FIRST_ARRAY) == ["[1, 2, 3]"]
