"""A prefill and a decode server of SGLang, and what a router does with them."""

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "examples" / "vllm_pair")]

from pair import DEFAULT_MODEL, Answer, Request, free_port  # noqa: E402
from server import Server  # noqa: E402

MODEL = Path(os.environ.get("KVFERRY_TEST_MODEL", DEFAULT_MODEL))
_rooms = itertools.count(1000)


def new_room() -> int:
    return next(_rooms)


class Servers:
    def __init__(
        self,
        folder: Path,
        model: Path = MODEL,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
    ):
        """Starts both and returns at once. The dicts change arguments of the servers."""
        self._port, self._folder, self._model = free_port(), folder, model
        # So that the end of a prompt moves alone too, behind what the decode server has cached.
        caches = {"disaggregation_decode_enable_radix_cache": True}
        self._arguments = {"prefill": prefill or {}, "decode": caches | (decode or {})}
        self.prefill = self._start("prefill")
        self.decode = self._start("decode")

    def _start(self, mode: str) -> Server:
        return Server(mode, self._model, self._folder, self._port, **self._arguments[mode])

    def wait_ready(self) -> None:
        self.prefill.wait_ready()
        self.decode.wait_ready()

    def start(
        self, prompt: list[int], max_tokens: int, room: int | None = None
    ) -> tuple[Request, Request]:
        """Both servers get the request. room: None is one of its own."""
        return self.start_at(self.prefill, self._port, prompt, max_tokens, room)

    def start_at(
        self,
        prefill: Server,
        port: int,
        prompt: list[int],
        max_tokens: int,
        room: int | None = None,
    ) -> tuple[Request, Request]:
        """That prefill server and the decode server get it. port: of the former's bootstrap."""
        where = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": port,
            "bootstrap_room": new_room() if room is None else room,
        }
        first, second = (it.start(prompt, max_tokens, where) for it in (prefill, self.decode))
        return first, second

    def answer(self, prompt: list[int], max_tokens: int = 8) -> Answer:
        prefill, decode = self.start(prompt, max_tokens)
        assert prefill.answer().error == ""
        answer = decode.answer()
        assert answer.error == ""
        return answer

    def restart_prefill(self) -> None:
        """After it was killed."""
        self.prefill.close()
        self.prefill = self._start("prefill")
        self.prefill.wait_ready()

    def close(self) -> None:
        self.prefill.stop()
        self.decode.stop()
        self.prefill.close()
        self.decode.close()


def said_by(folder: Path) -> Callable[..., list[int]]:
    """(prompt, max_tokens=8): what the model says, by transformers."""
    transformers, torch = (pytest.importorskip(name) for name in ("transformers", "torch"))
    torch.set_num_threads(1)  # Beside busy servers more threads would wait for each other.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def generate(prompt: list[int], max_tokens: int = 8) -> list[int]:
        with torch.no_grad():
            answer = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
            )
        return answer[0, len(prompt) :].tolist()

    return generate
