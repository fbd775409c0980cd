"""An engine of your own: a paged server loop that reuses prefixes, preempts and resumes.

    python examples/own_engine.py [--device cuda]

The cache is too small for its requests, and each must get the tokens that it gets alone.
"""

import argparse
from collections import Counter, deque
from dataclasses import dataclass, field

import torch

import torch_kvswap as kvs

BLOCK, LAYERS, HEADS, SIZE, DIM, VOCAB, LONGEST = 8, 2, 4, 16, 4 * 16, 64, 64
Cache = list[torch.Tensor]  # of each layer: keys and values, blocks, BLOCK, HEADS, SIZE


class Model:
    """Attention with random weights, a token at a time: no sum depends on what was cached."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device, shapes = device, [(VOCAB,), (VOCAB,), (LONGEST,), (LAYERS, 4, DIM)]
        self.tokens, self.head, self.positions, weights = (
            torch.randn(*shape, DIM, device="cpu").to(device) for shape in shapes
        )
        self.layers = weights / DIM**0.5

    def step(self, cache: Cache, blocks: list[int], at: int, token: int) -> int:
        """Writes the keys and values of the token at this position. Returns the next token."""
        table = torch.tensor(blocks, device=self.device)
        x = self.tokens[token] + self.positions[at]
        for layer, weights in zip(cache, self.layers, strict=True):
            query, key, value = (weights[:3] @ x).view(3, HEADS, SIZE)
            layer[:, blocks[at // BLOCK], at % BLOCK] = torch.stack((key, value))
            keys, values = layer[:, table].flatten(1, 2)[:, : at + 1]
            scores = torch.softmax(torch.einsum("hd,nhd->hn", query, keys), dim=-1)
            x = x + weights[3] @ torch.einsum("hn,nhd->hd", scores, values).flatten()
        return int((self.head @ x).argmax())


@dataclass(eq=False)
class Request:
    tokens: list[int]  # the prompt, and what was generated
    computed: int = 0  # tokens whose keys and values are in its blocks
    blocks: list[int] = field(default_factory=list)
    keys: kvs.prefix.PrefixKeys | None = None  # of its first blocks
    held: kvs.prefix.Preempted | None = None  # its blocks on the host, while it is preempted


class Engine:
    def __init__(self, model: Model, cache: Cache, prefixes: kvs.PrefixCache) -> None:
        self.model, self.cache, self.prefixes = model, cache, prefixes
        self.hasher = kvs.PrefixHasher("own-engine", "float32", block_tokens=BLOCK)
        self.free = list(range(cache[0].shape[1]))
        self.running, self.counts = list[Request](), Counter[str]()

    def run(self, requests: list[Request]) -> None:
        self.waiting = deque(requests)  # each must fit into the cache
        while self.waiting or self.running:
            for result in self.prefixes.poll(timeout=0.0 if self.running else None):
                if not result.ok:
                    raise RuntimeError(f"a {result.direction} failed: {result.error}")
            while self.waiting and self.start(self.waiting[0]):
                self.running.append(self.waiting.popleft())
            for request in list(self.running):
                if request in self.running:  # else an earlier one has preempted it
                    self.compute(request)

    def start(self, request: Request) -> bool:
        """Gives a request blocks, with what the host has of it. False: not now."""
        blocks = self.free[: -(-len(request.tokens) // BLOCK)]
        if len(blocks) * BLOCK < len(request.tokens):
            return False
        if request.held is not None:
            stored = -(-request.computed // BLOCK)
            state, job = self.prefixes.resume(request.held, blocks[:stored])
            if state == "pending":
                return False  # until poll() has reported its store
            request.held, found = None, request.computed
        else:
            request.keys = keys = self.hasher.lookup_keys(request.tokens)
            found = self.prefixes.lookup(keys).ready * BLOCK
            job = self.prefixes.load(keys, blocks[: len(keys)], prefix=found // BLOCK)
            self.counts["reused tokens"] += found
        request.computed = found if job else 0  # the rest is computed, also what was lost
        if job:
            job.wait()  # the kernels behind this line wait, the host does not
        request.blocks, self.free = blocks, self.free[len(blocks) :]
        return True

    def compute(self, request: Request) -> None:
        if request.computed == len(request.blocks) * BLOCK:
            if not self.free:
                self.preempt(self.running[-1])  # the newest, so that the oldest gets done
            if request.held is not None:
                return
            request.blocks.append(self.free.pop(0))
        at, request.computed = request.computed, request.computed + 1
        token = self.model.step(self.cache, request.blocks, at, request.tokens[at])
        if request.computed == len(request.tokens):
            request.tokens.append(token)
        if len(request.tokens) == LONGEST:
            keys = self.hasher.keys(request.tokens[: request.computed], known=request.keys)
            self.prefixes.store(keys, request.blocks[: len(keys)])
            self.leave(request, self.prefixes.evict(request.blocks))

    def preempt(self, request: Request) -> None:
        keys = self.hasher.request_keys(request.tokens[: request.computed])
        request.held = self.prefixes.preempt(keys, request.blocks[: len(keys)])
        if request.held is None:
            raise RuntimeError("the host pool is full; make it larger")
        self.leave(request, request.held.jobs)
        self.waiting.appendleft(request)
        self.counts["preemptions"] += 1

    def leave(self, request: Request, jobs: list[kvs.Job]) -> None:
        for job in jobs:
            job.wait()  # this stream may write the blocks, after the job
        self.running.remove(request)
        self.free, request.blocks = self.free + request.blocks, []


def serve(model: Model, prompts: list[list[int]], blocks: int) -> tuple[list[list[int]], Engine]:
    shape = (2, blocks, BLOCK, HEADS, SIZE)
    cache = kvs.allocate_layers(shape, LAYERS, dtype=torch.float32, device=model.device)
    gpu = kvs.PagedLayout(cache, block_dim=1)
    with kvs.PrefixCache(gpu, kvs.HostPool(gpu, num_pages=200)) as prefixes:
        engine, requests = Engine(model, cache, prefixes), [Request([*each]) for each in prompts]
        engine.run(requests)
    return [request.tokens for request in requests], engine


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    model = Model(parser.parse_args().device)
    prompts = [[*range(30), 5 * n, n + 3] for n in range(8)]
    alone = [serve(model, [prompt], blocks=LONGEST // BLOCK)[0][0] for prompt in prompts]
    together, engine = serve(model, prompts, blocks=20)
    assert together == alone
    assert min(engine.counts.values()) > 0
    print(f"{len(prompts)} requests got the tokens that they get alone; {dict(engine.counts)}")


if __name__ == "__main__":
    main()
