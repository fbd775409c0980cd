"""An engine around the real scheduler, connector and connector hooks of vLLM.

Only the model is ours. Its tokens depend on every byte of all blocks of the request: what a layer
writes follows from what the layers before it have read. So a block with wrong bytes, or one that is
read too early, changes the tokens. expected_tokens() computes them without a cache.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import vllm_engine  # noqa: F401  skips where vLLM's tests do not run
from patience import in_time
from vllm.config import (
    CacheConfig,
    CUDAGraphMode,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu import kv_connector as v2
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from torch_kvswap.integrations.vllm import spec as spec_module
from torch_kvswap.results import BlocksRejectedError, CorruptedPageError, TransferError

LAYERS, BLOCK, LANES = 4, 16, 16  # LANES: numbers of 4 bytes that a layer keeps of a token
NAMES = [f"layers.{layer}" for layer in range(LAYERS)]
STATES = "states"
VOCABULARY = 512
PRIME = 2**31 - 1
CONNECTOR = {
    "kv_connector": "KVSwapConnector",
    "kv_connector_module_path": "torch_kvswap.integrations.vllm",
}
THEIRS = {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
# The engine follows the policy that it is given here, and not that of the child.
MULTI = {"kv_connector": "MultiConnector", "kv_connector_module_path": None}
RUNNERS = pytest.mark.parametrize("runner", ["v1", "v2"])
SCHEDULERS = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def expected_tokens(prompt: Sequence[int], count: int, window: int | None = None) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        x = torch.tensor(tokens)
        places = torch.arange(len(tokens))
        for layer in range(LAYERS):
            x = attend(x, written(x, places, layer), places, layer, window)
        tokens.append(int(x[-1]) % VOCABULARY)
    return tokens[len(prompt) :]


def written(x: torch.Tensor, places: torch.Tensor, layer: int) -> torch.Tensor:
    """What a layer keeps of tokens: int64 [tokens, LANES], each of 31 bits."""
    lanes = torch.arange(LANES)
    return (x[:, None] * 48271 + places[:, None] * 7919 + lanes * (layer + 3) + 1) % PRIME


def attend(
    x: torch.Tensor, kept: torch.Tensor, places: torch.Tensor, layer: int, window: int | None
) -> torch.Tensor:
    """kept: of all tokens up to the last one of x, which are at `places`."""
    weights = torch.arange(1, LANES + 1)
    numbers = (kept.long() % PRIME * weights).sum(1) % PRIME
    order = torch.arange(1, len(numbers) + 1)
    sums = (numbers * order % PRIME).cumsum(0)
    seen = sums[places]
    if window is not None:
        seen = seen - torch.where(places < window, 0, sums[(places - window).clamp(min=0)])
    return (x * 31 + seen + layer) % PRIME


@dataclass
class State:
    """A request as the model runner has it."""

    tokens: list[int]
    computed: int
    prompt: int
    blocks: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)


class Inputs(NamedTuple):
    """What a step computes of a request: tokens, of which the last may be drafts, their places, and
    the slots of the cache that it writes and reads."""

    state: State
    drafts: list[int]
    x: torch.Tensor
    places: torch.Tensor
    write: torch.Tensor
    read: torch.Tensor


class Runner:
    """A model runner's half of the connector: its hooks are called by vLLM's code for runner V2
    (ActiveKVConnector) or V1 (KVConnectorModelRunnerMixin)."""

    def __init__(self, config: Any, kv_cache_config: Any, runner: str, heads: range) -> None:
        self.config, self.is_v2, self.heads = config, runner == "v2", heads
        shape = LAYERS, kv_cache_config.num_blocks, len(heads), BLOCK, LANES
        self.caches = dict(zip(NAMES, torch.empty(shape, dtype=torch.int32), strict=True))
        # Never zeros: a block that nobody has written must be seen.
        for layer, cache in enumerate(self.caches.values()):
            cache.fill_(-layer - 1)
        self.window = getattr(
            kv_cache_config.kv_cache_groups[0].kv_cache_spec, "sliding_window", None
        )
        # A layer of states has the bytes of the first layer, in blocks of its own.
        if len(kv_cache_config.kv_cache_groups) > 1:
            self.caches[STATES] = self.caches[NAMES[0]]
        self.states: dict[str, State] = {}
        self.drafts = config.num_speculative_tokens
        self.graph = CUDAGraphMode.NONE  # or FULL: no hooks then
        self.connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, kv_cache_config
        )
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        if self.is_v2:
            self.hooks = v2.ActiveKVConnector(config, self.caches)
        else:
            self.connector.register_kv_caches(self.caches)

    def shutdown(self) -> None:
        self.connector.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def execute(self, scheduled: Any) -> ModelRunnerOutput:
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self._update(scheduled)
        if not self.is_v2:  # as GPUModelRunner.execute_model() does
            self.connector.handle_preemptions(scheduled.kv_connector_metadata)
        for block in getattr(scheduled, "new_block_ids_to_zero", None) or ():
            for name in NAMES:
                self.caches[name][block] = 0
        for source, target in scheduled.kv_cache_block_copies or ():
            for name in NAMES:
                self.caches[name][target] = self.caches[name][source]
        if not scheduled.total_num_scheduled_tokens:
            if self.is_v2:
                return self.hooks.no_forward(scheduled)
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled, self.config)
        counts = scheduled.num_scheduled_tokens
        drafts = scheduled.scheduled_spec_decode_tokens
        batch = [
            self._inputs(self.states[name], count, len(drafts.get(name, ())))
            for name, count in counts.items()
        ]
        is_replay = self.graph == CUDAGraphMode.FULL
        context = set_forward_context(
            dict.fromkeys(NAMES, object()), self.config, cudagraph_runtime_mode=self.graph
        )
        if self.is_v2:
            with contextlib.nullcontext() if is_replay else context:
                self.hooks.pre_forward(scheduled)
                xs = self._forward(batch)
            sampled = self._sample(batch, xs)
            said = self.hooks.post_forward(scheduled.finished_req_ids)
        else:
            hooks = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled)
            with context, hooks as said:
                xs = self._forward(batch)
            sampled = self._sample(batch, xs)
        return ModelRunnerOutput(
            req_ids=list(counts),
            req_id_to_index={name: at for at, name in enumerate(counts)},
            sampled_token_ids=sampled,
            kv_connector_output=said,
        )

    def _update(self, scheduled: Any) -> None:
        gone = scheduled.finished_req_ids | (scheduled.preempted_req_ids or set())
        for name in gone:
            self.states.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            tokens = (new.prefill_token_ids if self.is_v2 else None) or new.prompt_token_ids
            self.states[new.req_id] = State(
                list(tokens), new.num_computed_tokens, len(new.prompt_token_ids)
            )
            self.states[new.req_id].blocks = list(new.block_ids[0])
        cached = scheduled.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            state = self.states.get(name)
            if name in cached.resumed_req_ids:
                tokens = list(cached.all_token_ids[name])
                prompt = len(tokens) - cached.num_output_tokens[at]
                computed = cached.num_computed_tokens[at]
                state = self.states[name] = State(tokens, computed, prompt)
            assert state is not None
            if cached.new_block_ids[at]:
                state.blocks += cached.new_block_ids[at][0]
            if not self.is_v2 and not self.drafts:  # V2 has its own count on the GPU
                state.computed = cached.num_computed_tokens[at]
                del state.tokens[state.prompt + cached.num_output_tokens[at] :]

    def _inputs(self, state: State, count: int, num_drafts: int) -> Inputs:
        places = torch.arange(state.computed, state.computed + count)
        drafts = [*state.drafts, *[0] * num_drafts][:num_drafts]
        x = torch.tensor([*state.tokens, *drafts][state.computed : state.computed + count])
        assert len(x) == count
        slots = (torch.tensor(state.blocks)[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
        read = slots[: state.computed + count]
        return Inputs(state, drafts, x, places, slots[places], read)

    def _forward(self, batch: list[Inputs]) -> list[torch.Tensor]:
        xs = [one.x for one in batch]
        for layer, name in enumerate(NAMES):
            cache = self.caches[name]
            for x, one in zip(
                xs, batch, strict=True
            ):  # as unified_kv_cache_update, before the hook
                self._write(cache, one.write, written(x, one.places, layer))
            if self.graph != CUDAGraphMode.FULL:
                self.connector.wait_for_layer_load(name)
            xs = [
                attend(x, self._read(cache, one.read), one.places, layer, self.window)
                for x, one in zip(xs, batch, strict=True)
            ]
        return [x[-1 - len(one.drafts) :] for x, one in zip(xs, batch, strict=True)]

    def _write(self, cache: torch.Tensor, slots: torch.Tensor, kept: torch.Tensor) -> None:
        """Every head keeps the same, plus its number."""
        for at, head in enumerate(self.heads):
            cache[slots // BLOCK, at, slots % BLOCK] = (kept + head).to(torch.int32)

    def _read(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """What all heads have kept; something else if they have not kept the same."""
        kept = [
            cache[slots // BLOCK, at, slots % BLOCK].long() - head
            for at, head in enumerate(self.heads)
        ]
        return kept[0] + sum((kept[0] - one).abs() for one in kept[1:])

    def _sample(self, batch: list[Inputs], xs: list[torch.Tensor]) -> list[list[int]]:
        """Drafts are right up to the first one that is not the token that follows."""
        sampled = []
        for (state, drafts, new, *_), x in zip(batch, xs, strict=True):
            state.computed += len(new) - len(drafts)
            tokens = (x.cpu() % VOCABULARY).tolist() if state.computed == len(state.tokens) else []
            right = [a == b for a, b in zip(drafts, tokens, strict=False)]
            tokens = tokens[: [*right, False].index(False) + 1]
            state.computed += max(len(tokens) - 1, 0)
            state.tokens += tokens
            sampled.append(tokens)
            if tokens and self.drafts:  # some are wrong
                known = expected_tokens(state.tokens, self.drafts, self.window)
                state.drafts = [one ^ (len(state.tokens) % 3 == at) for at, one in enumerate(known)]
        return sampled


class Serving:
    """An engine. Requests are served by step(), or run() until all have ended.

    Args:
        runner: "v1" or "v2".
        is_async: a step is scheduled before the one before it was executed and reported.
        blocks: GPU blocks, the first of which is vLLM's null block.
        batched: tokens of a step.
        window: of all layers, in tokens; None is full attention.
        cache: "kv", or "fp8", or "mla" for latent attention, of as many bytes.
        states: there is a Mamba layer, in a group of its own, whose states the model does not read.
        match_unit: prefixes are found up to a multiple of this many tokens, which divides BLOCK; needs states.
        drafts: tokens that are proposed in each step.
        heads: of each layer, divided among the workers. None: each worker has one, and its cache is
            that of the others.
        workers: ranks of tensor parallelism. The tokens are those of the last one.
        model: more of the ModelConfig.
        transfer: more of the KVTransferConfig.
        extra: more of kv_connector_extra_config.
    """

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        *,
        runner: str = "v2",
        is_async: bool = False,
        blocks: int = 64,
        pages: int = 256,
        batched: int = 256,
        window: int | None = None,
        cache: str = "kv",
        states: bool = False,
        match_unit: int = BLOCK,
        drafts: int = 0,
        heads: int | None = None,
        workers: int = 1,
        model: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        heads_here = 1 if heads is None else heads // workers
        page_bytes = LAYERS * BLOCK * LANES * 4 * heads_here
        options = {"cpu_bytes_to_use": pages * page_bytes * workers, **(extra or {})}
        how = {**CONNECTOR, **(transfer or {})}
        self.config = _config(folder, is_async, batched, how, options, workers, drafts, model)
        # Only now, because it wants Triton, which our model does without.
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "v2")))
        assert self.config.use_v2_model_runner == (runner == "v2")
        self.config.cache_config.num_gpu_blocks = blocks
        self.config.cache_config.kv_cache_layout = "LBHNC"
        if states:
            self.config.cache_config.mamba_cache_mode = "align"
            self.config.cache_config.prefix_match_unit = match_unit
        kv_cache_config = _kv_cache_config(blocks, window, cache, heads_here, states)
        self.runners = []  # before the scheduler, as in an engine
        for rank in range(workers):
            patch.setattr(self.config.parallel_config, "rank", rank)
            # They begin one after another, so nobody waits.
            group = SimpleNamespace(rank_in_group=rank, barrier=lambda: None)
            patch.setattr(spec_module, "get_tp_group", lambda group=group: group)
            patch.setattr(spec_module, "get_node_count", lambda: 1)
            with set_current_vllm_config(self.config):
                first = 0 if heads is None else rank * heads_here
                mine = range(first, first + heads_here)
                self.runners.append(Runner(self.config, kv_cache_config, runner, mine))
        patch.setattr(self.config.parallel_config, "rank", 0)
        kind = AsyncScheduler if is_async else Scheduler
        manager = StructuredOutputManager(self.config)
        how = {"block_size": BLOCK, "hash_block_size": match_unit, "log_stats": True}
        try:
            self.scheduler = kind(self.config, kv_cache_config, manager, **how)
        except BaseException:  # vLLM's region has a name in the file system
            for one in self.runners:
                one.shutdown()
            raise
        self.runner = self.runners[0]
        self._aggregator = KVOutputAggregator(workers)
        self.agree = True  # the ranks have had the same tokens in each step
        self.is_async = is_async
        self.steps: deque[tuple[Any, Any]] = deque()  # executed, not reported yet
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(match_unit, sha256)

    def add(self, name: str, prompt: Sequence[int], count: int = 4, transfer: Any = None) -> None:
        """transfer: the request's kv_transfer_params."""
        self.tokens[name] = []
        extra = {"extra_args": {"kv_transfer_params": transfer}} if transfer else {}
        sampling = SamplingParams(max_tokens=count, ignore_eos=True, **extra)
        request = Request(name, list(prompt), sampling, None, block_hasher=self._hasher)
        self.requests[name] = request
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    @property
    def is_busy(self) -> bool:
        waits = self.scheduler.connector.has_pending_push_work()
        return bool(self.steps) or self.scheduler.has_requests() or waits

    def step(self) -> None:
        """As EngineCore does: with asynchronous scheduling a step is reported after the next one was
        scheduled and launched."""
        scheduled = self.scheduler.schedule()
        self.steps.append((scheduled, self.execute(scheduled)))
        waits = self.is_async and scheduled.total_num_scheduled_tokens > 0
        while len(self.steps) > int(waits):
            self._report(*self.steps.popleft())

    def execute(self, scheduled: Any) -> Any:
        """The output of a step of all workers."""
        if len(self.runners) == 1:
            return self.runner.execute(scheduled)
        # Copies, as to and from other processes.
        outputs = [copy.deepcopy(one.execute(copy.deepcopy(scheduled))) for one in self.runners]
        tokens, *others = [one.sampled_token_ids for one in outputs]
        self.agree &= all(one == tokens for one in others)
        return self._aggregator.aggregate(outputs, len(outputs) - 1)

    def _report(self, scheduled: Any, output: Any) -> None:
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in outputs.outputs:
                self.tokens[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.ends[one.request_id] = str(one.finish_reason)
        if self.runner.drafts and not self.is_async:
            drafts = {name: self.runner.states[name].drafts for name in output.req_ids}
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), [*drafts.values()]))

    def run(self) -> None:
        for _ in range(2000):
            if not self.is_busy:
                return
            self.step()
        # The threads of a tier may need more time than so many steps.
        if not in_time(lambda: not self.is_busy or bool(self.step())):
            raise AssertionError(f"requests did not end: {self.scheduler.get_request_counts()}")

    def serve(self, prompts: dict[str, list[int]], count: int = 4) -> None:
        for name, prompt in prompts.items():
            self.add(name, prompt, count)
        self.run()

    def start_decoding(self) -> None:
        """Starts a request that decodes for long. Beside it a prompt is loaded before its step, if it
        has few tokens to compute."""
        self.add("decoding", prompt(99, 20), 60)
        self.step()

    def forget_gpu(self) -> None:
        """Drops the prefix cache of the GPU, so that all comes from the host."""
        assert self.scheduler.reset_prefix_cache()

    @property
    def workers(self) -> list[Any]:
        """The KVSwapWorker of each rank."""
        return [_ours(one.connector).connector_worker.worker for one in self.runners]

    @property
    def worker(self) -> Any:
        return self.workers[0]

    @property
    def manager(self) -> Any:
        return _ours(self.scheduler.connector).connector_scheduler.manager


def _ours(connector: Any) -> Any:
    """The connector, or the first child of a MultiConnector."""
    return getattr(connector, "sub_connectors", [connector])[0]


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


PROMPTS = {f"{n}": prompt(n, 33 + 16 * n) for n in range(5)}
CHUNKS = sum(len(one) // BLOCK for one in PROMPTS.values())


def again(
    turn: object, prompts: dict[str, list[int]] = PROMPTS, more: Sequence[int] = ()
) -> dict[str, list[int]]:
    """The same prompts as other requests, with more tokens at their ends."""
    return {f"{turn} {name}": [*one, *more] for name, one in prompts.items()}


def check(engine: Serving, prompts: dict[str, list[int]], count: int = 4) -> None:
    """The tokens of these requests are right."""
    for name, one in prompts.items():
        assert engine.tokens[name] == expected_tokens(one, count, engine.runner.window), name


# What fails for the last block only.
_OF_ONE_BLOCK: dict[Any, TransferError] = {
    "rejected": BlocksRejectedError("too wide"),
    "damaged": CorruptedPageError("other checksums"),
}


class Faults:
    """Makes transfers of an engine fail: bytes are destroyed before a model can read them, and the
    result says so. A load may fail in any layer and leave the layers before it right.

    Args:
        chooses: given the direction and the number of blocks, whether this transfer fails, and
            "rejected" or "damaged" if only its last block does.
        rank: the worker whose transfers fail.
    """

    def __init__(
        self, engine: Serving, chooses: Callable[[str, int], bool | str], rank: int = 0
    ) -> None:
        self.worker, self.chooses = engine.workers[rank], chooses
        self.count = {"store": 0, "load": 0}
        self.seen = {"store": 0, "load": 0}
        self._layer = itertools.cycle(range(LAYERS))
        self._failing: dict[int, bool | str] = {}
        self._submit, self._poll = self.worker._submit, self.worker._handler.poll
        self.worker._submit, self.worker._handler.poll = self.submit, self.poll

    def submit(self, moves: dict[int, Any], direction: str, **options: Any) -> Any:
        slots, layouts = self.worker._blocks_per_page, self.worker._handler.layouts
        places = [place for move in moves.values() for place in move.places(slots)]
        of_groups = [
            layout
            for move in moves.values()
            for layout, blocks in zip(layouts, move.blocks, strict=True)
            for _ in blocks
        ]
        self.seen[direction] += 1
        job = self._submit(moves, direction, **options)
        how = self.chooses(direction, len(places))
        if not how or job is None:
            return job
        self.count[direction] += 1
        self._failing[job.id] = how
        first = next(self._layer)
        fail = slice(-1, None) if how in _OF_ONE_BLOCK else slice(None)
        for layout, (block, page) in zip(of_groups[fail], places[fail], strict=True):
            if direction == "store":
                self.worker._pool.pages[page].fill_(0x5A)
            else:
                for tensor in layout.tensors[first:]:
                    tensor[block].view(torch.uint8).fill_(0x5A)
        return job

    def poll(self) -> list[Any]:
        return [self._spoil(result) for result in self._poll()]

    def _spoil(self, result: Any) -> Any:
        how = self._failing.pop(result.job_id, False)
        if not how:
            return result
        moves = [self.worker._open[number].move for number in result.tag]
        blocks = sum(len(some) for move in moves for some in move.blocks)
        rejected = (blocks - 1,) if how in _OF_ONE_BLOCK else ()
        error = _OF_ONE_BLOCK.get(how, TransferError("error 700"))
        return dataclasses.replace(result, state="failed", rejected=rejected, error=error)


def never(direction: str, blocks: int) -> bool:
    return False


def only(direction: str, how: bool | str = True) -> Callable[[str, int], bool | str]:
    return lambda one, blocks: one == direction and how


class RandomRequests:
    """Requests for an engine, of prompts with common beginnings, some of which are aborted.

    Attributes:
        served (dict[str, list[int]]): the prompts of those that were not aborted.
        preempted (int): how often one was preempted at most.
    """

    TOKENS = 12  # of each request

    def __init__(self, engine: Serving, chosen: random.Random) -> None:
        self.engine, self.chosen = engine, chosen
        self.documents = [prompt(100 + n, chosen.randrange(60, 180)) for n in range(8)]
        self.served: dict[str, list[int]] = {}
        self.number = self.preempted = 0

    def go_on(self, requests: int, aborts: float) -> None:
        """Adds requests, takes some steps, aborts one with this probability, and lets the GPU forget
        sometimes."""
        engine, chosen = self.engine, self.chosen
        for _ in range(requests):
            self.number += 1
            document = chosen.choice(self.documents)
            self.served[f"{self.number}"] = document[: chosen.randrange(40, len(document))]
            engine.add(f"{self.number}", self.served[f"{self.number}"], self.TOKENS)
        for _ in range(chosen.randrange(1, 30)):
            if engine.is_busy:
                engine.step()
        if chosen.random() < aborts:
            gone = f"{chosen.randrange(1, self.number + 1)}"
            engine.abort(gone)
            self.served.pop(gone, None)
        times = (one.num_preemptions for one in engine.requests.values())
        self.preempted = max(self.preempted, *times)
        if chosen.random() < 0.2:
            engine.run()
            engine.forget_gpu()


@contextlib.contextmanager
def serving(folder: Path, **how: Any) -> Iterator[Serving]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        made = Serving(folder, patch, **how)
        try:
            yield made
        finally:
            made.scheduler.shutdown()
            for runner in made.runners:
                runner.shutdown()


def _config(
    folder: Path,
    is_async: bool,
    batched: int,
    transfer: dict[str, Any],
    extra: dict[str, Any],
    workers: int,
    drafts: int,
    more: dict[str, Any] | None,
) -> VllmConfig:
    model = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 64}
    model |= {"num_hidden_layers": LAYERS, "num_attention_heads": 2, "ffn_dim": 128}
    model |= {"vocab_size": VOCABULARY, "max_position_embeddings": 2048, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(model))
    how = {"model": str(folder), "dtype": "float32", "max_model_len": 1024, **(more or {})}
    target = ModelConfig(skip_tokenizer_init=True, **how)
    parallel = ParallelConfig(
        tensor_parallel_size=workers,
        distributed_executor_backend="mp" if workers > 1 else None,
    )
    speculative = (
        SpeculativeConfig(
            method="ngram_gpu" if is_async else "ngram",
            num_speculative_tokens=drafts,
            prompt_lookup_max=3,
            target_model_config=target,
            target_parallel_config=parallel,
        )
        if drafts
        else None
    )
    return VllmConfig(
        model_config=target,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=batched,
            max_model_len=1024,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=is_async,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_role="kv_both", kv_connector_extra_config=extra, **transfer
        ),
        device_config=DeviceConfig(device="cpu"),
        parallel_config=parallel,
        speculative_config=speculative,
    )


def _kv_cache_config(
    blocks: int, window: int | None, cache: str, heads: int, states: bool
) -> KVCacheConfig:
    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": heads, "head_size": LANES // 2}
    shape["dtype"] = torch.float32
    if window is not None:
        spec = SlidingWindowSpec(**shape, sliding_window=window)
    elif cache == "mla":
        spec = MLAAttentionSpec(**shape | {"head_size": LANES})
    elif cache == "fp8":
        spec = FullAttentionSpec(**shape | {"head_size": 2 * LANES, "dtype": torch.float8_e4m3fn})
    else:
        spec = FullAttentionSpec(**shape)
    page = spec.page_size_bytes
    assert page == heads * BLOCK * LANES * 4
    # All layers are in one allocation, one behind the other. `size` is that of all of it.
    size, stride = page * blocks * LAYERS, page * blocks
    tensors = [KVCacheTensor(size, list(NAMES), layer_stride=stride, block_stride=page)]
    groups = [KVCacheGroupSpec(list(NAMES), spec)]
    if states:
        of_state = {"shapes": ((page // 4,),), "dtypes": (torch.float32,)}
        mamba = MambaSpec(block_size=BLOCK, **of_state, mamba_cache_mode="align")
        groups.append(KVCacheGroupSpec([STATES], mamba))
        tensors.append(KVCacheTensor(size, [STATES], layer_stride=stride, block_stride=page))
    return KVCacheConfig(blocks, tensors, groups, kv_cache_layout="LBHNC")
