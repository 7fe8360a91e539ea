"""`skerry-replica` in a container: determines which replica it is, fetches the code, runs it, and reports how it ended.

Never imports torch: the training script does, in its own process. images/README.md has the table of what a job of each
cloud finds in its environment; every row has a test.
"""
