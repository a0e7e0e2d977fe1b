"""A forked child leaves what its parent has alone."""

import subprocess
import sys

import pytest

# What has threads or connections, and a call of each.
MAKE_THREADED = """
import os, signal, sys
import kvferry

layout = kvferry.KvLayout.mha(1, 1, 1, 8, "uint8")
pools = [kvferry.KvPool.create(layout, 8) for _ in range(5)]
config = kvferry.Config.make()
prefill = kvferry.PrefillEndpoint(pools[0], config, "m", "p")
decode = kvferry.DecodeEndpoint(pools[1], config, "m", "d")
producer = kvferry.LookupProducer(pool=pools[2], config=config, model="m", max_bytes=8)
consumer = kvferry.LookupConsumer(
    pool=pools[3], config=config, model="m", producers=[producer.address]
)
host = kvferry.HostStore(1 << 20, layout=layout)
server = kvferry.StoreServer(host, config, "m")
remote = kvferry.RemoteStore(server.address, pools[4], config, "m")
tiered = kvferry.TieredStore(host, remote)
workers = kvferry.ThreadPool(2)

def fetch():
    handle = decode.fetch(prefill.publish([1], ready_layers=1), 0, [2])
    handle.wait(20000)

def use_all():
    fetch()
    remote.put("a", b"value")
    assert remote.get_bytes("a").tobytes() == b"value"
    assert consumer.metrics() and producer.metrics() and server.metrics()
"""


def run_script(script: str) -> None:
    """Ends well, and says nothing."""
    # Python 3.12 warns of every fork of a process with threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", MAKE_THREADED + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("before_its_exit", ["", "prefill.close(); producer.close(); del remote"])
def test_a_forked_child_exits_and_leaves_what_its_parent_has_alone(before_its_exit):
    run_script(f"""
use_all()
child = os.fork()
if child == 0:
    signal.alarm(20)
    {before_its_exit}
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
use_all()
assert decode.metrics()["fetches_ok"] == 2
""")


def test_what_has_threads_is_of_no_use_in_a_forked_child():
    run_script("""
def refusal(call):
    try:
        call()
    except kvferry.FailedPrecondition as error:
        return str(error)

parent = os.getpid()
lookup = consumer.drop_select(None, None, [1], 20000)
if os.fork() != 0:
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
signal.alarm(20)
calls = {
    "endpoints": [lambda: prefill.publish([1]), decode.metrics],
    "lookup buffers": [producer.metrics, consumer.metrics],
    "store servers": [server.metrics],
    "stores": [host.stats, remote.stats, tiered.stats],
    "lookups": [lookup.cancel, lambda: lookup.done],
}
for what, those in calls.items():
    for call in those:
        assert refusal(call) == f"made in process {parent}; {what} do not survive a fork"
""")
