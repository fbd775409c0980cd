"""The block managers that are compared, with one face: a prompt is in the form that each takes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from torch_kvswap.prefix.hashing import KEY_BYTES
from torch_kvswap.prefix.protocol import Outcome


class Contestant(Protocol):
    """form: the prompt of so many keys. stored: how many blocks of it got pages from a
    prepare_store(). to_complete: what is told about a job that has ended."""

    def form(self, keys: bytes) -> Any: ...
    def lookup(self, prompt: Any) -> int: ...
    def touch(self, prompt: Any) -> None: ...
    def prepare_store(self, prompt: Any) -> Any: ...
    def stored(self, job: Any) -> int: ...
    def prepare_load(self, prompt: Any) -> Any: ...
    def to_complete(self, prompt: Any, job: Any) -> Any: ...
    def complete_store(self, told: Any) -> None: ...
    def complete_load(self, told: Any) -> None: ...


class OfKeys:
    """Ours, in this process or of a server, that gets a prompt as one bytes object.

    in_lists: of a cache with a list of groups, of which there is one.
    """

    def __init__(self, manager: Any, in_lists: bool = False) -> None:
        self.manager, self.in_lists = manager, in_lists
        self.touch = manager.touch
        self.prepare_load, self.prepare_store = manager.prepare_load, manager.prepare_store
        self.complete_store = self._tell_server if in_lists else manager.complete
        self.complete_load = self.complete_store

    def form(self, keys: bytes) -> Any:
        return [keys] if self.in_lists else keys

    def lookup(self, prompt: Any) -> int:
        ready: int = self.manager.lookup(prompt).ready  # a stored method takes longer to call
        return ready

    def stored(self, job: Any) -> int:
        if job is None:
            return 0
        return len(job.pages[0] if self.in_lists else job.pages)

    def to_complete(self, prompt: Any, job: Any) -> Any:
        return job

    def _tell_server(self, job: Any) -> None:
        job._end(Outcome.DONE, ())
        self.manager._session.send()


class OfVllm:
    """vLLM's, as its scheduler calls it: lookups key by key, else by prompt, the ends as sets."""

    def __init__(self, pages: int) -> None:
        manager = import_module("vllm.v1.kv_offload.cpu.manager")
        base = import_module("vllm.v1.kv_offload.base")
        self._manager = manager.CPUOffloadingManager(pages, "lru")
        self._key = base.make_offload_key
        self._context = base.ReqContext("request")
        self._hit = base.LookupResult.HIT

    def form(self, keys: bytes) -> Any:
        return [self._key(key, 0) for key in split(keys)]

    def lookup(self, prompt: Any) -> int:
        look, context, hits = self._manager.lookup, self._context, 0
        for key in prompt:
            if look(key, context) is not self._hit:
                break
            hits += 1
        return hits

    def touch(self, prompt: Any) -> None:
        self._manager.touch(prompt, self._context)

    def prepare_store(self, prompt: Any) -> Any:
        return self._manager.prepare_store(prompt, self._context)

    def stored(self, job: Any) -> int:
        return 0 if job is None else len(job.keys_to_store)

    def prepare_load(self, prompt: Any) -> Any:
        return self._manager.prepare_load(prompt, self._context)

    def to_complete(self, prompt: Any, job: Any) -> Any:
        return set(prompt)

    def complete_store(self, told: Any) -> None:
        self._manager.complete_store(told, self._context)

    def complete_load(self, told: Any) -> None:
        self._manager.complete_load(told, self._context)


class OneByOne:
    """Another one, called for every single block."""

    def __init__(self, inner: Contestant) -> None:
        self._inner = inner

    def form(self, keys: bytes) -> Any:
        return [self._inner.form(key) for key in split(keys)]

    def lookup(self, prompt: Any) -> int:
        look = self._inner.lookup
        return sum(look(block) for block in prompt)

    def touch(self, prompt: Any) -> None:
        for block in prompt:
            self._inner.touch(block)

    def prepare_store(self, prompt: Any) -> Any:
        return [self._inner.prepare_store(block) for block in prompt]

    def stored(self, job: Any) -> int:
        return sum(map(self._inner.stored, job))

    def prepare_load(self, prompt: Any) -> Any:
        return [self._inner.prepare_load(block) for block in prompt]

    def to_complete(self, prompt: Any, job: Any) -> Any:
        return list(map(self._inner.to_complete, prompt, job))

    def complete_store(self, told: Any) -> None:
        for block in told:
            self._inner.complete_store(block)

    def complete_load(self, told: Any) -> None:
        for block in told:
            self._inner.complete_load(block)


def split(keys: bytes) -> Sequence[bytes]:
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
