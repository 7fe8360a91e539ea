"""The AWS sandbox under its public name; importing it imports moto."""

from skerry.testing.aws.sandbox import Sandbox

__all__ = ["Sandbox"]
