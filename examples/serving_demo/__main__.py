"""`python examples/serving_demo`, in a checkout whose native library is built."""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "examples")]  # torch_kvswap need not be installed
    from serving_demo.demo import main

    sys.exit(main(sys.argv[1:]))
