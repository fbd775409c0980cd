"""How a block is stored in its slot of a host page."""
