"""Parts of a prompt that is handed over while it is computed, and what both engines call them.

A router that gives a request to both engines at once has no tickets to carry. It draws a
transfer_id instead, and each engine works out by itself how the prompt is cut and under which lease
each part goes. The names hold the prompt's tokens and its LoRA adapter: engines that were given
different prompts do not find each other's parts. Their blocks may be of different sizes if both of
them divide a part.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.utils.math_utils import cdiv

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

TRANSFER_ID = "transfer_id"  # Key of kv_transfer_params, as of vLLM's MooncakeConnector.
# Random, as a lease id is: who knows it can fetch the prompt's KV. A UUID has 32 or 36 characters.
_MIN_ID_CHARACTERS = 16
_MAX_ID_CHARACTERS = 128
# Of KV that moves while more is computed: small against a prompt, large against a message. Long
# prompts are cut into few enough parts for many of them to wait (Config.max_fetches_per_peer).
_PART_TOKENS = 1024
_MAX_PARTS = 64
NULL_BLOCK = 0  # Stands for blocks that have left a window.
# Whatever changes the names or the cuts changes this too.
_VERSION = b"kvferry-parts-2"


class Part(NamedTuple):
    """Some blocks of a prompt, in a lease of their own."""

    lease_id: int
    first_block: int
    end_block: int
    end_token: int  # Its KV is final when the prompt is computed up to here.
    group: int = 0  # Of layers, that the blocks belong to.


class Place(NamedTuple):
    """Where a part is, as Part has it."""

    first_block: int
    end_block: int
    end_token: int
    group: int


def not_final(vllm_config: "VllmConfig") -> int:
    """The last so many tokens of a step that does not end what is known of its request: with
    several MTP modules vLLM writes the draft layers' KV of them again in the next one."""
    return max(0, vllm_config.num_prefill_lookahead_tokens - 1)


def final_tokens(request: "Request", scheduled: int, not_final: int) -> int:
    """Tokens whose KV is final after a step that computes so many."""
    computed = request.num_computed_tokens + scheduled
    return computed if computed >= request.num_tokens else max(0, computed - not_final)


def check_transfer_id(transfer_id: object) -> str:
    """What is wrong with one that a client sent; "" if nothing."""
    if (
        isinstance(transfer_id, str)
        and _MIN_ID_CHARACTERS <= len(transfer_id) <= _MAX_ID_CHARACTERS
        and transfer_id.isascii()
    ):
        return ""
    return (
        f"{TRANSFER_ID} has to be a random string of {_MIN_ID_CHARACTERS} to {_MAX_ID_CHARACTERS} "
        f"ASCII characters, such as a UUID"
    )


class Kind(Enum):
    """Of what a group of layers keeps of a prompt."""

    WHOLE = "all blocks"
    WINDOW = "those of the last tokens"
    # Of recurrent layers (Mamba, linear attention, short convolutions), behind all tokens.
    STATE = "a state in the one block that there is"
    LAST_STATE = "a state in the last of as many as KV would take: those before are not there"


class Window(NamedTuple):
    """What a group of layers keeps of a prompt."""

    kind: Kind
    # Of a window.
    tokens: int = 0  # The next one looks at so many, itself among them, or its drafts go back to.
    most_blocks: int = 0  # At any time while a prompt is computed, however long it is.


WHOLE = Window(Kind.WHOLE)
STATE = Window(Kind.STATE)
LAST_STATE = Window(Kind.LAST_STATE)
Windows = Sequence[Window]  # By group of layers.


def in_groups(windows: Windows) -> bool:
    """Whether a prompt is more than one list of blocks, all of them."""
    return list(windows) != [WHOLE]


def has_states(windows: Windows) -> bool:
    return STATE in windows or LAST_STATE in windows


def handed_over(windows: Windows, num_prompt_tokens: int) -> int:
    """Tokens of a prompt whose KV the decode engine gets. It computes the last one in any case, and
    a state that had seen that already would see it twice."""
    return num_prompt_tokens - has_states(windows)


def blocks_of(windows: Windows, group: int, num_tokens: int, block_size: int) -> range:
    """Of so many tokens handed over, those that the decode engine needs of a group: it computes the
    prompt's last token, which looks at as many as a window has, itself among them."""
    kind, kept, _ = windows[group]
    end_block = cdiv(num_tokens, block_size)
    if kind == Kind.STATE:
        return range(1)
    if kind == Kind.LAST_STATE:
        return range(end_block - 1, end_block)
    if kind == Kind.WHOLE:
        return range(end_block)
    num_prompt_tokens = num_tokens + has_states(windows)
    return range(max(0, num_prompt_tokens - kept) // block_size, end_block)


def most_blocks_computing(windows: Windows, num_tokens: int, block_size: int) -> int:
    """That a prompt of so many tokens takes of all groups, at any time while it is computed: of
    states those of a step, of the step before and of a prefix to be cached."""
    whole = cdiv(num_tokens, block_size)
    most = {Kind.WHOLE: whole, Kind.STATE: 3, Kind.LAST_STATE: 3}
    return sum(min(whole, most.get(it.kind, it.most_blocks)) for it in windows)


def most_blocks_loading(windows: Windows, num_tokens: int, block_size: int) -> int:
    """While it is loaded: of a window those that its last token looks at, wherever they begin."""
    at_end = [it._replace(most_blocks=cdiv(it.tokens, block_size) + 1) for it in windows]
    return most_blocks_computing(at_end, num_tokens, block_size)


def _unit(block_size: int, windows: Windows) -> int:
    """Tokens of which every part but the last is a multiple."""
    any_size = not in_groups(windows) and _PART_TOKENS % block_size == 0
    return _PART_TOKENS if any_size else block_size


def places(num_tokens: int, block_size: int, windows: Windows = (WHOLE,)) -> list[Place]:
    """Of the parts of so many tokens that are handed over, in the order in which they are computed:
    whole blocks of _PART_TOKENS, or more, and what is left. Of a group with a window or a state
    one: what is left of it at the end.

    Engines cut alike that have the same block size, or, without windows, sizes that divide
    _PART_TOKENS.
    """
    unit = _unit(block_size, windows)
    least = max(_PART_TOKENS, cdiv(num_tokens, _MAX_PARTS))
    blocks = cdiv(least, unit) * unit // block_size
    found = []
    for group, window in enumerate(windows):
        needed = blocks_of(windows, group, num_tokens, block_size)
        step = blocks if window == WHOLE else max(1, len(needed))
        for first in needed[::step]:
            end = min(first + step, needed.stop)
            end_token = num_tokens if end == needed.stop else end * block_size
            found.append(Place(first, end, end_token, group))
    return sorted(found, key=lambda place: place.end_token)


def cut(
    transfer_id: str,
    tokens: Sequence[int],
    block_size: int,
    windows: Windows = (WHOLE,),
    adapter: str = "",
) -> list[Part]:
    """The parts of tokens that are handed over, each at one of places(). adapter: adapter_of()."""
    prompt = _prompt(transfer_id, tokens, adapter, _unit(block_size, windows))
    parts = []
    for place in places(len(tokens), block_size, windows):
        # A state is the same one in whichever block.
        is_state = windows[place.group] in (STATE, LAST_STATE)
        first_token = 0 if is_state else place.first_block * block_size
        parts.append(Part(_lease_id(prompt, place.group, first_token), *place))
    return parts


def leases_of_all(name: str, tokens: Sequence[int], groups: int, adapter: str = "") -> list[int]:
    """Of all blocks of each group, of tokens that are handed over by tickets. `name` is random."""
    prompt = _prompt(name, tokens, adapter, unit=0)
    return [_lease_id(prompt, group, 0) for group in range(groups)]


def adapter_of(request: "Request") -> str:
    """The LoRA adapter whose KV the request's is, as clients call it; "" if none. Not its path:
    the other engine may have it elsewhere."""
    lora = request.lora_request
    return lora.lora_name if lora else ""


def _prompt(name: str, tokens: Sequence[int], adapter: str, unit: int) -> "hashlib._Hash":
    prompt = hashlib.sha256(_VERSION)
    prompt.update(struct.pack("<qq", unit, len(name)))
    prompt.update(name.encode())
    prompt.update(array("q", tokens).tobytes())
    if adapter:
        prompt.update(b"lora" + hashlib.sha256(adapter.encode("utf-8", "replace")).digest())
    return prompt


def _lease_id(prompt: "hashlib._Hash", group: int, first_token: int) -> int:
    part_name = prompt.copy()
    if group > 0:
        part_name.update(struct.pack("<q", -group))  # No part begins there.
    part_name.update(struct.pack("<q", first_token))
    return int.from_bytes(part_name.digest()[:8], "little") or 1  # 0 is no lease.


def announced_parts(
    request: "Request",
    tokens: list[int] | None,
    params: dict[str, Any],
    block_size: int,
    windows: Windows,
) -> tuple[list[Part], str]:
    """The parts of what is handed over of a prompt that both engines were given with a transfer_id,
    and what is wrong with that ("" if nothing). Neither: there is none."""
    transfer_id = params.get(TRANSFER_ID)
    if transfer_id is None:
        return [], ""
    if error := check_transfer_id(transfer_id):
        return [], error
    if tokens is None:
        return [], f"a prompt of embeddings cannot have a {TRANSFER_ID}"
    return cut(transfer_id, tokens, block_size, windows, adapter_of(request)), ""
