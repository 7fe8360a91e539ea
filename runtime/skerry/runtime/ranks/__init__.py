"""Agreement between the ranks of a replica: gather to rank 0, decide there, broadcast the result."""
