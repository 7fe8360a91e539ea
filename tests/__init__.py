"""A package, so that another installed package named `tests` cannot hide it."""
