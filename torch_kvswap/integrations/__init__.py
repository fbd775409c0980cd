"""Integrations with serving engines, one subpackage each; only `doctor` imports them."""

# The releases of engines that the adapters were tested with.
TESTED = {"vllm": "0.33.0", "sglang": "0.5.23"}


def is_tested(package: str, version: str) -> bool:
    """Whether this version of an engine is the one that its adapter was tested with."""
    return version.partition("+")[0] == TESTED[package]
