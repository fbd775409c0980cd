"""The commands of `python -m torch_kvswap`, one module each, and what they share."""
