"""Temporary credentials for a store: each module fetches one kind from the platform; `cache` renews them in time."""
