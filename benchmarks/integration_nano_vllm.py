"""Times nano-vllm with `examples/nano_vllm.py`, on a model of Qwen3-4B's shape with random weights.

A prompt is computed, then found on the GPU, then loaded from the host. Of a prompt with new tokens
only the others were served before. Twelve prompts from the host must get the tokens that they get
from the GPU, and others when the loaded blocks are zeroed. Requests per second are those of
--requests prompts in a random order, with and without the host, where the GPU has room for a third.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from nanovllm import SamplingParams
from nanovllm.engine.scheduler import Scheduler
from program import count, finish, new_parser
from report import Column, table_of
from timing import summary

from nano_vllm import HostLLM, SurvivingScheduler, first_tokens

PREFIXES = (8192, 0), (15872, 0), (8192, 2048)  # tokens served before, and new ones
SOURCES = "computed", "gpu", "host"


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__, of_gpu=False)
    parser.add_argument("--samples", type=count, default=7)
    parser.add_argument("--requests", type=count, default=24)
    parser.add_argument("--host-gib", type=count, default=32)
    parser.set_defaults(device="cuda")
    options = parser.parse_args(arguments)
    longest = 8 + max(map(sum, PREFIXES))
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        limits = {"max_model_len": longest, "max_num_batched_tokens": longest, "max_num_seqs": 16}
        llm = HostLLM(folder, options.host_gib << 30, **limits)
    torch.manual_seed(0)
    for parameter in llm.model_runner.model.parameters():
        if parameter.dim() > 1:  # the others are scales
            torch.nn.init.normal_(parameter, std=parameter.size(1) ** -0.5)
    cells = [time_first(llm, *prefix, options.samples) for prefix in PREFIXES]
    print(table_of(_columns(), cells))
    tokens = compare_tokens(llm, [random_tokens(at) for at in range(2048, 10240, 683)])
    print("prompts with the same tokens:", tokens)
    requests = serve_all(llm, [random_tokens(8192) for _ in range(options.requests)])
    print("requests a second:", requests)
    content = {"cells": cells, "tokens": tokens, "requests": requests}
    wrong = tokens["prompts"] - tokens["host_as_gpu"] + tokens["zeroed_as_gpu"]
    return finish(options, {"benchmark": "integration_nano_vllm", **content}, wrong)


def save_model(folder: str) -> None:
    """Everything that nano-vllm reads except weights."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    Qwen3Config(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        dtype="bfloat16",
    ).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"end": 0}, unk_token="end"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end").save_pretrained(folder)


def random_tokens(number: int) -> list[int]:
    tokens: list[int] = torch.randint(1000, (number,), device="cpu").tolist()
    return tokens


def time_first(llm: Any, served: int, new: int, samples: int) -> dict[str, Any]:
    """Milliseconds to the first token. The first sample warms up."""
    times: dict[str, list[float]] = {source: [] for source in SOURCES}
    for _ in range(samples + 1):
        prefix = random_tokens(served)
        for source in SOURCES:
            if source == "host":
                llm.forget_gpu()
            times[source].append(first_tokens(llm, prefix + random_tokens(new))[0])
    pairs = zip(times["host"][1:], times["gpu"][1:], strict=True)
    ratio = statistics.median(host / gpu for host, gpu in pairs)
    figures = {f"{source}_ms": summary(of[1:]) for source, of in times.items()}
    return {"served": served, "new": new, **figures, "host_to_gpu": round(ratio, 3)}


def compare_tokens(llm: Any, prompts: list[list[int]]) -> dict[str, int]:
    """The number of prompts that got the tokens that they get from the GPU."""
    got: dict[str, list[list[int]]] = {}
    prefixes = llm.scheduler.block_manager.prefixes
    load = prefixes.load

    def load_zeros(keys: Any, blocks: list[int], **options: Any) -> Any:
        job = load(keys, blocks, **options)
        if job is not None:
            job.wait()
            llm.model_runner.kv_cache[:, :, blocks] = 0
        return job

    for source in (*SOURCES, "zeroed"):
        if source in ("host", "zeroed"):
            llm.forget_gpu()
        if source == "zeroed":
            prefixes.load = load_zeros
        got[source] = [first_tokens(llm, prompt)[1] for prompt in prompts]
    prefixes.load = load
    llm.forget_gpu()
    equal = {
        f"{source}_as_gpu": sum(a == b for a, b in zip(of, got["gpu"], strict=True))
        for source, of in got.items()
        if source != "gpu"
    }
    return {"prompts": len(prompts), **equal}


def serve_all(llm: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Requests per second. The first of three rounds warms up."""
    config, host = llm.model_runner.config, llm.scheduler
    prefixes = host.block_manager.prefixes
    config.num_kvcache_blocks = sum(1 + len(each) // config.kvcache_block_size for each in prompts)
    config.num_kvcache_blocks //= 3
    plain = Scheduler(config)
    plain.block_manager.loads = []  # the hooks of HostLLM look there
    figures: dict[str, Any] = {"prompts": len(prompts), "gpu_blocks": config.num_kvcache_blocks}
    for name, scheduler in (
        ("without_host", plain),
        ("with_host", SurvivingScheduler(config, prefixes, config.model)),
    ):
        llm.scheduler, rates = scheduler, list[float]()
        for turn in range(3):
            for prompt in random.Random(turn).sample(prompts, len(prompts)):
                llm.add_request(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
            began = time.perf_counter()
            while not llm.is_finished():
                llm.step()
            rates.append(len(prompts) / (time.perf_counter() - began))
        figures[name] = [round(rate, 2) for rate in rates[1:]]
    llm.scheduler = host
    return figures


def _columns() -> list[Column[dict[str, Any]]]:
    return [
        Column("tokens served before", lambda row: row["served"]),
        Column("new", lambda row: row["new"]),
        Column("computed, ms", lambda row: row["computed_ms"]["quartiles"][1]),
        Column("on the GPU, ms", lambda row: row["gpu_ms"]["quartiles"][1]),
        Column("from the host, ms", lambda row: row["host_ms"]["quartiles"][1]),
        Column("host / GPU", lambda row: row["host_to_gpu"]),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
