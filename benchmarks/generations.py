"""Generations of transformers' continuous batching whose cache is too small, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import transformers as hf
from timing import synchronize

TOKENS = 16  # in a block
LENGTHS = 32, 96  # of the prompts


@dataclass(frozen=True)
class Generation:
    """tokens_per_second: from the first prompt to the last token. batches, preempted: how many."""

    tokens_per_second: float
    batches: int
    preempted: int


def new_prompts(requests: int, vocabulary: int) -> list[list[int]]:
    """Always the same, of different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(*LENGTHS, (requests,), generator=generator).tolist()
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


class Generations:
    """One continuous batching, which goes on between generations: its start is in none of them."""

    def __init__(self, manager: Any, device: torch.device) -> None:
        self._manager, self._device = manager, device
        self._preempted = 0
        self.offloading = offloading = manager.batch_processor.offloading_manager
        offload = offloading._offload_to_cpu

        def counted(victims: Sequence[Any], tables: Any) -> Any:
            self._preempted += len(victims)
            return offload(victims, tables)

        offloading._offload_to_cpu = counted

    def generate(self, prompts: list[list[int]], tokens: int) -> Generation:
        """So many tokens for each prompt."""
        batches, preempted = self._manager.current_batch, self._preempted
        begin = perf_counter()
        self._manager.add_requests(prompts, max_new_tokens=tokens)
        generated = 0
        for _ in prompts:
            result = self._manager.get_result(timeout=120)
            if result is None or result.error is not None:
                raise RuntimeError(f"a request has failed: {result}")
            generated += len(result.generated_tokens)
        seconds = perf_counter() - begin
        synchronize(self._device)
        return Generation(
            generated / seconds,
            self._manager.current_batch - batches,
            self._preempted - preempted,
        )


def batching(page_tokens: int, num_blocks: int, gib: float, **more: Any) -> Any:
    """The settings of a continuous batching. gib: of host memory."""
    settings = {
        "page_size": page_tokens,
        "num_blocks": num_blocks,
        "use_cuda_graph": False,
        "allow_block_sharing": False,
        "safety_margin": 0.0,
        "cpu_offload_space": gib,
    }
    if hasattr(hf.ContinuousBatchingConfig, "auto_switch_to_flash"):
        settings["auto_switch_to_flash"] = False
    return hf.ContinuousBatchingConfig(**settings, **more)


@contextmanager
def generations(
    model: Any, requests: int, tokens: int, asynchronous: bool
) -> Iterator[Generations]:
    """With blocks for three fifths of so many requests, which generate so many tokens each."""
    each = -(-(sum(LENGTHS) // 2 + tokens) // TOKENS)
    num_blocks = max(each * requests * 3 // 5, 2 * each)
    how = {"max_batch_tokens": 1024, "use_async_batching": asynchronous}
    generation = hf.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=tokens
    )
    with model.continuous_batching_context_manager(
        generation_config=generation,
        continuous_batching_config=batching(TOKENS, num_blocks, 0.25, **how),
    ) as manager:
        manager.add_requests([[1]], max_new_tokens=1)  # behind its result it has all that it makes
        assert manager.get_result(timeout=120) is not None
        yield Generations(manager, model.device)
