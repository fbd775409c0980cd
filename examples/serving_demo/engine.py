"""A serving engine on torch_kvswap, to copy from. docs/own_engine.md explains its rules.

Each step preempts requests if the others need more blocks than are free, starts requests for which
there is room, runs the model, polls, and accepts the tokens of all requests whose load succeeded.
Keys and values come from the GPU, the host or a second tier; whatever fails is computed again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

import torch_kvswap as kvs
from serving_demo.model import Model


@dataclass(eq=False)
class Request:
    """A prompt to be continued.

    Attributes:
        prompt (Sequence[int]): its tokens.
        new_tokens (int): number of tokens to generate.
        tokens (list[int]): the prompt, and the tokens generated so far.
        computed (int): tokens at the front that have keys and values, on the GPU or held.
        blocks (list[int]): its GPU blocks; none while it waits.
        held (Reservation | None): keeps the blocks of a preempted request on the host.
        load (Job | None): the model must wait for this load.
        was_asked (bool): its prefix was looked up before.
        first_token (float): when its first token was there, as of time.perf_counter().
    """

    prompt: Sequence[int]
    new_tokens: int
    tokens: list[int] = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    held: kvs.prefix.Reservation | None = None
    load: kvs.Job | None = None
    was_asked: bool = False
    first_token: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


class Engine:
    """Serves requests on the calling thread's current stream.

    Args:
        model (Model): the model.
        cache (list[Tensor]): `model.new_cache(num_blocks)`; each request must fit into it.
        prefixes (PrefixCache | None): for this cache, with one block per page. Nobody else may use
            it. None serves without a host cache.
        requests (Iterable[Request]): the requests to serve, the oldest first.

    Attributes:
        preemptions (int): how often a request was preempted.
        reused (int): tokens of prefixes that were loaded instead of computed.
        computed_again (int): tokens whose keys and values were lost, or could not be loaded.
    """

    def __init__(
        self,
        model: Model,
        cache: list[Tensor],
        prefixes: kvs.PrefixCache | None,
        requests: Iterable[Request],
    ) -> None:
        self.model, self.cache, self.prefixes = model, cache, prefixes
        # Keys differ where the blocks of equal tokens differ: by model and type of the cache.
        self.hasher = kvs.PrefixHasher("demo", str(model.cache_dtype), model.block_size)
        self.waiting = list(requests)
        self.age = {request: number for number, request in enumerate(self.waiting)}
        self.running: list[Request] = []
        self.free = list(range(cache[0].shape[1]))
        self.preemptions = self.reused = self.computed_again = 0

    def run(self) -> None:
        """Serves all requests."""
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        for request in sorted(self.running, key=self.age.__getitem__):
            self.make_room(request)
        self.admit()
        if not self.running:
            # Until a store ends; with a second tier or a server, for a millisecond.
            self.poll(timeout=None)
            return
        tokens = [(request, self.compute(request)) for request in self.running]
        # The tokens are on the host, so all loads that the model has waited for have ended.
        failed = self.poll()
        for request, token in tokens:
            if request not in failed:
                self.accept(request, token)

    def make_room(self, request: Request) -> None:
        """Gives a running request the block of its next token, or preempts the newest requests."""
        while request in self.running and self.blocks_of(request) > len(request.blocks):
            if self.free:
                request.blocks += self.take(1)
            else:  # the oldest request always goes on, so each is served in the end
                self.preempt(max(self.running, key=self.age.__getitem__))

    def admit(self) -> None:
        """Starts the requests for which there is room, also for their next token."""
        for request in sorted(self.waiting, key=self.age.__getitem__):
            if self.blocks_of(request) > len(self.free):
                break  # newer requests do not take its blocks
            request.blocks = self.take(self.blocks_of(request))
            if self.resume(request) if request.held else self.load_prefix(request):
                self.waiting.remove(request)
                self.running.append(request)
        for request in self.waiting:  # at the end, so that no more are looked up than fit
            self.give_back(request)

    def load_prefix(self, request: Request) -> bool:
        """Loads what the host has of a request. False: a later step may find more."""
        if self.prefixes is None:
            return True
        keys = self.hasher.lookup_keys(request.tokens)
        found = self.prefixes.lookup(keys, again=request.was_asked)
        request.was_asked = True
        if found.asking or found.pending:  # the second tier is being asked, or a store runs
            return False
        blocks = request.blocks[: len(keys)]
        if found.ready:
            request.load = self.prefixes.load(keys, blocks, prefix=found.ready, tag=request)
        if request.load is not None:  # None if they were evicted since lookup()
            request.computed = found.ready * self.model.block_size
            self.reused += request.computed
        return True

    def preempt(self, request: Request) -> None:
        self.preemptions += 1
        if self.prefixes is not None:
            keys = self.hasher.request_keys(request.tokens[: request.computed])
            request.held = self.prefixes.store(keys, request.blocks[: len(keys)], hold=True).lease
        if request.held is None:  # the host has no room
            self.forget(request)
        self.wait_again(request)

    def resume(self, request: Request) -> bool:
        """Loads a preempted request. False: its store has not been reported yet."""
        assert self.prefixes is not None
        keys = self.hasher.request_keys(request.tokens[: request.computed])
        is_pending = self.prefixes.lookup(keys, again=True).pending > 0
        request.load = self.prefixes.load(keys, request.blocks[: len(keys)], tag=request)
        if request.load is None and is_pending:
            return False
        request.held = None  # the load keeps what it reads
        if request.load is not None:
            return True
        self.forget(request)
        return self.load_prefix(request)

    def compute(self, request: Request) -> int:
        """The next token of a running request."""
        if request.load is not None:
            request.load.wait()  # the kernels from here on wait, the host does not
            request.load = None
        table, start = self.model.table(request.blocks), request.computed
        if request.generated and start == len(request.tokens) - 1:
            newest = torch.tensor(request.tokens[-1:], device=self.model.device)
            return int(self.model.decode(newest, start, self.cache, table))
        return int(self.model.prefill(request.tokens, self.cache, table, start))

    def poll(self, timeout: float | None = 0.0) -> set[Request]:
        """Ends jobs. Requests whose load failed wait to be computed again, and are returned."""
        if self.prefixes is None:
            return set()
        results = self.prefixes.poll(timeout)
        failed = {each.tag for each in results if each.direction == "load" and not each.ok}
        for request in failed:
            self.forget(request)
            self.wait_again(request)
        return failed

    def accept(self, request: Request, token: int) -> None:
        request.computed = len(request.tokens)
        request.tokens.append(token)
        request.first_token = request.first_token or perf_counter()
        if len(request.generated) < request.new_tokens:
            return
        if self.prefixes is not None:
            keys = self.hasher.keys(request.tokens[: request.computed])
            self.prefixes.store(keys, request.blocks[: len(keys)])
        self.running.remove(request)
        self.give_back(request)

    def take(self, count: int) -> list[int]:
        """Free blocks, which the model may write after the jobs that still use them."""
        blocks = [self.free.pop() for _ in range(count)]
        for job in self.prefixes.jobs_using(blocks) if self.prefixes is not None else ():
            job.wait()
        return blocks

    def give_back(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks = []

    def wait_again(self, request: Request) -> None:
        self.running.remove(request)
        self.waiting.append(request)
        self.give_back(request)

    def forget(self, request: Request) -> None:
        """Its keys and values are computed, or looked up, again. Nothing of it is stored before."""
        self.computed_again += request.computed
        request.computed = 0

    def blocks_of(self, request: Request) -> int:
        return self.model.blocks_for(len(request.tokens))
