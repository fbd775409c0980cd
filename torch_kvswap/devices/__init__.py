"""Devices that only torch can drive."""
