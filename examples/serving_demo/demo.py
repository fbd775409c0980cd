"""Serve prompts with a cache that is too small for them, and check every token.

Each request is first computed alone, in a cache that holds all of it. Then all are served together
in a small cache: blocks are offloaded to the host and come back. The tokens must be the same.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Literal

import torch

import torch_kvswap as kvs
from serving_demo.model import Model, same_bits_every_time
from serving_demo.server import Request, Server

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"  # which never changes
BLOCK_SIZE = 16
LONGEST_PROMPT = 96
Encoding = Literal["raw", "lossless"]


def parser() -> ArgumentParser:
    made = ArgumentParser("python examples/serving_demo", description=__doc__)
    made.add_argument("--device", default="cpu", help="such as cuda (default cpu)")
    made.add_argument("--requests", type=int, default=24)
    made.add_argument("--new-tokens", type=int, default=48, help="of each request")
    made.add_argument("--gpu-blocks", type=int, default=40, help=f"of {BLOCK_SIZE} tokens")
    made.add_argument(
        "--encoding",
        choices=("raw", "lossless"),
        default="raw",
        help="of the host pages; lossless keeps keys and values in bfloat16",
    )
    made.add_argument("--seed", type=int, default=0, help="of the weights and the prompts")
    made.add_argument(
        "--control", action="store_true", help="zero one loaded block: the tokens must change"
    )
    return made


def make_prompts(count: int, seed: int) -> list[bytes]:
    """Prompts from `TEXT` that begin in one of two ways and continue differently."""
    text, random, half = TEXT.read_bytes(), Random(seed), LONGEST_PROMPT // 2

    def cut(length: int) -> bytes:
        start = random.randrange(len(text) - length)
        return text[start : start + length]

    beginnings = [cut(half) for _ in range(2)]
    return [beginnings[i % 2] + cut(random.randint(1, half)) for i in range(count)]


def serve(
    model: Model, requests: list[Request], blocks: int, encoding: Encoding, control: bool
) -> Server:
    """Serves the requests in a cache of this many blocks, with offloading."""
    cache = model.new_cache(blocks)
    gpu = kvs.PagedLayout(cache, block_dim=1)
    pages = 2 * len(requests) * model.max_blocks  # room for every request, and for partial blocks
    with (
        kvs.HostPool(gpu, pages, encoding=encoding) as host,
        kvs.PrefixCache(gpu, host) as prefixes,
    ):
        server = Server(model, cache, prefixes, requests, control)
        server.run()
    return server


def run(options: Namespace) -> int:
    """Runs the demo.

    Returns:
        int: 0 if every token is as expected, or with --control, if only the corrupted request is
            wrong; otherwise 1.
    """
    prompts = make_prompts(options.requests, options.seed)
    requests = [Request(prompt, options.new_tokens) for prompt in prompts]
    max_blocks = -(-(LONGEST_PROMPT + options.new_tokens) // BLOCK_SIZE)
    if options.gpu_blocks <= max_blocks:
        sys.exit(f"--gpu-blocks must be more than {max_blocks}, the blocks of the longest request")
    dtype = torch.float32 if options.encoding == "raw" else torch.bfloat16
    model = Model(BLOCK_SIZE, max_blocks, options.seed, torch.device(options.device), dtype)
    expected = [model.generate(prompt, options.new_tokens) for prompt in prompts]
    start = perf_counter()
    server = serve(model, requests, options.gpu_blocks, options.encoding, options.control)
    seconds = perf_counter() - start
    needed = sum(model.blocks_for(len(prompt) + options.new_tokens) for prompt in prompts)
    stored, loaded = (server.bytes_moved[way] / 1e6 for way in ("store", "load"))
    print(
        f"{len(requests)} requests served on {options.device} in {seconds:.1f} s, in "
        f"{options.gpu_blocks} blocks instead of {needed}\n"
        f"{server.preemptions} preemptions, {stored:.1f} MB stored, {loaded:.1f} MB loaded; "
        f"{server.reused} of {sum(map(len, prompts))} prompt tokens came from the host"
    )
    wrong = [
        request
        for request, tokens in zip(requests, expected, strict=True)
        if request.tokens != tokens
    ]
    print(f"{sum(map(len, expected))} tokens compared, {len(wrong)} requests differ")
    if options.control:
        detected = wrong == [server.corrupted]
        print("control: " + ("detected" if detected else "the request should differ alone"))
        return 0 if detected else 1
    return 1 if wrong else 0


def main(arguments: list[str]) -> int:
    with same_bits_every_time():
        return run(parser().parse_args(arguments))
