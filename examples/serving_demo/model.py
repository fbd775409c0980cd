"""A small decoder-only transformer over a paged KV cache; nothing here knows of torch_kvswap.

RMSNorm, rotary embedding, grouped queries, float32, greedy decoding of bytes. The cache may have
another type.

Its results depend bit for bit on the request alone, not on other requests or on block numbers. It
computes one request at a time, in one of two shapes (a block of the prompt, or one token), and
always against `max_blocks` blocks. So every matrix product and reduction has the same shape,
alignment and order of additions in every run on a device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from torch_kvswap import allocate_layers

VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 2, 8, 2, 64
DIM = HIDDEN = 256
# With scores of deviation 1, attention would average over hundreds of keys, and no single key would
# matter. With this deviation a query attends to a few keys, wherever they are.
SCORE_DEVIATION = 4.0


@contextmanager
def same_bits_every_time() -> Iterator[None]:
    """Float32 without TF32, and one thread, so that sums do not depend on how work is divided."""
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; matrices are [outputs, inputs]."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """A model with seeded weights, equal on every device.

    Works on the calling thread's current stream. A block table is int64 [max_blocks] on the device;
    a cache is what new_cache() returns.

    Args:
        block_size (int): tokens per block.
        max_blocks (int): blocks of the longest request.
        seed (int): seed of the weights.
        device (torch.device): where to compute.
        cache_dtype (torch.dtype): the type of the cache, to which keys and values are rounded.
    """

    def __init__(
        self,
        block_size: int,
        max_blocks: int,
        seed: int,
        device: torch.device,
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.block_size, self.max_blocks = block_size, max_blocks
        self.device, self.cache_dtype = device, cache_dtype
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, gain: float = 1.0) -> Tensor:
            deviation = gain / sqrt(shape[-1])
            return (torch.randn(shape, generator=generator, device="cpu") * deviation).to(device)

        def layer() -> Layer:
            qkv = normal((HEADS + 2 * KV_HEADS) * HEAD_DIM, DIM)
            qkv[: HEADS * HEAD_DIM] *= SCORE_DEVIATION
            out = normal(DIM, HEADS * HEAD_DIM, gain=2.0)
            return Layer(qkv, out, normal(2 * HIDDEN, DIM), normal(DIM, HIDDEN, gain=1.7))

        self.embedding = normal(VOCAB, DIM, gain=sqrt(DIM))
        self.layers = [layer() for _ in range(LAYERS)]
        self.head = normal(VOCAB, DIM)
        self.positions = torch.arange(max_blocks * block_size, device=device)
        frequencies = 10_000.0 ** -(torch.arange(HEAD_DIM // 2, device=device) * 2 / HEAD_DIM)
        angles = self.positions[:, None, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def new_cache(self, num_blocks: int) -> list[Tensor]:
        """A zeroed cache: per layer [2 (K, V), num_blocks, block_size, KV_HEADS, HEAD_DIM]."""
        shape = (2, num_blocks, self.block_size, KV_HEADS, HEAD_DIM)
        return allocate_layers(shape, len(self.layers), dtype=self.cache_dtype, device=self.device)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def table(self, blocks: list[int]) -> Tensor:
        """The block table of a request, padded with its last block."""
        padded = blocks + blocks[-1:] * (self.max_blocks - len(blocks))
        return torch.tensor(padded, device=self.device)

    def prefill(
        self, prompt: Sequence[int], cache: list[Tensor], table: Tensor, cached: int = 0
    ) -> Tensor:
        """Computes a prompt, and returns the first new token, int64 [1].

        The first `cached` tokens, full blocks, are in the cache already. The rest of the last block
        is filled with padding, which decode() overwrites before it is read.
        """
        padding = self.blocks_for(len(prompt)) * self.block_size - len(prompt)
        tokens = torch.tensor([*prompt, *[0] * padding], device=self.device)
        for start in range(cached, len(prompt), self.block_size):
            logits = self.forward(tokens[start : start + self.block_size], start, cache, table)
        return logits[len(prompt) - start - 1].argmax(-1, keepdim=True)

    def decode(self, token: Tensor, position: int, cache: list[Tensor], table: Tensor) -> Tensor:
        """The token, int64 [1], that follows `token`, int64 [1], at this position."""
        return self.forward(token, position, cache, table)[0].argmax(-1, keepdim=True)

    def generate(self, prompt: bytes, new_tokens: int) -> list[int]:
        """The tokens of a request that is alone on the device, in a cache that holds all of it."""
        cache = self.new_cache(self.max_blocks)
        table = torch.arange(self.max_blocks, device=self.device)
        tokens = [self.prefill(prompt, cache, table)]
        for position in range(len(prompt), len(prompt) + new_tokens - 1):
            tokens.append(self.decode(tokens[-1], position, cache, table))
        generated: list[int] = torch.cat(tokens).tolist()
        return generated

    def forward(self, tokens: Tensor, start: int, cache: list[Tensor], table: Tensor) -> Tensor:
        """The logits, float32 [T, VOCAB], of tokens, int64 [T], at positions start, start + 1, ...

        Writes their keys and values to the blocks of `table`, which must already hold the positions
        before `start`. Positions behind the tokens are masked, and may hold anything.
        """
        positions = self.positions[start : start + len(tokens)]
        blocks, slots = table[positions // self.block_size], positions % self.block_size
        unseen = self.positions > positions[:, None]
        x = self.embedding[tokens]
        for layer, kv_cache in zip(self.layers, cache, strict=True):
            q, k, v = self._queries_keys_values(layer, rms_norm(x, (DIM,)), start)
            kv_cache[:, blocks, slots] = torch.stack((k, v)).to(kv_cache.dtype)
            keys, values = kv_cache.index_select(1, table).flatten(1, 2).float()
            values[start + len(tokens) :] = 0  # a weight of 0 does not mask NaN
            x = x + linear(attention(q, keys, values, unseen), layer.out)
            gate, up = linear(rms_norm(x, (DIM,)), layer.gate_up).chunk(2, -1)
            x = x + linear(silu(gate) * up, layer.down)
        return linear(rms_norm(x, (DIM,)), self.head)

    def _queries_keys_values(
        self, layer: Layer, x: Tensor, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = linear(x, layer.qkv).view(len(x), -1, HEAD_DIM)
        cos, sin = self.cos[start : start + len(x)], self.sin[start : start + len(x)]
        a, b = heads[:, : HEADS + KV_HEADS].chunk(2, -1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return rotated[:, :HEADS], rotated[:, HEADS:], heads[:, HEADS + KV_HEADS :]


def attention(queries: Tensor, keys: Tensor, values: Tensor, unseen: Tensor) -> Tensor:
    """Attention with grouped queries, [T, HEADS * HEAD_DIM].

    Args:
        queries (Tensor): [T, HEADS, HEAD_DIM].
        keys, values (Tensor): [C, KV_HEADS, HEAD_DIM].
        unseen (Tensor): bool [T, C], true where a query must not look.
    """
    n, group = len(queries), HEADS // KV_HEADS  # `group` query heads share a KV head
    q = queries.view(n, KV_HEADS, group, HEAD_DIM).permute(1, 2, 0, 3)
    scores = q.reshape(KV_HEADS, group * n, HEAD_DIM) @ keys.permute(1, 2, 0) * HEAD_DIM**-0.5
    scores = scores.masked_fill(unseen.repeat(group, 1), -torch.inf)
    out = torch.softmax(scores, -1) @ values.transpose(0, 1)
    return out.view(KV_HEADS, group, n, HEAD_DIM).permute(2, 0, 1, 3).reshape(n, -1)
