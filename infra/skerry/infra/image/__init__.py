"""The replica image: made, tried, listed and shipped. `skerry image` is the command, images/README.md the manual."""
