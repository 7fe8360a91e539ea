"""Deployed runs, whose replicas are jobs in clouds: prepare a spec, refresh, plan, apply, restart lost jobs, remove.

`prepared_deployment` prepares the value that all other modules take; only `read_clouds` and what uses it call clouds.
"""
