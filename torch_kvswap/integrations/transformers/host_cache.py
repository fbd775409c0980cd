"""A cache for `generate()` whose keys and values are on the host, except those of a few layers."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from torch_kvswap._native.arguments import kind_of, read_int
from torch_kvswap.encoding.slot import EncodingName, VerifyName, read_encoding, read_verify
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.offload.handler import Job, OffloadHandler
from torch_kvswap.results import BlocksRejectedError, TransferError

# A block of 8 heads of 128 has 128 KiB of keys, which one copy moves at full rate.
BLOCK_TOKENS = 64
# The share of blocks that may not fit into their encoded pages.
RAW_SHARE = 1 / 16
# Before this version generate(prefill_chunk_size=...) computes the tokens of a filled cache again.
_RECOMPUTES_CHUNKS = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)


class HostCache(Cache):  # type: ignore[misc]  # as _HostLayer
    """Keys and values in pinned host memory; the GPU has buffers for a few layers at a time.

    Use it so::

        cache = HostCache(model.config, max_tokens=131_072)
        model.generate(inputs, past_key_values=cache, prefill_chunk_size=8192)

    A layer's earlier tokens are loaded into a buffer while the layers before it compute, and its
    new tokens are stored as soon as they are projected (docs/long_prompts.md). Layers with a
    sliding window stay on the GPU, as in a DynamicCache. The first forward pass allocates the
    memory, with `n = 2 * max_tokens * batch * kv_heads * head_dim * bytes of a value`: n bytes on
    the GPU for each buffer, and 257 MiB for copies; n bytes on the host for each layer without a
    window.

    Not thread safe. Beam search, crop() and everything else that reorders or cuts tokens raise
    NotImplementedError. So do models with linear attention or other states.

    Args:
        config: the model's configuration.
        max_tokens (int): the most tokens of a sequence, prompt and generated tokens together.
        buffers (int): layers that are on the GPU at the same time, at least 2.
        encoding (str), verify (str): see HostPool. With "lossless", blocks that do not fit are kept
            raw, at most a sixteenth of all blocks.

    Raises:
        NotImplementedError: the model has layers of a kind that is not supported.
        TypeError, ValueError: an argument is invalid.
    """

    def __init__(
        self,
        config: Any,
        max_tokens: int,
        *,
        buffers: int = 3,
        encoding: EncodingName = "raw",
        verify: VerifyName = "off",
    ) -> None:
        if not hasattr(config, "get_text_config"):  # None gives a DynamicCache without layers
            raise TypeError(f"config is {kind_of(config)}; pass model.config")
        layers = DynamicCache(config=config).layers
        full = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
        for index, layer in enumerate(layers):
            if index not in full and not getattr(layer, "is_sliding", False):
                raise NotImplementedError(
                    f"layer {index} has a {type(layer).__name__}; HostCache has full attention and "
                    "sliding windows only"
                )
        if len(full) < 2:
            raise NotImplementedError(
                f"{len(full)} of {len(layers)} layers have full attention, and a HostCache needs "
                "two; use a DynamicCache"
            )
        read_encoding(encoding)
        options = {"encoding": encoding, "verify": read_verify(verify)}
        buffers = min(read_int("buffers", buffers, 2), len(full))
        self._host = _HostLayers(len(full), read_int("max_tokens", max_tokens, 1), buffers, options)
        for number, index in enumerate(full):
            layers[index] = _HostLayer(self._host, number)
        super().__init__(layers=layers)

    def close(self) -> None:
        """Waits for all copies and frees the memory. A cache that is dropped is closed."""
        self._host.is_closed = True
        self._host.free()

    def reset(self) -> None:
        """Forgets all tokens and keeps the memory."""
        self._host.reset()
        for layer in self.layers:
            layer.is_initialized = False  # reset() of transformers' layers keeps their length
            layer.cumulative_length = 0


class _HostLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers need not be installed
    """One layer with full attention. transformers asks it, and `_HostLayers` answers."""

    is_sliding = False

    def __init__(self, host: _HostLayers, number: int) -> None:
        super().__init__()
        self._host, self._number = host, number

    def lazy_initialization(self, *_: Tensor) -> None:
        self.is_initialized = True

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        return self._host.update(self._number, keys, values)

    def get_seq_length(self, *_: Any) -> int:
        return self._host.lengths[self._number]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self._host.max_tokens

    get_max_cache_shape = get_max_length

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "a HostCache cannot reorder or cut its tokens (beam search, assisted generation, "
            "crop()); use a DynamicCache"
        )

    offload = prefetch = reorder_cache = crop = _refuse
    batch_repeat_interleave = batch_select_indices = activate_past_recording = _refuse


class _HostLayers:
    """All layers with full attention. A step is one layer of one forward pass, from 0 on.

    Buffer `step % buffers` has the tokens of the step's layer, and page
    `i * layers + layer` has block i of a layer: pages are used from the first one on, while the
    others are still being pinned. A buffer is loaded for a later step when the store
    of its last tokens has ended, because the host page is then the only copy.
    """

    def __init__(self, layers: int, max_tokens: int, buffers: int, options: Any) -> None:
        self.layers, self.max_tokens, self.buffers = layers, max_tokens, buffers
        self.blocks = -(-max_tokens // BLOCK_TOKENS)  # of a layer
        self._options = options
        self._shape: tuple[Any, ...] | None = None
        self.is_closed = False
        self.reset()

    def reset(self) -> None:
        if self._shape is not None:
            for handler in (self.handler, self.raw):
                with contextlib.suppress(TransferError):  # of tokens that are forgotten
                    handler.synchronize()
                handler.poll()
        self.step, self.lengths, self._last_tokens = 0, [0] * self.layers, 0
        self.stores: dict[int, tuple[Job, range]] = {}  # with their blocks, by step
        self.loads: dict[int, list[Job]] = {}  # by step
        self.raw_pages: dict[int, int] = {}  # by the page that the block does not fit into

    def free(self) -> None:
        if self._shape is not None:
            self._shape = None
            for handler in (self.handler, self.raw):
                handler.close()
                handler.pools[0].close()
            del self.keys, self.values, self.handler, self.raw

    def _open(self, like: Tensor) -> None:
        batch, heads, _, size = like.shape
        shape = (batch, heads, size, like.dtype, like.device)
        if shape == self._shape:
            return
        self.free()
        with torch.inference_mode(False):  # the next call may be outside
            memory = torch.zeros(
                (2, self.buffers, self.blocks * BLOCK_TOKENS, batch, heads, size),
                dtype=like.dtype,
                device=like.device,
            )
        blocks = (self.buffers * self.blocks, BLOCK_TOKENS, batch, heads, size)
        gpu = PagedLayout([tensor.view(blocks) for tensor in memory])
        pages = self.layers * self.blocks
        host = HostPool(gpu, pages, **self._options, pin_in_background=like.is_cuda)
        self.handler = OffloadHandler(gpu, host)
        is_encoded = self._options["encoding"] != "raw"
        raw_pages = max(int(pages * RAW_SHARE), 1) if is_encoded else 1
        raw_pool = HostPool(gpu, raw_pages, verify=self._options["verify"])
        least = 1 << 20  # that kernels need: few blocks do not fit
        self.raw = OffloadHandler(gpu, raw_pool, staging_bytes=least)
        self.keys, self.values = memory
        self._shape = shape

    @torch.no_grad()
    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds tokens [batch, heads, tokens, size] to a layer, and returns all of its tokens."""
        if keys.requires_grad:
            raise RuntimeError("a HostCache has no gradients; call the model under torch.no_grad()")
        step, first, tokens = self.step, self.lengths[layer], keys.shape[2]
        last = first + tokens
        self._check(layer, tokens)
        if step == 0:
            self._open(keys)
        if step > 0:  # the step before has submitted its attention
            self._finish_store(step - 1)
            self._load(step - 1 + self.buffers)
        for job in self.loads.pop(step, ()):
            job.synchronize()
        buffer = step % self.buffers
        ours = self.keys[buffer, :last], self.values[buffer, :last]
        for cached, new in zip(ours, (keys, values), strict=True):
            cached[first:] = new.permute(2, 0, 1, 3)
        stored = range(first // BLOCK_TOKENS, -(-last // BLOCK_TOKENS))
        blocks, pages = self._place(step, stored)
        self.handler.pools[0].wait_ready(pages=pages[-1] + 1)
        self.stores[step] = self.handler.store(gpu_block_ids=blocks, page_ids=pages), stored
        self.lengths[layer], self.step = last, step + 1
        return ours[0].permute(1, 2, 0, 3), ours[1].permute(1, 2, 0, 3)

    def _check(self, layer: int, tokens: int) -> None:
        if self.is_closed:
            raise RuntimeError("the HostCache is closed; make another one")
        # A pass that failed in its first layer has taken the store before it.
        is_whole = self.step == 0 or self.step - 1 in self.stores
        if layer != self.step % self.layers or not is_whole:
            raise RuntimeError(
                f"full-attention layer {layer} follows layer {(self.step - 1) % self.layers}: a "
                "forward pass did not end, or the HostCache has another model's config; reset() "
                "it, or make another one"
            )
        if self.lengths[layer] + tokens > self.max_tokens:
            raise ValueError(
                f"{self.lengths[layer]} tokens and {tokens} new ones are more than "
                f"max_tokens={self.max_tokens}; make a larger HostCache"
            )
        if layer == 0:
            if 0 < self._last_tokens < tokens and _RECOMPUTES_CHUNKS:
                raise NotImplementedError(
                    f"transformers {transformers.__version__} may compute tokens of a filled cache "
                    "again; reset() the cache and pass the whole prompt, or use transformers 5.24"
                )
            self._last_tokens = tokens

    def _place(self, step: int, blocks: range) -> tuple[list[int], list[int]]:
        """The GPU blocks and pages of these blocks of the step's layer."""
        buffer, layer = step % self.buffers * self.blocks, step % self.layers
        return [buffer + i for i in blocks], [i * self.layers + layer for i in blocks]

    def _finish_store(self, step: int) -> None:
        """Waits until the step's tokens are on the host."""
        job, stored = self.stores.pop(step)
        blocks, pages = self._place(step, stored)
        rejected: tuple[int, ...] = ()
        try:
            job.synchronize()
        except BlocksRejectedError as error:
            rejected = error.rejected
        for position, page in enumerate(pages):
            if position not in rejected:
                self.raw_pages.pop(page, None)  # the block has fitted now
        self.handler.poll()
        if not rejected:
            return
        free = set(range(self.raw.pools[0].num_pages)).difference(self.raw_pages.values())
        for position in rejected:
            page = pages[position]
            if page not in self.raw_pages:
                if not free:
                    raise MemoryError(
                        f"more than {self.raw.pools[0].num_pages} blocks do not fit into encoded "
                        "pages; make the HostCache with encoding='raw'"
                    )
                self.raw_pages[page] = free.pop()
            self.raw.store(gpu_block_ids=[blocks[position]], page_ids=[self.raw_pages[page]])
        self.raw.synchronize()
        self.raw.poll()

    def _load(self, step: int) -> None:
        """Loads the earlier tokens of the step's layer behind the work submitted so far."""
        tokens = self.lengths[step % self.layers]
        blocks, pages = self._place(step, range(-(-tokens // BLOCK_TOKENS)))
        raw = [i for i, page in enumerate(pages) if page in self.raw_pages]
        raw_blocks = [blocks.pop(i) for i in reversed(raw)]
        raw_pages = [self.raw_pages[pages.pop(i)] for i in reversed(raw)]
        self.loads[step] = [
            handler.load(gpu_block_ids=block_ids, page_ids=page_ids)
            for handler, block_ids, page_ids in (
                (self.handler, blocks, pages),
                (self.raw, raw_blocks, raw_pages),
            )
            if block_ids
        ]
