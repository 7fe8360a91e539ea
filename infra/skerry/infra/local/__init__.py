"""Runs replicas on this machine as processes or containers, supervises them, and removes what a run left."""
