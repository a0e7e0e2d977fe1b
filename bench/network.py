"""Where the two sides of a TCP measurement run: on loopback, or in a network namespace each; and on
which processors."""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time

LINK_SECONDS = 5  # The kernel takes up to one to call a new cable connected; UCX uses no other.
DEVICE = "kv0"


class CannotMake(Exception):
    pass


@dataclasses.dataclass(frozen=True)
class End:
    host: str = "127.0.0.1"
    device: str = "lo"
    netns: str = ""  # Its name; "" is where run.py runs.
    cpus: tuple = ()  # () are all.

    @property
    def prefix(self):
        """What a command starts with to run there."""
        enter = ["ip", "netns", "exec", self.netns] if self.netns else []
        return [*enter, "taskset", "--cpu-list", self.cpu_list] if self.cpus else enter

    @property
    def cpu_list(self):
        return ",".join(map(str, self.cpus))


@dataclasses.dataclass(frozen=True)
class Network:
    name: str
    source: End = End()
    target: End = End()

    def settings(self, end):
        """Fields of kvferry's Config for a side at this end."""
        if not end.netns:
            return []
        return [
            f"listen_host={end.host}",
            f"net_device={end.device}",
            f"allowed_hosts={self.source.host},{self.target.host}",
            "allow_insecure_network=true",
        ]


LOOPBACK = Network("loopback")


def check_apart():
    """CannotMake when the two sides cannot be kept apart."""
    if len(os.sched_getaffinity(0)) < 2:
        raise CannotMake("there is one processor only")
    if not shutil.which("taskset"):
        raise CannotMake("the taskset command is missing (Debian: util-linux)")


def apart(network):
    """The same, each side on one half of the processors, as two hosts have their own."""
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    source = dataclasses.replace(network.source, cpus=tuple(cpus[:half]))
    target = dataclasses.replace(network.target, cpus=tuple(cpus[half:]))
    name = f"{network.name}; source on CPU {source.cpu_list}, target on {target.cpu_list}"
    return Network(name, source, target)


def check_netns():
    """CannotMake when it is plain that there will be no namespaces."""
    if os.geteuid() != 0:
        raise CannotMake("making network namespaces needs root")
    if not shutil.which("ip"):
        raise CannotMake("the ip command is missing (Debian: iproute2)")


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise CannotMake(
            f"ip {' '.join(words)}: {done.stderr.strip()} (in a container, network namespaces need "
            "CAP_SYS_ADMIN and CAP_NET_ADMIN)"
        )
    return done.stdout


def set_up(end):
    ip("-n", end.netns, "address", "add", f"{end.host}/24", "dev", end.device)
    for device in ("lo", end.device):
        ip("-n", end.netns, "link", "set", device, "up")


def wait_for_link(end):
    deadline = time.monotonic() + LINK_SECONDS
    while ip("-n", end.netns, "-brief", "link", "show", end.device).split()[1] != "UP":
        if time.monotonic() > deadline:
            raise CannotMake(f"{end.device} in {end.netns} did not come up in {LINK_SECONDS} s")
        time.sleep(0.1)


@contextlib.contextmanager
def netns_pair():
    """Two namespaces joined by a veth pair, removed at the end, also when run.py is ended."""
    check_netns()
    source = End("10.77.0.1", DEVICE, f"kvferry-s{os.getpid()}")
    target = End("10.77.0.2", DEVICE, f"kvferry-t{os.getpid()}")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.ExitStack() as made:
        made.callback(signal.signal, signal.SIGTERM, before)
        for end in (source, target):
            ip("netns", "add", end.netns)
            made.callback(ip, "netns", "delete", end.netns)  # Takes its end of the pair along.
        veth = ["type", "veth", "peer", "name", target.device, "netns", target.netns]
        ip("-n", source.netns, "link", "add", source.device, *veth)
        for end in (source, target):
            set_up(end)
        for end in (source, target):
            wait_for_link(end)
        yield Network("a veth pair between two network namespaces", source, target)
