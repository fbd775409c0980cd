"""What is stored when, and that it is found again."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from torch_kvswap.block_manager import BlockManager
from torch_kvswap.prefix_hash import DIGEST_BYTES, PrefixHasher
from torch_kvswap.storing import Chain, EagerStoring, LazyStoring

HASHER = PrefixHasher("m", "bfloat16", 4)
SYSTEM = list(range(8))  # two blocks that all prompts begin with


def prompt(number, blocks=2):
    return [*SYSTEM, *range(100 * number, 100 * number + 4 * blocks)]


def keys_of(number, blocks=2):
    return HASHER.keys(prompt(number, blocks))


def test_eager_storing_names_a_request_as_soon_as_it_is_computed_and_nothing_later():
    storing = EagerStoring()
    assert storing.computed(keys_of(1), [5, 6, 7, 8]) == [Chain(keys_of(1), [5, 6, 7, 8])]
    assert storing.evicting([8]) == []


def test_lazy_storing_names_what_leaves_with_the_prefix_that_stays():
    storing = LazyStoring()
    assert storing.computed(keys_of(1), [5, 6, 7, 8]) == []
    assert storing.computed(keys_of(2), [5, 6, 9, 10]) == []
    assert storing.evicting([8]) == [Chain(keys_of(1), [5, 6, 7, 8])]
    assert storing.evicting([7, 10]) == [
        Chain(keys_of(1)[: 3 * DIGEST_BYTES], [5, 6, 7]),
        Chain(keys_of(2), [5, 6, 9, 10]),
    ]
    assert storing.evicting([77]) == []


def test_blocks_that_leave_together_are_one_chain():
    storing = LazyStoring()
    storing.computed(keys_of(1), [5, 6, 7, 8])
    assert storing.evicting([8, 7, 6]) == [Chain(keys_of(1), [5, 6, 7, 8])]
    assert storing.evicting([8, 7]) == []


def test_a_block_that_was_given_to_another_prompt_is_never_named_for_the_first():
    storing = LazyStoring()
    storing.computed(keys_of(1), [5, 6, 7, 8])
    storing.computed(keys_of(2), [15, 16, 7, 9])  # nobody said that 7 would go
    assert storing.evicting([8]) == [Chain(keys_of(1)[3 * DIGEST_BYTES :], [8])]
    storing.computed(keys_of(3), [15, 16, 20, 21])
    storing.evicting([20])
    assert storing.evicting([21]) == [Chain(keys_of(3)[3 * DIGEST_BYTES :], [21])]


def test_of_two_copies_of_a_block_one_may_leave():
    storing = LazyStoring()
    storing.computed(keys_of(1), [5, 6, 7, 8])
    storing.computed(keys_of(1), [15, 16, 17, 18])
    assert storing.evicting([6]) == [Chain(keys_of(1)[: 2 * DIGEST_BYTES], [15, 16])]
    assert storing.evicting([18]) == [Chain(keys_of(1), [15, 16, 17, 18])]


class Server:
    """A GPU cache with a prefix cache of its own, least recently used blocks leaving first."""

    def __init__(self, gpu_blocks, storing, pages):
        self.manager, self.storing = BlockManager(pages), storing
        self.gpu = OrderedDict()  # key to block
        self.free = list(range(gpu_blocks))
        self.content = {}  # of a page
        self.stored = 0

    def store(self, chains):
        on = {block: key for key, block in self.gpu.items()}
        for keys, blocks in chains:
            store = self.manager.prepare_store(keys)
            if store is None:
                continue
            for place, page in zip(store.places, store.pages, strict=True):
                assert on[blocks[place]] == keys[place * 32 : place * 32 + 32]
                self.content[page] = on[blocks[place]]
            self.stored += len(store.pages)
            self.manager.complete(store)

    def serve(self, tokens):
        """How many blocks of the prompt were found on the host, and not on the GPU."""
        keys = HASHER.keys(tokens)
        split = [keys[i : i + 32] for i in range(0, len(keys), 32)]
        here = next((i for i, key in enumerate(split) if key not in self.gpu), len(split))
        ready = self.manager.lookup(keys).ready
        load = self.manager.prepare_load(keys, ready)
        assert [self.content[page] for page in load.pages] == split[:ready]
        self.manager.complete(load)
        for key in reversed(split):
            if key in self.gpu:
                self.gpu.move_to_end(key)
        while len(self.free) < len(split) - here:
            oldest = next(iter(self.gpu))
            self.store(self.storing.evicting([self.gpu[oldest]]))
            self.free.append(self.gpu.pop(oldest))
        for key in split:
            if key not in self.gpu:
                self.gpu[key] = self.free.pop()
        self.store(self.storing.computed(keys, [self.gpu[key] for key in split]))
        return max(ready - here, 0)


@pytest.mark.parametrize("kind", [EagerStoring, LazyStoring])
def test_prompts_that_have_left_the_gpu_are_found_on_the_host(kind):
    server = Server(10, kind(), 100)
    for number in range(1, 9):
        assert server.serve(prompt(number)) == 0
    assert server.serve(prompt(1)) == 2
    server.free += server.gpu.values()  # the engine forgets all that is on the GPU
    server.gpu.clear()
    assert server.serve(prompt(2)) == 4
    assert server.serve(prompt(1000)) == 0


def test_lazy_storing_stores_less_and_finds_as_much():
    order = np.random.default_rng(1).zipf(1.4, 400) % 30 + 1
    results = {}
    for kind in (EagerStoring, LazyStoring):
        server = Server(20, kind(), 200)
        results[kind] = sum(server.serve(prompt(int(number))) for number in order), server.stored
    assert results[LazyStoring][0] == results[EagerStoring][0] > 100
    assert results[LazyStoring][1] <= results[EagerStoring][1]


def test_lazy_storing_of_prompts_that_fit_on_the_gpu_stores_nothing():
    server = Server(20, LazyStoring(), 200)
    for _ in range(10):
        server.serve(prompt(1))
        server.serve(prompt(2))
    assert server.stored == 0
