"""Serve prompts through a cache that is too small for them.

Blocks are swapped to the host and back. Every token is compared with what the request gets alone in
a cache that is large enough.
"""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from time import perf_counter

import torch

from serving_demo.control import Control
from serving_demo.link import measure_link
from serving_demo.model import Model, same_bits_every_time
from serving_demo.prefixes import PrefixServer, alike_prompts
from serving_demo.report import first_differences, traffic_table
from serving_demo.request import Request
from serving_demo.serving import Server
from serving_demo.swapper import Swapper
from serving_demo.text import cut_prompts, read_text
from torch_kvswap.cli.progress import Progress
from torch_kvswap.handler import OffloadHandler
from torch_kvswap.host_pool.encoding import ENCODINGS, WIDTHS
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.layout import PagedLayout
from torch_kvswap.prefix.engine import OffloadEngine

SHORTEST_PROMPT, LONGEST_PROMPT = 16, 96


class UserError(Exception):
    """A request that cannot be fulfilled; the message says what to change."""


def _has_device(kind: str) -> bool:
    """Whether torch can use devices of this type."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == kind


def main(arguments: list[str]) -> int:
    """Runs the demo.

    Returns:
        int: 0 if every token is as expected, or with --control if the corruption was detected; 1 if
            not; 2 for invalid options.
    """
    options = _parser().parse_args(arguments)
    try:
        requests = _requests(options)
        _check(options, requests)
    except UserError as error:
        print(f"serving_demo: {error}", file=sys.stderr)
        return 2
    with same_bits_every_time():
        return _run(options, requests)


def _parser() -> ArgumentParser:
    parser = ArgumentParser("python examples/serving_demo", description=__doc__)
    add = parser.add_argument
    add("--device", default="cpu", help="cpu, cuda or another device of torch (default cpu)")
    add("--requests", type=_positive, default=32)
    add("--new-tokens", type=_positive, default=64, help="of each request")
    add("--gpu-blocks", type=_positive, default=40, help="blocks in the cache")
    add("--block-size", type=_positive, default=16, help="tokens per block")
    add("--host-pages", type=_positive, help="default: enough for all requests")
    add("--blocks-per-page", type=_positive, default=1)
    add(
        "--encoding",
        choices=ENCODINGS,
        default="raw",
        help="of the host pages; lossless keeps keys and values in bfloat16",
    )
    add("--bits-per-value", type=float, choices=WIDTHS, help="of lossless pages")
    add("--rounds", type=_positive, default=3, help="rounds of prompts with common prefixes")
    add("--seed", type=int, default=0, help="seed of the weights and the prompts")
    add("--file", type=Path, help="text to cut the prompts from; default: the README")
    add("--progress", action="store_true", help="show progress even if stderr is no terminal")
    add("--control", action="store_true", help="zero one loaded block: the tokens must change")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _requests(options: Namespace) -> list[Request]:
    try:
        name, text = read_text(options.file)
    except OSError as error:
        raise UserError(f"no text for the prompts: {error}; --file names another one") from error
    if len(text) < LONGEST_PROMPT:
        raise UserError(f"{name} has {len(text)} bytes, prompts take up to {LONGEST_PROMPT}")
    prompts = cut_prompts(text, options.requests, SHORTEST_PROMPT, LONGEST_PROMPT, options.seed)
    print(f"{len(prompts)} prompts cut from {name}, {options.new_tokens} new tokens each")
    return [
        Request(index, prompt, options.new_tokens, options.block_size)
        for index, prompt in enumerate(prompts)
    ]


def _check(options: Namespace, requests: list[Request]) -> None:
    largest = max(request.max_blocks for request in requests)
    if options.gpu_blocks < largest:
        raise UserError(
            f"--gpu-blocks {options.gpu_blocks} cannot hold the longest request, "
            f"which takes {largest} blocks of {options.block_size} tokens"
        )
    if options.bits_per_value is not None and options.encoding == "raw":
        raise UserError("--bits-per-value is for --encoding lossless")
    if options.encoding != "raw" and options.device not in ("cpu", "cuda"):
        raise UserError(f"--encoding {options.encoding} is for --device cpu and cuda")
    if options.device != "cpu" and not _has_device(options.device):
        raise UserError(
            f"--device {options.device}: torch finds no such device; --device cpu needs none"
        )


def _run(options: Namespace, requests: list[Request]) -> int:
    device = torch.device(options.device)
    max_blocks = max(request.max_blocks for request in requests)
    cache_dtype = torch.float32 if options.encoding == "raw" else torch.bfloat16
    model = Model(options.block_size, max_blocks, options.seed, device, cache_dtype)
    bar = _progress("alone  ", options)
    expected = []
    for request in requests:
        expected.append(model.generate(request.prompt, request.new_tokens))
        bar.advance(request.new_tokens)
    swapper, control = _serve(options, model, requests)
    print(traffic_table(swapper.traffic, measure_link(device) if device.type == "cuda" else None))
    code = _compare(requests, expected, control)
    return code or (0 if options.control else _serve_alike(options, model, requests))


def _serve(
    options: Namespace, model: Model, requests: list[Request]
) -> tuple[Swapper, Control | None]:
    """Serves the requests with swapping, and prints a summary."""
    blocks = [request.max_blocks for request in requests]
    pages = options.host_pages or sum(-(-n // options.blocks_per_page) for n in blocks)
    cache = model.new_cache(options.gpu_blocks)
    layout = PagedLayout(cache, block_dim=1)
    bar = _progress("serving", options)
    with (
        _host_pool(layout, pages, options) as host,
        OffloadHandler(layout, host) as handler,
    ):
        swapper = Swapper(OffloadEngine(handler), model.block_size)
        control = Control(swapper, cache) if options.control else None
        server = Server(model, cache, swapper, requests, control.zero if control else None)
        start = perf_counter()
        while server.is_busy:
            bar.advance(server.step())
        seconds = perf_counter() - start
    print(
        f"served on {options.device} in {seconds:.1f} s: {options.gpu_blocks} blocks of "
        f"{options.block_size} tokens instead of {sum(blocks)}, "
        f"{swapper.traffic['store'].requests} preemptions"
    )
    if swapper.traffic["store"].requests == 0:
        print("nothing was swapped: give fewer --gpu-blocks or more --host-pages", file=sys.stderr)
    return swapper, control


def _host_pool(layout: PagedLayout, pages: int, options: Namespace) -> HostPool:
    encoding = {"encoding": options.encoding, "bits_per_value": options.bits_per_value}
    return HostPool(layout, pages, options.blocks_per_page, **encoding)


def _compare(requests: list[Request], expected: list[list[int]], control: Control | None) -> int:
    """Prints the requests that differ, and returns the exit code."""
    differences = first_differences(requests, expected)
    zeroed = control.request if control else None
    if control and zeroed is None:
        print("--control: nothing was loaded; give fewer --gpu-blocks", file=sys.stderr)
        return 2
    for difference in differences:
        print(difference, file=sys.stdout if difference.request is zeroed else sys.stderr)
    print(f"{sum(map(len, expected))} tokens compared, {len(differences)} requests differ")
    if zeroed is None:
        return 1 if differences else 0
    if [difference.request for difference in differences] == [zeroed]:
        print(f"control: request {zeroed.id} lost a block and differs, no other does")
        return 0
    print(f"control: request {zeroed.id} lost a block and should differ alone", file=sys.stderr)
    return 1


def _serve_alike(options: Namespace, model: Model, requests: list[Request]) -> int:
    """Serves prompts with common prefixes in rounds, and returns the exit code."""
    _, text = read_text(options.file)
    longest = max(len(request.prompt) for request in requests)
    prompts = alike_prompts(text, options.requests, longest, options.seed)
    new_tokens = min(options.new_tokens, 8)
    expected = [model.generate(prompt, new_tokens) for prompt in prompts]
    layout = PagedLayout(model.new_cache(2 * model.max_blocks), block_dim=1)
    pages = options.host_pages or sum(-(-len(prompt) // model.block_size) for prompt in prompts)
    wrong = 0
    with (
        _host_pool(layout, pages, options) as host,
        OffloadHandler(layout, host) as handler,
    ):
        server = PrefixServer(model, OffloadEngine(handler))
        for number in range(options.rounds):
            server.reused = server.computed = 0
            got = [server.generate(prompt, new_tokens) for prompt in prompts]
            wrong += sum(one != other for one, other in zip(got, expected, strict=True))
            tokens = server.reused + server.computed
            print(
                f"round {number + 1} of {len(prompts)} prompts that begin alike: {server.reused} "
                f"of {tokens} tokens from the host, {server.reused / tokens:.0%}"
            )
    print(f"{options.rounds * len(prompts)} answers compared, {wrong} differ")
    return 1 if wrong else 0


def _progress(label: str, options: Namespace) -> Progress:
    total = options.requests * options.new_tokens
    return Progress(label, total, options.progress or sys.stderr.isatty(), sys.stderr)
