"""A small model served with a KV cache that is too small: how an engine uses torch_kvswap."""
