"""Prefix caching: which blocks of prompts are on which host pages."""
