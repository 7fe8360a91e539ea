"""An AWS account in memory: moto's server, the gaps of moto closed by `shims/`, and jobs that are real containers.

`skerry.testing.sandbox.Sandbox` starts it. Importing this package imports neither moto nor boto3.
"""
