"""Which prefixes of prompts are on which host pages."""
