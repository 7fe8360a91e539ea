"""Runs whose replicas are jobs in clouds: from a spec to a plan, and from a plan to what it says."""
