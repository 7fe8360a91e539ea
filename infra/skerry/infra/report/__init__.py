"""Writes a run as one page, and its figures as files for other programs."""
