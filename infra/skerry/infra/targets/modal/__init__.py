"""Modal: groups of replicas as sandboxes of an App."""
