"""The log of a run in the store: object keys, typed records, and reading and writing them."""
