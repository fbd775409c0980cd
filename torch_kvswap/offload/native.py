"""The native part of an OffloadHandler, csrc/bindings/handler.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_kvswap._native.arguments import NotCopyable
from torch_kvswap._native.keep_alive import allow_free
from torch_kvswap._native.loader import native
from torch_kvswap._native.log import log, warn_once
from torch_kvswap.host_pool.memory import Registration
from torch_kvswap.offload.streams import resolve_waiting
from torch_kvswap.results import DeviceLostError

if TYPE_CHECKING:
    from torch_kvswap.offload.groups import Groups


class NativeHandler(NotCopyable, native.Handler):
    """Owns the native handler and, in `groups`, the memory of the groups. Alive until close() has
    succeeded.

    Any thread may call any method. In a forked child every method raises RuntimeError, except
    destroy(), which does nothing there.

    Attributes:
        owner (str): what errors say is closed.
        was_closed (bool): by its owner's close(), not by that of a pool.
        shared (Registration | None): of what it shares with other ranks, until close().
    """

    groups: Groups
    shared: Registration | None = None
    owner = "handler"
    was_closed = False

    def __init__(
        self, groups: Groups, submit_thread: bool, options: native.CopyMethodOptions
    ) -> None:
        self.device = groups.device
        native.Handler.__init__(
            self,
            groups,
            groups.layouts_for_native,
            groups.is_list,
            groups.num_layers,
            *_kind_and_index(self.device),
            submit_thread,
            options,
        )
        self._warn_of_slower_copies()

    def _warn_of_slower_copies(self) -> None:
        if why := self.slower_copies:
            log.warning("%s (docs/copy_methods.md)", why)
        if self.device.type == "cuda" and not native.driver_has_batch():
            warn_once(
                "the CUDA driver is older than 12.8 and has no cuMemcpyBatchAsync: copies of "
                "scattered blocks take one driver call per fragment; update the driver"
            )

    def check_open(self) -> None:
        """Raises RuntimeError if it is closed, or its device is lost."""
        try:
            super().check_open()
        except DeviceLostError:
            raise
        except RuntimeError:
            self.check_process()
            is_pool = any(pool._memory.pages is None for pool in self.groups.pools)
            if is_pool and not self.was_closed:
                raise RuntimeError(
                    f"the host pool is closed, and with it its {self.owner}; make new ones"
                ) from None
            raise RuntimeError(f"the {self.owner} is closed; make a new one") from None

    def let_wait(self, job: native.Job, layer_group: int, stream: object) -> None:
        """Makes a stream wait for a layer group of a job; -1 means the whole job.

        Returns when the stream was told to wait, which takes as long as submitting a queued job.

        Args:
            job (native.Job): the job.
            layer_group (int): the group.
            stream: see resolve_waiting().
        """
        self.wait(job, layer_group, *resolve_waiting(stream, self.device))

    def move_to(self, groups: Groups) -> None:
        """Replaces the groups. Raises RuntimeError, with nothing changed, if a job is running."""
        self.rebind(groups, groups.layouts_for_native)

    def close(self) -> None:
        """Refuses new jobs and waits for all jobs. Ctrl-C interrupts it."""
        super().close()
        if self.shared is not None:
            self.shared.remove()
        allow_free(self)

    def destroy(self) -> None:
        """Finalizer: closes the handler. If it raises, the handler stays alive."""
        if not self.is_current_process:
            return allow_free(self)  # a forked child has no copies
        try:
            self.close()
        except RuntimeError as error:
            log.warning(
                "a handler was dropped, not closed, and cannot wait for its jobs: %s; its cache "
                "and host pool stay in memory",
                error,
            )


def _kind_and_index(device: torch.device) -> tuple[native.DeviceKind, int]:
    if device.type == "cpu":
        return native.DeviceKind.HOST, -1
    return native.DeviceKind.CUDA, device.index
