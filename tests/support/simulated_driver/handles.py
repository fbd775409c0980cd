"""The simulated driver's streams and events as PyTorch objects."""

from __future__ import annotations

import torch


class Stream(torch.cuda.Stream):
    """Any handle, as in `Driver`. index: of the GPU."""

    def __new__(cls, handle: int, index: int = 0) -> Stream:
        made: Stream = object.__new__(cls)
        made.cuda_stream, made.device = handle, torch.device("cuda", index)
        return made

    def __init__(self, *_: int, **__: int) -> None:
        pass

    def __repr__(self) -> str:
        return f"Stream({self.cuda_stream})"

    def __del__(self) -> None:
        pass


class Event(torch.cuda.Event):
    """From `driver.cuda.create_event()`; the test destroys it. Handle 0 was never recorded."""

    def __new__(cls, handle: int) -> Event:
        made: Event = object.__new__(cls)
        made.cuda_event = handle
        return made

    def __init__(self, handle: int) -> None:
        pass

    def __del__(self) -> None:
        pass
