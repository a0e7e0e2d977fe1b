"""Other Python threads run while the core works for long, and are no trouble at exit."""

import contextlib
import json
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import kvferry
import numpy as np
import pytest
from quantized_pools import mxfp4_layout
from waiting import wait_for


@contextlib.contextmanager
def only_given_turns():
    """No thread gets a turn from another one that does not give it: Python takes none away."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def lets_others_run(call, for_s: float) -> bool:
    """Whether another thread has a turn during one of many calls."""
    turns, done = 0, False

    def take_turns() -> None:
        nonlocal turns
        while not done:
            turns += 1
            time.sleep(1e-5)

    other = threading.Thread(target=take_turns)
    with only_given_turns():
        other.start()
        deadline, had_one = time.monotonic() + for_s, False
        while not had_one and time.monotonic() < deadline:
            before = turns
            call()
            had_one = turns != before
        done = True
        other.join()
    return had_one


def make_tokens() -> kvferry.TokenKvPool:
    return kvferry.TokenKvPool.create(kvferry.KvLayout.mha(2, 16, 8, 128, "bfloat16"), 4096)


def make_states() -> kvferry.GdnPool:
    return kvferry.GdnPool(
        max_requests=8,
        num_layers=4,
        num_v_heads=8,
        head_k_dim=128,
        head_v_dim=128,
        conv_dim=2048,
        conv_kernel_size=4,
    )


def make_caches() -> kvferry.BlockCache:
    return kvferry.BlockCache.create(
        num_blocks=64, num_layers=8, block_size=16, num_kv_heads=8, head_dim=128
    )


def make_model_pools():
    llama = {
        "model_type": "llama",
        "head_dim": 128,
        "hidden_size": 1024,
        "max_position_embeddings": 4096,
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "torch_dtype": "bfloat16",
    }
    model = kvferry.ModelConfig.from_json(json.dumps(llama))
    return lambda: kvferry.ModelPools.create(model, page_size=16, num_tokens=4096)


def make_host_tiers():
    device = make_tokens()
    return lambda: kvferry.HostKvPool.create(device, ratio=1, keep_free_bytes=0)


def get_quantized():
    pool = kvferry.TokenKvPool.create(mxfp4_layout(8, 128, page_size=16), 4096)
    slots = np.arange(4096, dtype=np.int32)
    return lambda: pool.get_quantized("mxfp4", 0, 0, slots)


def reset_states():
    pool = make_states()
    return lambda: pool.reset_states([1, 2, 3, 4])


def copy_states():
    pool = make_states()
    return lambda: pool.copy_states([1, 2, 3, 4], [5, 6, 7, 8])


def store_stats():
    return kvferry.HostStore(1 << 20).stats


def write_requests():
    pool = kvferry.ReqToTokenPool(1024, 4096)
    [slot] = pool.alloc(1)
    values = np.arange(4096, dtype=np.int32)
    return lambda: pool.write(slot, 0, values)


def write_request_batch():
    pool = kvferry.ReqToTokenPool(64, 4096)
    slots = np.array(pool.alloc(64))
    firsts, counts = np.zeros_like(slots), np.full_like(slots, 4096)
    values = np.arange(64 * 4096, dtype=np.int32)
    return lambda: pool.write_batch(slots, firsts, counts, values)


def make_endpoints(kind, **options):
    pool = kvferry.KvPool.create(kvferry.KvLayout.mha(1, 1, 1, 8, "uint8"), 8)
    config = kvferry.Config.make()
    kept = []  # Taking leave gives the GIL, too.

    def make() -> None:
        kept.append(kind(pool=pool, config=config, model="m", **options))

    return make


def make_servers():
    store, config = kvferry.HostStore(1 << 20), kvferry.Config.make()
    kept = []
    return lambda: kept.append(kvferry.StoreServer(store, config, "m"))


# Each makes what is called.
CALLS = {
    "TokenKvPool.create": lambda: make_tokens,
    "TokenKvPool.get_quantized": get_quantized,
    "HostKvPool.create": make_host_tiers,
    "BlockCache.create": lambda: make_caches,
    "ModelPools.create": make_model_pools,
    "GdnPool": lambda: make_states,
    "GdnPool.reset_states": reset_states,
    "GdnPool.copy_states": copy_states,
    "HostStore.stats": store_stats,
    "ReqToTokenPool.write": write_requests,
    "ReqToTokenPool.write_batch": write_request_batch,
    "PrefillEndpoint": lambda: make_endpoints(kvferry.PrefillEndpoint),
    "DecodeEndpoint": lambda: make_endpoints(kvferry.DecodeEndpoint),
    "RemoteStore": lambda: make_endpoints(kvferry.RemoteStore, address="tcp://127.0.0.1:1"),
    "StoreServer": make_servers,
    "LookupProducer": lambda: make_endpoints(kvferry._core.LookupProducer, max_bytes=1 << 20),
    "LookupConsumer": lambda: make_endpoints(
        kvferry._core.LookupConsumer, producers=["tcp://127.0.0.1:1"]
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_others_have_turns(name):
    assert lets_others_run(CALLS[name](), for_s=20)


def test_a_short_call_keeps_its_turn():
    """That turns are not taken, without which the others would show nothing."""
    pool = make_tokens()
    assert not lets_others_run(lambda: pool.num_tokens, for_s=0.2)


# ---------------------------------------------------------------- exit

SHORT_WAITS = """
layout = kvferry.KvLayout.mha(1, 1, 1, 8, "uint8")
pools = [kvferry.KvPool.create(layout, 8) for _ in range(2)]
config = kvferry.Config.make()
prefill = kvferry.PrefillEndpoint(pools[0], config, "m", "p")
decode = kvferry.DecodeEndpoint(pools[1], config, "m", "d")
fetch = decode.fetch(prefill.publish([1]), 0, [2], timeout_ms=60000)

def use():
    try:
        fetch.wait(1)
    except kvferry.DeadlineExceeded:
        pass
"""
STORE_READS = """
store = kvferry.HostStore(1 << 20)
store.put("a", bytes(1 << 16))

def use():
    store.get_bytes("a")
"""
CONFIGS = """
def use():
    kvferry.Config.make({"lanes": 1})
"""
# The last to let go of a pool and its owner is a thread that does not have the GIL.
OWNERS = """
layout = kvferry.KvLayout.mha(1, 1, 1, 8, "uint8")
config = kvferry.Config.make()

def use():
    array = np.zeros(8 * layout.page_bytes, np.uint8)
    address, size = array.ctypes.data, array.nbytes // 2
    buffers = [(address, size), (address + size, size)]
    pool = kvferry.KvPool.adopt(layout, buffers, array)
    store = kvferry.RemoteStore("tcp://127.0.0.1:1", pool, config, "m")
    del array, pool
    store.close()
"""


PAGES, MODEL = 256, "m"


def is_there(address: str) -> bool:
    """Whether anybody listens at tcp://host:port: a node does to its end."""
    host, port = address.removeprefix("tcp://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=20).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture
def fetched():
    """Makes prefill endpoints out of which two requests are being fetched: each, and the lease of
    its request that is not ready."""
    layout = kvferry.KvLayout.mha(2, 16, 8, 128, "bfloat16")
    source, target = kvferry.KvPool.create(layout, PAGES), kvferry.KvPool.create(layout, PAGES)
    config = kvferry.Config.make({"same_host_path": "network"})
    decode = kvferry.DecodeEndpoint(target, config, MODEL)

    def make():
        prefill = kvferry.PrefillEndpoint(source, config, MODEL)
        long = prefill.publish(list(range(PAGES - 8)), ready_layers=2)
        short = prefill.publish(list(range(PAGES - 8, PAGES)), ready_layers=1)
        decode.fetch(short, 0, list(range(8)))
        decode.fetch(long, 0, list(range(8, PAGES)))
        wait_for(lambda: prefill.metrics()["transfers_active"] > 0)
        return prefill, kvferry.Ticket.parse(short).lease_id

    yield make
    decode.close()


def test_close_returns_when_nothing_is_sent_any_more(fetched):
    """Also where another thread takes a request back meanwhile."""
    for _ in range(30):
        prefill, lease = fetched()
        address = prefill.address

        def release(prefill=prefill, lease=lease):
            with contextlib.suppress(kvferry.Error):
                prefill.release(lease)

        thread = threading.Thread(target=release)
        thread.start()
        prefill.close()
        assert not is_there(address)
        thread.join()


def test_who_finds_an_endpoint_closed_finds_it_ended(fetched):
    for _ in range(30):
        prefill, _ = fetched()
        address = prefill.address
        thread = threading.Thread(target=prefill.close)
        thread.start()
        with pytest.raises(kvferry.FailedPrecondition, match="the endpoint is closed"):
            while True:
                prefill.metrics()
        assert not is_there(address)
        thread.join()


# An insert waits for room, in a daemon thread, when the interpreter exits and somebody closes the
# buffer.
CLOSED_AT_EXIT = """
import os, threading, time
import numpy as np
import kvferry

layout = kvferry.KvLayout.mha(2, 4, 1, 8, "float32")
key = np.zeros((2, 4, 1, 8), np.float32)

class Owner:
    def __init__(self):
        self.buffer = kvferry.KVLookupBuffer(
            "producer", model="m", layout=layout, max_bytes=layout.page_bytes
        )

    def __del__(self, write=os.write):
        self.buffer.close()
        write(1, b"closed")

owner = Owner()
owner.buffer.insert([1, 2, 3, 4], None, key, key)
waits = ([1, 2, 3, 5], None, key, key, None, 30000)
threading.Thread(target=owner.buffer.insert, args=waits, daemon=True).start()
time.sleep(0.2)
"""

# The garbage collection that making a result begins closes what is asked for it.
CLOSED_BY_A_COLLECTION = """
import gc
import kvferry

layout = kvferry.KvLayout.mha(2, 4, 1, 8, "float32")
prefill = kvferry.PrefillEndpoint(kvferry.KvPool.create(layout, 4), kvferry.Config.make({}), "m")

class Owner:
    def __init__(self):
        self.me = self

    def __del__(self):
        prefill.close()

gc.collect()
gc.freeze()
Owner()
gc.set_threshold(1)
try:
    while True:
        prefill.metrics()
except kvferry.FailedPrecondition:
    print("closed", end="")
"""


@pytest.mark.parametrize("script", [CLOSED_AT_EXIT, CLOSED_BY_A_COLLECTION], ids=["exit", "gc"])
def test_close_waits_for_no_call_that_cannot_end(script):
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "closed"), done.stderr


# As torch's, but that asks for the GIL each time.
PYTHON_ARRAYS = """
class Array:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        time.sleep(0)
        return self.array.__dlpack__(**options)

pool = kvferry.TokenKvPool.create(kvferry.KvLayout.mha(1, 1, 1, 8, "float32"), 8)
slots, rows = Array(np.arange(8)), Array(np.zeros((8, 8), np.float32))

def use():
    pool.set_kv_buffer(0, slots, [rows, rows])
"""


def exit_with_daemons(uses: str) -> subprocess.CompletedProcess:
    script = f"""
import threading, time
import kvferry
import numpy as np
{uses}
def use_for_ever():
    while True:
        use()

use()
for _ in range(4):
    threading.Thread(target=use_for_ever, daemon=True).start()
time.sleep(0.1)
"""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


USES = {
    "waits": SHORT_WAITS,
    "store": STORE_READS,
    "config": CONFIGS,
    "owners": OWNERS,
    "arrays": PYTHON_ARRAYS,
}


@pytest.mark.parametrize("name", USES)
def test_an_exit_is_a_clean_one_while_daemon_threads_use_kvferry(name):
    for _ in range(2):
        done = exit_with_daemons(USES[name])
        assert (done.returncode, done.stderr) == (0, "")


def test_nothing_but_gil_h_takes_or_releases_the_gil():
    """nanobind's own guards abort at exit."""
    raw = re.compile(r"gil_scoped|PyGILState_|PyEval_\w+Thread")
    python = pathlib.Path(__file__).parents[2] / "python"
    users = {path.name for path in python.glob("*.*") if raw.search(path.read_text())}
    assert users == {"gil.h", "gil.cc"}
