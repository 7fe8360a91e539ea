"""The target `kubernetes`: replicas as Jobs of a cluster that exists already."""
