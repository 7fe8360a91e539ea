"""The spec: its models, the YAML reader, and the checks on the text alone."""
