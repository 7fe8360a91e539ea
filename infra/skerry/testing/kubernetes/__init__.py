"""A Kubernetes cluster in memory behind a real endpoint: `KubernetesSandbox`."""

from skerry.testing.kubernetes.sandbox import KubernetesSandbox

__all__ = ["KubernetesSandbox"]
