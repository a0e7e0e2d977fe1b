"""What run.py measures: kvferry, NIXL and the limits of the machine, each driven over pipes."""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

from workload import format_runs

ROOT = Path(__file__).resolve().parent.parent
ANSWER_SECONDS = 300  # Longest that any one command may take.
SALT = 7


class BenchError(Exception):
    pass


class Driver:
    """A process that answers each command line with a line of JSON (driver.h, nixl_peer.py)."""

    def __init__(self, command, env=None):
        self.name = Path(command[0]).name
        self.errors = ErrorTail()
        try:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors.file,
                env={**os.environ, **(env or {})},
            )
        except OSError as error:
            raise BenchError(f"cannot start {command[0]}: {error.strerror}") from error
        self.pending = b""
        self.ready = self.receive()

    def ask(self, *words):
        try:
            self.process.stdin.write((" ".join(str(word) for word in words) + "\n").encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # receive() says why.
        return self.receive(words[0])

    def receive(self, what="starting"):
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\n" not in self.pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise BenchError(f"{self.name}: no answer to {what} in {ANSWER_SECONDS} s")
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                rc = self.process.wait()
                raise BenchError(
                    f"{self.name}: ended with code {rc} while {what}: {self.errors.tail()}"
                )
            self.pending += chunk
        line, _, self.pending = self.pending.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {what}: {answer['error']}")
        return answer

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def stop(self):
        self.resume()
        with contextlib.suppress(OSError):
            self.process.stdin.write(b"quit\n")
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.file.close()


class ErrorTail:
    def __init__(self):
        self.file = open(os.memfd_create("stderr"), "w+b", buffering=0)

    def tail(self):
        self.file.seek(0)
        lines = self.file.read().decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or "(nothing on stderr)"


@dataclasses.dataclass
class Sample:
    seconds: float
    cpu: float


class System:
    """Moves `remote` pages of one pool to `local` pages of another, and can be timed."""

    def __init__(self, name, shape, remote, local):
        self.name, self.shape = name, shape
        self.remote, self.local = format_runs(remote), format_runs(local)
        self.drivers = []

    def start_driver(self, command, env=None):
        driver = Driver(command, env)
        self.drivers.append(driver)
        return driver

    def sample(self):
        raise NotImplementedError

    def stop(self):
        for driver in self.drivers:
            driver.stop()


class Kvferry(System):
    def __init__(self, name, shape, remote, local, build, settings):
        super().__init__(name, shape, remote, local)
        command = [build / "bench/kvferry_bench_transfer", "--pool-pages", shape.pool_pages]
        command += shape.layout
        for setting in settings:
            command += ["--config", setting]
        self.prefill = self.start_driver([*command, "--role", "prefill"])
        self.decode = self.start_driver([*command, "--role", "decode"])
        self.prefill.ask("fill", SALT)
        self.about = f"UCX {self.decode.ready['ucx']}, {self.decode.ready['build']} build"

    def sample(self):
        cpu_before = self.prefill.ask("cpu")["cpu"]
        ticket = self.prefill.ask("publish", self.remote)["ticket"]
        result = self.decode.ask("fetch", ticket, self.local)
        outcome = self.prefill.ask("ended")["outcome"]
        cpu = self.prefill.ask("cpu")["cpu"] - cpu_before
        if outcome != "fetched":
            raise BenchError(f"{self.name}: the lease {outcome}")
        self.decode.ask("verify", SALT, self.local, self.remote)
        self.decode.ask("zero", self.local)
        return Sample(result["seconds"], result["cpu"] + cpu)


class NixlPair:
    """Two NIXL processes; `source` holds the pattern. Shared by the READ and the WRITE system."""

    def __init__(self, shape, python, tls):
        command = [python, ROOT / "bench/peers/nixl_peer.py", "--buffers", shape.buffers]
        command += ["--page-bytes", shape.page_bytes, "--pool-pages", shape.pool_pages]
        env = {"UCX_TLS": tls, "UCX_NET_DEVICES": "lo"}
        self.source = Driver([*command, "--name", "source"], env)
        try:
            self.target = Driver([*command, "--name", "target"], env)
        except BenchError:
            self.source.stop()
            raise
        self.about = f"NIXL {self.source.ready['version']}"
        for own, other in ((self.source, self.target), (self.target, self.source)):
            own.ask("peer", other.ready["metadata"], other.ready["base"])
        self.source.ask("fill", SALT)
        self.source.pause()
        self.target.pause()

    @contextlib.contextmanager
    def awake(self):
        """NIXL's progress threads poll without pause and would take cores from the others' runs."""
        self.source.resume()
        self.target.resume()
        try:
            yield
        finally:
            self.source.pause()
            self.target.pause()


class Nixl(System):
    def __init__(self, operation, shape, remote, local, pair):
        super().__init__(f"NIXL {operation}", shape, remote, local)
        self.operation, self.pair = operation.lower(), pair
        self.drivers = [pair.source, pair.target]
        self.about = pair.about

    def sample(self):
        with self.pair.awake():
            return self.move()

    def move(self):
        source, target = self.pair.source, self.pair.target
        active, passive = (target, source) if self.operation == "read" else (source, target)
        own, other = self.local, self.remote
        if self.operation == "write":
            own, other = other, own
        cpu_before = passive.ask("cpu")["cpu"]
        result = active.ask(self.operation, own, other)
        cpu = passive.ask("cpu")["cpu"] - cpu_before
        target.ask("verify", SALT, self.local, self.remote)
        target.ask("zero", self.local)
        return Sample(result["seconds"], result["cpu"] + cpu)


class Limit(System):
    def __init__(self, kind, shape, remote, local, driver):
        super().__init__(kind, shape, remote, local)
        self.driver = driver
        self.drivers = [driver]
        self.about = ""

    def sample(self):
        if self.name == "memcpy":
            result = self.driver.ask("memcpy", SALT, self.local, self.remote)
        else:
            result = self.driver.ask("tcp", self.shape.request_bytes)
        return Sample(result["seconds"], result["cpu"])
