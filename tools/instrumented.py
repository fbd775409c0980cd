"""A copy of the checkout in `build`, with a native library that was compiled with other flags.

What a test starts there cannot take the library of the checkout by mistake.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("benchmarks", "conftest.py", "csrc", "examples", "pyproject.toml", "tests", "torch_kvswap")


def say(message: str) -> None:
    print(f"torch_kvswap: {message}", file=sys.stderr, flush=True)


def make_copy(copy: Path, more: Iterable[str] = ()) -> None:
    """Copies what tests need, except for the library.

    Args:
        copy: The folder. What else is there stays, such as the simulated driver.
        more: Files and folders of the checkout to copy besides.
    """
    say(f"making {copy}")
    copy.mkdir(parents=True, exist_ok=True)
    for name in [*COPIED, *more]:
        source, target = ROOT / name, copy / name
        if source.is_file():
            shutil.copy2(source, target)
        else:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))


def build_library(copy: Path, flags: dict[str, str]) -> None:
    """Builds the library into the copy, with its objects in `objects` there.

    Args:
        copy: The folder.
        flags: Variables of the environment that setup.py reads, such as CXXFLAGS.
    """
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(copy)]
    command += ["--build-temp", str(copy / "objects")]  # beside those of the ordinary build
    environment = {**os.environ, **flags}
    subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=True)


def names_tests(arguments: list[str]) -> bool:
    """Whether pytest's arguments say which files or tests to run."""
    return any((ROOT / argument.partition("::")[0]).exists() for argument in arguments)
