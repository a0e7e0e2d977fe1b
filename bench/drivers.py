"""Processes that run.py drives over pipes."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

ANSWER_SECONDS = 300  # Longest that any one command may take.


class BenchError(Exception):
    pass


def program(command):
    """Its name; a script's rather than that of its Python."""
    name = Path(command[0]).name
    return Path(command[1]).name if name.startswith("python") else name


def check_settings(binary, settings, parser):
    """Of --config, by a process that is started with them, and ended: it knows the fields and their
    ranges. Ends this program where it refuses them."""
    command = [binary, "--role=prefill", "--pool-pages=1"]
    command += [f"--config={setting}" for setting in settings]
    tried = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    if tried.returncode != 0:
        said = tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"]
        parser.error(f"{' '.join(settings)}: {said[-1]}")


class Driver:
    """A process that answers each line with a line of JSON (driver.h, peers/pool_side.py)."""

    def __init__(self, command, env=None, prefix=()):
        self.name = program(command)
        self.errors = ErrorTail()
        try:
            self.process = subprocess.Popen(
                [str(word) for word in (*prefix, *command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors.file,
                env={**os.environ, **(env or {})},
            )
        except OSError as error:
            raise BenchError(f"cannot start {self.name}: {error.strerror}") from error
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
                said = self.errors.tail(3) or "(nothing on stderr)"
                raise BenchError(f"{self.name}: ended with code {rc} while {what}: {said}")
            self.pending += chunk
        line, _, self.pending = self.pending.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            said = self.errors.tail(1)
            raise BenchError(f"{self.name}: {what}: {answer['error']}" + (said and f" ({said})"))
        return answer

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

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

    def tail(self, count):
        self.file.seek(0)
        lines = self.file.read().decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-count:])
