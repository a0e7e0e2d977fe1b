"""How a prompt that both engines are given at once is cut, and what its parts are called."""

from itertools import combinations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvferry.vllm.parts import (  # noqa: E402
    LAST_STATE,
    STATE,
    WHOLE,
    blocks_of,
    cut,
    handed_over,
    most_blocks_computing,
    most_blocks_loading,
)
from vllm_steps import window  # noqa: E402


def test_parts_of_a_prompt_cover_it_in_whole_blocks():
    for tokens, block in [(1, 16), (1024, 16), (1025, 16), (3000, 48), (200_000, 16), (1500, 4096)]:
        parts = cut("t" * 16, range(tokens), block)
        assert len(parts) <= 64
        assert [it.first_block for it in parts] == [0] + [it.end_block for it in parts[:-1]]
        assert parts[-1].end_block == -(-tokens // block) and parts[-1].end_token == tokens
        assert all(it.end_token == it.end_block * block for it in parts[:-1])
        assert all(it.end_token - it.first_block * block >= 1024 for it in parts[:-1])
        assert len({it.lease_id for it in parts} - {0}) == len(parts)


def test_parts_have_names_that_only_the_same_prompt_has():
    def names(
        transfer_id: str = "t" * 16,
        tokens: list[int] | None = None,
        block: int = 16,
        adapter: str = "",
    ):
        prompt = list(range(2000)) if tokens is None else tokens
        return {it.lease_id for it in cut(transfer_id, prompt, block, adapter=adapter)}

    assert names() == names()
    others = [
        names("t" * 15 + "u"),
        names(tokens=[*range(1999), 0]),
        names(tokens=list(range(2001))),
        names(block=48),
        names(adapter="a"),
        names(adapter="\ud800"),  # No UTF-8, from a client's JSON.
    ]
    assert all(a.isdisjoint(b) for a, b in combinations([names(), *others], 2))


@pytest.mark.parametrize("tokens", [1, 1024, 1025, 70_000, 200_000])
def test_engines_with_blocks_of_other_sizes_cut_a_prompt_alike(tokens: int):
    def parts(block: int):
        return [
            (it.lease_id, it.first_block * block, it.end_token)
            for it in cut("t" * 16, range(tokens), block)
        ]

    for block in (1, 32, 64, 256, 1024):
        assert parts(block) == parts(16)
    # What is left of a window begins at a block.
    windows = (WHOLE, window(100))
    of_one, of_other = (
        {it.lease_id for it in cut("t" * 16, range(tokens), block, windows)} for block in (16, 32)
    )
    assert of_one.isdisjoint(of_other)


def test_what_is_handed_over_of_a_prompt_by_kind_of_layers():
    assert handed_over((WHOLE,), 100) == handed_over((WHOLE, window(64)), 100) == 100
    # A state has no tokens behind it that the decode engine computes.
    assert handed_over((WHOLE, STATE), 100) == handed_over((LAST_STATE, WHOLE), 100) == 99
    windows = (WHOLE, STATE, window(40), LAST_STATE)
    for tokens in (1, 15, 16, 17, 32, 99):
        whole, state, of_window, last = (
            blocks_of(windows, group, tokens, 16) for group in range(4)
        )
        assert (whole, state) == (range(-(-tokens // 16)), range(1))
        assert last == whole[-1:]
        # What the next token looks at, itself among it.
        assert of_window == range(max(0, tokens + 1 - 40) // 16, whole.stop)
    assert blocks_of((WHOLE, window(40)), 1, 99, 16) == range(59 // 16, 7)


def test_blocks_that_a_prompt_may_take():
    for most_blocks in (most_blocks_computing, most_blocks_loading):
        assert most_blocks((WHOLE,), 100, 16) == 7
        assert most_blocks((STATE, WHOLE, LAST_STATE), 100, 16) == 7 + 2 * 3
        assert most_blocks((STATE, WHOLE, LAST_STATE), 17, 16) == 3 * 2
    windows = (WHOLE, window(40, most_blocks=6))
    # More than the window, before it gives some back, but never more than all.
    assert most_blocks_computing(windows, 96, 16) == 6 + 6
    assert most_blocks_computing(windows, 1000, 16) == 63 + 6
    assert most_blocks_computing(windows, 32, 16) == 2 + 2
    assert most_blocks_loading(windows, 1000, 16) == 63 + 4
    assert most_blocks_loading(windows, 32, 16) == 2 + 2


@pytest.mark.parametrize("tokens", [1, 31, 2500])
def test_a_state_is_a_part_of_its_own_at_the_end(tokens: int):
    parts = cut("t" * 16, range(tokens), 16, (STATE, WHOLE, LAST_STATE))
    end = -(-tokens // 16)
    assert [
        (it.group, it.first_block, it.end_block, it.end_token) for it in parts if it.group != 1
    ] == [(0, 0, 1, tokens), (2, end - 1, end, tokens)]
    of_attention = [it for it in parts if it.group == 1]
    assert of_attention[-1].end_token == tokens
    assert of_attention[-1].end_block == -(-tokens // 16)
    assert len({it.lease_id for it in parts}) == len(parts)
    assert [it.end_token for it in parts] == sorted(it.end_token for it in parts)


def test_engines_with_and_without_prefix_caching_name_a_state_alike():
    of_one, of_other = (
        {it.lease_id for it in cut("t" * 16, range(2500), 16, (state, WHOLE))}
        for state in (STATE, LAST_STATE)
    )
    assert of_one == of_other


def test_names_of_parts_do_not_change():
    """Engines of two releases have to find each other's; else _VERSION says so."""
    parts = cut("0123456789abcdef", range(1100), 16)
    assert [(it.lease_id, it.first_block, it.end_block) for it in parts] == [
        (0xA16FAD4EA6B5837D, 0, 64),
        (0x844AD888242C58D1, 64, 69),
    ]
