"""Integrations with serving engines, one subpackage each; only `doctor` imports them."""
