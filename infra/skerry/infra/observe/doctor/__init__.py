"""Examines the log of a run for `skerry doctor`."""
