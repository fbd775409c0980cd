"""Serve prompts with a cache that is too small for them, and check every token.

Each request is first computed alone, in a cache that holds all of it. Then all are served together
in a small cache, without and with a host cache. With it, blocks are offloaded to the host and come
back. The tokens must be the same.
"""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Literal, NamedTuple

import torch

import torch_kvswap as kvs
from serving_demo.engine import Engine, Request
from serving_demo.model import Model, same_bits_every_time

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"  # which never changes
BLOCK_SIZE = 16
LONGEST_PROMPT = 96
Encoding = Literal["raw", "lossless"]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def read_device(text: str) -> torch.device:
    if text.partition(":")[0] not in ("cpu", "cuda"):
        raise ArgumentTypeError(f"the demo runs on cpu and cuda, not on {text}")
    device = torch.device(text)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentTypeError("PyTorch finds no GPU; leave --device out")
    return device


def parser() -> ArgumentParser:
    made = ArgumentParser("python examples/serving_demo", description=__doc__)
    made.add_argument("--device", type=read_device, default="cpu", help="cpu (default) or cuda")
    made.add_argument("--requests", type=positive, default=24, help="number of prompts")
    made.add_argument(
        "--new-tokens", type=positive, default=48, help="tokens generated for each request"
    )
    made.add_argument(
        "--gpu-blocks",
        type=int,
        default=40,
        help=f"size of the cache, in blocks of {BLOCK_SIZE} tokens",
    )
    made.add_argument(
        "--encoding",
        choices=("raw", "lossless"),
        default="raw",
        help="how host pages keep blocks; lossless uses bfloat16 keys and values",
    )
    made.add_argument("--seed", type=int, default=0, help="for random weights and prompts")
    made.add_argument(
        "--control", action="store_true", help="zero one loaded block: the tokens must change"
    )
    made.add_argument(
        "--server",
        metavar="PATH",
        help="socket of a `python -m torch_kvswap serve`, which several demos can share",
    )
    made.add_argument(
        "--plot", metavar="FILE", help="draw the times to first token; needs matplotlib"
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


class CorruptingEngine(Engine):
    """Zeros a block of the first request that it resumes, whenever that comes back."""

    corrupted: Request | None = None

    def resume(self, request: Request) -> bool:
        is_loaded = super().resume(request)
        if request.load is not None and self.corrupted in (None, request):
            self.corrupted = request
            request.load.wait()
            for kv_cache in self.cache:
                kv_cache[:, request.blocks[0]] = 0
        return is_loaded


class Run(NamedTuple):
    """How requests were served.

    Attributes:
        engine (Engine): what it counted.
        requests (list[Request]): with their tokens.
        waits (list[float]): seconds until the first token of each request, ascending.
        seconds (float): until all were done.
        bytes_moved (tuple[int, int]): to the host, and back.
    """

    engine: Engine
    requests: list[Request]
    waits: list[float]
    seconds: float
    bytes_moved: tuple[int, int]


def serve(
    model: Model, requests: list[Request], options: Namespace, encoding: Encoding | None
) -> Run:
    """Serves the requests in a cache of `options.gpu_blocks` blocks.

    Args:
        encoding (Encoding | None): of the host pages; None serves without a host cache.
    """
    cache = model.new_cache(options.gpu_blocks)
    with ExitStack() as stack:
        prefixes = None
        gpu = kvs.PagedLayout(cache, block_dim=1)
        if encoding is not None and options.server:
            named = f"demo, seed {options.seed}"  # other weights give other keys and values
            try:
                prefixes = kvs.PrefixCache.connect(
                    options.server, gpu, model=named, encoding=encoding
                )
            except (OSError, ValueError) as error:
                sys.exit(f"--server: {error}")
            stack.enter_context(prefixes)
        elif encoding is not None:
            pages = 2 * len(requests) * model.max_blocks  # for every request, and partial blocks
            host = stack.enter_context(kvs.HostPool(gpu, pages, encoding=encoding))
            prefixes = stack.enter_context(kvs.PrefixCache(gpu, host))
        engine = (CorruptingEngine if options.control else Engine)(model, cache, prefixes, requests)
        start = perf_counter()
        engine.run()
        seconds, moved = perf_counter() - start, (0, 0)
        if prefixes is not None:
            prefixes.synchronize()
            metrics = prefixes.metrics()
            moved = metrics.stores.bytes, metrics.loads.bytes
    waits = sorted(each.first_token - start for each in requests)
    return Run(engine, requests, waits, seconds, moved)


def table(without: Run, using: Run) -> str:
    """What an operator asks, without and with the host cache."""
    runs = (without, using)
    prompt = sum(len(request.prompt) for request in using.requests)
    rows = [
        ("", ["without host cache", "with"]),
        (
            "time to first token, median",
            [f"{1e3 * run.waits[len(run.waits) // 2]:.0f} ms" for run in runs],
        ),
        (
            "time to first token, p99",
            [f"{1e3 * run.waits[-1 - len(run.waits) // 100]:.0f} ms" for run in runs],
        ),
        ("all requests done", [f"{1e3 * run.seconds:.0f} ms" for run in runs]),
        (f"of {prompt} prompt tokens, not computed", [f"{run.engine.reused}" for run in runs]),
        ("preempted requests", [f"{run.engine.preemptions}" for run in runs]),
        ("tokens computed again after that", [f"{run.engine.computed_again}" for run in runs]),
    ]
    return "\n".join(f"{name:38}{first:>20}{second:>12}" for name, (first, second) in rows)


def plot(without: Run, using: Run, title: str, file: str) -> None:
    """Draws how many requests have waited how long for their first token."""
    figure, axes = import_module("matplotlib.pyplot").subplots()
    shares = [100 * (number + 1) / len(using.waits) for number in range(len(using.waits))]
    for name, each in (("without host cache", without), ("with", using)):
        axes.step([1e3 * wait for wait in each.waits], shares, where="post", label=name)
    axes.set(xlabel="time to first token, ms", ylabel="requests, %", xlim=0, ylim=(0, 100))
    axes.set_title(title)
    axes.legend()
    figure.savefig(file)


def run(options: Namespace) -> int:
    """Runs the demo.

    Returns:
        int: 0 if every token is as expected, or with --control, if only the corrupted request is
            wrong; 2 if it cannot draw; otherwise 1.
    """
    if options.plot and find_spec("matplotlib") is None:
        print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    prompts = make_prompts(options.requests, options.seed)
    max_blocks = -(-(LONGEST_PROMPT + options.new_tokens) // BLOCK_SIZE)
    if options.gpu_blocks <= max_blocks:
        sys.exit(f"--gpu-blocks must be more than {max_blocks}, the blocks of the longest request")
    dtype = torch.float32 if options.encoding == "raw" else torch.bfloat16
    device = options.device
    other = ""
    if device.type == "cpu" and torch.cuda.is_available():
        other = "; --device cuda uses the GPU"
    print(f"running on {device}{other}\ncomputing each request alone ...", flush=True)
    model = Model(BLOCK_SIZE, max_blocks, options.seed, device, dtype)
    expected = [model.generate(prompt, options.new_tokens) for prompt in prompts]
    runs = []
    for name, encoding in (("without", None), ("with", options.encoding)):
        print(f"serving them together {name} a host cache ...", flush=True)
        requests = [Request(prompt, options.new_tokens) for prompt in prompts]
        runs.append(serve(model, requests, options, encoding))
    without, using = runs
    needed = sum(model.blocks_for(len(prompt) + options.new_tokens) for prompt in prompts)
    stored, loaded = (count / 1e6 for count in using.bytes_moved)
    load = f"{len(prompts)} requests in {options.gpu_blocks} blocks instead of {needed}"
    print(f"{load}; {stored:.1f} MB stored, {loaded:.1f} MB loaded\n{table(without, using)}")
    if device.type == "cpu":
        print("(such a small model computes as fast as the CPU copies: the times show no gain)")
    if options.plot:
        plot(without, using, f"a small random model on {device}: {load}", options.plot)
    wrong = [
        request
        for request, tokens in zip(using.requests, expected, strict=True)
        if request.generated != tokens
    ]
    print(f"{sum(map(len, expected))} tokens compared, {len(wrong)} requests differ")
    if options.control:
        detected = wrong == [getattr(using.engine, "corrupted", None)]
        print("control: " + ("detected" if detected else "the request should differ alone"))
        return 0 if detected else 1
    return 1 if wrong else 0


def main(arguments: list[str]) -> int:
    with same_bits_every_time():
        return run(parser().parse_args(arguments))
