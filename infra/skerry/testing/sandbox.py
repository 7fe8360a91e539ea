"""The public import path of the AWS sandbox; importing it imports moto."""

from skerry.testing.aws.sandbox import Sandbox

__all__ = ["Sandbox"]
