"""Google Cloud: the bucket, accounts, federation and repository of a run, over REST and google-auth, imported late."""
