"""Our manager meets the contract of vLLM's scheduler, call by call, and evicts prompts from their ends.

vLLM need not be installed. Where it is, its own manager is tested beside ours.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_contract import IS_REAL, KVSwapManager, base, common

HIT, MISS = base.LookupResult.HIT, base.LookupResult.MISS
PENDING = base.LookupResult.HIT_PENDING
METRIC = "vllm:kv_offload_cpu_cache_usage_perc"
POLICIES = pytest.mark.parametrize("policy", ["lru", "arc"])
SEEDS = range(4)
needs_vllm = pytest.mark.skipif(not IS_REAL, reason="vLLM is not here")


def key(document: int, place: int, group: int = 0) -> bytes:
    """As long as those of vLLM: a SHA-256 and a group."""
    return document.to_bytes(28, "big") + place.to_bytes(4, "big") + group.to_bytes(4, "big")


def keys(*places: int, prompt: int = 0) -> list[bytes]:
    return [key(prompt, place) for place in places]


def request(name: str = "request", prompt: int = 0) -> Any:
    made = base.ReqContext(name)
    for place, group in itertools.product(range(100), range(2)):
        made.set_offload_key_position(key(prompt, place, group), 16 * (place + 1))
    return made


def manager(
    pages: int = 4, policy: str = "lru", threshold: int = 0, events: bool = False
) -> KVSwapManager:
    return KVSwapManager(pages, policy, threshold, events)


def store(of: Any, context: Any, *places: int, prompt: int = 0) -> list[bytes]:
    """What was evicted for it."""
    output = of.prepare_store(keys(*places, prompt=prompt), context)
    if output.keys_to_store:
        of.complete_store(set(output.keys_to_store), context)
    return list(output.evicted_keys)


def pages_of(spec: Any) -> list[int]:
    assert isinstance(spec, common.CPULoadStoreSpec)
    return [int(page) for page in spec.block_ids]


def evicted_one_by_one(of: Any, count: int) -> list[bytes]:
    other = request("other", 9)
    return [one for place in range(count) for one in store(of, other, place, prompt=9)]


# Calls


@POLICIES
def test_it_agrees_with_a_model_through_random_calls(policy):
    """The model knows only what the contract says: what has been stored and not evicted, where, and
    what events tell of it. Keys of two groups have the same hashes."""
    ours, random_, asks = manager(12, policy, events=True), random.Random(5), request("asks")
    state: dict[bytes, Any] = {}
    page_of: dict[bytes, int] = {}
    held: set[int] = set()  # by jobs at a reset
    told, lost = set[bytes](), set[bytes]()
    filling: list[list[bytes]] = []
    loading: list[tuple[Any, list[bytes], list[int]]] = []
    for step in range(3000):
        some = [key(0, n % 15, n // 15) for n in random_.sample(range(30), random_.randint(1, 6))]
        action = random_.randrange(4)
        if random_.random() < 0.01:
            ours.reset_cache()
            held |= {page_of[one] for of_job in filling for one in of_job}
            held |= {page for _, _, pages in loading for page in pages}
            state, filling, loading = {}, [], []
        if random_.random() < 0.05:
            ours.on_reset_flushed()
            held.clear()
        if action == 0:
            output = ours.prepare_store(some, request())
            if output is not None:
                new = [one for one in some if one not in state]
                assert output.keys_to_store == new
                for one in output.evicted_keys:
                    assert state.pop(one) is HIT
                    assert one not in some
                pages = pages_of(output.store_spec)
                in_use = held.union(*(of_load for _, _, of_load in loading))
                assert in_use.union(page_of[one] for one in state).isdisjoint(pages)
                page_of |= zip(new, pages, strict=True)
                state |= dict.fromkeys(new, PENDING)
                filling += [new] if new else []
        elif action == 1 and filling:
            ended, well = filling.pop(random_.randrange(len(filling))), random_.random() < 0.8
            ours.complete_store(set(ended), request(), success=well)
            state |= dict.fromkeys(ended, HIT)
            for one in ended if not well else ():
                del state[one]
                lost.add(one)
        elif action == 2:
            hits = [one for one in some if state.get(one) is HIT]
            if hits != some:
                with pytest.raises(
                    RuntimeError, match=f"request asks: not all of the {len(some)} "
                ):
                    ours.prepare_load(some, asks)
            context = request(str(step))  # several load the same keys
            pages = pages_of(ours.prepare_load(hits, context))
            assert pages == [page_of[one] for one in hits]
            loading.append((context, hits, pages))
        elif action == 3 and loading:
            context, of_load, pages = loading.pop(random_.randrange(len(loading)))
            if of_load and random_.random() < 0.2:  # another load may have failed to read it, too
                ours.fail_pages(pages[:1])
                if state.get(of_load[0]) is HIT and page_of[of_load[0]] == pages[0]:
                    del state[of_load[0]]
            ours.complete_load(set(of_load), context)
        for one in some:
            assert ours.lookup(one, asks) is state.get(one, MISS)
        assert ours._states.keys() == state.keys()
        if random_.random() < 0.3:
            for event in ours.take_events():
                if event.metadata_only:
                    assert lost.difference(state).issuperset(event.keys)
                    lost.difference_update(event.keys)
                else:
                    was_told = told.issuperset if event.removed else told.isdisjoint
                    assert was_told(event.keys)
                    told.symmetric_difference_update(event.keys)
            assert told == {one for one, of_key in state.items() if of_key is HIT}
            assert lost <= state.keys(), "they are stored again"
            lost.clear()
    ours.reset_cache()
    ours.on_reset_flushed()
    assert len(ours.prepare_store(keys(*range(12)), request()).keys_to_store) == 12


@needs_vllm
def test_a_threshold_counts_offers():
    def skipped() -> int:
        return int(ours.get_stats().reduce()["vllm:kv_offload_stores_skipped"])

    ours = manager(threshold=2)
    assert ours.prepare_store(keys(1, 2, 3), request()).keys_to_store == []
    assert [skipped(), skipped()] == [3, 0]
    assert ours.prepare_store(keys(1, 2, 4), request()).keys_to_store == keys(1, 2)
    assert skipped() == 1


@needs_vllm
def test_stats_say_what_is_in_use():
    ours = manager()
    assert ours.get_stats().reduce()[METRIC] == 0
    store(ours, request(), 1)
    ours.prepare_load(keys(1), request())
    ours.prepare_store(keys(2, 3), request())
    stats = ours.get_stats().reduce()
    assert stats[METRIC] == 0.75
    assert stats["vllm:kv_offload_cpu_cache_write_usage_perc"] == 0.5
    assert stats["vllm:kv_offload_cpu_cache_read_usage_perc"] == 0.25
    assert ours.prepare_store(keys(4, 5, 6, 7), request()) is None
    assert ours.get_stats().reduce()["vllm:kv_offload_cpu_allocation_size_sum"] == 4
    ours.complete_load(keys(1), request())
    ours.complete_store(keys(2, 3), request())
    assert ours.get_stats().reduce()[METRIC] == 0


# Eviction


@POLICIES
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("finishes", ["never", "before its stores end", "after them"])
@pytest.mark.parametrize(
    ("begin", "end"), [([0, 1, 2], [0, 1, 2]), ([0, 1, 2], [0, 2, 1]), ([2, 0, 1], [2, 0, 1])]
)
def test_a_prompt_is_evicted_from_its_end(policy, finishes, begin, end, groups):
    """However its stores begin and end. Each names the keys of one group of layers after another."""
    ours, one = manager(6 * groups, policy), request()
    every = [key(0, place, group) for place in range(6) for group in range(groups)]
    stores = {
        number: [key(0, 2 * number + at, group) for group in range(groups) for at in range(2)]
        for number in begin
    }
    for number in begin:
        assert ours.prepare_store(stores[number], one).keys_to_store == stores[number]
    if finishes == "before its stores end":
        ours.on_request_finished(one)
    for number in end:
        ours.complete_store(set(stores[number]), one)
    if finishes == "after them":
        ours.on_request_finished(one)
    assert evicted_one_by_one(ours, len(every)) == every[::-1]


def test_arc_counts_no_own_reuse():
    """Only what another request has found is kept when others come."""
    ours, one, another = manager(policy="arc"), request("1"), request("2", 1)
    store(ours, one, 0, 1)
    assert store(ours, one, 0, 1) == []  # it was preempted, and is offered again
    ours.on_request_finished(one)
    store(ours, another, 0, 1, prompt=1)
    ours.on_request_finished(another)
    again = request("3", 1)
    assert ours.prepare_store(keys(0, 1, prompt=1), again).keys_to_store == []
    ours.on_request_finished(again)
    assert evicted_one_by_one(ours, 4) == keys(1, 0) + keys(1, 2, prompt=9)


def test_a_loaded_prompt_is_evicted_from_its_end():
    """Before its request has finished. Loads name one group of layers after another, too."""
    ours, one = manager(), request()
    every = [key(0, place, group) for place in range(2) for group in range(2)]
    for some in (every[2:], every[:2]):  # stored by two requests, the end first
        ours.complete_store(ours.prepare_store(some, request("stores")).keys_to_store, one)
    loaded = every[::2] + every[1::2]
    ours.prepare_load(loaded, one)
    ours.complete_load(loaded, one)
    assert evicted_one_by_one(ours, 4) == every[::-1]


# Traffic


def serve(of: Any, number: int, chosen: random.Random, said: list[Any]) -> Iterator[None]:
    """A request, step by step: it loads the blocks on the host and stores the rest. Each store ends
    a step later, the last one after the request, its keys without an order, as vLLM's scheduler
    names them. said: the answers to its stores, and how many chunks vLLM counts for each."""
    document = min(chosen.randrange(60), chosen.randrange(60))  # some are asked for often
    named = keys(*range(chosen.randrange(4, 9 + 40 * document // 60)), prompt=document)
    context = request(str(number), document)
    of.on_new_request(context)
    found = 0
    while found < len(named) - 1 and of.lookup(named[found], context).name == "HIT":
        found += 1
    if found:
        of.prepare_load(named[:found], context)
    yield
    if found:
        of.complete_load(set(named[:found]), context)
    storing: list[bytes] = []
    for begin in range(found, len(named), 8):
        if storing:
            of.complete_store(set(storing), context)
        output = of.prepare_store(named[begin : begin + 8], context)
        size = of.get_stats().reduce().get("vllm:kv_offload_cpu_allocation_size_sum")
        said.append((size, output and (output.keys_to_store, output.evicted_keys)))
        storing = output.keys_to_store if output else []
        yield
    of.on_request_finished(context)
    yield
    if storing:
        of.complete_store(set(storing), context)


def answers(of: Any, seed: int) -> list[Any]:
    """What a manager answers during 600 requests, 4 at a time."""
    chosen, said = random.Random(seed), list[Any]()
    waiting = [serve(of, number, chosen, said) for number in range(600)]
    running: list[Iterator[None]] = []
    while waiting or running:
        while waiting and len(running) < 4:
            running.append(waiting.pop())
        one = chosen.choice(running)
        if next(one, running) is running:
            running.remove(one)
    return said


@needs_vllm
@pytest.mark.parametrize("seed", SEEDS)
def test_lru_stores_and_evicts_what_vllm_does(seed):
    """There are pages for an eighth of the chunks. With half as many, vLLM evicts others at times."""
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    assert answers(manager(200), seed) == answers(CPUOffloadingManager(200), seed)
