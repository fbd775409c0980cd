"""Blocks with the keys and values of a real model, in a pool of any encoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from blocks import ONE_BY_ONE, NumberedBlocks
from timing import synchronize
from torch import Tensor

from torch_kvswap import OffloadHandler

# bf16 keys and values of SmolLM2-135M; tests/data says how they were made.
CONTENTS = Path(__file__).parents[1] / "tests" / "data" / "smollm2_page.bin"
_ODD = 7919  # a prime, so that the blocks begin at different places of the contents


class ModelBlocks(NumberedBlocks):
    """Blocks whose bytes are runs of CONTENTS, each from a place of its own.

    Args:
        pool_options: of the HostPool, such as encoding="lossless".
    """

    def __init__(
        self,
        device: torch.device,
        count: int,
        layers: int,
        fragment_bytes: int,
        arrangement: str = ONE_BY_ONE,
        **pool_options: Any,
    ) -> None:
        self._contents = torch.from_numpy(np.fromfile(CONTENTS, np.int64)).to(device)
        sizes = count, layers, fragment_bytes
        super().__init__(device, *sizes, arrangement, torch.bfloat16, **pool_options)

    def refill(self) -> None:
        self._number_anew()
        self._fill_blocks(self._in_pages)
        self._move_all("store")
        self._fill_blocks(self._in_blocks)
        synchronize(self.device)

    def wrong(self) -> int:
        """Loads all pages, because their bytes may be encoded."""
        wrong = self._wrong_blocks()
        self._move_all("load")
        self._in_blocks = self._in_pages.clone()
        return wrong + self._wrong_blocks()

    def _move_all(self, direction: str) -> None:
        ids = list(range(self.count))
        with OffloadHandler(self.layout, self.host) as handler:
            if direction == "store":
                handler.store(gpu_block_ids=ids, page_ids=ids).synchronize()
            else:
                handler.load(page_ids=ids, gpu_block_ids=ids).synchronize()

    def _bytes(self, numbers: Tensor) -> Tensor:
        width = self._words * len(self.tensors)
        words = torch.arange(width, device=self.device)
        places = numbers.to(self.device)[:, None] * _ODD + words
        return self._contents[places % len(self._contents)]
