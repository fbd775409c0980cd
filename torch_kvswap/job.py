"""A store or a load as its caller sees it."""

from __future__ import annotations

import torch

from torch_kvswap.channel import Channel
from torch_kvswap.transfer import Direction, Result, Transfer, TransferError


class Job:
    """A store or a load, from its submission on. Any thread may call it. Keeps its handler.

    id: its number within the handler. direction: "store" or "load". nbytes: what it copies.
    """

    def __init__(self, handler: object, channel: Channel, transfer: Transfer) -> None:
        self.id = transfer.id
        self.direction: Direction = channel.direction
        self.nbytes = transfer.nbytes
        self.handler = handler
        self._channel = channel
        self._transfer = transfer

    @property
    def result(self) -> Result | None:
        """How it ended; None while it runs, and until done(), wait() or finished() has looked."""
        return self._transfer.result

    def done(self) -> bool:
        """Whether it has ended, ok or failed. Waits for nothing."""
        self._channel.poll()
        return self.result is not None

    def wait_on(self, stream: torch.cuda.Stream | None = None) -> None:
        """Makes work given to the stream from now on wait for the job; the host goes on.

        A stream of any device; None is the current stream of the cache's device. Raises
        TransferError for a job that has failed; what fails later, finished() and wait() tell.
        """
        self._channel.wait_on(self._transfer, stream)
        if self.result is not None and not self.result.ok:
            raise TransferError([self.result]) from self.result.error
