"""Shared disks: a folder that the operator and every replica mount under the same path."""
