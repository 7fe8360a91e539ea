"""Clouds on this machine, for tests: an AWS account and a Google project, whose jobs are real containers with Docker.

For tests of users' specs and for this project's own. `sandbox.Sandbox` is the AWS account, `google.GoogleSandbox` the
Google project, `plugin` has the pytest fixtures. Importing this package imports no cloud SDK and no moto. README.md is
its manual.
"""
