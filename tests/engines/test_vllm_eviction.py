"""Which chunks our manager for vLLM evicts when prompts are stored in several steps.

vLLM need not be installed. Where it is, its own manager is tested beside ours.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm_contract import IS_REAL, KVSwapManager, base, manager_module
from vllm_traffic import MODELS, LruModel, Traffic, key

Access = manager_module.Access
POLICIES = ("lru", "arc")
HAS_POSITIONS = hasattr(base.ReqContext, "set_offload_key_position")
SEEDS = range(4)


def keys(*places: int, prompt: int = 0) -> list[bytes]:
    return [key(prompt, place) for place in places]


def context(name: str = "request", prompt: int = 0) -> Any:
    made = base.ReqContext(name)
    if HAS_POSITIONS:
        for place in range(100):
            made.set_offload_key_position(key(prompt, place), 16 * (place + 1))
    return made


def store(manager: Any, request: Any, *places: int, prompt: int = 0) -> list[bytes]:
    """What was evicted for it."""
    output = manager.prepare_store(keys(*places, prompt=prompt), request)
    manager.complete_store(set(output.keys_to_store), request)
    return list(output.evicted_keys)


def evicted_one_by_one(manager: Any, count: int) -> list[bytes]:
    other = context("other", 9)
    return [one for place in range(count) for one in store(manager, other, place, prompt=9)]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_head_of_a_running_request_outlives_what_it_stored_later(policy):
    manager, request = KVSwapManager(6, policy, 0, False), context()
    for first in (0, 2, 4):
        store(manager, request, first, first + 1)
    assert evicted_one_by_one(manager, 3) == keys(5, 4, 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_head_of_a_request_that_has_ended_outlives_its_tail(policy):
    manager, request = KVSwapManager(6, policy, 0, False), context()
    for first in (0, 2, 4):
        store(manager, request, first, first + 1)
    manager.on_request_finished(request)
    assert evicted_one_by_one(manager, 6) == keys(5, 4, 3, 2, 1, 0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_stores_that_end_after_the_request_in_any_order_go_before_its_head(policy, order):
    manager, request = KVSwapManager(6, policy, 0, False), context()
    store(manager, request, 0, 1)
    open_stores = [manager.prepare_store(keys(*some), request) for some in ((2, 3), (4, 5))]
    manager.on_request_finished(request)
    for number in order:
        manager.complete_store(set(open_stores[number].keys_to_store), request)
    assert evicted_one_by_one(manager, 6) == keys(5, 4, 3, 2, 1, 0)


def managers_of(policy: str, pages: int) -> list[Any]:
    """Ours and, where it is installed, that of vLLM 0.33."""
    found = [KVSwapManager(pages, policy, 0, False)]
    if IS_REAL and HAS_POSITIONS:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        found.append(CPUOffloadingManager(pages, cache_policy=policy))
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("whose", range(2 if IS_REAL and HAS_POSITIONS else 1))
def test_a_store_that_ends_late_is_no_newer_than_its_request(policy, whose):
    manager, old, new = managers_of(policy, 4)[whose], context("1"), context("2", 1)
    output = manager.prepare_store(keys(0, 1), old)
    manager.on_request_finished(old)
    store(manager, new, 0, 1, prompt=1)
    manager.on_request_finished(new)
    manager.complete_store(set(output.keys_to_store), old)
    assert evicted_one_by_one(manager, 4) == keys(1, 0) + keys(1, 0, prompt=1)


@pytest.mark.parametrize("whose", range(2 if IS_REAL and HAS_POSITIONS else 1))
def test_a_load_that_ends_late_is_no_newer_than_its_request(whose):
    manager, old, new = managers_of("lru", 4)[whose], context("1"), context("2", 1)
    store(manager, context("0"), 0, 1)
    manager.prepare_load(keys(0, 1), old)
    store(manager, new, 0, 1, prompt=1)
    manager.on_request_finished(new)
    manager.complete_load(set(keys(0, 1)), old)
    assert evicted_one_by_one(manager, 4) == keys(1, 0) + keys(1, 0, prompt=1)


def test_a_request_that_has_ended_is_newer_than_one_that_came_later():
    manager, first, second = KVSwapManager(4, "lru", 0, False), context("1"), context("2", 1)
    store(manager, first, 0, 1)
    store(manager, second, 0, 1, prompt=1)
    manager.on_request_finished(first)
    assert evicted_one_by_one(manager, 2) == keys(1, 0, prompt=1)


@pytest.mark.skipif(not HAS_POSITIONS, reason="0.26 has no positions")
@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_that_are_stored_later_than_those_behind_them_keep_their_place(policy):
    manager, request = KVSwapManager(6, policy, 0, False), context()
    for places in ((4, 5), (0, 1), (2, 3)):
        store(manager, request, *places)
    manager.on_request_finished(request)
    assert evicted_one_by_one(manager, 6) == keys(5, 4, 3, 2, 1, 0)


def test_for_arc_what_a_request_has_stored_itself_is_not_used_twice():
    """Only what another request has found is kept when others come."""
    manager, one, another = KVSwapManager(4, "arc", 0, False), context("1"), context("2", 1)
    store(manager, one, 0, 1)
    if not HAS_POSITIONS:
        manager.touch(keys(0, 1), one)
    assert store(manager, one, 0, 1) == []  # it was preempted, and is offered again
    manager.on_request_finished(one)
    store(manager, another, 0, 1, prompt=1)
    manager.on_request_finished(another)
    again = context("3", 1)
    assert manager.prepare_store(keys(0, 1, prompt=1), again).keys_to_store == []
    manager.on_request_finished(again)
    assert evicted_one_by_one(manager, 2) == keys(1, 0)
    assert manager._blocks.stats().idle_pages == 4


def test_a_reset_forgets_what_requests_have_had():
    manager, request = KVSwapManager(4, "lru", 0, False), context()
    store(manager, request, 0, 1)
    manager.reset_cache()
    manager.lookup(key(0, 0), request)  # it starts again
    store(manager, request, 2, 3)
    manager.on_request_finished(request)
    assert evicted_one_by_one(manager, 4) == keys(3, 2)


def test_the_state_of_a_request_is_where_vllm_keeps_it():
    manager, request = KVSwapManager(4, "lru", 0, False), context()
    before = set(vars(request))
    manager.on_new_request(request)
    store(manager, request, 0)
    if HAS_POSITIONS:
        assert request.get_state(Access).keys == keys(0)
        assert set(vars(request)) == before
    else:  # 0.26 has no place for it
        assert request._kvswap_access.keys == keys(0)


def test_a_request_of_another_manager_starts_anew():
    """Its state tells which chunks it had found, and whether it was running at a reset."""
    first, second = (KVSwapManager(4, "lru", 0, False) for _ in range(2))
    request = context("7")
    for manager in (first, second, first):
        store(manager, request, 0)
        assert manager.lookup(key(0, 0), request).name == "HIT"
        assert Access.of(request, manager, object()).keys == keys(0)


@pytest.mark.parametrize("is_fenced", [True, False])
def test_pages_of_jobs_at_a_reset_are_free_when_the_workers_have_ended_them(is_fenced, monkeypatch):
    """is_fenced: False is vLLM 0.26, which does not tell when they have."""
    monkeypatch.setattr(base.OffloadingManager, "on_reset_flushed", None, raising=False)
    if not is_fenced:
        monkeypatch.delattr(base.OffloadingManager, "on_reset_flushed")
    manager, request, other = KVSwapManager(4, "lru", 0, False), context(), context("other", 1)
    store(manager, request, 0, 1)
    held = [
        *manager.prepare_load(keys(0, 1), request).block_ids,
        *manager.prepare_store(keys(2), request).store_spec.block_ids,
    ]
    manager.reset_cache()
    if is_fenced:
        assert manager.prepare_store(keys(0, 1, prompt=1), other) is None
        output = manager.prepare_store(keys(0, prompt=1), other)
        assert not {*output.store_spec.block_ids} & {*held}
        manager.on_reset_flushed()
        manager.on_reset_flushed()
    assert len(manager.prepare_store(keys(1, 2, 3, prompt=1), other).keys_to_store) == 3


def rates(make: Any, share: float) -> float:
    found = []
    for seed in SEEDS:
        traffic = Traffic(seed)
        found.append(traffic.run(make(int(share * traffic.chunks))))
    return sum(found) / len(found)


def ours(policy: str) -> Any:
    return lambda pages: KVSwapManager(pages, policy, 0, False)


class _Unordered(KVSwapManager):  # type: ignore[misc, valid-type]
    """The control: it evicts in the order in which stores end."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self._blocks.order = lambda *_, **__: None

    def _renew(self, *_: Any) -> None:
        pass


@pytest.mark.skipif(not HAS_POSITIONS, reason="the model is of 0.33")
@pytest.mark.parametrize(("policy", "share"), [("lru", 0.3), ("arc", 0.1), ("arc", 0.3)])
def test_under_chunked_prefill_as_much_is_found_as_by_the_manager_of_vllm(policy, share):
    found = rates(ours(policy), share)
    assert found >= rates(MODELS[policy], share) - 1e-9
    unordered = rates(lambda pages: _Unordered(pages, policy, 0, False), share)
    assert found > unordered


def stored_and_evicted(manager: Any, seed: int) -> list[Any]:
    """The answers to all stores of some traffic."""
    said, prepare_store = [], manager.prepare_store

    def prepare(keys: list[bytes], request: Any) -> Any:
        output = prepare_store(keys, request)
        said.append(output and (output.keys_to_store, output.evicted_keys))
        return output

    manager.prepare_store = prepare
    Traffic(seed).run(manager)
    return said


@pytest.mark.skipif(not HAS_POSITIONS, reason="the model is of 0.33")
@pytest.mark.parametrize("seed", SEEDS)
def test_lru_stores_and_evicts_what_vllm_does(seed):
    """Stores end after their requests, and after requests that ended later."""
    assert stored_and_evicted(ours("lru")(150), seed) == stored_and_evicted(LruModel(150), seed)


@pytest.mark.skipif(not (IS_REAL and HAS_POSITIONS), reason="vLLM 0.33 is not here")
@pytest.mark.parametrize("policy", POLICIES)
def test_the_model_finds_what_the_manager_of_vllm_finds(policy):
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    def theirs(pages: int) -> Any:
        return CPUOffloadingManager(pages, cache_policy=policy)

    for share in (0.1, 0.3):
        assert rates(theirs, share) == rates(MODELS[policy], share)


def test_without_positions_a_touch_of_all_keys_tells_their_order():
    """0.26 calls it at the first lookup."""
    manager, before, request = KVSwapManager(6, "lru", 0, False), context("1"), context("2")
    store(manager, before, 3)
    if HAS_POSITIONS:
        request.get_offload_key_position = lambda key: None
    manager.touch(keys(0, 1, 2, 3, 4), request)
    for place in (0, 1, 2, 4):
        store(manager, request, place)
    manager.on_request_finished(request)
    assert evicted_one_by_one(manager, 6) == keys(4, 3, 2, 1, 0)
