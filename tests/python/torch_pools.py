"""KV caches of torch tensors, as engines make them, that kvferry adopts; as a program, a prefill
process that has such a cache and does what it is told on its standard input."""

import json
import os
import sys
import traceback

import kvferry
import torch

LAYERS, PAGE, HEADS, HEAD_DIM = 8, 16, 8, 128
PREFILL_PAGES, DECODE_PAGES = 36, 30
MODEL = "test/model"


def random_bits(seed: int, *shape: int) -> torch.Tensor:
    """Of bfloat16 numbers; NaNs among them, so that they are compared as integers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator)


class Cache:
    """A tensor [pages, PAGE, HEADS, ...] for K and one for V of each layer, or one for both.

    place: "cuda", "cpu", or "shared", memory of the host that other processes can be given."""

    def __init__(self, place: str, fused: bool, num_pages: int):
        self.device = "cuda:0" if place == "cuda" else "cpu"
        self.num_pages = num_pages
        self.names = ["kv"] if fused else ["k", "v"]
        self.page_shape = (PAGE, HEADS, 2 * HEAD_DIM if fused else HEAD_DIM)
        make_layout = kvferry.KvLayout.fused if fused else kvferry.KvLayout.mha
        layout = make_layout(LAYERS, PAGE, HEADS, HEAD_DIM, "bfloat16")
        shared = None
        if place == "shared":
            shared = kvferry.SharedMemory.create(num_pages * layout.page_bytes)
        self.tensors = self._make_tensors(shared)
        self.pool = kvferry.KvPool.adopt(
            layout,
            [(tensor.data_ptr(), tensor.nbytes) for tensor in self.tensors],
            self.tensors,
            shared,
            "host" if self.device == "cpu" else self.device,
        )

    def _make_tensors(self, shared: kvferry.SharedMemory | None) -> list[torch.Tensor]:
        """K of each layer, then V of each."""
        shape, count = (self.num_pages, *self.page_shape), len(self.names) * LAYERS
        if shared is not None:
            memory = torch.from_numpy(shared.array()).view(torch.bfloat16)
            size = self.num_pages * memory.new_empty(self.page_shape).numel()
            return [memory[i * size : (i + 1) * size].view(shape) for i in range(count)]
        tensors, self.others = [], []
        for i in range(count):
            tensors.append(torch.empty(shape, dtype=torch.bfloat16, device=self.device))
            if i % 3 == 0:  # What else an engine has, amid the cache in what torch got at once.
                self.others.append(torch.empty(1_500_000, dtype=torch.uint8, device=self.device))
        return tensors

    def bits(self, kind: int, layer: int) -> torch.Tensor:
        return self.tensors[kind * LAYERS + layer].view(torch.int16)

    def values(self, seed: int, kind: int, layer: int, count: int) -> torch.Tensor:
        """What a request of so many pages has computed there, on the host."""
        return random_bits(1000 * seed + kind * LAYERS + layer, count, *self.page_shape)

    def compute(self, seed: int, layer: int, pages: list[int]) -> None:
        for kind in range(len(self.names)):
            values = self.values(seed, kind, layer, len(pages))
            self.bits(kind, layer)[pages] = values.to(self.device)
        self.wait()

    def wait(self) -> None:
        """For what torch has been asked to do."""
        if self.device != "cpu":
            torch.cuda.current_stream().synchronize()


class Prefill:
    """What the process is told to do: the methods, by name."""

    def __init__(self):
        self.cache = self.endpoint = None

    def open(self, place: str, fused: bool, config: dict) -> dict:
        """Instead of the cache and the endpoint that were there."""
        if self.endpoint is not None:
            self.endpoint.close()
        self.cache = self.endpoint = None
        self.cache = Cache(place, fused, PREFILL_PAGES)
        self.endpoint = kvferry.PrefillEndpoint(
            self.cache.pool, kvferry.Config.make(config), MODEL, "p"
        )
        # Whatever was tried on the device to share it, torch's next steps do not fail for it.
        one = torch.ones(64, device=self.cache.device).sum().item()
        assert one == 64, one
        segments = torch.cuda.memory_snapshot() if self.cache.device != "cpu" else []
        return {"expandable": any(segment.get("is_expandable") for segment in segments)}

    def publish(self, pages: list[int], seed: int, layers: int = LAYERS, times: int = 1):
        """Tickets at once, of `times` requests that have the same pages; then computes as many of
        the layers."""
        tickets = [self.endpoint.publish(pages, PAGE * len(pages)) for _ in range(times)]
        yield tickets
        leases = [kvferry.Ticket.parse(ticket).lease_id for ticket in tickets]
        for layer in range(layers):
            self.cache.compute(seed, layer, pages)
            for lease in leases:
                self.endpoint.layer_ready(lease, layer)

    def metrics(self) -> dict:
        return self.endpoint.metrics()


def main() -> None:
    # Whatever else is printed goes where errors go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prefill = Prefill()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(prefill, request.pop("do"))(**request)
            steps = [answer] if isinstance(answer, dict) else answer
            for step in steps:
                print(json.dumps(step), file=answers, flush=True)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # Who waits for an answer sees the end at once.
    os._exit(0)


if __name__ == "__main__":
    main()
