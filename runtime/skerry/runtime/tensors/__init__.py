"""Tensors as payload objects: their layout, format, encoding, reading and reduction.

`layout`, `payload_format`, `payload_reader` and `payload_check` need no torch.
"""
