"""Swaps blocks inside a compiled function.

    python examples/compiled_swap.py [--device cuda]

swap_blocks and swap_kv_blocks declare what they write, so torch.compile keeps them in the graph and
in order with the operations around them.
"""

from __future__ import annotations

import argparse

import torch

from torch_kvswap import swap_kv_blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device

    @torch.compile(fullgraph=True)
    def write_and_store(
        layers: list[torch.Tensor], host: list[torch.Tensor], ids: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        for number, layer in enumerate(layers):
            layer += number  # a kernel that writes the blocks
        swap_kv_blocks(layers, host, ids, slots)
        return layers[0].sum()

    layers = [torch.zeros(8, 16, 64, device=device) for _ in range(4)]
    host = [torch.zeros(32, 16, 64, device="cpu", pin_memory=device != "cpu") for _ in layers]
    ids, slots = (torch.tensor(blocks, device="cpu") for blocks in ([5, 2], [30, 31]))
    write_and_store(layers, host, ids, slots)
    assert [int(layer[30:].amin()) for layer in host] == [0, 1, 2, 3]
    assert not any(layer[:30].any() for layer in host)
    print("two blocks of each layer were stored after the kernels that wrote them")


if __name__ == "__main__":
    main()
