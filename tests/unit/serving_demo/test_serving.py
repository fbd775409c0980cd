import random
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from serving_demo.model import Model, same_bits_every_time
from serving_demo.request import Request
from serving_demo.serving import Server
from serving_demo.swapper import Swapper
from torch_kvswap.handler import LOADS, Result
from torch_kvswap.prefix.engine import OffloadEngine

JUNK = 77.0


def ended(number, direction, nbytes, tag):
    """A Result after a second of copying."""
    times = 0.0, 0.0, 1.0
    return Result(number, direction, "done", nbytes, nbytes, "host", *times, (), None, tag)


class LateJob:
    is_submitted = True

    def __init__(self, handler, number, direction, blocks, pages, tag):
        self.handler, self.id, self.direction, self.tag = handler, number, direction, tag
        self.blocks, self.pages = blocks, pages

    def wait(self):
        self.handler.run_up_to(self)

    def query(self):
        return self not in self.handler.pending[self.direction]


class LateHandler:
    """Copies as late as an asynchronous handler may: when the job is reported or waited for.

    Each direction copies in order, independently of the other. A caller that reuses blocks or pages
    before that, or reads them without waiting, gets junk.
    """

    def __init__(self, cache, num_pages, blocks_per_page=1, seed=0):
        self.host = SimpleNamespace(
            num_pages=num_pages,
            blocks_per_page=blocks_per_page,
            local_pages=range(num_pages),
            num_ready_pages=num_pages,
        )
        self.pools = (self.host,)
        layout = {"block_bytes": 8, "num_blocks": cache[0].shape[1], "dtype": cache[0].dtype}
        self.layouts = (SimpleNamespace(**layout),)
        self._native = SimpleNamespace(groups=SimpleNamespace(is_list=False))
        self.cache = cache
        slots = num_pages * blocks_per_page
        self.memory = [torch.full((2, slots, *t.shape[2:]), JUNK) for t in cache]
        self.random = random.Random(seed)
        self.rate = self.random.choice([0.05, 0.3, 1.0])
        self.pending = {"store": deque(), "load": deque()}
        self.results, self.count = [], 0
        self.reserved, self._ended = {}, []

    def _submit(self, channel, ids, *, tag, reserved, **options):
        direction = "load" if channel == LOADS else "store"
        blocks, pages, _ = ids
        if direction == "load":
            for kv_cache in self.cache:
                kv_cache[:, blocks] = JUNK
        assert len(pages) == -(-len(blocks) // self.host.blocks_per_page)
        self.count += 1
        job = LateJob(self, self.count, direction, list(blocks), list(pages), tag)
        reserved.job = job
        self.reserved[job.id] = reserved
        self.pending[direction].append(job)
        return job

    def run_up_to(self, job):
        while job in self.pending[job.direction]:
            self.run_next(job.direction)

    def run_next(self, direction):
        job, k = self.pending[direction].popleft(), self.host.blocks_per_page
        slots = [job.pages[i // k] * k + i % k for i in range(len(job.blocks))]
        for kv_cache, memory in zip(self.cache, self.memory, strict=True):
            if job.direction == "store":
                memory[:, slots] = kv_cache[:, job.blocks]
                kv_cache[:, job.blocks] = JUNK
            else:
                kv_cache[:, job.blocks] = memory[:, slots]
        nbytes = len(slots) * 8
        self.results.append(ended(job.id, job.direction, nbytes, job.tag))

    def _assign_pages_to(self, engine):
        pass

    def _check_options(self, after, layer_groups=None, gate=None):
        pass

    def _read_ended(self, end, timeout):
        assert timeout == 0
        for result in self._take_results():
            end(result, self.reserved.pop(result.job_id))
            self._ended.append(result)

    def _take_results(self):
        for direction, jobs in self.pending.items():
            while jobs and self.random.random() < self.rate:
                self.run_next(direction)
        return self.take_results(self.rate)

    def take_results(self, rate=1.0):
        taken = []
        while self.results and self.random.random() <= rate:
            taken.append(self.results.pop(0))
        return taken

    def synchronize(self):
        for direction, jobs in self.pending.items():
            while jobs:
                self.run_next(direction)


class ExactModel(Model):
    """Its tokens depend on every byte that a request has cached, and on where; it is fast."""

    def __init__(self, block_size, max_blocks):
        self.block_size, self.max_blocks = block_size, max_blocks
        self.cache_dtype = torch.float32
        self.device = torch.device("cpu")
        self.layers = [None]

    def forward(self, tokens, start, cache, table):
        for position, token in enumerate(tokens.tolist(), start):
            block, slot = table[position // self.block_size], position % self.block_size
            cache[0][:, block, slot] = token
        seen = cache[0][:, table].flatten(1, 2).sum((0, 2, 3)).long()
        weights = torch.arange(len(seen)) * 2 + 1
        hashes = [int((seen * weights)[: start + i + 1].sum()) for i in range(len(tokens))]
        return functional.one_hot(torch.tensor(hashes) // 256 * 7 % 256, 256)


def make_requests(lengths, new_tokens, block_size, seed=0):
    random_bytes = random.Random(seed).randbytes
    return [
        Request(i, random_bytes(length), new_tokens, block_size) for i, length in enumerate(lengths)
    ]


def assert_is_sound(server, requests):
    owned = [number for request in requests for number in request.blocks]
    assert len(set(owned)) == len(owned)
    assert server.blocks.num_free + len(owned) == server.blocks.num_total
    for request in requests:
        assert request.blocks or not request.job
        assert not (request.is_done and request.job and request.job.direction == "store")


def serve(model, requests, handler):
    def comes_back_to_go_on(request):
        assert request.has_room

    engine = OffloadEngine(handler)
    swapper = Swapper(engine, model.block_size)
    server = Server(model, handler.cache, swapper, requests, comes_back_to_go_on)
    generated = 0
    while server.is_busy:
        generated += server.step()
        assert_is_sound(server, requests)
    assert generated == sum(request.new_tokens for request in requests)
    assert not any(request.blocks or request.preempted for request in requests)
    stats = engine.manager.stats()
    assert stats.free_pages + stats.idle_pages == stats.pages
    return swapper


def alone(model, requests):
    return [model.generate(request.prompt, request.new_tokens) for request in requests]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(1, 16),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(1, 60),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_every_request_gets_the_tokens_it_gets_alone_whatever_is_too_small(
    lengths, new_tokens, block_size, spare_blocks, num_pages, blocks_per_page, seed
):
    requests = make_requests(lengths, new_tokens, block_size)
    max_blocks = max(request.max_blocks for request in requests)
    model = ExactModel(block_size, max_blocks)
    cache = model.new_cache(max_blocks + spare_blocks)
    swapper = serve(model, requests, LateHandler(cache, num_pages, blocks_per_page, seed))
    assert [request.tokens for request in requests] == alone(model, requests)
    moved = swapper.traffic
    assert moved["store"].requests == moved["load"].requests
    assert moved["store"].blocks <= moved["load"].blocks


def test_the_transformer_swaps_and_no_token_changes():
    requests = make_requests([9, 12, 5, 16, 9, 14], 40, block_size=8)
    model = Model(block_size=8, max_blocks=7, seed=1, device=torch.device("cpu"))
    with same_bits_every_time():
        swapper = serve(model, requests, LateHandler(model.new_cache(10), 48, 1))
        assert [request.tokens for request in requests] == alone(model, requests)
    assert swapper.traffic["load"].requests > 10
    assert swapper.traffic["load"].nbytes == swapper.traffic["load"].blocks * 8


def corrupted(how):
    """The requests whose tokens change when `how` treats the load of each request."""
    requests = make_requests([30, 20, 41, 16, 9, 33], 24, block_size=8)
    model = ExactModel(block_size=8, max_blocks=8)
    handler = LateHandler(model.new_cache(14), 48, 1)
    submit = handler._submit

    def corrupt_loads(channel, ids, **options):
        blocks, pages, first_block = ids
        if channel == LOADS:
            pages = how(pages)
        return submit(channel, (blocks, pages, first_block), **options)

    handler._submit = corrupt_loads
    serve(model, requests, handler)
    return [
        request.id
        for request, expected in zip(requests, alone(model, requests), strict=True)
        if request.tokens != expected
    ]


def test_blocks_that_come_back_in_another_order_are_seen_in_the_tokens():
    assert corrupted(list) == []
    assert corrupted(lambda page_ids: page_ids[::-1]) != []


def test_the_others_are_decoded_while_a_request_moves():
    requests = make_requests([8, 8, 8], 24, block_size=8)
    model = ExactModel(block_size=8, max_blocks=4)
    handler = LateHandler(model.new_cache(8), 12)
    handler._take_results = handler.take_results  # nothing ends by itself
    server = Server(model, handler.cache, Swapper(OffloadEngine(handler), 8), requests)
    steps_beside = 0
    while server.is_busy:
        moves = any(handler.pending.values())
        steps_beside += bool(server.step() and moves)
    assert [request.tokens for request in requests] == alone(model, requests)
    assert steps_beside > 5


def test_a_request_that_comes_back_and_goes_at_once_is_not_stored_again():
    (request,) = make_requests([30], 24, block_size=8)
    model = ExactModel(block_size=8, max_blocks=8)
    handler = LateHandler(model.new_cache(8), 12)
    handler.rate = 1.0
    swapper = Swapper(OffloadEngine(handler), 8)
    request.blocks, request.cached, request.tokens = [0, 1, 2, 3], 30, [9]
    for _ in range(2):
        swapper.store(request)
        assert swapper.is_moving
        assert swapper.is_storing
        assert swapper.poll() == [("store", request)]
        assert not swapper.is_moving
        swapper.load(request)
        assert not swapper.is_storing
        assert swapper.poll() == [("load", request)]
    assert [(moved.requests, moved.blocks) for moved in swapper.traffic.values()] == [
        (2, 4),
        (2, 8),
    ]


def test_a_request_is_let_in_only_if_the_host_could_take_it():
    requests = make_requests([8, 8, 8], 24, block_size=8)
    model = ExactModel(block_size=8, max_blocks=4)
    swapper = serve(model, requests, LateHandler(model.new_cache(5), num_pages=7))
    assert swapper.traffic["store"].requests == 0
    requests = make_requests([8, 8, 8], 24, block_size=8)
    swapper = serve(model, requests, LateHandler(model.new_cache(5), num_pages=8))
    assert swapper.traffic["store"].requests > 0


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_failed_transfer_stops_the_server_and_names_the_request(direction):
    requests = make_requests([8, 8, 8], 24, block_size=8)
    model = ExactModel(block_size=8, max_blocks=4)
    handler = LateHandler(model.new_cache(5), num_pages=12)
    finished = handler._take_results
    reason = OSError("the link fell off")

    def fail():
        return [
            replace(r, state="failed", error=reason) if r.direction == direction else r
            for r in finished()
        ]

    handler._take_results = fail
    with pytest.raises(
        RuntimeError, match=rf"the {direction} of request \d failed: the link fell off"
    ) as caught:
        serve(model, requests, handler)
    assert caught.value.__cause__ is reason
