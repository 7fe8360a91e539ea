"""The parts of `scripts/bench chaos`: what a replica does, what its diary says, and the picture."""
