"""What is going on in a run, read from its store and folded into one frozen view. Never writes."""
