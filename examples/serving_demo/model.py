"""A small decoder-only transformer over a paged KV cache: RMSNorm, rotary embedding, grouped
queries, float32, greedy decoding of bytes.

Its bits depend on the request alone, never on who else is served or on which blocks it got: one
request is computed at a time, in one of two shapes (a block of the prompt, or one token), always
against `max_blocks` blocks. So every matrix product and every reduction has the same shape, the
same alignment and hence the same order of additions in every run on a device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

VOCAB = 256
LAYERS = 4
HEADS = 8
KV_HEADS = 2
HEAD_DIM = 64
DIM = HEADS * HEAD_DIM // 2
HIDDEN = 2 * DIM
# Scores with a deviation of 1 would average over hundreds of keys until none of them mattered.
# At this one a query attends to a few keys, wherever they lie.
SCORE_DEVIATION = 4.0
# silu(a) * b of two unit normals has this mean square.
GATED_MEAN_SQUARE = 0.36


@contextmanager
def same_bits_every_time() -> Iterator[None]:
    """Float32 without TF32, and one thread, so that no sum depends on how work was divided."""
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
    """Seeded weights on `device`, the same on every device, for requests of at most
    `max_blocks * block_size` tokens. Works on the calling thread's current stream."""

    def __init__(self, block_size: int, max_blocks: int, seed: int, device: torch.device) -> None:
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
        """One float32 tensor [2 (K and V), num_blocks, block_size, KV_HEADS, HEAD_DIM] a layer."""
        shape = (2, num_blocks, self.block_size, KV_HEADS, HEAD_DIM)
        return [torch.zeros(shape, device=self.device) for _ in self.layers]

    def padded(self, blocks: list[int]) -> list[int]:
        """A block table: the blocks of a request, and any block in place of those to come."""
        return blocks + blocks[-1:] * (self.max_blocks - len(blocks))

    def prefill(self, prompt: bytes, cache: list[Tensor], table: Tensor, cached: int = 0) -> Tensor:
        """Fills the blocks of `table` (int64 [max_blocks], on the device) with the prompt's keys
        and values, and returns the first token, int64 [1]. What the prompt leaves of its last
        block is filled with padding, which `decode` overwrites before it looks there. cached:
        tokens whose keys and values are there already, in full blocks, and not those of all."""
        padded = prompt.ljust(-(-len(prompt) // self.block_size) * self.block_size, b"\0")
        tokens = torch.tensor(list(padded), device=self.device)
        for start in range(cached, len(prompt), self.block_size):
            logits = self.forward(tokens[start : start + self.block_size], start, cache, table)
        return logits[len(prompt) - start - 1].argmax(-1, keepdim=True)

    def decode(self, token: Tensor, position: int, cache: list[Tensor], table: Tensor) -> Tensor:
        """The token that follows `token` (int64 [1]), which stands at `position`."""
        return self.forward(token, position, cache, table)[0].argmax(-1, keepdim=True)

    def generate(self, prompt: bytes, new_tokens: int) -> list[int]:
        """What a request alone on the device gets, in a cache that holds all of it."""
        cache = self.new_cache(self.max_blocks)
        table = torch.arange(self.max_blocks, device=self.device)
        tokens = [self.prefill(prompt, cache, table)]
        for position in range(len(prompt), len(prompt) + new_tokens - 1):
            tokens.append(self.decode(tokens[-1], position, cache, table))
        generated: list[int] = torch.cat(tokens).tolist()
        return generated

    def forward(self, tokens: Tensor, start: int, cache: list[Tensor], table: Tensor) -> Tensor:
        """Logits [T, VOCAB] of `tokens` (int64 [T]) at positions start, start + 1, ...

        Their keys and values are written to the blocks of `table`, which must hold the positions
        before `start` already. What lies behind the tokens is masked: it may be anything finite.
        """
        positions = self.positions[start : start + len(tokens)]
        blocks, slots = table[positions // self.block_size], positions % self.block_size
        unseen = self.positions > positions[:, None]
        x = self.embedding[tokens]
        for layer, kv_cache in zip(self.layers, cache, strict=True):
            y = functional.rms_norm(x, (DIM,), layer.attention_norm)
            q, k, v = self._queries_keys_values(layer, y, start)
            kv_cache[:, blocks, slots] = torch.stack((k, v))
            keys, values = kv_cache.index_select(1, table).flatten(1, 2)
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
    """[T, HEADS * HEAD_DIM] of queries [T, HEADS, HEAD_DIM] over keys and values
    [C, KV_HEADS, HEAD_DIM]; `unseen` [T, C] is true where a query must not look."""
    n, group = len(queries), HEADS // KV_HEADS  # so many queries share a head of keys
    q = queries.view(n, KV_HEADS, group, HEAD_DIM).permute(1, 2, 0, 3)
    scores = q.reshape(KV_HEADS, group * n, HEAD_DIM) @ keys.permute(1, 2, 0) * HEAD_DIM**-0.5
    scores = scores.masked_fill(unseen.repeat(group, 1), -torch.inf)
    out = torch.softmax(scores, -1) @ values.transpose(0, 1)
    return out.view(KV_HEADS, group, n, HEAD_DIM).permute(2, 0, 1, 3).reshape(n, -1)
