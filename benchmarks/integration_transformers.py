"""Preempts requests of transformers' continuous batching, and shows what that costs its own manager
and ours, in turns.

"lost": one large request among small ones lacks a block and is preempted, and comes back some
batches later. All calls of the manager are timed: on the host, and on the stream of the model,
which has nothing else to do then. To that comes by how much the batches meanwhile were slower.
"throughput": tokens per second of a generation whose cache is too small, its start left out. The
model has random weights. Blocks that come back with other bytes are counted. Ends with 1 when there
are any, else with 0, whether or not the targets are met. Needs torch_kvswap[transformers].
"""

from __future__ import annotations

import gc
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
import transformers as hf
from integration_transformers_report import MANAGERS, Cell, Rate, judge, tables
from preemptions import Preemptions
from program import device_of, finish, new_parser
from timing import no_garbage_collection, synchronize

from torch_kvswap.cli.progress import Progress
from torch_kvswap.integrations import transformers as integration

WARM_UPS = 2


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    model = new_model(device, options.layers, options.kv_heads)
    sizes = options.block_tokens or ([16, 64, 256] if on_cuda else [16])
    counts = options.blocks or ([64, 512] if on_cuda else [8])
    progress = Progress("transformers", len(sizes) * len(counts) + options.rounds, True, sys.stderr)
    cells = []
    with pageable_without(on_cuda):
        for size in sizes:
            for count in counts:
                cells.append(measure(model, size, count, options.samples))
                progress.advance(1)
        rates = [Rate(asynchronous) for asynchronous in ((False, True) if on_cuda else (False,))]
        for _ in range(options.rounds):
            for rate in rates:
                add_round(rate, model, options.requests, options.tokens)
            progress.advance(1)
    verdicts = judge(cells, rates) if on_cuda else []
    print(tables(cells, rates), "", *verdicts, sep="\n")
    content = {
        "benchmark": "integration_transformers",
        "transformers": hf.__version__,
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "lost": [cell.to_json() for cell in cells],
        "throughput": [rate.to_json() for rate in rates],
    }
    return finish(options, content, verdicts, sum(cell.wrong for cell in cells))


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--block-tokens", type=int, nargs="+", help="tokens in a block (16 64 256)")
    add("--blocks", type=int, nargs="+", help="blocks of the request that is preempted (64 512)")
    add("--samples", type=int, default=7, help="preemptions in a cell, of each manager")
    add("--rounds", type=int, default=3, help="generations for the throughput, of each manager")
    add("--requests", type=int, default=24, help="prompts in a generation, of 384 tokens")
    add("--tokens", type=int, default=128, help="tokens that each prompt generates")
    add("--layers", type=int, default=16)
    add("--kv-heads", type=int, default=4, help="of 64 numbers each")
    return parser


def new_model(device: torch.device, layers: int, kv_heads: int) -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=1 << 20,
    )
    with torch.device(device):
        model = hf.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.set_attn_implementation("paged|sdpa" if hf.__version__.startswith("5.17.") else "sdpa")
    return model


@contextmanager
def pageable_without(cuda: bool) -> Iterator[None]:
    """Without CUDA nothing can be pinned, so transformers' own manager takes what there is."""
    from transformers.generation.continuous_batching import offloading_manager

    empty = torch.empty

    def pageable(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*shape, **options)

    if cuda:
        yield
        return
    with mock.patch.object(offloading_manager.torch, "empty", pageable):
        yield


@contextmanager
def managed_by(manager: str) -> Iterator[None]:
    if manager == "ours":
        with integration.enable():
            yield
    else:
        yield


def measure(model: Any, block_tokens: int, blocks: int, samples: int) -> Cell:
    cell = Cell(block_tokens, blocks)
    runs = {}
    for manager in MANAGERS:
        with managed_by(manager):
            runs[manager] = Preemptions(model, block_tokens, blocks)
    with no_garbage_collection():
        for number in range(-WARM_UPS, samples):
            for manager in MANAGERS if number % 2 else MANAGERS[::-1]:
                loss = runs[manager].preempt()
                if number >= 0:
                    cell.losses[manager].append(loss)
    for run in runs.values():
        cell.wrong += run.wrong
        cell.block_bytes = run.block_bytes
    del run, runs
    gc.collect()  # their caches and host memory
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return cell


def add_round(rate: Rate, model: Any, requests: int, tokens: int) -> None:
    for manager in MANAGERS if len(rate.rates["ours"]) % 2 else MANAGERS[::-1]:
        with managed_by(manager):
            rate.rates[manager].append(generate(model, requests, tokens, rate.asynchronous))


def generate(model: Any, requests: int, tokens: int, asynchronous: bool) -> float:
    """Tokens per second, with blocks for three fifths of the requests."""
    length, size = 384, 32
    each = -(-(length + tokens) // size)
    settings = {
        "block_size" if hf.__version__.startswith("5.17.") else "page_size": size,
        "num_blocks": max(each * requests * 3 // 5, 2 * each),
        "max_batch_tokens": 1024,
        "use_cuda_graph": False,
        "use_async_batching": asynchronous,
        "allow_block_sharing": False,
        "safety_margin": 0.0,
        "cpu_offload_space": 0.5,
    }
    if hasattr(hf.ContinuousBatchingConfig, "auto_switch_to_flash"):
        settings["auto_switch_to_flash"] = False
    torch.manual_seed(0)
    prompts = torch.randint(4096, (requests, length)).tolist()
    generation = hf.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=tokens
    )
    with model.continuous_batching_context_manager(
        generation_config=generation,
        continuous_batching_config=hf.ContinuousBatchingConfig(**settings),
    ) as manager:
        begin = perf_counter()
        manager.add_requests(prompts, max_new_tokens=tokens)
        generated = 0
        for _ in range(requests):
            result = manager.get_result(timeout=120)
            if result is None or result.error is not None:
                raise RuntimeError(f"a request has failed: {result}")
            generated += len(result.generated_tokens)
        seconds = perf_counter() - begin
    synchronize(model.device)
    return generated / seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
