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


class HostCache(Cache):  # type: ignore[misc]  # as _HostLayer
    """Keys and values in pinned host memory; the GPU has buffers for a few layers at a time.

    Use it so::

        cache = HostCache(model.config, max_tokens=131_072)
        model.generate(inputs, cache=cache, prefill_chunk_size=8192)

    A layer's earlier tokens are loaded into a buffer while the layers before it compute, and its
    new tokens are stored as soon as they are projected (docs/long_prompts.md). Layers with a
    sliding window stay on the GPU, as in a DynamicCache. The first forward pass allocates the
    memory, with `n = 2 * max_tokens * batch * kv_heads * head_dim * bytes of a value`: n bytes on
    the GPU for each buffer, and 256 MiB for copies (257 if encoded); n bytes on the host for each
    layer without a window.

    Not thread safe. After a forward pass that an error or an interrupt has stopped, all others
    raise RuntimeError until reset(), unless the pass was refused before its first layer changed.
    Beam search, crop() and everything else that reorders or cuts tokens raise NotImplementedError.

    Args:
        config: the model's configuration.
        max_tokens (int): the most tokens of a sequence, prompt and generated tokens together.
        buffers (int): layers that are on the GPU at the same time, at least 2.
        encoding (str), verify (str): see HostPool. With "lossless", blocks that do not fit are kept
            raw, at most a sixteenth of all blocks.

    Raises:
        ImportError: transformers is older than 5.24.
        NotImplementedError: the model has an encoder, or layers of a kind that is not supported.
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
        if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
            raise ImportError(
                f"transformers {transformers.__version__} may compute tokens of a filled cache "
                "again; a HostCache needs transformers 5.24"
            )
        if not hasattr(config, "get_text_config"):  # None gives a DynamicCache without layers
            raise TypeError(f"config is {kind_of(config)}; pass model.config")
        if config.is_encoder_decoder:
            raise NotImplementedError(
                "the model has an encoder, and a HostCache is for models with a decoder only; use "
                "transformers' EncoderDecoderCache"
            )
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
        self._next: int | None = 0  # the layer whose update is due; None if a layer is half changed
        self._batch, self._is_closed = 0, False

    def close(self) -> None:
        """Waits for all copies and frees the memory. A cache that is dropped is closed."""
        self._is_closed = True
        self._host.free()

    def reset(self) -> None:
        """Forgets all tokens and keeps the memory."""
        self._next = None
        self._host.reset()
        super().reset()
        self._next = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:  # keys and values
        """Adds tokens [batch, heads, tokens, size] to a layer, and returns all that it attends to.

        Raises:
            RuntimeError: the cache is closed, the tensors have gradients, or the last pass stopped.
            ValueError: too many tokens, or another batch size than that of the earlier tokens.
        """
        self._check(key_states, value_states, layer_idx)
        self._next = None
        attended = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._next = (layer_idx + 1) % len(self.layers)
        return attended

    def _check(self, keys: Tensor, values: Tensor, layer: int) -> None:
        if self._is_closed:
            raise RuntimeError("the HostCache is closed; make another one")
        if layer != self._next:
            raise RuntimeError(
                f"layer {layer} is not the next one: a forward pass did not end, or the HostCache "
                "has another model's config; reset() it, or make another one"
            )
        if keys.requires_grad or values.requires_grad:
            raise RuntimeError("a HostCache has no gradients; call the model under torch.no_grad()")
        if layer > 0:
            return
        length, batch, tokens = self.get_seq_length(), keys.shape[0], keys.shape[2]
        if length + tokens > self._host.max_tokens:
            raise ValueError(
                f"{length} tokens and {tokens} new ones are more than "
                f"max_tokens={self._host.max_tokens}; make a larger HostCache"
            )
        if length > 0 and batch != self._batch:
            raise ValueError(
                f"a batch of {batch} sequences, and the HostCache has tokens of {self._batch}; "
                "pass as many, or reset() it first"
            )
        self._batch = batch

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "a HostCache cannot reorder or cut its tokens (beam search, assisted generation, "
            "crop()); use a DynamicCache"
        )

    offload = prefetch = reorder_cache = crop = _refuse
    batch_repeat_interleave = batch_select_indices = activate_past_recording = _refuse


class _HostLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers need not be installed
    """One layer with full attention. transformers asks it, and `_HostLayers` answers."""

    is_sliding = False

    def __init__(self, host: _HostLayers, number: int) -> None:
        super().__init__()
        self._host, self._number = host, number

    def lazy_initialization(self, *_: Tensor) -> None:
        self.is_initialized = True

    def reset(self) -> None:
        self.is_initialized = False

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        return self._host.update(self._number, keys, values)

    def get_seq_length(self, *_: Any) -> int:
        return self._host.lengths[self._number]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self._host.max_tokens


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
        self.reset()

    def reset(self) -> None:
        if self._shape is not None:
            for handler in self.handlers:
                with contextlib.suppress(TransferError):  # of tokens that are forgotten
                    handler.synchronize()
                handler.poll()
        self.step, self.lengths = 0, [0] * self.layers
        self.stores: dict[int, tuple[Job, range]] = {}  # with their blocks, by step
        self.loads: dict[int, list[Job]] = {}  # by step
        self.raw_pages: dict[int, int] = {}  # by the page that the block does not fit into

    def free(self) -> None:
        if self._shape is not None:
            self._shape = None
            for handler in self.handlers:
                handler.close()
                handler.pools[0].close()
            del self.keys, self.values, self.handlers

    def _open(self, keys: Tensor, values: Tensor) -> None:
        shape, of_values = _shape_of(keys), _shape_of(values)
        if shape != of_values or (self.step > 0 and shape != self._shape):
            raise NotImplementedError(
                f"full-attention layer {self.step % self.layers} has keys of {shape} and values of "
                f"{of_values} (batch, heads, size, dtype, device), and a HostCache needs the same "
                "for all; use a DynamicCache"
            )
        if shape == self._shape:
            return
        self.free()
        batch, heads, size, dtype, device = shape
        with torch.inference_mode(False):  # the next call may be outside
            memory = torch.zeros(
                (2, self.buffers, self.blocks * BLOCK_TOKENS, batch, heads, size),
                dtype=dtype,
                device=device,
            )
        blocks = (self.buffers * self.blocks, BLOCK_TOKENS, batch, heads, size)
        gpu = PagedLayout([tensor.view(blocks) for tensor in memory])
        pages = self.layers * self.blocks
        host = HostPool(gpu, pages, **self._options, pin_in_background=device.type == "cuda")
        self.handlers: list[OffloadHandler] = [OffloadHandler(gpu, host)]
        if self._options["encoding"] != "raw":  # the second one is for blocks that do not fit
            raw = HostPool(gpu, max(int(pages * RAW_SHARE), 1), verify=self._options["verify"])
            least = 1 << 20  # that kernels need: few blocks do not fit
            self.handlers.append(OffloadHandler(gpu, raw, staging_bytes=least))
        self.keys, self.values = memory
        self._shape = shape

    @torch.no_grad()
    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._open(keys, values)
        step, first = self.step, self.lengths[layer]
        last = first + keys.shape[2]
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
        handler = self.handlers[0]
        handler.pools[0].wait_ready(pages=pages[-1] + 1)
        self.stores[step] = handler.store(gpu_block_ids=blocks, page_ids=pages), stored
        self.lengths[layer], self.step = last, step + 1
        return ours[0].permute(1, 2, 0, 3), ours[1].permute(1, 2, 0, 3)

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
        self.handlers[0].poll()
        if not rejected:
            return
        raw = self.handlers[1]
        free = set(range(raw.pools[0].num_pages)).difference(self.raw_pages.values())
        for position in rejected:
            page = pages[position]
            if page not in self.raw_pages:
                if not free:
                    raise MemoryError(
                        f"more than {raw.pools[0].num_pages} blocks do not fit into encoded "
                        "pages; make the HostCache with encoding='raw'"
                    )
                self.raw_pages[page] = free.pop()
            raw.store(gpu_block_ids=[blocks[position]], page_ids=[self.raw_pages[page]])
        raw.synchronize()
        raw.poll()

    def _load(self, step: int) -> None:
        """Loads the earlier tokens of the step's layer behind the work submitted so far."""
        tokens = self.lengths[step % self.layers]
        blocks, pages = self._place(step, range(-(-tokens // BLOCK_TOKENS)))
        raw = [i for i, page in enumerate(pages) if page in self.raw_pages]
        raw_blocks = [blocks.pop(i) for i in reversed(raw)]
        raw_pages = [self.raw_pages[pages.pop(i)] for i in reversed(raw)]
        self.loads[step] = [
            handler.load(gpu_block_ids=block_ids, page_ids=page_ids)
            for handler, block_ids, page_ids in zip(
                self.handlers, (blocks, raw_blocks), (pages, raw_pages), strict=False
            )
            if block_ids
        ]


def _shape_of(tensor: Tensor) -> tuple[int, int, int, torch.dtype, torch.device]:
    batch, heads, _, size = tensor.shape
    return batch, heads, size, tensor.dtype, tensor.device
