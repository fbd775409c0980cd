"""Computes a prompt whose keys and values do not fit on the GPU: layers share a few buffers.

    python examples/long_prompt.py [--device cuda] [--tokens 131072 --chunk 8192] [--encoding raw]

The prompt is computed in chunks. Before the attention of a layer, its earlier keys and values are
loaded into one of the buffers; after it, those of the chunk are stored. The host page is then the
only copy. The result is compared with that of a cache that holds all layers. `--control` leaves out
the waits and must fail (without a GPU, set KVSWAP_LATE_CPU=1).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

import torch_kvswap as kvs


class Model:
    """A decoder with random weights: norm and attention, norm and MLP."""

    def __init__(self, layers: int, heads: int, kv_heads: int, size: int, device: str) -> None:
        self.layers, self.heads, self.kv_heads, self.size = layers, heads, kv_heads, size
        self.device, hidden = device, heads * size

        def weights(inputs: int, outputs: int) -> list[Tensor]:
            shape, scale = (inputs, outputs), inputs**-0.5
            normal = (torch.randn(shape, device=device) * scale for _ in range(layers))
            return [of.bfloat16() for of in normal]

        self.qkv = weights(hidden, (heads + 2 * kv_heads) * size)
        self.out, self.up = weights(hidden, hidden), weights(hidden, 4 * hidden)
        self.down = weights(4 * hidden, hidden)

    def project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [tokens, heads, size]."""
        normed = functional.rms_norm(x, x.shape[1:])
        both = (normed @ self.qkv[layer]).view(len(x), -1, self.size)
        first, last = self.heads, self.heads + self.kv_heads
        return both[:, :first], both[:, first:last], both[:, last:]

    def attend(self, layer: int, x: Tensor, *attended: Tensor) -> Tensor:
        """The layer's output from the chunk's queries, and the keys and values of all tokens."""
        q, k, v = (of.transpose(0, 1)[None] for of in attended)
        mask = causal_lower_right(q.shape[2], k.shape[2])
        mixed: Tensor = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        x = x + mixed[0].transpose(0, 1).flatten(1) @ self.out[layer]
        return (
            x
            + functional.silu(functional.rms_norm(x, x.shape[1:]) @ self.up[layer])
            @ self.down[layer]
        )


class Resident:
    """Keys and values of all layers on the GPU. A step is one layer of one chunk."""

    def __init__(self, model: Model, tokens: int, buffers: int) -> None:
        shape = (buffers, tokens, model.kv_heads, model.size)
        both = torch.zeros((2, *shape), dtype=torch.bfloat16, device=model.device)
        self.keys, self.values = both

    def wait(self, step: int) -> None:
        """Makes the current stream wait until the step's buffer holds the earlier tokens."""

    def leave(self, step: int) -> None:
        """The step's buffer has the chunk's tokens, and its attention was submitted."""


class Offloaded(Resident):
    """Keys and values of `buffers` layers on the GPU, and of all layers on the host."""

    def __init__(
        self,
        model: Model,
        tokens: int,
        chunk: int,
        buffers: int = 3,
        block: int = 256,
        encoding: Literal["raw", "lossless"] = "lossless",
        raw_pages: int | None = None,
        control: bool = False,
    ) -> None:
        super().__init__(model, tokens, buffers)
        self.buffers, self.layers, self.control = buffers, model.layers, control
        self.blocks, self.chunk_blocks = tokens // block, chunk // block  # of a layer
        self.steps = tokens // chunk * model.layers
        shape = (buffers * self.blocks, block, model.kv_heads, model.size)
        gpu = kvs.PagedLayout([self.keys.view(shape), self.values.view(shape)])
        pages = model.layers * self.blocks
        self.handler = kvs.OffloadHandler(gpu, kvs.HostPool(gpu, pages, encoding=encoding))
        # Blocks that do not fit into their encoded pages, which is rare, are kept as they are.
        self.raw = kvs.OffloadHandler(gpu, kvs.HostPool(gpu, raw_pages or max(pages // 16, 1)))
        self.raw_page_of: dict[int, int] = {}  # by the page that they do not fit into
        self.stores: dict[int, kvs.Job] = {}  # by step
        self.loads: dict[int, list[kvs.Job]] = {}

    def close(self) -> None:
        for handler in (self.handler, self.raw):
            handler.close()

    def wait(self, step: int) -> None:
        for job in self.loads.pop(step, []):
            if not self.control:
                job.wait()

    def leave(self, step: int) -> None:
        first = step // self.layers * self.chunk_blocks  # of the chunk
        blocks, pages = self.place(step, range(first, first + self.chunk_blocks))
        self.stores[step] = self.handler.store(gpu_block_ids=blocks, page_ids=pages)
        # While the GPU computes this step, the store of the one before ends. Its buffer is next.
        if step > 0:
            self.finish_store(step - 1)
            self.load(step - 1 + self.buffers)
        if step + 1 == self.steps:
            self.finish_store(step)
            self.handler.synchronize()  # raises if a load failed since the last poll()
            self.raw.synchronize()

    def place(self, step: int, blocks: range) -> tuple[list[int], list[int]]:
        """The GPU blocks and the pages of these blocks of the step's layer."""
        buffer, layer = step % self.buffers, step % self.layers
        return [buffer * self.blocks + i for i in blocks], [layer * self.blocks + i for i in blocks]

    def finish_store(self, step: int) -> None:
        """Returns when the chunk's blocks of the step are on the host, so that its buffer is free.

        Raises:
            TransferError: the store, or a load, failed.
            MemoryError: too many blocks do not fit into encoded pages.
        """
        store = self.stores.pop(step)
        if self.control:
            return
        try:
            store.synchronize()
        except kvs.BlocksRejectedError as error:
            first = step // self.layers * self.chunk_blocks
            blocks, pages = self.place(step, range(first, first + self.chunk_blocks))
            used, room = len(self.raw_page_of), self.raw.pools[0].num_pages
            raw_pages = range(used, used + len(error.rejected))
            if raw_pages.stop > room:
                raise MemoryError(
                    f"more than {room} blocks do not fit; use encoding='raw'"
                ) from error
            rejected = [blocks[position] for position in error.rejected]
            self.raw.store(gpu_block_ids=rejected, page_ids=raw_pages).synchronize()
            keys = [pages[position] for position in error.rejected]
            self.raw_page_of.update(zip(keys, raw_pages, strict=True))
        for result in [*self.handler.poll(), *self.raw.poll()]:
            if result.direction == "load" and result.error is not None:
                raise result.error

    def load(self, step: int) -> None:
        """Loads the earlier tokens of the step's layer, at once: its buffer is free."""
        if step >= self.steps:
            return
        encoded: tuple[list[int], list[int]] = [], []
        raw: tuple[list[int], list[int]] = [], []
        places = self.place(step, range(step // self.layers * self.chunk_blocks))
        for block, page in zip(*places, strict=True):
            blocks, pages = raw if page in self.raw_page_of else encoded
            blocks.append(block)
            pages.append(self.raw_page_of.get(page, page))
        self.loads[step] = [
            handler.load(gpu_block_ids=blocks, page_ids=pages, after=())
            for handler, (blocks, pages) in ((self.handler, encoded), (self.raw, raw))
            if blocks
        ]


def prefill(model: Model, prompt: Tensor, chunk: int, cache: Resident) -> Tensor:
    """Computes the prompt [tokens, hidden] in chunks. Returns the last chunk's output."""
    steps = itertools.count()
    for start in range(0, len(prompt), chunk):
        x = prompt[start : start + chunk]
        for layer in range(model.layers):
            step = next(steps)
            keys, values = (
                of[step % len(of), : start + chunk] for of in (cache.keys, cache.values)
            )
            queries, keys[start:], values[start:] = model.project(layer, x)
            cache.wait(step)
            x = model.attend(layer, x, queries, keys, values)
            cache.leave(step)
    return x.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--tokens", type=int, default=32768 if on_gpu else 1024)
    parser.add_argument("--chunk", type=int, default=8192 if on_gpu else 256)
    parser.add_argument("--layers", type=int, default=32 if on_gpu else 8)
    parser.add_argument("--heads", type=int, default=32 if on_gpu else 4)
    parser.add_argument("--kv-heads", type=int, default=8 if on_gpu else 2)
    parser.add_argument("--buffers", type=int, default=3)
    parser.add_argument("--block", type=int, default=256 if on_gpu else 64, help="tokens per block")
    parser.add_argument("--encoding", choices=("raw", "lossless"), default="lossless")
    parser.add_argument("--control", action="store_true", help="leave out the waits")
    of = parser.parse_args()
    if min(of.tokens, of.chunk, of.block, of.heads, of.kv_heads) < 1:
        parser.error("--tokens, --chunk, --block, --heads and --kv-heads must be 1 or more")
    if of.tokens % of.chunk or of.chunk % of.block or of.heads % of.kv_heads:
        parser.error("--chunk must divide --tokens, --block --chunk, and --kv-heads --heads")
    if not 2 <= of.buffers <= of.layers:
        parser.error(f"--buffers must be 2 to --layers, which is {of.layers}")

    torch.manual_seed(0)
    model = Model(of.layers, of.heads, of.kv_heads, 128 if on_gpu else 32, of.device)
    prompt = torch.randn(of.tokens, of.heads * model.size, device=of.device).bfloat16()
    prefill(model, prompt[: of.chunk], of.chunk, Resident(model, of.chunk, of.layers))  # warms up
    few = Offloaded(
        model, of.tokens, of.chunk, of.buffers, of.block, of.encoding, control=of.control
    )
    outputs, seconds = [], []
    for cache in (few, Resident(model, of.tokens, of.layers)):
        began = time.perf_counter()
        outputs.append(prefill(model, prompt, of.chunk, cache))
        seconds.append(time.perf_counter() - began)
    few.close()
    if not torch.equal(*outputs):
        sys.exit("the outputs differ")
    print(
        f"{of.tokens:,} tokens with {of.buffers} of {of.layers} layers on the GPU: outputs equal, "
        f"{seconds[0]:.2f} s; {seconds[1]:.2f} s with all of them"
    )


if __name__ == "__main__":
    main()
