"""Logic that several targets have in common. Knows no target."""
