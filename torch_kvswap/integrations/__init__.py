"""Serving engines that run on torch_kvswap, a module for each; none is imported by the package."""
