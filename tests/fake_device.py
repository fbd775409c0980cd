"""A device that runs nothing by itself: it writes down what it is told, and fails when asked to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class FakeStream:
    def __init__(self, device: FakeDevice, name: str) -> None:
        self._device = device
        self.name = name

    def synchronize(self) -> None:
        self._device.step(f"synchronize {self.name}")


class FakeEvent:
    def __init__(self, device: FakeDevice, name: str) -> None:
        self._device = device
        self.name = name
        self.happened = False

    def record(self, stream: FakeStream) -> None:
        self._device.step(f"record {self.name} on {stream.name}")
        self.happened = False

    def wait(self, stream: FakeStream) -> None:
        self._device.step(f"{stream.name} waits for {self.name}")

    def query(self) -> bool:
        self._device.fail_if_lost()
        return self.happened

    def synchronize(self) -> None:
        self._device.step(f"host waits for {self.name}")
        self._device.on_synchronize(self)
        self._device.fail_if_lost()

    def elapsed_time(self, end_event: FakeEvent) -> float:
        return 2000.0


class FakeDevice:
    """log: every call. fail: steps that raise, by their text in the log. Events happen when
    `run` says so, or when the host waits for them."""

    path = "fake"

    def __init__(self) -> None:
        self.lost: BaseException | None = None
        self.broken: BaseException | None = None
        self.log: list[str] = []
        self.fail: dict[str, BaseException] = {}
        self.events: list[FakeEvent] = []
        self.on_synchronize = lambda event: self.run()
        self._streams = 0

    def step(self, text: str) -> None:
        self.log.append(text)
        if text in self.fail:
            raise self.fail.pop(text)

    def fail_if_lost(self) -> None:
        if self.broken is not None:
            raise self.broken

    def run(self) -> None:
        for event in self.events:
            event.happened = True

    def take_log(self) -> str:
        log, self.log = self.log, []
        return "\n".join(log)

    def new_stream(self) -> FakeStream:
        name = f"stream{self._streams}"
        self.step(f"new {name}")
        self._streams += 1
        return FakeStream(self, name)

    def free_stream(self, stream: FakeStream) -> None:
        self.step(f"free {stream.name}")

    def new_event(self) -> FakeEvent:
        name = f"event{len(self.events)}"
        self.step(f"new {name}")
        self.events.append(FakeEvent(self, name))
        return self.events[-1]

    def check_not_capturing(self) -> None:
        pass

    def resolve_after(self, after: object) -> tuple[FakeStream | None, FakeEvent | None]:
        if isinstance(after, FakeEvent):
            return None, after
        if after == ():
            return None, None
        return self.resolve_stream(after), None

    def resolve_stream(self, stream: object) -> FakeStream:
        return FakeStream(self, "current") if stream is None else stream

    @contextmanager
    def current(self, stream: FakeStream) -> Iterator[None]:
        self.step(f"make {stream.name} current")
        try:
            yield
        finally:
            self.log.append("make the caller's stream current")

    def is_lost_by(self, error: BaseException) -> bool:
        return getattr(error, "error_code", None) != 900
