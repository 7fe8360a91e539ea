"""A cloud on this machine, for tests: an AWS account in memory, whose Batch runs real containers where Docker is.

For those who test their own specs, and for this project's own tests. `sandbox.Sandbox` is the way in, `plugin` gives it
to pytest. Importing this package imports no cloud's SDK and no moto; README.md is its manual.
"""
