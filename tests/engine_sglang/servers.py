"""A prefill and a decode server of SGLang, and what a router does with them."""

import itertools
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "examples" / "vllm_pair")]

from pair import DEFAULT_MODEL, Answer, Request, free_port  # noqa: E402
from server import Server  # noqa: E402

MODEL = Path(os.environ.get("KVFERRY_TEST_MODEL", DEFAULT_MODEL))
_rooms = itertools.count(1000)


class Servers:
    def __init__(self, folder: Path):
        """Starts both and returns at once."""
        self._port, self._folder = free_port(), folder
        self.prefill = self._start("prefill")
        self.decode = self._start("decode")

    def _start(self, mode: str) -> Server:
        return Server(mode, MODEL, self._folder, self._port)

    def wait_ready(self) -> None:
        self.prefill.wait_ready()
        self.decode.wait_ready()

    def start(self, prompt: list[int], max_tokens: int) -> tuple[Request, Request]:
        """Both servers get the request."""
        where = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._port,
            "bootstrap_room": next(_rooms),
        }
        prefill, decode = (
            it.start(prompt, max_tokens, where) for it in (self.prefill, self.decode)
        )
        return prefill, decode

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
