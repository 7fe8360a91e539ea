"""A Google Cloud project on this machine, for tests: one server that plays the services that skerry calls.

Every request is checked with the documents that Google publishes of its services. `sandbox.GoogleSandbox` is the way
in. It talks to nobody, but for the AWS that it is given to ask who somebody is.
"""

from skerry.infra.testing.google.sandbox import GoogleSandbox

__all__ = ["GoogleSandbox"]
