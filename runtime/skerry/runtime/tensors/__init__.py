"""Tensors as payload objects: their layout, format, encoding, reading and reduction.

`byte_layout`, `payload_format`, `payload_reader` and `contribution_readability` need no torch.
"""
