"""Pushes the replica image, which scripts/image builds. `skerry image` is the command, images/README.md the manual."""
