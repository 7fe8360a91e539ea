"""AWS Batch: groups of replicas as jobs on machines that exist only while they run."""
