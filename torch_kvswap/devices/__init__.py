"""Devices that only torch can drive, and what their vendors add."""
