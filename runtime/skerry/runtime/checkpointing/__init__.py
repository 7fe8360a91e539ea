"""Saves, checks and loads state: checkpoints, receipts, local state, divergence, garbage collection."""
