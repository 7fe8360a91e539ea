"""The sandbox's fixtures, as a user of the plugin has them."""

from skerry.infra.testing.plugin import skerry_sandbox

__all__ = ["skerry_sandbox"]
