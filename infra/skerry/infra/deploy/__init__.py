"""Deployed runs, whose replicas are jobs in clouds: prepare a spec, refresh, plan, apply, restart lost jobs, remove.

`deployment` prepares the value that all other modules take; only `refresh` and the modules above it call clouds.
"""
