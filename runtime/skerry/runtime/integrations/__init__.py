"""Callbacks that train under DiLoCo in a loop that a framework owns: `hf` (transformers), `lightning`.

Importing one imports its framework; no other module of skerry does.
"""
