"""The parts of a run that do not depend on its target: record, code archive, preflight checks, restarts, pins."""
