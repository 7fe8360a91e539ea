"""What runs on the operator's machine: specs, starting, watching and removing runs. No torch."""
