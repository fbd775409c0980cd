"""Times a prompt and the tokens after it with caches of transformers that hold less on the GPU.

The model has random weights and the shape of --layers, --heads, --kv-heads. Its chunks are computed
with a DynamicCache (all on the GPU, if it fits), transformers' own offloading, and HostCache, raw
and lossless, in turns. A HostCache pins its memory during its first prompt, so it is timed again
after reset(). The prompt's logits are compared with those of the DynamicCache: HostCache's must be
equal, those of transformers' offloading are reported. Logits of later tokens are not compared: with
one row, cuBLAS may sum in another order each time.
"""

from __future__ import annotations

import contextlib
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

from program import count, device_of, finish, new_parser
from report import Column, table_of

CACHES = ("resident", "OffloadedCache", "HostCache raw", "HostCache lossless")
Row = tuple[int, str, dict[str, float]]  # of a prompt's length and a cache


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--chunk", type=count, default=8192)
    parser.add_argument(
        "--new-tokens", type=count, default=4, help="tokens decoded after the prompt"
    )
    parser.add_argument("--layers", type=count, default=32)
    parser.add_argument("--heads", type=count, default=32)
    parser.add_argument("--kv-heads", type=count, default=8)
    parser.add_argument("--head-size", type=count, default=128)
    parser.add_argument("--buffers", type=count, default=3)
    parser.add_argument("--turns", type=count, default=2)
    options = parser.parse_args(arguments)
    cells, wrong = [], 0
    model = make_model(options)
    for tokens in options.tokens:
        best: dict[str, dict[str, float]] = {}
        for turn in range(options.turns + 1):
            # The first turn warms up.
            prompt = tokens if turn > 0 else min(tokens, 2 * options.chunk)
            resident = None
            for name in CACHES:
                with contextlib.suppress(torch.OutOfMemoryError):
                    most = prompt + options.new_tokens
                    for used, cache in new_caches(name, model, most, options):
                        times, logits = run(model, cache, prompt, options)
                        if name == "resident":
                            resident = logits
                        times["is_equal"] = resident is None or torch.equal(logits, resident)
                        wrong += name.startswith("HostCache") and not times["is_equal"]
                        if turn > 0:
                            old = best.setdefault(used, times)
                            best[used] = {key: min(old[key], times[key]) for key in times}
        cells += [(tokens, name, times) for name, times in best.items()]
    print(table_of(_columns(), cells))
    return finish(options, {"benchmark": "long_prompts", "cells": _json(cells, options)}, wrong)


def make_model(options: Namespace) -> Any:
    import transformers

    hidden = options.heads * options.head_size
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=max(options.tokens) + options.new_tokens,
    )
    torch.manual_seed(0)
    with torch.device(device_of(options)):
        return transformers.LlamaForCausalLM(config).bfloat16().eval()


def new_caches(name: str, model: Any, tokens: int, options: Namespace) -> Iterator[tuple[str, Any]]:
    """Yields each cache with its name: a HostCache twice, OffloadedCache only on a GPU."""
    import transformers

    from torch_kvswap.integrations.transformers import HostCache

    if name == "resident":
        yield name, transformers.DynamicCache(config=model.config)
    elif name == "OffloadedCache":
        if options.device == "cuda":  # its streams are CUDA's
            yield name, transformers.DynamicCache(config=model.config, offloading=True)
    else:
        encoding = name.removeprefix("HostCache ")
        made = HostCache(model.config, tokens, buffers=options.buffers, encoding=encoding)
        with contextlib.closing(made) as cache:
            yield name, cache
            cache.reset()
            yield f"{name}, again", cache


@torch.inference_mode()
def run(
    model: Any, cache: Any, tokens: int, options: Namespace
) -> tuple[dict[str, float], torch.Tensor]:
    """Seconds of the prompt and of a later token, peak bytes beside the weights; its logits."""
    device = device_of(options)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    inputs = (torch.arange(tokens, device=device) * 7919 % 1024)[None]
    began = time.perf_counter()
    for start in range(0, tokens, options.chunk):
        chunk = inputs[:, start : start + options.chunk]
        logits = model(chunk, cache=cache, logits_to_keep=1).logits
    of_prompt = logits.cpu()
    prompt = time.perf_counter() - began
    began = time.perf_counter()
    for _ in range(options.new_tokens):
        token = logits.argmax(-1)
        logits = model(token, cache=cache, logits_to_keep=1).logits
    logits.cpu()
    seconds = (time.perf_counter() - began) / max(options.new_tokens, 1)
    peak = torch.cuda.max_memory_allocated() - weights if device.type == "cuda" else 0
    return {"prompt_s": prompt, "token_s": seconds, "peak_bytes": peak}, of_prompt


def _columns() -> list[Column[Row]]:
    return [
        Column("tokens", lambda row: row[0]),
        Column("cache", lambda row: row[1]),
        Column("prompt, s", lambda row: row[2]["prompt_s"]),
        Column("a token, s", lambda row: row[2]["token_s"]),
        Column("peak, GB", lambda row: row[2]["peak_bytes"] / 1e9),
        Column("logits", lambda row: "equal" if row[2]["is_equal"] else "differ"),
    ]


def _json(cells: list[Row], options: Namespace) -> list[dict[str, Any]]:
    sizes = ("chunk", "new_tokens", "layers", "heads", "kv_heads", "head_size", "buffers")
    shape = {name: getattr(options, name) for name in sizes}
    return [{"tokens": tokens, "cache": name, **shape, **times} for tokens, name, times in cells]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
