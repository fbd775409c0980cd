"""The scheduler side of KVSwapOffloadingSpec with `host_server`: the host pages are those of a
server, which engines share (docs/serve.md)."""

from __future__ import annotations

import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from torch_kvswap._C import fold_keys
from torch_kvswap.integrations.vllm.access import Access
from torch_kvswap.integrations.vllm.scheduler_session import SchedulerSession
from torch_kvswap.integrations.vllm.scheduler_side import HostManager, Key
from torch_kvswap.prefix.manager import BlockStats
from torch_kvswap.prefix.protocol import KeyState
from torch_kvswap.prefix.session import RemoteReservation

_MISS, _HIT = base.LookupResult.MISS, base.LookupResult.HIT
_PENDING, _RETRY = base.LookupResult.HIT_PENDING, base.LookupResult.RETRY
_ASKED, _ARRIVES = -1, KeyState.ARRIVES  # asked: no answer has come
_RESULTS: dict[int, base.LookupResult] = {
    _ASKED: _RETRY,
    _ARRIVES: _PENDING,
    KeyState.ABSENT: _MISS,
}
_STATS_SECONDS = 1.0


class _Asked(Access):
    """What a request has asked the server for.

    Attributes:
        states (dict[bytes, int]): of the keys that were looked up: a KeyState, or the page.
        to_ask (dict[bytes, None]): keys to ask for at the end of the step, in this order.
        held (list[RemoteReservation]): the pages.
        is_wanted (bool): this step has looked something up.
        resets (int): of the index, when the request began.
    """

    def __init__(self, resets: int) -> None:
        super().__init__()
        self.resets = resets
        self.states: dict[Key, int] = {}
        self.to_ask: dict[Key, None] = {}
        self.held: list[RemoteReservation] = []
        self.is_wanted = False

    def look(self, key: Key, storing: Container[Key]) -> int:
        """The state of a key. It is asked for if it is new, and again if it had no page.

        storing: keys that arrive because this engine stores them. The server does not know them.
        """
        state = self.states.get(key)
        if state is None:
            if key in storing:
                return _ARRIVES
            self.states[key] = state = _ASKED
        elif state >= _ASKED:  # or a page
            return state
        self.to_ask[key] = None
        return _ARRIVES if key in storing else state

    def answer(self, keys: Sequence[Key], held: RemoteReservation) -> None:
        """The server has answered for these keys."""
        self.states.update(zip(keys, held.answers, strict=True))
        self.held.append(held)

    def take_held(self) -> list[RemoteReservation]:
        """What is held. The request knows no key any more."""
        held, self.held = self.held, []
        self.states.clear()
        self.to_ask.clear()
        return held


class SharedManager(HostManager[list[RemoteReservation]]):
    """vLLM's OffloadingManager on the pages of a server.

    lookup() never waits. It says RETRY for a key that it does not know, and vLLM looks on; at the
    end of the step all these keys are one message, and the answer is there in the next step. What
    the server has found it holds for this engine, until the request has loaded it, or has not
    looked for it in a step.

    Stores get pages that are borrowed before it is known for which keys. When a copy has ended, its
    keys are published. Another engine may have stored them meanwhile: then its page stays. An
    engine without requests gives its pages back.

    Without a server nothing is found and nothing is stored.

    Args:
        session (SchedulerSession): of this engine.
        info (Mapping[str, Any] | None): what config_info() reports.
    """

    def __init__(self, session: SchedulerSession, info: Mapping[str, Any] | None = None) -> None:
        super().__init__(info)
        self._session = session
        self._requests: set[str] = set()
        self._is_idle = False  # there were no requests at the end of the last step
        self._active: set[_Asked] = set()  # requests that hold or ask for something
        self._unanswered = 0  # requests to the server
        # Keys that the server has, as far as is known. Others evict them, so they are asked for
        # again when they are offered.
        self._known: dict[Key, None] = {}
        self._storing: dict[Key, int] = {}  # their pages
        self._resets = session.resets  # as far as the requests know
        self._is_new_step = True
        self._stats: BlockStats | None = None  # as the server has told them last
        self._stats_asked = -_STATS_SECONDS

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        self._requests.add(req_context.req_id)
        self._asked(req_context)
        return base.RequestOffloadingContext()

    def lookup(self, key: Key, req_context: base.ReqContext) -> base.LookupResult:
        """The state of a key: RETRY until the server has answered."""
        if self._is_new_step:
            self._is_new_step = False
            self._poll()
        if not self._session.is_joined:
            return _MISS
        asked = self._asked(req_context, starts=True)
        if not asked.is_wanted:
            self._want(asked)
        state = asked.look(key, self._storing)
        return _HIT if state >= 0 else _RESULTS[state]

    def _begin_load(
        self, keys: Collection[Key], req_context: base.ReqContext
    ) -> tuple[list[RemoteReservation], Any] | None:
        asked = self._asked(req_context)
        pages = list(map(asked.states.get, keys, repeat(KeyState.ABSENT)))
        if min(pages, default=0) < 0:
            return None
        held = asked.take_held()
        asked.see(req_context, keys)
        self._session.touch(fold_keys(asked.sort(keys)))
        return held, pages

    def _end_load(self, load: list[RemoteReservation], keys: Collection[Key]) -> None:
        failed = self._take_failed(page for one in load for page in one.answers)
        self._session.end_hold(load, failed, is_damaged="damaged" in failed.values())
        for key in keys if failed else ():
            self._known.pop(key, None)

    def on_request_finished(self, req_context: base.ReqContext) -> None:
        """Makes the request's chunks the newest."""
        self._requests.discard(req_context.req_id)
        asked = self._asked(req_context)
        if asked.resets != self._resets:  # the next server has the numbers of its pages, too
            return
        self._drop(asked)
        if asked.keys:
            self._session.order(fold_keys(asked.keys), renew=True)

    def prepare_store(
        self, keys: Collection[Key], req_context: base.ReqContext
    ) -> base.PrepareStoreOutput | None:
        """Pages for the keys that the server does not have, as far as is known.

        keys_to_store keeps the order of `keys`. None if a later step will have more pages. A
        request that was running at another engine's reset, or when the server was lost, stores
        nothing until it starts again.
        """
        nothing = base.PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        asked = self._asked(req_context)
        if asked.resets != self._resets or not self._session.is_joined:
            return nothing
        asked.see(req_context, keys)
        known = [key for key in keys if key in self._known]
        if known:  # those that others have evicted meanwhile are stored when they are offered next
            for key in known:
                asked.look(key, self._storing)
            self._want(asked)
        new = [key for key in keys if key not in self._known and key not in self._storing]
        if not new:
            return nothing
        pages = self._session.begin_store(len(new))
        self._sizes.append(len(new))
        if pages is None:
            return None
        page_of = dict(zip(new, pages, strict=False))
        self._storing.update(page_of)
        return base.PrepareStoreOutput(list(page_of), CPULoadStoreSpec(pages), [])

    def complete_store(
        self, keys: Collection[Key], req_context: base.ReqContext, success: bool = True
    ) -> None:
        """Publishes the stores of these keys. vLLM names all keys of a store at once."""
        page_of = {key: self._storing.pop(key) for key in keys}
        pages = list(page_of.values())
        failed = self._take_failed(pages) if success else pages
        stored = [key for key, page in page_of.items() if page not in failed]
        if self._session.end_store(pages, [page_of[key] for key in stored], fold_keys(stored)):
            self._know(stored)
            # Directly behind the chunk in front of them: a prompt is evicted from its end.
            asked = self._asked(req_context)
            self._session.order(fold_keys(asked.with_predecessor(stored, self._known)))

    def on_schedule_end(self, context: base.ScheduleEndContext) -> None:
        """Asks for what the step has looked up and does not know, and lets go of what it has not
        looked up."""
        if self._is_new_step:
            self._poll()
        for asked in list(self._active):
            if not asked.is_wanted:
                self._drop(asked)
            asked.is_wanted = False
        was_idle, self._is_idle = self._is_idle, not self._requests
        self._session.end_step(was_idle and self._is_idle)
        if not self._unanswered:  # behind end_step(): a request that has its answer has pages, too
            self._ask()
        self._is_new_step = True

    def has_pending_work(self) -> bool:
        """Whether steps without requests must go on: something is held, or will be."""
        can_give_back = self._session.has_free_pages and not self._requests
        return bool(self._active) or self._session.is_asking or can_give_back

    def reset_cache(self) -> None:
        """Forgets all chunks of the server, also those of other engines.

        vLLM does not report the jobs of open reservations any more. Their pages are not used again
        before on_reset_flushed().
        """
        for asked in self._active:
            self._session.end_hold(asked.take_held())
        loads = chain(*self._loads.values())
        self._flushed += (partial(self._session.end_hold, held) for held in loads)
        pages = list(self._storing.values())
        self._flushed.append(partial(self._session.end_store, pages, [], b""))
        for known in (self._loads, self._storing, self._failed):
            known.clear()
        self._session.reset()
        self._forget()

    def get_stats(self) -> OffloadingConnectorStats:
        """The pages are those of the server."""
        now = time.monotonic()
        if now - self._stats_asked > _STATS_SECONDS:
            self._stats_asked = now
            self._session.ask_stats(partial(setattr, self, "_stats"))
        return self._stats_with(self._stats)

    def shutdown(self) -> None:
        """Leaves the server."""
        self._session.close()

    def _asked(self, context: base.ReqContext, starts: bool = False) -> _Asked:
        """What a request has asked for. starts: a request from before a reset is new."""
        asked: _Asked | None = context.get_state(_Asked)
        if asked is None or (starts and asked.resets != self._resets):
            asked = _Asked(self._resets)
            context.set_state(asked)
        return asked

    def _ask(self) -> None:
        for asked in self._active:
            if keys := list(asked.to_ask):
                asked.to_ask.clear()
                self._unanswered += 1
                self._session.hold(fold_keys(keys), partial(self._take, asked, keys))

    def _take(self, asked: _Asked, keys: list[Key], held: RemoteReservation) -> None:
        """Takes an answer of the server."""
        if asked.resets != self._resets:
            return self._session.end_hold([held])
        self._unanswered -= 1
        asked.answer(keys, held)
        self._want(asked)  # the step that begins may look for it
        for key in keys:
            if asked.states[key] < 0:
                self._known.pop(key, None)
        self._know(key for key in keys if asked.states[key] >= 0)

    def _know(self, keys: Iterable[Key]) -> None:
        self._known.update(zip(keys, repeat(None)))
        for key in list(islice(self._known, max(len(self._known) - self._session.num_pages, 0))):
            del self._known[key]

    def _want(self, asked: _Asked) -> None:
        asked.is_wanted = True
        self._active.add(asked)

    def _drop(self, asked: _Asked) -> None:
        """Lets go of what a request holds."""
        asked.is_wanted = False
        self._active.discard(asked)
        self._session.end_hold(asked.take_held())

    def _poll(self) -> None:
        self._session.poll()
        if self._session.resets != self._resets:  # by another engine, or the server was lost
            for asked in list(self._active):
                self._drop(asked)
            self._forget()

    def _forget(self) -> None:
        """Forgets all chunks, but not the jobs."""
        self._active.clear()
        self._known.clear()
        self._unanswered = 0  # an answer that still comes is for nobody
        self._resets = self._session.resets
