"""The benchmark of block managers: it runs, and judges its figures right."""

from __future__ import annotations

import json
import random

import block_manager
import pytest
from block_manager_report import MISS
from block_managers import OfDigests, OfKeys, OneByOne

pytestmark = pytest.mark.slow  # of a benchmark program

OPERATIONS = {
    "prepare_store",
    "complete_store",
    "lookup",
    MISS,
    "touch",
    "prepare_load",
    "complete_load",
    "prepare_store, evicting",
}


def test_all_calls_are_timed_for_every_way_of_calling(tmp_path, capsys):
    file = tmp_path / "figures.json"
    arguments = ["--pages", "400", "--blocks", "20", "--samples", "3", "--policies", "lru"]
    assert block_manager.main([*arguments, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert {(its["manager"], its["operation"]) for its in figures["cells"]} == {
        (manager, operation)
        for manager in ("digests", "keys", "by key")
        for operation in OPERATIONS
    }
    assert all(its["prompt"]["mean"] > 0 for its in figures["cells"])
    assert figures["longest_hold_ms"] > 0
    assert [its["manager"] for its in figures["memory"]] == ["digests"]
    text = capsys.readouterr().out
    assert text.count("not measured") == 6  # what is beside vLLM's


@pytest.mark.parametrize("kind", [OfDigests, OfKeys, "one by one"])
def test_every_way_of_calling_finds_what_was_stored(kind):
    manager = OneByOne(OfKeys(50, "lru")) if kind == "one by one" else kind(50, "lru")
    prompt, other = (manager.form(bytes([i]) * 32 + bytes([i + 1]) * 32) for i in (1, 5))
    block_manager.fill(manager, [bytes([1]) * 32 + bytes([2]) * 32])
    assert (manager.lookup(prompt), manager.lookup(other)) == (2, 0)
    manager.touch(prompt)
    manager.complete_load(manager.to_complete(prompt, manager.prepare_load(prompt)))


@pytest.mark.parametrize("nth", [8, 13])  # the first of the new prompts, the last that evicts
def test_a_manager_that_does_not_store_all_of_a_prompt_is_not_timed(nth):
    class Lazy(OfDigests):
        called = 0

        def __init__(self, pages, policy):
            super().__init__(pages, policy)
            self.prepare_store = self.prepare_part

        def prepare_part(self, prompt):
            self.called += 1
            return self.manager.prepare_store(prompt[32:] if self.called == nth else prompt)

    numbers = random.Random(0)
    prompts = [numbers.randbytes(64) for _ in range(13)]
    for manager in (OfDigests(20, "lru"), Lazy(20, "lru")):
        turns = block_manager.calls(manager, prompts, 3)
        if isinstance(manager, Lazy):
            with pytest.raises(RuntimeError, match="not stored every block"):
                dict(turns)
        else:
            assert {*dict(turns)} == OPERATIONS
