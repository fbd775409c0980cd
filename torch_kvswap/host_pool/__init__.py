"""Host memory for pages of a KV cache."""
