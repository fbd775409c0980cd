"""Tests of handlers on the fake accelerator, each with a device queue of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from fake_accelerator import DEVICE_TYPE, Accelerator, on_fake_accelerator

if TYPE_CHECKING:
    from torch_kvswap.devices.queue import DeviceQueue
    from torch_kvswap.handler import OffloadHandler

DEVICE = f"{DEVICE_TYPE}:0"


def on_queued_device(body: Callable[..., None]) -> Callable[..., None]:
    """Decorates a test as on_fake_accelerator() does. Handlers that other tests have left, and
    devices that they have lost, do not matter to it."""

    @functools.wraps(body)
    def with_new_queue(accelerator: Accelerator, **arguments: object) -> None:
        forget_queues()
        try:
            body(accelerator, **arguments)
        finally:
            forget_queues()

    return on_fake_accelerator(with_new_queue)


def forget_queues() -> None:
    """The next handler of each device makes a new queue, as in a new process."""
    from torch_kvswap.devices import backend, queue

    for one in queue._queues.values():
        one.stop()
    queue._queues.clear()
    backend._registered.clear()


def queue_of(handler: OffloadHandler) -> DeviceQueue:
    found = handler._native.groups.queue
    assert found is not None
    return found


def current() -> torch.Stream:
    return torch.accelerator.current_stream(DEVICE)
