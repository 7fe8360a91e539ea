"""Clouds: the resources that hold a run, and the handlers that make them."""
