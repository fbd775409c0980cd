"""Requests like those of vLLM's scheduler, and a model of vLLM's own manager."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from vllm_contract import base, common

STEP_CHUNKS = 8  # that are computed of a prompt in a step
RUNNING = 4  # requests


def key(document: int, place: int, group: int = 0) -> bytes:
    """As long as those of vLLM: a SHA-256 and a group."""
    return document.to_bytes(28, "big") + place.to_bytes(4, "big") + group.to_bytes(4, "big")


@dataclass(eq=False)
class Request:
    context: Any
    keys: list[bytes]
    computed: int  # chunks
    stored: int = 0
    open_stores: list[list[bytes]] = field(default_factory=list)


class Traffic:
    """Prompts of documents with different beginnings, some of them asked for often; each is
    prefilled in steps, several at a time. Stores end a step later, the last ones after the request,
    their keys without an order, as vLLM's scheduler names them."""

    def __init__(self, seed: int, documents: int = 60, most: int = 48) -> None:
        self.random = random.Random(seed)
        self.lengths = [self.random.randrange(8, most) for _ in range(documents)]
        self.asked = self.hits = self.number = 0

    @property
    def chunks(self) -> int:
        return sum(self.lengths)

    def run(self, manager: Any, requests: int = 600) -> float:
        """The share of the chunks that were found on the host."""
        running: list[Request] = []
        while requests or running:
            while requests and len(running) < RUNNING:
                running.append(self._begin(manager))
                requests -= 1
            for request in running:
                self._step(manager, request)
            ended = [request for request in running if request.computed == len(request.keys)]
            running = [request for request in running if request not in ended]
            for request in ended:
                manager.on_request_finished(request.context)
                for keys in request.open_stores:
                    manager.complete_store(set(keys), request.context)
        return self.hits / self.asked

    def _begin(self, manager: Any) -> Request:
        # Half of the requests go to a fifth of the documents.
        few = self.random.random() < 0.5
        document = self.random.randrange(len(self.lengths) // (5 if few else 1))
        length = self.random.randrange(4, self.lengths[document] + 1)
        keys = [key(document, place) for place in range(length)]
        self.number += 1
        context = base.ReqContext(str(self.number))
        if hasattr(context, "set_offload_key_position"):
            for place, one in enumerate(keys):
                context.set_offload_key_position(one, 16 * (place + 1))
        manager.on_new_request(context)
        found = 0
        while found < length - 1 and manager.lookup(keys[found], context).name == "HIT":
            found += 1
        self.asked, self.hits = self.asked + length, self.hits + found
        if found:
            manager.prepare_load(keys[:found], context)
            manager.complete_load(set(keys[:found]), context)
        return Request(context, keys, found, found)

    def _step(self, manager: Any, request: Request) -> None:
        for keys in request.open_stores:
            manager.complete_store(set(keys), request.context)
        request.open_stores.clear()
        request.computed = min(request.computed + STEP_CHUNKS, len(request.keys))
        output = manager.prepare_store(
            request.keys[request.stored : request.computed], request.context
        )
        if output is not None:
            request.stored = request.computed
            if output.keys_to_store:
                request.open_stores.append(output.keys_to_store)
        if not hasattr(request.context, "get_offload_key_position"):  # 0.26
            manager.touch(request.keys, request.context)


@dataclass
class _Chunk:
    rank: tuple[int, int]
    is_ready: bool = False


class LruModel:
    """vLLM 0.33's CPUOffloadingManager with its LRU policy, as far as Traffic asks: chunks are
    evicted by rank. That of a running request is its number, the chunks behind first; when it has
    ended its chunks get the newest ranks, the first chunk that of all."""

    def __init__(self, pages: int) -> None:
        self.pages, self.chunks, self.last = pages, {}, 0
        self.requests: dict[str, tuple[int, dict[bytes, None]]] = {}
        self.inserted: set[tuple[str, bytes]] = set()

    def on_new_request(self, context: Any) -> None:
        self.requests[context.req_id] = (0, {})

    def lookup(self, key: bytes, context: Any) -> Any:
        chunk = self.chunks.get(key)
        if chunk is None:
            return base.LookupResult.MISS
        return base.LookupResult.HIT if chunk.is_ready else base.LookupResult.HIT_PENDING

    def prepare_load(self, keys: Collection[bytes], context: Any) -> None:
        self._access(keys, context)

    def complete_load(self, keys: Collection[bytes], context: Any) -> None:
        pass

    def prepare_store(self, keys: list[bytes], context: Any) -> Any:
        new = [key for key in keys if key not in self.chunks]
        self._missed(new)
        ready = [key for key in keys if key in self.chunks and self.chunks[key].is_ready]
        self._access([key for key in keys if key in new or key in ready], context)
        evicted: list[bytes] = []
        if len(new) + len(self.chunks) > self.pages:
            found = self._evict(len(new) + len(self.chunks) - self.pages, set(keys))
            if found is None:
                return None
            evicted = found
        rank = self.requests[context.req_id][0]
        for key in new:
            self._insert(key, _Chunk((rank, -context.get_offload_key_position(key))))
            self.inserted.add((context.req_id, key))
        return base.PrepareStoreOutput(new, common.CPULoadStoreSpec([]), evicted)

    def complete_store(self, keys: Collection[bytes], context: Any) -> None:
        for key in keys:
            self.chunks[key].is_ready = True

    def on_request_finished(self, context: Any) -> None:
        for key in reversed(sorted(self._keys(context), key=context.get_offload_key_position)):
            if key in self.chunks:
                self.last += 1
                self.chunks[key].rank = (self.last, 0)

    def _keys(self, context: Any) -> dict[bytes, None]:
        return self.requests[context.req_id][1]

    def _access(self, keys: Collection[bytes], context: Any) -> None:
        rank, seen = self.requests[context.req_id]
        if not rank:
            self.last += 1
            rank = self.last
            self.requests[context.req_id] = rank, seen
        for key in keys:
            if key in seen:
                continue
            seen[key] = None
            if key in self.chunks:
                now = (rank, -context.get_offload_key_position(key))
                self.chunks[key].rank = max(now, self.chunks[key].rank)

    def _missed(self, keys: list[bytes]) -> None:
        pass

    def _insert(self, key: bytes, chunk: _Chunk) -> None:
        self.chunks[key] = chunk

    def _evict(self, count: int, protected: set[bytes]) -> list[bytes] | None:
        idle = [key for key, one in self.chunks.items() if one.is_ready and key not in protected]
        if len(idle) < count:
            return None
        evicted = sorted(idle, key=lambda key: self.chunks[key].rank)[:count]
        for key in evicted:
            del self.chunks[key]
        return evicted


class ArcModel(LruModel):
    """With its ARC policy: what a request has stored stays in the recent list (t1) when it ends,
    and what it has reused goes to the frequent one (t2); both become the newest, from the end on.
    Ghosts (b1, b2) of what is to be stored move the target."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        self.target = 0.0
        self.lists: list[OrderedDict[bytes, None]] = [OrderedDict(), OrderedDict()]
        self.ghosts: list[OrderedDict[bytes, None]] = [OrderedDict(), OrderedDict()]
        self.reused: set[tuple[str, bytes]] = set()

    def prepare_load(self, keys: Collection[bytes], context: Any) -> None:
        super().prepare_load(keys, context)
        self.reused.update((context.req_id, key) for key in keys)

    def prepare_store(self, keys: list[bytes], context: Any) -> Any:
        ready = [key for key in keys if key in self.chunks and self.chunks[key].is_ready]
        name = context.req_id
        self.reused.update((name, key) for key in ready if (name, key) not in self.inserted)
        return super().prepare_store(keys, context)

    def on_request_finished(self, context: Any) -> None:
        for key in reversed(sorted(self._keys(context), key=context.get_offload_key_position)):
            side = next((side for side in (0, 1) if key in self.lists[side]), None)
            if side is None:
                continue
            name = context.req_id, key
            if name in self.reused:
                del self.lists[side][key]
                self.lists[1][key] = None
            elif name in self.inserted:
                self.lists[side].move_to_end(key)

    def _missed(self, keys: list[bytes]) -> None:
        recent, frequent = self.ghosts
        for key in reversed(keys):
            if key in recent:
                self.target = min(self.target + max(1, len(frequent) / len(recent)), self.pages)
                recent.move_to_end(key)
            elif key in frequent:
                self.target = max(self.target - max(1, len(recent) / len(frequent)), 0)
                frequent.move_to_end(key)

    def _insert(self, key: bytes, chunk: _Chunk) -> None:
        super()._insert(key, chunk)
        self.lists[0][key] = None
        for ghosts in self.ghosts:
            ghosts.pop(key, None)

    def _evict(self, count: int, protected: set[bytes]) -> list[bytes] | None:
        idle = [
            [key for key in of if self.chunks[key].is_ready and key not in protected]
            for of in self.lists
        ]
        if sum(map(len, idle)) < count:
            return None
        evicted, recent = [], len(self.lists[0])
        for _ in range(count):
            side = 0 if recent >= int(self.target) and idle[0] else 1
            side = side if idle[side] else 1 - side
            key = idle[side].pop(0)
            recent -= side == 0
            evicted.append(key)
            del self.lists[side][key], self.chunks[key]
            self.ghosts[side][key] = None
        for ghosts in self.ghosts:
            while len(ghosts) > self.pages:
                ghosts.popitem(last=False)
        return evicted


MODELS = {"lru": LruModel, "arc": ArcModel}
