"""A small engine that swaps requests through torch_kvswap, and compares every token."""
