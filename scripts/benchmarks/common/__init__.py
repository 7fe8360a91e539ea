"""Options that several benchmarks share."""
