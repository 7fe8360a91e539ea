"""SageMaker: groups of replicas as training jobs."""
