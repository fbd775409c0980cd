"""Writes the types of the native library, for type checkers.

python tools/write_stub.py FILE
"""

import sys
from pathlib import Path

from nanobind.stubgen import StubGen

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

from torch_kvswap._native.loader import native


def main(file: str) -> None:
    stub = StubGen(native, include_docstrings=False, include_private=True)
    stub.put(native)
    Path(file).write_text(stub.get())


if __name__ == "__main__":
    main(*sys.argv[1:])
