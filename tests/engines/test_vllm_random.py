"""Random engines under vLLM's real scheduler, with random failures, aborts, preemptions and resets:
each answer is right, unless its request was told that its load has failed."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fuzz import fuzz
from vllm_contract import KVSwapWorker
from vllm_serving import Faults, RandomRequests, expected_tokens, never, prompt, serving
from vllm_tiers import tier, without_gpu

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 40},
    "states": {"states": True},
    "states in parts": {"states": True, "match_unit": 8},
    "latent": {"cache": "mla", "workers": 2},
    "fp8": {"cache": "fp8"},
    "heads": {"workers": 2, "heads": 2},
    "drafts": {"drafts": 3},
    "chunks": {"extra": {"blocks_per_chunk": 2}},
}


class RandomEngine:
    """An engine of this kind. spoils: whether failures are told to nobody."""

    def __init__(self, seed: int, kind: str, has_tiers: bool, spoils: bool = False) -> None:
        self.chosen = chosen = random.Random(f"{seed} {kind} {has_tiers}")
        self.how = {"runner": chosen.choice(["v1", "v2"]), "is_async": chosen.random() < 0.5}
        self.how["transfer"] = {"kv_load_failure_policy": chosen.choice(["recompute", "fail"])}
        self.how |= {"blocks": chosen.choice([28, 40]), "batched": chosen.choice([32, 64, 256])}
        self.how |= {"pages": chosen.choice([24, 64, 160]), "extra": {}, **KINDS[kind]}
        self.has_tiers, self.spoils = has_tiers, spoils
        self.rate = 1.0 if spoils else chosen.choice([0, 0.1, 0.5])
        if not has_tiers:
            more = {
                "store_threshold": chosen.choice([1, 2]),
                "verify": chosen.choice(["off", "load"]),
            }
            more["eviction_policy"] = chosen.choice(["lru", "arc"])
            self.how["extra"] = {**self.how["extra"], **({} if spoils else more)}

    def __repr__(self) -> str:
        return f"{self.how}, {self.rate}"

    def chooses(self, direction: str, blocks: int) -> bool | str:
        if self.spoils:
            return direction == "load"
        how = [True, "rejected", "damaged" if direction == "load" else True]
        return self.chosen.random() < self.rate and self.chosen.choice(how)

    def run(self) -> Counter[str]:
        with tempfile.TemporaryDirectory() as made:
            folder, how = Path(made), self.how
            if self.has_tiers:
                how = how | {"extra": how["extra"] | tier(folder)}
            with serving(folder, **how) as engine:
                return self._serve(engine)

    def _serve(self, engine: Any) -> Counter[str]:
        chosen, ranks = self.chosen, range(len(engine.workers))
        is_ours = all(isinstance(one, KVSwapWorker) for one in engine.workers)
        faults = [Faults(engine, self.chooses, rank) for rank in ranks if is_ours]
        for one in faults if self.spoils else ():
            one._spoil = lambda result: result  # type: ignore[method-assign]
        requests = RandomRequests(engine, chosen)
        for turn in range(8):
            requests.go_on(chosen.randrange(2, 6), aborts=0.3)
            if chosen.random() < 0.2:
                engine.scheduler.connector.reset_cache()
            elif chosen.random() < 0.2:
                engine.run()  # vLLM resets neither while something is loaded nor while a step runs
                if not engine.is_async:
                    engine.add(f"at reset {turn}", prompt(turn, 40), 20)
                    engine.step()
                everything = {"reset_running_requests": True, "reset_connector": True}
                assert engine.scheduler.reset_prefix_cache(**everything)
        engine.run()
        engine.forget_gpu()
        for one in faults:
            one.chooses = one.chooses if self.spoils else never
        last = {f"last {name}": one[:-1] for name, one in [*requests.served.items()][-4:]}
        engine.serve(last, requests.TOKENS)
        failed = {name for name in (requests.served | last) if engine.ends[name] == "error"}
        assert not failed or self.how["transfer"]["kv_load_failure_policy"] == "fail"
        assert failed.isdisjoint(last) or self.spoils
        for name, one in (requests.served | last).items():
            if name not in failed:
                expected = expected_tokens(one, requests.TOKENS, self.how.get("window"))
                assert engine.tokens[name] == expected, name
        assert engine.agree or self.rate, "all ranks have had the same tokens"
        stats = engine.manager.get_stats().reduce()
        assert stats["vllm:kv_offload_cpu_cache_usage_perc"] == 0, "no page is held"
        assert not failed or any(one.count["load"] for one in faults)
        return Counter()


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    without_gpu(monkeypatch)


@pytest.mark.parametrize("has_tiers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_right_whatever_happens(kind, has_tiers):
    fuzz(lambda seed: RandomEngine(seed, kind, has_tiers), 2)


@pytest.mark.parametrize("kind", KINDS)
def test_control_silent_failures_give_wrong_answers(kind):
    with pytest.raises(AssertionError, match="again with KVSWAP_FUZZ_SEED="):
        fuzz(lambda seed: RandomEngine(seed, kind, False, spoils=True), 5)
