"""The plugin's own fixtures, taken by hand: these tests do not need it to be installed."""

from skerry.testing.plugin import skerry_containers, skerry_registry, skerry_sandbox

__all__ = ["skerry_containers", "skerry_registry", "skerry_sandbox"]
