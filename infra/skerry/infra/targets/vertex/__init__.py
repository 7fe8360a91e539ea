"""Vertex AI: groups of replicas as custom jobs."""
