"""Our manager meets the contract of vLLM's scheduler, call by call."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from vllm_engine import CPULoadStoreSpec, KVSwapManager, base, key, keys

from torch_kvswap.integrations.vllm.scheduler_side import usage_of

HIT, MISS = base.LookupResult.HIT, base.LookupResult.MISS
PENDING = base.LookupResult.HIT_PENDING
METRIC = "vllm:kv_offload_cpu_cache_usage_perc"


def request(name: str = "request") -> Any:
    return base.ReqContext(name)


def manager(
    pages: int = 4, policy: str = "lru", threshold: int = 0, events: bool = True
) -> KVSwapManager:
    return KVSwapManager(pages, policy, threshold, events)


def stored(of: KVSwapManager, *numbers: int) -> Any:
    output = of.prepare_store(keys(*numbers), request())
    of.complete_store(set(keys(*numbers)), request())
    return output


def found(of: KVSwapManager, *numbers: int) -> list[Any]:
    return [of.lookup(key(number), request()) for number in numbers]


def pages(spec: Any) -> list[int]:
    assert isinstance(spec, CPULoadStoreSpec)
    return [int(page) for page in spec.block_ids]


@pytest.fixture(params=["lru", "arc"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_keys_of_two_groups_with_one_hash_are_two():
    ours = manager()
    ours.prepare_store([key(1, group=0)], request())
    assert ours.lookup(key(1, group=1), request()) is MISS
    assert ours.lookup(key(1, group=0), request()) is PENDING
    both = [key(1, group=0), key(1, group=1)]
    assert ours.prepare_store(both, request()).keys_to_store == both[1:]
    ours.complete_store(set(both), request())
    assert len(set(pages(ours.prepare_load(both, request())))) == 2


def test_keys_of_another_hash_function_work_too():
    ours, short = manager(), [bytes([n]) * 20 for n in (1, 2)]
    assert ours.prepare_store(short, request()).keys_to_store == short
    ours.complete_store(set(short), request())
    assert [ours.lookup(one, request()) for one in short] == [HIT, HIT]


def test_keys_to_store_keep_the_order_they_were_given_in():
    ours = manager(pages=100)
    stored(ours, 4, 8, 15)
    order = list(range(30))
    random.Random(3).shuffle(order)
    output = ours.prepare_store(keys(*order), request())
    new = [number for number in order if number not in (4, 8, 15)]
    assert output.keys_to_store == keys(*new)
    page_of = dict(zip(output.keys_to_store, pages(output.store_spec), strict=True))
    ours.complete_store(set(output.keys_to_store), request())
    for number in new:
        assert pages(ours.prepare_load([key(number)], request(str(number)))) == [
            page_of[key(number)]
        ]


def test_pages_to_load_are_in_the_order_of_the_keys():
    ours = manager()
    output = stored(ours, 1, 2, 3)
    page_of = dict(zip((1, 2, 3), pages(output.store_spec), strict=True))
    for order in ((1, 2, 3), (2, 3, 1)):
        loaded = ours.prepare_load(keys(*order), request())
        assert pages(loaded) == [page_of[number] for number in order]
        ours.complete_load(set(keys(*order)), request())


def test_what_a_store_names_is_not_evicted_for_it(policy):
    ours = manager(policy=policy)
    stored(ours, 1, 2)
    ours.touch(keys(1), request())  # now 2 would be the first to go
    output = ours.prepare_store(keys(2, 3, 4, 5), request())
    assert output.keys_to_store == keys(3, 4, 5)
    assert output.evicted_keys == keys(1)
    ours.complete_store(set(keys(2, 3, 4, 5)), request())
    assert found(ours, 1, 2, 3, 4, 5) == [MISS, HIT, HIT, HIT, HIT]


def test_a_store_without_room_is_none_and_changes_nothing(policy):
    ours = manager(policy=policy)
    stored(ours, 1, 2)
    ours.prepare_store(keys(3), request())
    ours.prepare_load(keys(1), request())
    assert ours.prepare_store(keys(4, 5, 6), request()) is None
    assert found(ours, 1, 2, 3, 4, 5) == [HIT, HIT, PENDING, MISS, MISS]
    assert list(ours.take_events()) == [event(1, 2)]


def test_a_load_of_what_is_not_stored_is_an_error():
    ours = manager()
    ours.prepare_store(keys(1), request())
    for number in (1, 2):
        with pytest.raises(RuntimeError, match="request r: not all of the 1 chunks to load"):
            ours.prepare_load(keys(number), request("r"))


def test_open_loads_of_the_same_keys_are_counted(policy):
    ours, twice = manager(policy=policy), request("twice")
    stored(ours, 1, 2)
    for _ in range(2):
        ours.prepare_load(keys(1, 2), twice)
    ours.complete_load(set(keys(1, 2)), twice)
    assert ours.prepare_store(keys(5, 6, 7), request()) is None, "the second one reads them"
    ours.complete_load(set(keys(1, 2)), twice)
    assert len(ours.prepare_store(keys(5, 6, 7), request()).evicted_keys) == 1
    assert not ours._loads
    with pytest.raises(RuntimeError, match="request twice: no load of these 2 chunks is open"):
        ours.complete_load(set(keys(1, 2)), twice)


HAS_METADATA_EVENTS = hasattr(base.OffloadingEvent, "metadata_only")  # 0.33


def theirs(**options: Any) -> Any:
    """vLLM's own manager of four chunks."""
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    return CPUOffloadingManager(4, **options)


def failing_stores(of: Any) -> list[Any]:
    stored(of, 1)
    one = request()
    for numbers in ((2, 3), (4,)):
        of.prepare_store(keys(*numbers), one)
        of.complete_store(set(keys(*numbers)), one, success=False)
    of.prepare_store(keys(3), request("again"))
    said = [
        (event.keys, event.removed, getattr(event, "metadata_only", False))
        for event in of.take_events()
    ]
    return [(sorted(some), *details) for some, *details in said] + list(of.take_events())


def test_a_failed_store_tells_vllm_to_drop_what_it_kept_for_the_event():
    """But not of a key that is stored again by then. 0.26 keeps nothing."""
    dropped = [(keys(2), True, True), (keys(4), True, True)] if HAS_METADATA_EVENTS else []
    assert failing_stores(manager()) == [(keys(1), False, False), *dropped]
    assert failing_stores(theirs(enable_events=True)) == [(keys(1), False, False), *dropped]


def test_what_was_touched_is_evicted_last_and_of_a_prompt_the_end_first():
    ours = manager()
    stored(ours, 1, 2, 3, 4)
    ours.touch(keys(1, 2), request())
    assert stored(ours, 5, 6).evicted_keys == keys(4, 3)
    assert stored(ours, 7).evicted_keys == keys(2)


def test_a_load_counts_as_a_use():
    ours = manager(pages=2)
    stored(ours, 1)
    stored(ours, 2)
    ours.prepare_load(keys(1), request())
    ours.complete_load(set(keys(1)), request())
    assert stored(ours, 3).evicted_keys == keys(2)


def test_with_a_threshold_a_block_is_stored_when_it_was_offered_so_often():
    ours = manager(threshold=2)
    assert ours.prepare_store(keys(1, 2, 3), request()).keys_to_store == []
    assert ours.get_stats().reduce()["vllm:kv_offload_stores_skipped"] == 3
    assert ours.get_stats().reduce()["vllm:kv_offload_stores_skipped"] == 0
    assert ours.prepare_store(keys(1, 2, 4), request()).keys_to_store == keys(1, 2)
    assert ours.get_stats().reduce()["vllm:kv_offload_stores_skipped"] == 1


@pytest.mark.parametrize("threshold", [0, 2])
def test_the_histogram_of_allocations_has_stores_that_found_no_room(threshold):
    said = []
    for of in (manager(threshold=threshold), theirs(store_threshold=threshold)):
        for name, numbers in enumerate(((1, 2, 3), (1, 2, 3), (4, 5), (4, 5, 6))):
            one = request(str(name))
            for each in keys(*numbers):
                of.lookup(each, one)  # 0.26 counts these, 0.33 offers
            output = of.prepare_store(keys(*numbers), one)
        assert output is None
        said.append(of.get_stats().reduce())
    assert said[0] == said[1]


def event(*numbers: int, removed: bool = False) -> Any:
    medium = base.Medium.CPU if hasattr(base, "Medium") else "CPU"
    return base.OffloadingEvent(keys(*numbers), medium, removed)


def test_events_tell_in_order_what_was_stored_and_evicted_each_once():
    ours = manager()
    ours.prepare_store(keys(1, 2), request())
    assert list(ours.take_events()) == []
    ours.complete_store(set(keys(1, 2)), request())
    stored(ours, 3, 4, 5)
    assert list(ours.take_events()) == [event(1, 2), event(2, removed=True), event(3, 4, 5)]
    assert list(ours.take_events()) == []


def test_a_reset_removes_what_was_said_to_be_stored():
    ours = manager()
    stored(ours, 1, 2)
    ours.prepare_store(keys(3), request())
    ours.reset_cache()
    assert list(ours.take_events()) == [event(1, 2), event(1, 2, removed=True)]
    ours.reset_cache()
    assert list(ours.take_events()) == []


def test_without_events_nothing_is_kept():
    ours = manager(events=False)
    stored(ours, 1, 2, 3, 4)
    stored(ours, 5)
    assert list(ours.take_events()) == []


def test_a_reset_forgets_all_and_frees_the_pages_of_jobs_nobody_will_end():
    ours = manager()
    stored(ours, 1)
    ours.prepare_load(keys(1), request())
    ours.prepare_store(keys(2, 3), request())
    ours.reset_cache()
    assert found(ours, 1, 2, 3) == [MISS] * 3
    ours.on_reset_flushed()
    assert ours.get_stats().reduce()[METRIC] == 0
    assert stored(ours, 1, 2, 3, 4).keys_to_store == keys(1, 2, 3, 4)
    assert found(ours, 1, 2, 3, 4) == [HIT] * 4


def test_a_request_that_ran_at_a_reset_stores_nothing_until_it_starts_again():
    ours, running, waiting = manager(), request("running"), request("waiting")
    without_stores = request("without stores")
    for one in (running, waiting, without_stores):
        ours.on_new_request(one)
    ours.prepare_store(keys(1), running)
    ours.complete_store(set(keys(1)), running)
    ours.reset_cache()
    ours.on_reset_flushed()
    for _ in range(2):
        output = ours.prepare_store(keys(1, 2), running)
        assert (output.keys_to_store, pages(output.store_spec), output.evicted_keys) == ([], [], [])
        ours.on_request_finished(running)  # vLLM 0.26 says so before the last store
    assert ours.prepare_store(keys(1), without_stores).keys_to_store == []
    assert ours.lookup(key(1), waiting) is MISS  # it starts
    assert ours.prepare_store(keys(1), waiting).keys_to_store == keys(1)
    assert ours.lookup(key(2), running) is MISS  # it was preempted, and starts again
    assert ours.prepare_store(keys(1, 2), running).keys_to_store == keys(2)


def test_a_new_request_stores_after_a_reset_without_a_lookup():
    ours, new = manager(), request("new")
    ours.reset_cache()
    ours.on_new_request(new)
    assert ours.prepare_store(keys(1), new).keys_to_store == keys(1)


def test_the_stats_say_what_is_in_use_and_how_large_stores_were():
    ours = manager()
    assert ours.get_stats().reduce()[METRIC] == 0
    stored(ours, 1)
    ours.prepare_load(keys(1), request())
    ours.prepare_store(keys(2, 3), request())
    stats = ours.get_stats().reduce()
    assert stats[METRIC] == 0.75
    assert stats["vllm:kv_offload_cpu_cache_write_usage_perc"] == 0.5
    assert stats["vllm:kv_offload_cpu_cache_read_usage_perc"] == 0.25
    assert ours.get_stats().reduce()[METRIC] == 0.75
    ours.complete_load(keys(1), request())
    assert ours.get_stats().reduce()[METRIC] == 0.5
    ours.complete_store(set(keys(2, 3)), request())
    assert ours.get_stats().reduce()[METRIC] == 0
    ours.prepare_store(keys(4), request())
    ours.reset_cache()
    ours.on_reset_flushed()
    assert ours.get_stats().reduce()[METRIC] == 0


def test_a_new_request_has_the_default_policy_and_its_end_needs_nothing():
    ours = manager()
    assert ours.on_new_request(request()) == base.RequestOffloadingContext()
    ours.on_request_finished(request())
    assert not ours.has_pending_work()
    ours.shutdown()


def test_it_agrees_with_a_model_through_random_calls(policy):
    """The model knows only what the contract says: what has been stored and not evicted."""
    ours, random_ = manager(pages=12, policy=policy), random.Random(5)
    state: dict[bytes, Any] = {}
    filling: list[list[bytes]] = []
    loading: list[tuple[Any, list[bytes]]] = []
    for step in range(3000):
        some = [key(n % 15, n // 15) for n in random_.sample(range(30), random_.randint(1, 6))]
        action = random_.randrange(5)
        if random_.random() < 0.01:
            ours.reset_cache()
            state, filling, loading = {}, [], []
        if random_.random() < 0.05:
            ours.on_reset_flushed()
        if action == 0:
            output = ours.prepare_store(some, request())
            if output is not None:
                new = [one for one in some if one not in state]
                assert output.keys_to_store == new
                for one in output.evicted_keys:
                    assert state.pop(one) is HIT
                    assert one not in some
                    assert not any(one in of_load for _, of_load in loading)
                state |= dict.fromkeys(new, PENDING)
                filling += [new] if new else []
        elif action == 1 and filling:
            ended, well = filling.pop(random_.randrange(len(filling))), random_.random() < 0.8
            ours.complete_store(set(ended), request(), success=well)
            state |= dict.fromkeys(ended, HIT)
            for one in ended if not well else ():
                del state[one]
        elif action == 2:
            hits = [one for one in some if state.get(one) is HIT]
            loading.append((request(str(step)), hits))
            assert len(set(pages(ours.prepare_load(hits, loading[-1][0])))) == len(hits)
        elif action == 3 and loading:
            context, of_load = loading.pop(random_.randrange(len(loading)))
            ours.complete_load(set(of_load), context)
        else:
            ours.touch(some, request())
        for one in some:
            assert ours.lookup(one, request()) is state.get(one, MISS)
        assert ours._states.keys() == state.keys()
        assert ours.get_stats().reduce()[METRIC] == usage_of(ours._blocks.stats())[METRIC]


@pytest.mark.slow  # it compares times, which are of this thread only: a busy machine may stop it
def test_a_lookup_costs_about_what_it_costs_vllm():
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    prompt, context, seconds = keys(*range(1000)), request(), []
    for one in (manager(pages=1000), CPUOffloadingManager(1000)):
        one.prepare_store(prompt, context)
        one.complete_store(set(prompt), context)
        times = []
        for _ in range(20):
            began = time.thread_time()
            for each in prompt:
                one.lookup(each, context)
            times.append(time.thread_time() - began)
        seconds.append(min(times))
    assert seconds[0] < 3 * seconds[1]
