"""Compares replicas that share the pages of a server with replicas that have caches of their own.

Conversations are simulated, without a GPU: each has one of ten first parts, and grows by what a
turn adds. Each turn goes to any replica. Both ways keep the same number of chunks in all. As in
vLLM, a replica asks for all chunks of the prompt and stores the missing ones. For the shared ones a
real server runs, and pages that replicas hold for their next stores are no room.

The program then times one answer of the server: SharedManager asks for all chunks of a prompt, and
the server has them.
"""

from __future__ import annotations

import random
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

import numpy as np
from page_server import serving, tiny_cache
from program import new_parser, write_figures
from report import Column, Verdict, table_of
from timing import Spread, new_samples

from torch_kvswap.prefix import BlockManager
from torch_kvswap.prefix.client import RemotePools, describe
from torch_kvswap.prefix.halves import Held, SchedulerSession, WorkerSession
from torch_kvswap.prefix.hashing import DIGEST_BYTES

KEYS = 512
FIRST_PARTS, FIRST_CHUNKS, MOST_TURNS, TURN_CHUNKS = 10, 20, 8, 8
OPEN = 60  # conversations at a time
Prompt = list[bytes]  # the digest of each chunk


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__, of_gpu=False)
    add = parser.add_argument
    add("--replicas", type=int, default=8)
    add("--chunks", type=int, default=3200, help="in all caches together")
    add("--requests", type=int, default=4000)
    add("--samples", type=int, default=500, help="of the time of an answer")
    options = parser.parse_args(arguments)
    prompts = list(conversations(options.requests))
    routes = random.Random(1).choices(range(options.replicas), k=options.requests)
    per_replica = options.chunks // options.replicas
    private = [Private(per_replica).serve for _ in range(options.replicas)]
    found = {"private": share_found(prompts, routes, private)}
    with serving(options.chunks) as path, ExitStack() as open_replicas:
        shared = [
            open_replicas.enter_context(replica(path, number)).serve
            for number in range(options.replicas)
        ]
        found["shared"] = share_found(prompts, routes, shared)
    with serving(max(options.chunks, 4 * KEYS)) as path, replica(path, 0) as one:
        answer = time_answers(one, options.samples)
    verdicts = [
        Verdict("found in shared over private", 2.0, found["shared"] / found["private"], True),
        Verdict(f"us for {KEYS} keys, asked and answered", 100.0, answer.median),
    ]
    columns: list[Column[tuple[str, float]]] = [
        Column("caches", lambda row: row[0]),
        Column("chunks found, %", lambda row: round(100 * row[1], 1)),
    ]
    print(table_of(columns, list(found.items())), "", *verdicts, sep="\n")
    settings = {name: getattr(options, name) for name in ("replicas", "chunks", "requests")}
    content = {"benchmark": "replicas", "settings": settings, "found": found}
    write_figures(options, {**content, "answer_us": asdict(answer)}, verdicts)
    return 0


def conversations(requests: int) -> Iterator[Prompt]:
    """The prompt of each request."""
    chance = random.Random(0)
    firsts = [
        [chance.randbytes(DIGEST_BYTES) for _ in range(FIRST_CHUNKS)] for _ in range(FIRST_PARTS)
    ]
    going: list[tuple[Prompt, int]] = []
    for _ in range(requests):
        if len(going) < OPEN:
            going.append((list(chance.choice(firsts)), chance.randint(1, MOST_TURNS)))
        at = chance.randrange(len(going))
        prompt, turns = going[at]
        prompt += [chance.randbytes(DIGEST_BYTES) for _ in range(TURN_CHUNKS)]
        yield list(prompt)
        going[at] = prompt, turns - 1
        if turns == 1:
            del going[at]


def share_found(
    prompts: Sequence[Prompt], routes: Sequence[int], replicas: Sequence[Callable[[Prompt], int]]
) -> float:
    found = [replicas[route](prompt) for route, prompt in zip(routes, prompts, strict=True)]
    return sum(found) / sum(map(len, prompts))


class Private:
    """A replica with a cache of its own."""

    def __init__(self, pages: int) -> None:
        self._blocks = BlockManager(pages)

    def serve(self, prompt: Prompt) -> int:
        """How many chunks in front are found. The others are stored."""
        keys = b"".join(prompt)
        found = self._blocks.lookup(keys).ready
        load = self._blocks.prepare_load(keys[: found * DIGEST_BYTES])
        store = self._blocks.prepare_store(keys)
        for reservation in (load, store):
            if reservation is not None and reservation.id:
                self._blocks.complete(reservation)
        self._blocks.order(keys, renew=True)
        return found


class Shared:
    """A replica at a server."""

    def __init__(self, session: SchedulerSession) -> None:
        self.session = session

    def ask(self, keys: bytes) -> Held:
        """Waits for the answer, as a step of the engine does not."""
        answers: list[Held] = []
        self.session.hold([keys], answers.extend)
        while not answers:
            self.poll()
        return answers[0]

    def poll(self) -> None:
        """Waits until something has come."""
        assert self.session._connection is not None
        select.select([self.session._connection], [], [], 1)
        self.session.poll()
        if not self.session.is_joined:
            raise RuntimeError("the server is lost")

    def serve(self, prompt: Prompt) -> int:
        """As Private's."""
        keys = b"".join(prompt)
        held = self.ask(keys)
        found = next(
            (at for at, index in enumerate(held.indices) if at != index), len(held.indices)
        )
        new = prompt[found:]
        while (pages := self.session.begin_store(len(new))) is None:
            self.session.end_step()  # as vLLM offers them again in the next step
            self.poll()
        self.session.end_store(pages, pages, b"".join(new[: len(pages)]))
        self.session.begin_load([held])
        self.session.end_load([held])
        self.session.order(keys, renew=True)
        self.session.end_step()
        return found


@contextmanager
def replica(path: str, number: int) -> Iterator[Shared]:
    layout = tiny_cache()
    cache = describe([layout], None, "none", 0, 1, 1, "raw", None, "off", bytes_of={})
    worker = WorkerSession(path, f"{number}", cache, RemotePools([layout], False, {}))
    worker.join()
    session = SchedulerSession(path, f"{number}")
    session.join()
    try:
        yield Shared(session)
    finally:
        session.close()
        worker.close()


def time_answers(one: Shared, samples: int) -> Spread:
    """Microseconds for a prompt of KEYS chunks."""
    prompt = list(np.random.default_rng(0).bytes(DIGEST_BYTES) for _ in range(KEYS))
    while one.serve(prompt) < KEYS:
        pass
    keys, times = b"".join(prompt), new_samples(samples)
    for number in range(samples):
        began = time.perf_counter_ns()
        held = one.ask(keys)
        times[number] = time.perf_counter_ns() - began
        if len(held.pages) != KEYS:
            raise RuntimeError("the server has not found every chunk")
        one.session.end_hold([held])
    return Spread.of(times)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
