"""Executors: start replicas from ten lines of Python, without a spec. Nine places, one protocol (ServerlessExecutor).

Executors plan nothing and keep no state. What an executor of a cloud needs (a queue, a role, an account) must already
exist. A handle is enough to find its start again. Importing this package calls no cloud and needs no SDK.
"""

from skerry.infra.executors.aws_batch import BatchExecutor
from skerry.infra.executors.hf_jobs import HFJobsExecutor
from skerry.infra.executors.kubernetes import KubernetesExecutor
from skerry.infra.executors.local import DockerExecutor, LocalProcessExecutor
from skerry.infra.executors.modal import ModalExecutor
from skerry.infra.executors.sagemaker import SageMakerExecutor
from skerry.infra.executors.slurm import SlurmExecutor
from skerry.infra.executors.vertex import VertexExecutor
from skerry.infra.run.executor import Ending, ReplicaHandle, ServerlessExecutor
from skerry.infra.spec.model import Faults, Outer

__all__ = [
    "BatchExecutor",
    "DockerExecutor",
    "Ending",
    "Faults",
    "HFJobsExecutor",
    "KubernetesExecutor",
    "LocalProcessExecutor",
    "ModalExecutor",
    "Outer",
    "ReplicaHandle",
    "SageMakerExecutor",
    "ServerlessExecutor",
    "SlurmExecutor",
    "VertexExecutor",
]
