"""Random jobs of handlers with encoded and raw groups, many in flight, against a model."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from drained import drain
from encoded_cache import EncodedCache
from torch import Tensor

from torch_kvswap.handler import Job, Result

if TYPE_CHECKING:
    from simulated_driver import Driver

ENCODINGS = ("lossless", "raw", "lossless")
BLOCKS, PAGES, PER_PAGE, LAYERS = 12, 8, 2, 4
REJECTED = "rejected"  # what a slot holds that its store has rejected
INVALID = "invalid"  # what a slot holds whose store has failed

Place = tuple[int, int]  # group, and block or slot


@dataclass
class Expected:
    job: Job
    rejected: tuple[int, ...] = ()
    source_failed: bool = False


class Fuzz:
    """Rounds of jobs. At the end of each, everything is compared."""

    def __init__(self, driver: Driver | None, seed: int, mode: str = "", **options: Any) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.cache = EncodedCache(
            driver,
            blocks=BLOCKS,
            pages=PAGES,
            per_page=PER_PAGE,
            layers=LAYERS,
            encodings=ENCODINGS,
            submit_thread=self.rng.random() < 0.3,
            **options,
        )
        if driver is not None:
            driver.set_mode(mode, seed)
        self.slots: dict[Place, Tensor | str] = {
            (group, slot): REJECTED if encoding == "lossless" else self._raw_slot(group, slot)
            for group, encoding in enumerate(ENCODINGS)
            for slot in range(PAGES * PER_PAGE)
        }
        self.counts: Counter[str] = Counter()

    def _raw_slot(self, group: int, slot: int) -> Tensor:
        page = self.cache.pools[group].pages[slot // PER_PAGE, slot % PER_PAGE]
        return page.view(torch.int16).clone()

    def run(self, rounds: int) -> Counter[str]:
        with self.cache:
            for _ in range(rounds):
                self._round()
        return self.counts

    def _round(self) -> None:
        cache, rng = self.cache, self.rng
        self.spoiled: set[Place] = set()
        for group in range(len(ENCODINGS)):
            for block in range(BLOCKS):
                for layer in cache.tensors[group]:
                    layer[block] = torch.randn(layer.shape[1]).bfloat16()
                if rng.random() < 0.08:
                    cache.spoil(block, group=group)
                    self.spoiled.add((group, block))
        self.blocks: dict[Place, Tensor | None] = {
            (group, block): cache.block(block, group)
            for group in range(len(ENCODINGS))
            for block in range(BLOCKS)
        }
        cache.synchronize()
        self.failed_loads: set[Place] = set()  # blocks whose latest load was not done
        expected = [self._submit() for _ in range(rng.randint(5, 40))]
        drain(cache.handler)
        results = {result.job_id: result for result in cache.handler.poll()}
        for of_job in expected:
            self._judge(of_job, results[of_job.job.id])
        for (group, block), bits in self.blocks.items():
            assert bits is None or cache.is_same(block, bits, group), f"block {block} of {group}"
            self.counts["compared"] += bits is not None

    def _judge(self, expected: Expected, result: Result) -> None:
        assert result.rejected == expected.rejected, (expected, result)
        is_ok = not expected.rejected and not expected.source_failed
        assert result.ok is is_ok, (expected, result)
        self.counts[result.state] += 1
        self.counts["rejected"] += len(result.rejected)

    def _submit(self) -> Expected:
        rng = self.rng
        is_store = rng.random() < 0.5
        # Else rejected blocks and failures spread over all pages.
        avoids_bad = not is_store and rng.random() < 0.9
        lists: list[tuple[list[int], list[int], int]] = []
        moves: list[tuple[int, int, int]] = []
        for group in range(len(ENCODINGS)):
            count = rng.choice([0, 1, 2, 5]) if group else rng.choice([1, 2, 4])
            first = rng.randrange(PER_PAGE) if count else 0
            blocks = rng.sample(range(BLOCKS), count)
            usable = [page for page in range(PAGES) if not avoids_bad or self._is_good(group, page)]
            needed = -(-(first + count) // PER_PAGE) if count else 0
            if needed > len(usable):
                blocks, needed, first = [], 0, 0
            pages = rng.sample(usable, needed)
            lists.append((blocks, pages, first))
            for at, block in enumerate(blocks, first):
                moves.append((group, block, pages[at // PER_PAGE] * PER_PAGE + at % PER_PAGE))
        blocks_, pages_, firsts = ([of[part] for of in lists] for part in range(3))
        options: dict[str, Any] = {"first_block": firsts}
        if is_store:
            job = self.cache.store(blocks_, pages_, **options)
            return self._stored(job, moves)
        options["expedited"] = rng.random() < 0.3
        options["layer_groups"] = rng.choice([1, 1, 2, len(ENCODINGS) * LAYERS])
        job = self.cache.load(pages_, blocks_, **options)
        return self._loaded(job, moves)

    def _is_good(self, group: int, page: int) -> bool:
        return not any(
            isinstance(self.slots[group, slot], str)
            for slot in range(page * PER_PAGE, (page + 1) * PER_PAGE)
        )

    def _stored(self, job: Job, moves: list[tuple[int, int, int]]) -> Expected:
        if any((group, block) in self.failed_loads for group, block, _ in moves):
            for group, _, slot in moves:
                self.slots[group, slot] = INVALID
            return Expected(job, source_failed=True)
        rejected = []
        for position, (group, block, slot) in enumerate(moves):
            bits = self.blocks[group, block]
            assert bits is not None
            does_not_fit = (group, block) in self.spoiled and ENCODINGS[group] == "lossless"
            self.slots[group, slot] = REJECTED if does_not_fit else bits
            if does_not_fit:
                rejected.append(position)
        return Expected(job, tuple(rejected))

    def _loaded(self, job: Job, moves: list[tuple[int, int, int]]) -> Expected:
        found = [self.slots[group, slot] for group, _, slot in moves]
        source_failed = any(held is INVALID for held in found)
        rejected = []
        for position, ((group, block, _), held) in enumerate(zip(moves, found, strict=True)):
            if source_failed:
                self.blocks[group, block] = None
            elif isinstance(held, str):
                rejected.append(position)
            else:
                self.blocks[group, block] = held
                # Only raw slots hold blocks that do not fit. They come from their own group.
                (self.spoiled.add if self._is_spoiled(held) else self.spoiled.discard)(
                    (group, block)
                )
        for group, block, _ in moves:
            place = (
                self.failed_loads.add if source_failed or rejected else self.failed_loads.discard
            )
            place((group, block))
        return Expected(job, () if source_failed else tuple(rejected), source_failed)

    @staticmethod
    def _is_spoiled(bits: Tensor) -> bool:
        exponents = (bits >> 7) & 0xFF
        return bool((exponents > 140).any())
