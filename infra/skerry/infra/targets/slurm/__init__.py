"""Slurm: groups of replicas as batch jobs of a cluster."""
