"""Reads a run's store: the view that `status` shows, and the examination of `doctor`. Never writes."""
