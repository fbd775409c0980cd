"""Serving engines that run on torch_kvswap, a module for each."""
