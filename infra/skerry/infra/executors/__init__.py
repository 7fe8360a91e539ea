"""Replicas from ten lines of Python, without a spec: five places, one protocol (`executor.ServerlessExecutor`).

Nothing is planned and nothing remembered: what an executor of a cloud is given (a queue, a role, an account) exists
already, and a handle says all that is needed to find its start again. Importing this asks nobody and needs no SDK.
"""

from skerry.infra.executor import Ending, ReplicaHandle, ServerlessExecutor
from skerry.infra.executors.batch import BatchExecutor
from skerry.infra.executors.here import DockerExecutor, LocalExecutor
from skerry.infra.executors.sagemaker import SageMakerExecutor
from skerry.infra.executors.vertex import VertexExecutor
from skerry.infra.spec import Faults, Outer

__all__ = [
    "BatchExecutor",
    "DockerExecutor",
    "Ending",
    "Faults",
    "LocalExecutor",
    "Outer",
    "ReplicaHandle",
    "SageMakerExecutor",
    "ServerlessExecutor",
    "VertexExecutor",
]
