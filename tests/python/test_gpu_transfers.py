"""Two processes of one machine whose KV caches are torch's tensors, on a GPU where there is one:
every byte of what moves, what does not move, and whether the pages are read where they lie. The
same on the host, for want of a GPU, in memory that is shared ("shared") and that is not ("cpu")."""

import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import kvferry
import pytest

torch = pytest.importorskip("torch")

from torch_pools import DECODE_PAGES, LAYERS, MODEL, PREFILL_PAGES, Cache, random_bits  # noqa: E402

# So that the end of a process is noticed even where no connection ends with it.
CONFIG = {"heartbeat_interval_ms": 200, "heartbeat_timeout_ms": 8000}
REQUESTS = (7, 1, 9)  # Pages of those that are under way at once.


def why_no_gpu() -> str:
    """Why tests on a GPU cannot run here; empty when they can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    try:
        kvferry.KvPool.create(kvferry.KvLayout.mha(1, 4, 2, 8, "bfloat16"), 1, memory="cuda:0")
    except kvferry.Error as error:
        return str(error)
    return ""


needs_gpu = pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu() or "there is a GPU")


def pairs(*of: str):
    """(prefill, decode) as parameters, of "cuda-cpu" and so on."""
    return pytest.mark.parametrize(
        ("there", "here"),
        [
            pytest.param(*pair.split("-"), id=pair, marks=[needs_gpu] if "cuda" in pair else [])
            for pair in of
        ],
    )


either_kind = pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])


class PrefillProcess:
    """Runs torch_pools.py."""

    def __init__(self, folder: Path, *, expandable_segments: bool = False):
        self.log = folder / "prefill.log"
        env = dict(os.environ)
        env.pop("PYTORCH_ALLOC_CONF", None)
        env["OMP_NUM_THREADS"] = "1"  # What torch does here is little.
        env["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{expandable_segments}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "torch_pools.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
            )
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def ask(self, what: str, seconds: float = 60, **arguments):
        assert self.process.poll() is None, self.said("it has ended")
        try:
            self.process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self.process.stdin.flush()
            answer = self.answers.get(timeout=seconds)
        except (queue.Empty, BrokenPipeError) as error:
            said = self.said(f"no answer to {what} within {seconds} s")
            self.kill()
            raise AssertionError(said) from error
        if not answer:
            self.kill()
            raise AssertionError(self.said(f"it ended at {what}"))
        return json.loads(answer)

    def open(self, place: str, fused: bool = False, **config) -> dict:
        # Torch may still be on its way in, and a GPU's context.
        return self.ask("open", 120, place=place, fused=fused, config=CONFIG | config)

    def in_place(self) -> int:
        return self.ask("metrics")["transfers_in_place"]

    def has_sent_all_packed(self) -> None:
        metrics = self.ask("metrics")
        assert metrics["transfers_in_place"] == 0, self.said(f"read in place: {metrics}")

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def said(self, what: str) -> str:
        """With what the process has printed."""
        return (
            f"{what}; prefill process {self.process.pid}, exit code {self.process.poll()}, "
            f"printed:\n{self.output()[-4000:] or '(nothing)'}"
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)


class Decode:
    """A cache here, full of its own numbers, and what it must hold."""

    def __init__(self, place: str, fused: bool = False, **config):
        self.random = random.Random(5)
        self.cache = Cache(place, fused, DECODE_PAGES)
        self.expected = []
        for i, tensor in enumerate(self.cache.tensors):
            self.expected.append(random_bits(900_000 + i, *tensor.shape))
            tensor.view(torch.int16).copy_(self.expected[i])
        self.cache.wait()
        config = kvferry.Config.make(CONFIG | config)
        self.endpoint = kvferry.DecodeEndpoint(self.cache.pool, config, MODEL, name="d")

    def page_lists(self, num_pages: int, counts) -> list[list[int]]:
        """As many pages for each, of runs of up to four; no page twice."""
        pages, runs = list(range(num_pages)), []
        while pages:
            length = self.random.randint(1, 4)
            runs.append(pages[:length])
            pages = pages[length:]
        self.random.shuffle(runs)
        pages = [page for run in runs for page in run]
        return [[pages.pop() for _ in range(count)] for count in counts]

    def fetch_some(self, prefill: PrefillProcess) -> None:
        """Some requests at once, of some the first pages not; looks at every byte afterwards."""
        started = []
        there = self.page_lists(PREFILL_PAGES, REQUESTS)
        here = self.page_lists(DECODE_PAGES, REQUESTS)
        for source, target in zip(there, here, strict=True):
            seed = self.random.randrange(1 << 30)
            (ticket,) = prefill.ask("publish", pages=source, seed=seed)
            first = self.random.randrange(len(source))
            handle = self.endpoint.fetch(ticket, first, target[first:])
            started.append((handle, seed, first, target))
        for handle, seed, first, target in started:
            try:
                handle.wait(20000)
            except kvferry.Error as error:
                pytest.fail(prefill.said(f"fetching failed: {type(error).__name__}: {error}"))
            self.expect(seed, first, target)
        self.check(prefill)

    def expect(self, seed: int, first: int, target: list[int]) -> None:
        for kind in range(len(self.cache.names)):
            for layer in range(LAYERS):
                values = self.cache.values(seed, kind, layer, len(target))
                self.expected[kind * LAYERS + layer][target[first:]] = values[first:]

    def expect_what_is_there(self, pages: list[int]) -> None:
        for want, tensor in zip(self.expected, self.cache.tensors, strict=True):
            want[pages] = tensor.view(torch.int16)[pages].cpu()

    def check(self, prefill: PrefillProcess) -> None:
        wrong = []
        for i, want in enumerate(self.expected):
            have = self.cache.tensors[i].view(torch.int16).cpu()
            if not torch.equal(have, want):
                name, layer = self.cache.names[i // LAYERS], i % LAYERS
                pages = (have != want).flatten(1).any(1).nonzero().flatten().tolist()
                wrong.append(f"{name} of layer {layer}, pages {pages}")
        assert not wrong, prefill.said(f"other bytes than expected: {'; '.join(wrong)}")

    def fetch_until_in_place(self, prefill: PrefillProcess) -> int:
        """The prefill side has to hear first that its pool is mapped. Returns how many transfers
        were."""
        end, rounds = time.monotonic() + 30, 0
        while True:
            self.fetch_some(prefill)
            rounds += 1
            if in_place := prefill.in_place():
                return in_place
            if rounds >= 5 and time.monotonic() > end:
                what = f"{rounds} times {len(REQUESTS)} fetches, none of pages where they lie"
                pytest.fail(prefill.said(what))


class Processes:
    """Starts prefill processes; most tests have one after the other the same."""

    def __init__(self, new_folder):
        self._new_folder = new_folder
        self._all: list[PrefillProcess] = []
        self._usual: PrefillProcess | None = None

    def start(self, **options) -> PrefillProcess:
        self._all.append(PrefillProcess(self._new_folder(), **options))
        return self._all[-1]

    def usual(self) -> PrefillProcess:
        if self._usual is None or self._usual.process.poll() is not None:
            self._usual = self.start()
        return self._usual

    def close(self) -> None:
        for each in self._all:
            each.kill()


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    made = Processes(lambda: tmp_path_factory.mktemp("prefill"))
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def few_threads():
    """Torch's threads would spin beside the other process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def decode_with():
    """Makes the decode side, and closes it."""
    made: list[Decode] = []

    def make(*args, **config) -> Decode:
        made.append(Decode(*args, **config))
        return made[-1]

    yield make
    for each in made:
        each.endpoint.close()


@either_kind
@pairs("shared-cpu", "cuda-cuda")
def test_pages_are_read_where_they_lie(processes, decode_with, there, here, fused):
    # On the host what is quickest would depend on the machine.
    path = {"same_host_path": "in_place" if there == "shared" else "auto"}
    prefill, decode = processes.usual(), decode_with(here, fused, **path)
    prefill.open(there, fused, **path)
    before = decode.fetch_until_in_place(prefill)
    for _ in range(3):
        decode.fetch_some(prefill)
        after = prefill.in_place()
        assert after >= before + len(REQUESTS), prefill.said(f"{before} in place, then {after}")
        before = after


@either_kind
@pairs("cpu-cpu", "cpu-cuda", "cuda-cpu")
def test_pages_that_nobody_else_reaches_come_packed(processes, decode_with, there, here, fused):
    prefill, decode = processes.usual(), decode_with(here, fused)
    prefill.open(there, fused)
    for _ in range(3):
        decode.fetch_some(prefill)
    prefill.has_sent_all_packed()


@either_kind
@pairs("shared-cuda")
def test_memory_of_the_host_that_is_shared(processes, decode_with, there, here, fused):
    """In place or not, as kvferry chooses."""
    prefill, decode = processes.usual(), decode_with(here, fused)
    prefill.open(there, fused)
    for _ in range(5):
        decode.fetch_some(prefill)


@pytest.mark.parametrize("path", ["network", "arena"])
@pairs("shared-cpu", "cuda-cuda")
def test_paths_that_read_no_pool(processes, decode_with, there, here, path):
    prefill, decode = processes.usual(), decode_with(here, same_host_path=path)
    prefill.open(there, same_host_path=path)
    for _ in range(4):
        decode.fetch_some(prefill)
    prefill.has_sent_all_packed()


@pairs("cuda-cuda")
def test_expandable_segments_are_shared_with_nobody(processes, decode_with, there, here):
    """Torch's, which CUDA gives no other process."""
    prefill, decode = processes.start(expandable_segments=True), decode_with(here)
    if not prefill.open(there)["expandable"]:
        pytest.skip(prefill.said("torch has made no expandable segments"))
    for _ in range(4):
        decode.fetch_some(prefill)
    prefill.has_sent_all_packed()
    warning = "peers on this host get copies of the pages"
    assert warning in prefill.output(), prefill.said("no warning")


# Last: were a GPU's context of this process of no use afterwards, all others would fail with it.
@pairs("shared-cpu", "cuda-cuda")
def test_the_prefill_process_is_killed(processes, decode_with, there, here):
    path = {"same_host_path": "in_place" if there == "shared" else "auto"}
    prefill, decode = processes.start(), decode_with(here, **path)
    other = processes.start()  # Meanwhile; it makes its cache after the death of the first.
    prefill.open(there, **path)
    decode.fetch_until_in_place(prefill)

    here_half, here_whole = decode.page_lists(DECODE_PAGES, (6, 12))
    there_half, there_whole = decode.page_lists(PREFILL_PAGES, (6, 12))
    (ticket,) = prefill.ask("publish", pages=there_half, seed=1, layers=LAYERS // 2)
    half = decode.endpoint.fetch(ticket, 0, here_half)
    half.wait_layer(LAYERS // 2 - 1, 20000)
    tickets = prefill.ask("publish", pages=there_whole, seed=2, times=300)
    before = prefill.in_place()  # And all layers have been computed.

    killer = threading.Timer(0.02, prefill.process.kill)
    killer.start()
    fetched, error = 0, None
    for ticket in tickets:
        handle = decode.endpoint.fetch(ticket, 0, here_whole)
        try:
            handle.wait(20000)
        except kvferry.Error as raised:
            error = raised
            assert handle.done, f"still under way after 20 s, {fetched} fetches before it: {error}"
            break
        fetched += 1
    killer.join()
    print(f"{before} transfers in place, then {fetched} fetches; then {error!r}")
    with pytest.raises(kvferry.Error) as raised:
        half.wait(20000)
    assert half.done, f"still under way 20 s after the death of its sender: {raised.value}"

    # The device still serves this process, and nothing was written where nothing was fetched.
    assert torch.arange(1000, device=decode.cache.device).sum().item() == 499500
    decode.expect_what_is_there(here_half)
    if error is None:
        decode.expect(2, 0, here_whole)
    else:
        decode.expect_what_is_there(here_whole)
    decode.check(prefill)
    other.open(there, **path)
    decode.fetch_until_in_place(other)
