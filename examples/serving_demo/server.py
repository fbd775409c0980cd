"""A scheduler with continuous batching: everything that it does with torch_kvswap is in this file.

- A new prompt: `lookup`, `load` what the host has, compute the rest.
- No free block: `preempt` a request. Its blocks are stored, and free when the store has ended.
  Without a host cache its blocks are lost, and computed again when there is room.
- Room again: `resume` the request in other blocks.
- A request is done: `store` its prompt, which others may begin with.
- Each step: `poll`.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

import torch_kvswap as kvs
from serving_demo.model import Model
from torch_kvswap.prefix import Preempted


@dataclass(eq=False)
class Request:
    """A prompt to be continued.

    Attributes:
        prompt (bytes): its tokens.
        new_tokens (int): number of tokens to generate.
        tokens (list[int]): the tokens generated so far.
        cached (int): tokens at the front whose keys and values are computed.
        blocks (list[int]): its GPU blocks; none while it waits or is preempted.
        preempted (Preempted | None): what keeps its blocks on the host.
        load (Job | None): its kernels must wait for this load.
        first_token (float): when its first token was there, as of time.perf_counter().
    """

    prompt: bytes
    new_tokens: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    preempted: Preempted | None = None
    load: kvs.Job | None = None
    first_token: float = 0.0

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.new_tokens

    @property
    def cached_tokens(self) -> list[int]:
        return [*self.prompt, *self.tokens][: self.cached]

    @property
    def computed_tokens(self) -> bytes:
        """What must be in the cache before the next token: all but the newest one."""
        return self.prompt + bytes(self.tokens[:-1])


class Server:
    """Serves requests on the calling thread's current stream.

    Args:
        model (Model): the model.
        cache (list[Tensor]): `model.new_cache(num_blocks)`; each request must fit into it.
        prefixes (PrefixCache | None): for this cache, with one block per page. Nobody else may use
            it. None serves without a host cache.
        requests (Iterable[Request]): the requests to serve.
        corrupts (bool): zero a block of the first preempted request whenever it comes back.

    Attributes:
        preemptions (int): how often a request was preempted.
        reused (int): prompt tokens that were loaded instead of computed.
        computed_again (int): tokens of preempted requests whose blocks were lost.
        bytes_moved (dict[str, int]): by direction.
        corrupted (Request | None): the request that lost a block.
    """

    def __init__(
        self,
        model: Model,
        cache: list[Tensor],
        prefixes: kvs.PrefixCache | None,
        requests: Iterable[Request],
        corrupts: bool = False,
    ) -> None:
        self.preemptions = self.reused = self.computed_again = 0
        self.bytes_moved = {"store": 0, "load": 0}
        self.corrupted: Request | None = None
        self._model, self._cache, self._prefixes = model, cache, prefixes
        # Keys differ where the blocks of equal tokens differ: by model and type of the cache.
        self._hasher = kvs.PrefixHasher("demo", str(model.cache_dtype), model.block_size)
        self._waiting = deque(requests)
        self._running: list[Request] = []
        self._preempted: deque[Request] = deque()
        self._free = list(range(cache[0].shape[1]))
        self._leaving: list[tuple[list[kvs.Job], list[int]]] = []  # blocks that stores still read
        self._corrupts = corrupts

    def run(self) -> None:
        """Serves all requests.

        Raises:
            RuntimeError: a transfer failed.
        """
        while self._waiting or self._running or self._preempted:
            self._collect()
            generated = self._decode()
            resumed = self._resume()
            admitted = self._admit()
            if self._prefixes is not None and not (generated or resumed or admitted):
                self._report(self._prefixes.poll(timeout=None))  # until a store ends

    def _collect(self) -> None:
        """Frees the blocks of ended stores."""
        if self._prefixes is None:
            return
        self._report(self._prefixes.poll())
        leaving, self._leaving = self._leaving, []
        for jobs, blocks in leaving:
            if all(job.query() for job in jobs):
                self._free += blocks
            else:
                self._leaving.append((jobs, blocks))

    def _report(self, results: list[kvs.Result]) -> None:
        for result in results:
            if not result.ok:
                raise RuntimeError(f"a {result.direction} failed: {result.error}") from result.error
            self.bytes_moved[result.direction] += result.nbytes

    def _decode(self) -> int:
        """Computes one token of each running request that has a block for it."""
        generated = []
        for request in tuple(self._running):
            if request not in self._running or not self._make_room(request):
                continue
            if request.load is not None:
                request.load.wait()  # only the kernels from here on wait, not the host
                request.load = None
            token = torch.tensor(request.tokens[-1:], device=self._model.device)
            table = self._model.table(request.blocks)
            generated.append(self._model.decode(token, request.cached, self._cache, table))
            request.cached += 1
            request.tokens.append(int(generated[-1]))
            if request.is_done:
                self._finish(request)
        return len(generated)

    def _make_room(self, request: Request) -> bool:
        """Whether the request has a block for its next token.

        If none is free, a request is preempted, unless a store will free blocks anyway.
        """
        if request.cached == len(request.blocks) * self._model.block_size:
            if self._free:
                request.blocks.append(self._free.pop(0))
            elif not self._leaving:
                self._preempt(self._running[0])  # the one that runs for longest
        return request.cached < len(request.blocks) * self._model.block_size

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self.preemptions += 1
        if self._prefixes is None:
            self.computed_again += request.cached
            self._free += request.blocks
            request.blocks = []
            self._waiting.appendleft(request)
            return
        used = request.blocks[: self._model.blocks_for(request.cached)]
        keys = self._hasher.request_keys(request.cached_tokens)
        request.preempted = self._prefixes.preempt(keys, used)
        if request.preempted is None:
            raise RuntimeError("the host pool is full; make it larger")
        self._leaving.append((request.preempted.jobs, request.blocks))
        request.blocks, request.load = [], None
        self._preempted.append(request)

    def _resume(self) -> int:
        """Loads preempted requests for which there is room, and returns how many."""
        resumed = 0
        for request in tuple(self._preempted):
            assert self._prefixes is not None
            assert request.preempted is not None
            used = self._model.blocks_for(request.cached)
            if used + 1 > len(self._free):
                continue
            state, job = self._prefixes.resume(request.preempted, self._free[:used])
            if state == "pending":
                continue  # poll() has not reported its store yet
            if job is None:
                raise RuntimeError("a preempted request is lost: its store failed")
            request.preempted, request.load = None, job
            request.blocks = self._take(used)
            self._preempted.remove(request)
            self._running.append(request)
            resumed += 1
            if self._corrupts and self.corrupted in (None, request):
                self.corrupted = request
                job.wait()
                for kv_cache in self._cache:
                    kv_cache[:, request.blocks[0]] = 0
        return resumed

    def _admit(self) -> int:
        """Computes the prompts of new requests for which there is room, and returns how many."""
        admitted = 0
        while self._waiting:
            request = self._waiting[0]
            context = request.computed_tokens
            count = self._model.blocks_for(len(context))
            if count > len(self._free):
                break
            self._running.append(self._waiting.popleft())
            request.blocks = self._take(count)
            cached = self._load_prefix(request)
            self.reused += cached
            table = self._model.table(request.blocks)
            token = int(self._model.prefill(context, self._cache, table, cached))
            if not request.tokens:
                request.tokens.append(token)
                request.first_token = perf_counter()
            request.cached = len(context)
            if request.is_done:
                self._finish(request)
            admitted += 1
        return admitted

    def _load_prefix(self, request: Request) -> int:
        """Loads the blocks at the front that the host has, and returns their number of tokens."""
        if self._prefixes is None:
            return 0
        keys = self._hasher.lookup_keys(list(request.prompt))
        ready = self._prefixes.lookup(keys).ready
        if ready:
            blocks = request.blocks[: len(keys)]
            job = self._prefixes.load(keys, blocks, prefix=ready)
            if job is None:
                return 0
            job.wait()
        return ready * self._model.block_size

    def _finish(self, request: Request) -> None:
        self._running.remove(request)
        if self._prefixes is None:
            self._free += request.blocks
            request.blocks = []
            return
        keys = self._hasher.keys(list(request.prompt))
        self._prefixes.store(keys, request.blocks[: len(keys)])
        # The store just made, and earlier ones that still read these blocks.
        self._leaving.append((self._prefixes.evict(request.blocks), request.blocks))
        request.blocks = []

    def _take(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        return taken
