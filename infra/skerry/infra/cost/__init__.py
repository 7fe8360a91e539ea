"""The cost of a run: prices, and the estimate made from them."""
