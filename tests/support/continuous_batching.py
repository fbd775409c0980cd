"""Continuous batching of transformers with tiny random models and a cache that is too small."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None
    or (importlib.util.find_spec("psutil") is None and not torch.cuda.is_available()),
    reason="needs the extra torch_kvswap[transformers]",
)
KINDS = ("full", "hybrid", "sliding")
TOKENS = 40  # that each request generates
BLOCK = 8  # tokens in a block


def model(
    kind: str, device: str = "cpu", dtype: torch.dtype = torch.float32, head_dim: int = 16
) -> Any:
    """Llama, or Gemma 3 with three windows to a full attention, or Mistral with windows only."""
    import transformers as hf

    torch.set_num_threads(1)  # tiny matrices, and other tests beside
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
    }
    window = {"sliding_window": 32 if kind == "sliding" else 16}
    if kind == "full":
        made = hf.LlamaForCausalLM(hf.LlamaConfig(num_hidden_layers=2, **sizes))
    elif kind == "hybrid":
        types = ["sliding_attention"] * 3 + ["full_attention"]
        config = hf.Gemma3TextConfig(num_hidden_layers=4, layer_types=types, **window, **sizes)
        made = hf.Gemma3ForCausalLM(config)
    else:
        made = hf.MistralForCausalLM(hf.MistralConfig(num_hidden_layers=2, **window, **sizes))
    made.set_attn_implementation("sdpa")
    return made.eval().to(device, dtype)


def prompts(count: int = 6, shared: int = 0) -> list[list[int]]:
    """Of different lengths; shared: with so many tokens in common."""
    torch.manual_seed(1)
    common = torch.randint(128, (shared,)).tolist()
    return [common + torch.randint(128, (12 + i,)).tolist() for i in range(count)]


def config(blocks: int, gib: float = 0.002, **options: Any) -> Any:
    import transformers as hf

    size = {"page_size": BLOCK}
    if hasattr(hf.ContinuousBatchingConfig, "auto_switch_to_flash"):
        size["auto_switch_to_flash"] = False  # there is none for float32
    return hf.ContinuousBatchingConfig(
        **{"num_blocks": blocks, "max_batch_tokens": 64, "cpu_offload_space": gib}
        | {"use_cuda_graph": False, **size, **options}
    )


def generation(**options: Any) -> Any:
    import transformers as hf

    made = hf.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=TOKENS
    )
    for name, value in options.items():  # now nothing is said against forks that are all the same
        setattr(made, name, value)
    return made


def small(kind: str) -> int:
    """Blocks of a cache that is too small for the prompts."""
    return {"full": 20, "hybrid": 16, "sliding": 14}[kind]


@dataclass
class Seen:
    """What is seen of our managers: the managers, how many requests they stored and brought back,
    and how many of those came back with other bytes."""

    managers: list[Any] = field(default_factory=list)
    parked: int = 0
    back: int = 0
    wrong: int = 0
    bytes_of: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    @property
    def swap(self) -> Any:
        return self.managers[-1].parked.swap

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of any request, on the host or on its way."""
        for manager in self.managers:
            swap = manager.parked.swap
            swap.reset()
            if manager.parked.requests or len(swap._free) != swap.pool.num_pages or swap._busy:
                return False
        return True


def first_parts_of(nbytes: int) -> Any:
    """Requests are stored in small parts: several, although the models here are tiny."""
    from torch_kvswap.integrations.transformers import swap

    return mock.patch.object(swap, "FIRST_PART_BYTES", nbytes)


@contextlib.contextmanager
def ours(**options: Any) -> Iterator[Seen]:
    """Enabled, and watched: what a request has in its blocks is compared when it comes back."""
    from torch_kvswap.integrations import transformers as integration
    from torch_kvswap.integrations.transformers import parked as transformers_parked
    from torch_kvswap.integrations.transformers import swap_manager

    seen = Seen()
    made = swap_manager.SwapManager.__init__
    park = transformers_parked.ParkedRequests.park
    activate = transformers_parked.ParkedRequests._activate

    def contents(parked: Any, tables: Any) -> list[torch.Tensor]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return [
            torch.cat(
                [_bytes(t)[units].view(len(units), -1) for t in parked.view.layout.tensors], 1
            )
            for units in parked.view.units(tables)
        ]

    def watched_init(self: Any, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        seen.managers.append(self)

    def watched_park(self: Any, state: Any, tables: Any) -> bool:
        before = contents(self, tables)
        kept = park(self, state, tables)
        if kept:
            seen.parked += 1
            seen.bytes_of[state.request_id] = before
        return kept

    def watched_activate(self: Any, parked: Any) -> None:
        name = parked.state.request_id
        now = contents(self, self.view.tables(name))
        for before, after in zip(seen.bytes_of.pop(name), now, strict=True):
            count = min(len(before), len(after))
            seen.wrong += not torch.equal(before[:count], after[:count])
        seen.back += 1
        activate(self, parked)

    with (
        mock.patch.object(swap_manager.SwapManager, "__init__", watched_init),
        mock.patch.object(transformers_parked.ParkedRequests, "park", watched_park),
        mock.patch.object(transformers_parked.ParkedRequests, "_activate", watched_activate),
        integration.enable(**options),
    ):
        yield seen


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(1).view(torch.uint8)


def tokens(of: Any, inputs: list[list[int]], settings: Any, **options: Any) -> list[list[int]]:
    """What generate_batch generates, in the order of the prompts."""
    results = of.generate_batch(
        inputs, generation_config=generation(**options), continuous_batching_config=settings
    )
    assert all(result.error is None for result in results.values())
    return [result.generated_tokens for result in results.values()]


class Steps:
    """A continuous batching that goes on when the test says so, in this thread."""

    def __init__(self, of: Any, inputs: list[list[int]], settings: Any, **options: Any) -> None:
        self.model = of
        self.manager = of.init_continuous_batching(
            generation_config=generation(**options), continuous_batching_config=settings
        )
        self.processor = self.manager._create_batch_processor()
        self.manager.batch_processor = self.processor
        self.scheduler = self.processor.scheduler
        self.names = self.manager.add_requests(
            inputs, max_new_tokens=options.get("max_new_tokens", TOKENS)
        )

    def step(self) -> bool:
        """A batch, or nothing: whether there was one."""
        with torch.no_grad():
            if not self.processor.prepare_next_batch():
                return False
            self.processor._generation_step(self.model)
            self.processor.update_batch()
        return True

    def until(self, condition: Callable[[], bool], steps: int = 500) -> None:
        for _ in range(steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"not within {steps} steps: {self.scheduler.active_requests}")

    def finish(self) -> list[list[int]]:
        """The tokens of the requests that end, in their order."""
        self.step()
        self.until(lambda: not self.scheduler.has_pending_requests())
        return self.results()

    def results(self) -> list[list[int]]:
        found, router = {}, self.manager.output_router
        while not router.output_queue.empty():
            result = router.output_queue.get()
            assert result.error is None, result.error
            found[result.request_id] = result.generated_tokens
        return [found[name] for name in self.names if name in found]

    def state(self, name: str) -> Any:
        return self.scheduler.waiting_requests.get(name) or self.scheduler.active_requests.get(name)

    def cancel(self, name: str) -> None:
        self.manager.cancel_request(name)

    @property
    def free_blocks(self) -> float:
        """Of the cache: all of it is 1 when no request is left."""
        cache = self.processor.cache
        cache.evict_cached_blocks()
        cache.pool.try_to_free_sectors()
        return cache.compute_free_capacity()
