"""The plan and apply engine: resource graph, plan, apply, state. Knows no cloud."""
