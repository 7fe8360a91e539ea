"""Hugging Face Jobs: groups of replicas as jobs of a user or an organization."""
