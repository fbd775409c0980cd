"""Moves KV-cache blocks between GPU and host memory for LLM serving engines."""

from torch_kvswap import _extension

_extension.load()
