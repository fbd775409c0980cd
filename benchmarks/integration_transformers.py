"""Preempts requests of transformers' continuous batching, and shows what that costs its own manager
and ours, in turns.

"lost": one large request among small ones lacks a block and is preempted, and comes back some
batches later. All calls of the manager are timed: on the host, and on the stream of the model,
which has nothing else to do then. So is the cache where it gives the request its blocks again,
which our manager calls and theirs leaves to the scheduler. Whole batches vary by more than that.

"throughput": tokens per second of generations whose cache is too small, and in how many batches.
The fastest of many are compared: a generation of this model is launched by the host, which other
programs slow down for seconds at a time. All managers are made anew in each round, because each
generates in a thread of its own, and threads differ by which core they stay on. Their manager runs
twice, as two, to show what runs of one differ by.

The model has random weights. Blocks that come back with other bytes are counted; in the warm-ups
they are also overwritten meanwhile, because a request gets the same ones again. Needs
torch_kvswap[transformers].
"""

from __future__ import annotations

import gc
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import torch
import transformers as hf
from generations import generations, new_prompts
from integration_transformers_report import MANAGERS, Cell, Rate, tables
from preemptions import Preemptions
from program import count, device_of, finish, new_parser
from timing import in_turn, no_garbage_collection

from torch_kvswap.integrations import transformers as integration

WARM_UPS = 2
GENERATIONS = 2  # of each manager, in a round


def main(arguments: list[str]) -> int:
    begin = perf_counter()
    options = _parser().parse_args(arguments)
    device = device_of(options)
    on_cuda = device.type == "cuda"
    model = new_model(device, options.layers, options.kv_heads)
    sizes = options.block_tokens or ([16, 64, 256] if on_cuda else [16])
    counts = options.blocks or ([64, 512] if on_cuda else [8])
    modes = (False, True) if on_cuda else (False,)
    cells = [Cell(size, count) for size in sizes for count in counts]
    rates = [Rate(asynchronous) for asynchronous in modes]
    for_cells = 0.4 * options.seconds
    with pageable_without(on_cuda):
        for number, cell in enumerate(cells, 1):
            measure(cell, model, options.samples, begin + for_cells * number / len(cells))
        for number, rate in enumerate(rates, 1):
            left = (options.seconds - for_cells) * (1 - number / len(rates))
            add_rounds(rate, model, options, begin + options.seconds - left)
    print(tables(cells, rates))
    content = {
        "benchmark": "integration_transformers",
        "transformers": hf.__version__,
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "lost": [cell.to_json() for cell in cells],
        "throughput": [rate.to_json() for rate in rates],
    }
    return finish(options, content, sum(cell.wrong for cell in cells))


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--block-tokens", type=int, nargs="+", help="tokens in a block (16 64 256)")
    add("--blocks", type=int, nargs="+", help="blocks of the request that is preempted (64 512)")
    add("--samples", type=count, default=5, help="least preemptions per cell and manager")
    add("--rounds", type=count, default=3, help="least rounds of generations")
    add("--seconds", type=float, default=90, help="time for both, which go on until then")
    add("--requests", type=count, default=16, help="prompts per generation")
    add("--tokens", type=count, default=32, help="tokens generated per prompt")
    add("--layers", type=count, default=16)
    add("--kv-heads", type=count, default=4, help="heads of 64 values")
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
    model.set_attn_implementation("sdpa")
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


def measure(cell: Cell, model: Any, samples: int, deadline: float) -> None:
    runs = {}
    for manager in MANAGERS:
        with managed_by(manager):
            runs[manager] = Preemptions(model, cell.block_tokens, cell.blocks)
    with no_garbage_collection():
        number = -WARM_UPS
        while number < samples or perf_counter() < deadline:
            for manager in in_turn(MANAGERS, number):
                loss = runs[manager].preempt(overwrites=number < 0)
                if number >= 0:
                    cell.losses[manager].append(loss)
            number += 1
    for run in runs.values():
        cell.wrong += run.wrong
        cell.block_bytes = run.block_bytes
    del run, runs
    _free(model)


def add_rounds(rate: Rate, model: Any, options: Namespace, deadline: float) -> None:
    prompts = new_prompts(options.requests, model.config.vocab_size)
    number, took = 0, 0.0
    while number < options.rounds or perf_counter() + took < deadline:
        begin = perf_counter()
        order = in_turn(tuple(rate.runs), number)
        with ExitStack() as stack:
            runs = {}
            for manager in order:
                with managed_by(manager):
                    each = generations(model, options.requests, options.tokens, rate.asynchronous)
                    runs[manager] = stack.enter_context(each)
                runs[manager].generate(prompts, options.tokens)
            for manager in order * GENERATIONS:
                rate.runs[manager].append(runs[manager].generate(prompts, options.tokens))
        _free(model)
        number, took = number + 1, perf_counter() - begin


def _free(model: Any) -> None:
    """Caches and host memory of managers that are gone."""
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
