"""The operator's side: reads a spec, plans and applies it, starts, watches and removes runs. Imports no torch."""
