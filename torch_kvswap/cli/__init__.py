"""What `python -m torch_kvswap` runs: a module per command, and the pieces they are made of."""
