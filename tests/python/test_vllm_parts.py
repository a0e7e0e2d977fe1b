"""How a prompt that both engines are given at once is cut, and what its parts are called."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvferry.vllm.parts import cut  # noqa: E402


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
    def names(transfer_id: str = "t" * 16, tokens: list[int] | None = None, block: int = 16):
        prompt = list(range(2000)) if tokens is None else tokens
        return {it.lease_id for it in cut(transfer_id, prompt, block)}

    assert names() == names()
    others = [
        names("t" * 15 + "u"),
        names(tokens=[*range(1999), 0]),
        names(tokens=list(range(2001))),
        names(block=48),
    ]
    assert all(names().isdisjoint(other) for other in others)


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
    windows = (None, 100)
    of_one, of_other = (
        {it.lease_id for it in cut("t" * 16, range(tokens), block, windows)} for block in (16, 32)
    )
    assert of_one.isdisjoint(of_other)


def test_names_of_parts_do_not_change():
    """Engines of two releases have to find each other's; else _VERSION says so."""
    parts = cut("0123456789abcdef", range(1100), 16)
    assert [(it.lease_id, it.first_block, it.end_block) for it in parts] == [
        (0xA16FAD4EA6B5837D, 0, 64),
        (0x844AD888242C58D1, 64, 69),
    ]
