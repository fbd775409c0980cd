"""A small decoder-only transformer over a paged KV cache.

RMSNorm, rotary embedding, grouped queries, float32, greedy decoding of bytes. The cache may have
another type.

Its results depend bit for bit on the request alone, not on other requests or on block numbers. It
computes one request at a time, in one of two shapes (a block of the prompt, or one token), and
always against `max_blocks` blocks. So every matrix product and reduction has the same shape,
alignment and order of additions in every run on a device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

from torch_kvswap import allocate_layers

VOCAB = 256
LAYERS = 4
HEADS = 8
KV_HEADS = 2
HEAD_DIM = 64
DIM = HEADS * HEAD_DIM // 2
HIDDEN = 2 * DIM
# With scores of deviation 1, attention would average over hundreds of keys, and no single key would
# matter. With this deviation a query attends to a few keys, wherever they are.
SCORE_DEVIATION = 4.0
# Mean square of silu(a) * b for unit normal a and b.
GATED_MEAN_SQUARE = 0.36


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

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """A model with seeded weights, equal on every device.

    Works on the calling thread's current stream.

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
        self.cache_dtype = cache_dtype
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.device = device
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, gain: float = 1.0) -> Tensor:
            deviation = gain / sqrt(shape[-1])
            return (torch.randn(shape, generator=generator) * deviation).to(device)

        def layer() -> Layer:
            qkv = normal((HEADS + 2 * KV_HEADS) * HEAD_DIM, DIM)
            qkv[: HEADS * HEAD_DIM] *= SCORE_DEVIATION
            return Layer(
                attention_norm=torch.ones(DIM, device=device),
                qkv=qkv,
                out=normal(DIM, HEADS * HEAD_DIM, gain=2.0),
                mlp_norm=torch.ones(DIM, device=device),
                gate_up=normal(2 * HIDDEN, DIM),
                down=normal(DIM, HIDDEN, gain=GATED_MEAN_SQUARE**-0.5),
            )

        self.embedding = normal(VOCAB, DIM, gain=DIM**0.5)
        self.layers = [layer() for _ in range(LAYERS)]
        self.norm = torch.ones(DIM, device=device)
        self.head = normal(VOCAB, DIM)
        self.positions = torch.arange(max_blocks * block_size, device=device)
        frequencies = 10_000.0 ** -(torch.arange(HEAD_DIM // 2, device=device) * 2 / HEAD_DIM)
        angles = self.positions[:, None, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def new_cache(self, num_blocks: int) -> list[Tensor]:
        """A zeroed cache: per layer [2, num_blocks, block_size, KV_HEADS, HEAD_DIM].

        Index 0 of the first dimension is K, index 1 is V.
        """
        shape = (2, num_blocks, self.block_size, KV_HEADS, HEAD_DIM)
        return allocate_layers(shape, len(self.layers), dtype=self.cache_dtype, device=self.device)

    def padded(self, blocks: list[int]) -> list[int]:
        """The block table of a request, padded to max_blocks entries with its last block."""
        return blocks + blocks[-1:] * (self.max_blocks - len(blocks))

    def prefill(self, prompt: bytes, cache: list[Tensor], table: Tensor, cached: int = 0) -> Tensor:
        """Computes a prompt.

        Writes its keys and values to its blocks. The rest of the last block is filled with padding,
        which decode() overwrites before it is read.

        Args:
            prompt (bytes): the tokens.
            cache (list[Tensor]): from new_cache().
            table (Tensor): int64 [max_blocks] on the device, the blocks of the request.
            cached (int): tokens at the front that are in the cache already, in full blocks, fewer
                than the prompt has.

        Returns:
            Tensor: int64 [1], the first new token.
        """
        padded = prompt.ljust(-(-len(prompt) // self.block_size) * self.block_size, b"\0")
        tokens = torch.tensor(list(padded), device=self.device)
        for start in range(cached, len(prompt), self.block_size):
            logits = self.forward(tokens[start : start + self.block_size], start, cache, table)
        return logits[len(prompt) - start - 1].argmax(-1, keepdim=True)

    def decode(self, token: Tensor, position: int, cache: list[Tensor], table: Tensor) -> Tensor:
        """Computes the next token.

        Args:
            token (Tensor): int64 [1], the last token.
            position (int): position of `token`.
            cache (list[Tensor]): from new_cache().
            table (Tensor): int64 [max_blocks] on the device, the blocks of the request.

        Returns:
            Tensor: int64 [1].
        """
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
        """Computes the logits of tokens at positions start, start + 1, ...

        Writes their keys and values to the blocks of `table`, which must already hold the positions
        before `start`. Positions behind the tokens are masked, and may hold any finite values.

        Args:
            tokens (Tensor): int64 [T].
            start (int): position of the first token.
            cache (list[Tensor]): from new_cache().
            table (Tensor): int64 [max_blocks] on the device, the blocks of the request.

        Returns:
            Tensor: float32 [T, VOCAB].
        """
        positions = self.positions[start : start + len(tokens)]
        blocks, slots = table[positions // self.block_size], positions % self.block_size
        unseen = self.positions > positions[:, None]
        x = self.embedding[tokens]
        for layer, kv_cache in zip(self.layers, cache, strict=True):
            y = functional.rms_norm(x, (DIM,), layer.attention_norm)
            q, k, v = self._queries_keys_values(layer, y, start)
            kv_cache[:, blocks, slots] = torch.stack((k, v)).to(kv_cache.dtype)
            keys, values = kv_cache.index_select(1, table).flatten(1, 2).float()
            x = x + functional.linear(attention(q, keys, values, unseen), layer.out)
            y = functional.rms_norm(x, (DIM,), layer.mlp_norm)
            gate, up = functional.linear(y, layer.gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        return functional.linear(functional.rms_norm(x, (DIM,), self.norm), self.head)

    def _queries_keys_values(
        self, layer: Layer, x: Tensor, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = functional.linear(x, layer.qkv).view(len(x), -1, HEAD_DIM)
        cos, sin = self.cos[start : start + len(x)], self.sin[start : start + len(x)]
        a, b = heads[:, : HEADS + KV_HEADS].chunk(2, -1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return rotated[:, :HEADS], rotated[:, HEADS:], heads[:, HEADS + KV_HEADS :]


def attention(queries: Tensor, keys: Tensor, values: Tensor, unseen: Tensor) -> Tensor:
    """Attention with grouped queries.

    Args:
        queries (Tensor): [T, HEADS, HEAD_DIM].
        keys (Tensor): [C, KV_HEADS, HEAD_DIM].
        values (Tensor): [C, KV_HEADS, HEAD_DIM].
        unseen (Tensor): bool [T, C], true where a query must not look.

    Returns:
        Tensor: [T, HEADS * HEAD_DIM].
    """
    n, group = len(queries), HEADS // KV_HEADS  # `group` query heads share a KV head
    q = queries.view(n, KV_HEADS, group, HEAD_DIM).permute(1, 2, 0, 3)
    scores = q.reshape(KV_HEADS, group * n, HEAD_DIM) @ keys.permute(1, 2, 0) * HEAD_DIM**-0.5
    scores = scores.masked_fill(unseen.repeat(group, 1), -torch.inf)
    out = torch.softmax(scores, -1) @ values.transpose(0, 1)
    return out.view(KV_HEADS, group, n, HEAD_DIM).permute(2, 0, 1, 3).reshape(n, -1)
