"""A Google Cloud project on this machine, for tests: one server that plays the services that skerry calls.

Every request is checked with Google's discovery documents. `GoogleSandbox` starts it. It connects to no other host,
except the AWS endpoint that verifies AWS identities.
"""

from skerry.testing.google.sandbox import GoogleSandbox

__all__ = ["GoogleSandbox"]
