"""What `skerry-replica` does in a container: finds its place, fetches the code, runs it, and ends as the contract says.

Never imports torch: the training script does, in a process of its own. The table of what each cloud's job sees is in
images/README.md; every row of it has a test.
"""
