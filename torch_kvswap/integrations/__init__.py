"""Integrations with serving engines, one subpackage each; the package imports none of them."""
