"""A vLLM engine in a process of its own, that serves rounds of prompts when it is told to.

Started by integration_vllm.py: `vllm_server.py FD`, settings and orders as lines of JSON on stdin,
answers as lines of JSON on the file descriptor, vLLM's own words on stdout. The last answer, behind
the last order, says that the engine has ended.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed


def main(arguments: list[str]) -> int:
    answers = os.fdopen(int(arguments[0]), "w", buffering=1)
    settings = json.loads(sys.stdin.readline())
    engine = start(settings)
    print(json.dumps({"ready": engine.describe()}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(engine.serve(**order)), file=answers)
    engine.end()
    print(json.dumps({}), file=answers)
    return 0


class Engine:
    """The prompts of a round are random tokens from a seed, with a prefix that they share."""

    def __init__(self, llm: Any, vocabulary: int) -> None:
        self._llm = llm
        self._vocabulary = vocabulary

    def describe(self) -> dict[str, Any]:
        import vllm

        config = self._llm.llm_engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "gpu_blocks": config.cache_config.num_gpu_blocks,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
        }

    def serve(
        self, seed: int, prompts: int, lengths: Sequence[int], output: int, **how: Any
    ) -> dict[str, Any]:
        """how: prefixes and prefix, how many prefixes there are and their length; alone: one prompt
        after the other; drop: forget the GPU's prefix cache first, before each one if alone;
        order: which of the prompts, all by default; new: so many tokens at the end of each prompt
        are others, which were never served; beside: so many other requests decode meanwhile, and
        the answer has the longest of their steps."""
        made = make_prompts(
            seed, prompts, lengths, how["prefixes"], how["prefix"], self._vocabulary
        )
        chosen = [made[number] for number in how.get("order") or range(len(made))]
        if new := how.get("new", 0):
            ends = f"{seed}, {how.get('beside', 0)}"  # what one kind has computed no other finds
            chosen = replace_ends(chosen, new, ends, self._vocabulary)
        batches = [[prompt] for prompt in chosen] if how.get("alone") else [chosen]
        requests, steps, seconds = [], [], 0.0
        for batch in batches:
            if how.get("drop") and not self._llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not drop its prefix cache")
            began = time.perf_counter()
            if others := how.get("beside"):
                request, step = self._generate_beside(batch[0], others)
                requests.append(request)
                steps.append(step)
            else:
                requests += self._generate(batch, output)
            seconds += time.perf_counter() - began
            if how.get("alone"):
                self._generate([[5, 6, 7]], 8)  # until what was stored is known to be
        return {
            "seconds": seconds,
            "ttft": [request.metrics.first_token_latency for request in requests],
            "cached": [request.num_cached_tokens or 0 for request in requests],
            "tokens": [list(request.outputs[0].token_ids) for request in requests],
            "steps": steps,
            "loads": [_counted(f"vllm:kv_offload_load_{what}_total") for what in ("bytes", "time")],
        }

    def end(self) -> None:
        """Waits for all stores, also to tiers."""
        self._generate([[5, 6, 7]], 8)  # until what was stored is known to be, as in serve()
        if not self._llm.reset_prefix_cache(reset_connector=True):  # waits for the tiers
            raise RuntimeError("vLLM did not drop its caches")
        self._llm.llm_engine.engine_core.shutdown()

    def _generate(self, prompts: list[list[int]], output: int) -> list[Any]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        found: list[Any] = self._llm.generate(inputs, _sampling(output), use_tqdm=False)
        return found

    def _generate_beside(self, prompt: list[int], others: int) -> tuple[Any, float]:
        """The first token of a prompt, and the longest time between two tokens of the requests that
        decode meanwhile."""
        engine = self._llm.llm_engine
        names = [
            engine.add_request(f"other {number}", {"prompt_token_ids": [5, 6, 7]}, _sampling(1000))
            for number in range(others)
        ]
        made: dict[str, Any] = {}

        def step() -> bool:
            """Whether the others have one more token."""
            outputs = {output.request_id: output for output in engine.step()}
            made.update(outputs)
            return "other 0" in outputs

        def last() -> int:
            return len(made["other 0"].outputs[0].token_ids) if "other 0" in made else 0

        while last() < 8:
            step()
        engine.add_request("new", {"prompt_token_ids": prompt}, _sampling(1))
        longest, before = 0.0, time.perf_counter()
        while "new" not in made:
            if step():
                now = time.perf_counter()
                longest, before = max(longest, now - before), now
        engine.abort_request(names, internal=True)
        while engine.has_unfinished_requests():
            engine.step()
        return made["new"], longest


def _counted(name: str) -> float:
    """What vLLM has counted since it started."""
    from prometheus_client import REGISTRY

    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return float(sum(sample.value for sample in samples if sample.name == name))


def _sampling(output: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)


def make_prompts(
    seed: int, count: int, lengths: Sequence[int], prefixes: int, prefix: int, vocabulary: int
) -> list[list[int]]:
    """lengths: least and most tokens."""
    made = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [made.randrange(10, vocabulary) for _ in range(number)]

    shared = [tokens(prefix) for _ in range(prefixes)]
    return [
        [*shared[number % prefixes], *tokens(made.randint(*lengths) - prefix)]
        for number in range(count)
    ]


def replace_ends(
    prompts: Sequence[Sequence[int]], new: int, seed: str, vocabulary: int
) -> list[list[int]]:
    """The prompts with `new` random tokens at their ends."""
    made = random.Random(f"ends {seed}")
    return [
        [*prompt[:-new], *(made.randrange(10, vocabulary) for _ in range(new))]
        for prompt in prompts
    ]


def start(settings: Mapping[str, Any]) -> Engine:
    """settings: arguments of vllm.LLM, and `preload`, a file to run first (for machines without a
    GPU)."""
    arguments = dict(settings)
    preload = arguments.pop("preload", None)
    if preload:
        with open(preload) as file:
            exec(compile(file.read(), preload, "exec"), {"__name__": "preload"})
    from vllm import LLM

    with open(os.path.join(arguments["model"], "config.json")) as file:
        vocabulary = json.load(file)["vocab_size"]
    llm = LLM(**arguments)
    llm.apply_model(randomize)
    engine = Engine(llm, vocabulary)
    engine.serve(0, 2, (40, 40), 4, prefixes=1, prefix=8, drop=True)  # kernels are compiled
    return engine


def randomize(model: Any) -> None:
    """Weights under which the next token depends on all tokens before: those of load_format=dummy
    are so small that attention makes no difference."""
    import torch

    generators: dict[Any, Any] = {}
    # The ranks have parts of each weight. With latent attention they have some weights as a whole.
    rank = 0 if hasattr(model.config, "kv_lora_rank") else torch.distributed.get_rank()
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() < 2:
                weight.fill_(1.0 if "norm" in name else 0.0)
                continue
            if weight.device not in generators:
                generators[weight.device] = torch.Generator(weight.device).manual_seed(1 + rank)
            scale = 1.0 if "embed" in name else 2.0 / weight.shape[1] ** 0.5
            noise = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
            noise.normal_(0.0, scale, generator=generators[weight.device])
            weight.copy_(noise)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
