"""The replica image: build, test, list contents, push. `skerry image` is the command, images/README.md the manual."""
