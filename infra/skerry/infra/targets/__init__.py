"""Where replicas can run, one module per kind. Targets know nothing of each other."""
