"""Pools whose rows are blocks of few bits."""

import kvferry


def mxfp4_layout(
    heads: int, head_dim: int, page_size: int = 1, num_layers: int = 1
) -> kvferry.KvLayout:
    """Of layers that keep keys alone."""
    return kvferry.KvLayout(
        num_layers=num_layers,
        page_size=page_size,
        dtype="uint8",
        page_format="NHD",
        tensors=kvferry.quantized_tensors("mxfp4", "k", heads, head_dim),
    )
