"""AWS: the bucket, roles, image repository, log group and security group of a run."""
