"""Amazon: the bucket, roles, the image's repository, and what the targets there have in common."""
