"""Integrations with serving engines, a module or a package each; only `doctor` imports them."""

import difflib
import os
from collections.abc import Sequence

# The releases of engines that the adapters were tested with.
TESTED = {"vllm": "0.33.0", "sglang": "0.5.23"}


def is_tested(package: str, version: str) -> bool:
    """Whether this version of an engine is the one that its adapter was tested with."""
    return version.partition("+")[0] == TESTED[package]


def not_installed(package: str, error: ModuleNotFoundError) -> ImportError:
    """The error of an adapter whose engine is missing, or lacks a module."""
    return ImportError(f"{error}; install {package} by pip install 'torch_kvswap[{package}]'")


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The end of an error about an option that is unknown: the nearest name, or all of them."""
    if near := difflib.get_close_matches(name, known, 1):
        return f"did you mean {near[0]}?"
    return f"the options are {', '.join(known)}"


def real_path(name: str) -> str:
    """A file or folder by its absolute path, because engines may have other working directories;
    other names as they are."""
    return os.path.realpath(name) if os.path.exists(name) else name
