"""nano-vllm with its prefixes in host memory: nothing of it is patched, three classes are derived.
For an engine of your own, serving_demo/engine.py is easier to copy from.

    pip install git+https://github.com/GeeeekExplorer/nano-vllm
    python examples/nano_vllm.py MODEL

A prompt that was served before comes from the host, layer by layer while it is computed. A request
that is preempted keeps its blocks there. What cannot be loaded is computed again. The program
compares the tokens of a prompt that was computed with those of one that was loaded.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
from nanovllm import LLM, SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler

import torch_kvswap as kvs


class HostBlockManager(BlockManager):
    """Also finds blocks on the host, and stores blocks there."""

    def __init__(self, config: Any, prefixes: kvs.PrefixCache, model: str) -> None:
        super().__init__(config.num_kvcache_blocks, config.kvcache_block_size)
        self.prefixes, self.loads = prefixes, list[kvs.Job]()  # those of this step
        dtype = str(prefixes.layouts[0].dtype)
        self.hasher = kvs.PrefixHasher(model, dtype, block_tokens=self.block_size)

    def can_allocate(self, seq: Any) -> int:
        """How many blocks the GPU has, and behind them the host. -1: there is no room now."""
        seq.on_gpu = super().can_allocate(seq)
        if seq.on_gpu < 0:
            return -1
        was_asked = hasattr(seq, "keys")
        seq.keys = self.hasher.lookup_keys(seq.token_ids)
        found = self.prefixes.lookup(seq.keys[seq.on_gpu :], again=was_asked)
        return int(seq.on_gpu + found.ready)

    def allocate(self, seq: Any, num_cached_blocks: int) -> None:
        super().allocate(seq, seq.on_gpu)
        missing = slice(seq.on_gpu, num_cached_blocks)
        keys, blocks = seq.keys[missing], seq.block_table[missing]
        if blocks:
            layers = len(self.prefixes.layouts[0].tensors)
            job = self.prefixes.load(keys, blocks, layer_groups=layers, tag=(seq, missing))
            if job is not None:  # None if they were evicted since lookup()
                self.loads.append(job)
                seq.num_cached_tokens = num_cached_blocks * self.block_size
        self.prefixes.touch(seq.keys[: seq.on_gpu])
        self.prefixes.order(seq.keys[:num_cached_blocks], renew=True)
        seq.held = None  # the load keeps what it reads

    def publish(self, seq: Any, loaded: slice) -> None:
        """Lets other requests use blocks that were loaded. They continue the GPU's own hashes."""
        before = self.blocks[seq.block_table[loaded.start - 1]].hash if loaded.start else -1
        for number in range(loaded.start, loaded.stop):
            block, tokens = self.blocks[seq.block_table[number]], seq.block(number)
            before = self.compute_hash(tokens, before)
            block.update(before, tokens)
            self.hash_to_block_id[before] = block.block_id

    def keys_of(self, seq: Any) -> kvs.prefix.PrefixKeys:
        """The keys of the full blocks that are computed."""
        return self.hasher.keys(seq.token_ids[: seq.num_cached_tokens])

    def deallocate(self, seq: Any) -> None:
        if keys := self.keys_of(seq):
            self.prefixes.store(keys, seq.block_table[: len(keys)])  # copies what the host lacks
        super().deallocate(seq)

    def _allocate_block(self) -> int:
        for job in self.prefixes.jobs_using([self.free_block_ids[0]]):
            job.wait()  # the stream may write the block after the jobs that still use it
        return int(super()._allocate_block())


class HostScheduler(Scheduler):
    """Keeps preempted requests on the host, and accepts no token of a load that failed."""

    def __init__(self, config: Any, prefixes: kvs.PrefixCache, model: str) -> None:
        super().__init__(config)
        self.block_manager = HostBlockManager(config, prefixes, model)

    def preempt(self, seq: Any) -> None:
        if keys := self.block_manager.keys_of(seq):
            blocks = seq.block_table[: len(keys)]
            seq.held = self.block_manager.prefixes.store(keys, blocks, hold=True).lease
        super().preempt(seq)

    def postprocess(self, seqs: list[Any], token_ids: list[int], is_prefill: bool) -> None:
        """The host has the tokens of the step: all loads that it waited for have ended."""
        self.block_manager.loads.clear()
        failed = []
        for result in self.block_manager.prefixes.poll():
            if result.direction == "load" and result.ok:
                self.block_manager.publish(*result.tag)
            elif result.direction == "load":
                failed.append((result.tag[0], result.error))
        for seq, error in failed:
            self.restart(seq, error)
        left_out = [seq for seq, _ in failed]
        kept = [pair for pair in zip(seqs, token_ids, strict=True) if pair[0] not in left_out]
        super().postprocess([seq for seq, _ in kept], [token for _, token in kept], is_prefill)

    def restart(self, seq: Any, error: Exception | None) -> None:
        raise RuntimeError(f"a load failed: {error}")


class SurvivingScheduler(HostScheduler):
    """Computes a request again whose load failed."""

    def restart(self, seq: Any, error: Exception | None) -> None:
        (self.running if seq in self.running else self.waiting).remove(seq)
        seq.num_cached_tokens = seq.num_scheduled_tokens = 0  # nothing of it may be stored
        self.preempt(seq)


class HostLLM(LLM):
    """nano-vllm with so many bytes of host memory."""

    def __init__(self, model: str, host_bytes: int, **options: Any) -> None:
        super().__init__(model, **options)
        runner = self.model_runner
        if runner.world_size > 1:
            raise ValueError("tensor_parallel_size is more than 1, which this example does not do")
        gpu = kvs.PagedLayout(runner.kv_cache.unbind(1), block_dim=1)  # a tensor for each layer
        pool = kvs.HostPool(gpu, host_bytes // gpu.block_bytes, verify="load")
        self.scheduler = SurvivingScheduler(runner.config, kvs.PrefixCache(gpu, pool), model)
        layers = [one for one in runner.model.modules() if hasattr(one, "k_cache")]
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self.wait_for_layer, number))

    def wait_for_layer(self, number: int, *_: object) -> None:
        """The stream, not the host, waits for a layer of the loads right before its attention."""
        for job in self.scheduler.block_manager.loads:
            job.wait(layer_group=number)

    def forget_gpu(self) -> None:
        """What was stored is then found on the host only."""
        manager = self.scheduler.block_manager
        manager.prefixes.synchronize()
        manager.prefixes.poll()
        manager.hash_to_block_id.clear()


def first_tokens(llm: Any, prompt: list[int]) -> tuple[float, list[int]]:
    """Milliseconds to the first token of a prompt, and its first eight tokens."""
    params = SamplingParams(temperature=1e-5, max_tokens=8, ignore_eos=True)
    llm.add_request(prompt, params)
    torch.cuda.manual_seed(0)  # decides between tokens that are equally likely
    start, first, done = time.perf_counter(), 0.0, list[Any]()
    while not done:
        done, _ = llm.step()
        first = first or 1000 * (time.perf_counter() - start)
    return first, done[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder with a Qwen3 model")
    parser.add_argument("--tokens", type=int, default=15872, help="length of the prompt")
    arguments = parser.parse_args()
    longest = arguments.tokens + 8
    llm = HostLLM(arguments.model, 16 << 30, max_model_len=longest, max_num_batched_tokens=longest)
    for _ in range(2):  # warms up
        first_tokens(llm, [7] * arguments.tokens)
    prompt = torch.randint(1000, (arguments.tokens,), device="cpu").tolist()
    computed, tokens = first_tokens(llm, prompt)
    on_gpu, again = first_tokens(llm, prompt)
    llm.forget_gpu()
    on_host, loaded = first_tokens(llm, prompt)
    assert loaded == again
    print(f"first of {arguments.tokens} tokens: computed {computed:.0f} ms, from the host ", end="")
    print(f"{on_host:.0f} ms, on the GPU {on_gpu:.0f} ms; tokens as computed: {tokens == loaded}")


if __name__ == "__main__":
    main()
