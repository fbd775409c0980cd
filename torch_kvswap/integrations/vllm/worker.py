"""The worker side of KVSwapOffloadingSpec: copies blocks with an OffloadHandler."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_offload import base

from torch_kvswap._native.loader import native
from torch_kvswap.host_pool.pool import HostPool
from torch_kvswap.integrations.vllm.kv_layouts import Move, group_layouts, read_move
from torch_kvswap.integrations.vllm.options import SpecOptions
from torch_kvswap.integrations.vllm.served import ServedPool
from torch_kvswap.offload.handler import Job, OffloadHandler
from torch_kvswap.results import CorruptedPageError, DeviceLostError, TransferError, error_of

_log = logging.getLogger(__name__)
_LAYER_GROUPS = 16  # at most, of an in-step load


class Failure(NamedTuple):
    """What a transfer has not copied.

    Attributes:
        number (int): vLLM's number of the transfer.
        direction (str): "store" or "load".
        reason (str): "failed"; "rejected", if blocks do not fit into encoded slots; "damaged", if
            they are not what was stored; or "dropped", if it was not begun.
        blocks (set[int]): GPU blocks.
        pages (set[int]): host pages.
    """

    number: int
    direction: str
    reason: str
    blocks: set[int]
    pages: set[int]


class _Open(NamedTuple):
    """A transfer that has not been reported to vLLM. Transfers of a step can share a job, whose tag
    has all their numbers."""

    move: Move
    job: Job


class KVSwapWorker(base.OffloadingWorker):
    """vLLM's OffloadingWorker on an OffloadHandler.

    The thread that runs the model calls all methods, with the model's stream as the current stream.
    Stores and loads wait for all work submitted to this stream so far: a store's blocks were
    written there, and a load's blocks may still be zeroed there, by the same step before a
    synchronous load or by an earlier step for the previous owner of the block.

    vLLM asserts that transfers succeed. So every transfer is reported as a success, and
    take_failures() tells KVSwapConnector what was not copied.

    Args:
        kv_caches: vLLM's CanonicalKVCaches.
        num_pages (int): host pages.
        blocks_per_page (int): GPU blocks per page.
        options (SpecOptions): copy options.
        layers (Sequence[Sequence[str]]): see group_layouts().
        make_pool (Callable[..., HostPool]): HostPool, or makes one in memory that workers share.
        serve (Callable[..., ServedPool] | None): instead has the pages of a server, which decides
            how many there are.
        has_writers (bool): others write the pages, too. vLLM loads them only when they are whole.
        exchange (tuple[int, int] | None): see OffloadHandler. vLLM gives all workers the same loads
            in the same order.
        at_end (Callable[[], None]): called when nothing uses the pages any more.

    Attributes:
        layer_groups (dict[str | None, int]): of an in-step load, by layer; empty if not known.

    Raises:
        ValueError: no group has layers in this worker, or the server refuses its cache, and why.
    """

    def __init__(
        self,
        kv_caches: Any,
        num_pages: int,
        blocks_per_page: int,
        options: SpecOptions,
        layers: Sequence[Sequence[str]],
        make_pool: Callable[..., HostPool] = HostPool,
        serve: Callable[..., ServedPool] | None = None,
        has_writers: bool = False,
        exchange: tuple[int, int] | None = None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._failures: list[Failure] = []
        self.layer_groups = _layer_groups(kv_caches, layers)
        dtype = torch.bfloat16 if options.encoding != "raw" else None
        of_groups = group_layouts(kv_caches, layers, dtype)
        self._has_layers = [layout is not None for layout in of_groups]
        layouts = [layout for layout in of_groups if layout is not None]
        if not layouts:
            raise ValueError(
                "no layer of this worker has a KV cache to offload; divide the layers among the "
                "stages of the pipeline so that each has one, or leave out kv_transfer_config"
            )
        largest = max(layouts, key=lambda layout: layout.block_bytes)
        self._blocks_per_page = blocks_per_page
        how: dict[str, Any] = {"encoding": options.encoding, "verify": options.verify}
        self._served = None
        if serve is not None:
            self._served = serve(layouts, largest, blocks_per_page, how)
            self._pools = self._served.pools  # replaced in place while no transfer is open
        else:
            how |= {"pin_in_background": options.pin_in_background}
            self._pools = [make_pool(largest, num_pages, blocks_per_page, **how)]
        self._has_writers, self._at_end = has_writers, at_end
        pools = [self._pool.view_for(layout) for layout in layouts]
        self._expedites_steps = exchange is None  # expedited loads are not exchanged
        self._handler = OffloadHandler(
            layouts,
            pools,
            copy_method=options.copy_method,
            staging_bytes=options.staging_bytes,
            exchange=exchange,
        )
        if self._served is not None:
            self._served.start(self._handler)
        _log.info("torch_kvswap moves the KV-cache blocks of vLLM: %s", self._pool)
        self._open: dict[int, _Open] = {}  # key: vLLM's number
        self._step_loads: dict[int, Move] | None = None  # while they are gathered
        self._ended: list[base.TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Starts a store. Always returns True; a transfer without blocks ends at once.

        Raises:
            ValueError: src_spec and dst_spec do not fit together.
        """
        self._submit({job_id: self._read(src_spec, dst_spec)}, "store")
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Starts a load, as submit_store().

        vLLM sets `expedited` for loads of the step that begins: see gather_step_loads().
        """
        move = self._read(dst_spec, src_spec)
        if expedited and self._step_loads is not None:
            self._step_loads[job_id] = move
        else:
            self._submit({job_id: move}, "load", expedited=expedited)
        return True

    def gather_step_loads(self) -> None:
        """From now on expedited loads wait for begin_step_loads(). They are of whole chunks, of a
        cache with one group of layers."""
        self._step_loads = {}

    def begin_step_loads(self) -> Job | None:
        """Starts the loads that were gathered, as one job: each layer group lands for all of them
        before the next group of any.

        They also end together: if the job fails, all of them have failed. If it failed only because
        of rejected blocks, loads without one have succeeded.

        Returns:
            Job | None: the job, for streams to wait for. None if there is none, or it could not be
            started.

        Raises:
            ValueError: several were gathered, and one is not of whole chunks.
        """
        moves, self._step_loads = self._step_loads, None
        if not moves:
            return None
        groups = max(self.layer_groups.values(), default=0) + 1
        return self._submit(moves, "load", expedited=self._expedites_steps, layer_groups=groups)

    def hold_stream(self) -> None:
        """Makes the current stream wait for all stores that have begun, so that what comes next may
        write to their blocks."""
        for _, job in self._open.values():
            if job.direction == "store":
                job.wait()

    def take_failures(self) -> list[Failure]:
        """What the transfers that get_finished() has reported did not copy; each once."""
        taken, self._failures = self._failures, []
        return taken

    def get_finished(self) -> list[base.TransferResult]:
        """Reports each ended transfer once, with the bytes copied and the seconds taken."""
        if self._open:  # vLLM asks in every step
            self._collect()
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Blocks the host until transfers have ended.

        Unknown numbers are ignored, and those of gathered loads. get_finished() still reports the
        transfers.
        """
        known = job_ids & self._open.keys()
        # poll() reports failed jobs, too.
        with contextlib.suppress(TransferError):
            self._handler.synchronize([self._open[number].job for number in known])
        self._collect()

    def shutdown(self) -> None:
        """Waits for running transfers, then frees the host memory."""
        if self._served is not None:
            self._handler.close()
            self._served.close()
        self._pool.close()
        self._at_end()

    @property
    def _pool(self) -> HostPool:
        """The host pages."""
        return self._pools[0]

    def _read(self, gpu: Any, host: Any) -> Move:
        return read_move(gpu, host, self._has_layers, self._blocks_per_page)

    def _submit(self, moves: Mapping[int, Move], direction: str, **options: Any) -> Job | None:
        """Starts transfers as one job, when their pages are pinned. Reports their ends if there is
        nothing to copy, or if they cannot be started."""
        numbers = tuple(moves)
        blocks, pages, first = Move.joined(list(moves.values()), self._blocks_per_page)
        if not any(map(len, blocks)):
            self._report(numbers, 0, 0.0)
            return None
        try:
            if not self._pool.is_ready:  # assigned without asking how far this worker is
                last = max(int(some.max()) for some in pages if len(some))
                self._pool.wait_ready(pages=last + 1)
            if self._has_writers and direction == "load":
                self._handler.mark_written(pages)  # although a store of this worker may have failed
            ids = {"gpu_block_ids": blocks, "page_ids": pages, "first_slot": first}
            job: Job = getattr(self._handler, direction)(**ids, **options, tag=numbers)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, DeviceLostError):
                raise
            _log.error(
                "transfer %s of vLLM could not start: %s", ", ".join(map(str, numbers)), error
            )
            for number, move in moves.items():
                places = move.places(self._blocks_per_page)
                self._fail(number, direction, "failed", places)
            return None
        for number, move in moves.items():
            self._open[number] = _Open(move, job)
        return job

    def _collect(self) -> None:
        """Polls the handler, and reports the jobs that have ended."""
        for result in self._handler.poll():
            moves = {number: self._open.pop(number).move for number in result.tag}
            if result.ok:
                self._report(result.tag, result.nbytes, result.copy_seconds)
                continue
            lost = [
                (number, place)
                for number, move in moves.items()
                for place in move.places(self._blocks_per_page)
            ]
            if result.rejected:
                lost = [lost[position] for position in result.rejected]
            _log.log(logging.DEBUG if result.rejected else logging.ERROR, "%s", error_of([result]))
            reason = "rejected" if result.rejected else "failed"
            if isinstance(result.error, CorruptedPageError):
                reason = "damaged"
            for number in moves:
                places = [place for owner, place in lost if owner == number]
                self._fail(number, result.direction, reason, places)

    def _fail(
        self, number: int, direction: str, reason: str, places: Sequence[tuple[int, int]]
    ) -> None:
        """Reports the end of a transfer whose job has failed and not copied these blocks of it."""
        if places:
            blocks, pages = map(set, zip(*places, strict=True))
            self._failures.append(Failure(number, direction, reason, blocks, pages))
        self._ended.append(_result_of(number))

    def _report(self, numbers: Sequence[int], nbytes: int, seconds: float) -> None:
        """Reports the success of a job, which vLLM counts once."""
        first, *others = numbers
        self._ended.append(base.TransferResult(first, True, nbytes, seconds))
        self._ended += map(_result_of, others)


def _layer_groups(kv_caches: Any, layers: Sequence[Sequence[str]]) -> dict[str | None, int]:
    """The layer groups of the layers of a cache with one group of layers."""
    names, refs = layers[0], kv_caches.group_data_refs[0]
    if len(names) != len(refs):
        return {}
    tensors = [*dict.fromkeys(ref.tensor_idx for ref in refs)]
    groups = min(_LAYER_GROUPS, len(tensors))
    return {
        name: native.layer_group_of(tensors.index(ref.tensor_idx), groups, len(tensors))
        for name, ref in zip(names, refs, strict=True)
    }


def _result_of(number: int) -> base.TransferResult:
    """The end of a transfer that vLLM does not count."""
    return base.TransferResult(number, True, None, None)
