"""A package, so that no other package named `tests` that somebody installs hides it."""
