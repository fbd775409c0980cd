"""Every transfer waits for what it must, ends once, and leaves nothing behind."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import pytest
from expecttest import assert_expected_inline
from fake_device import FakeDevice, FakeEvent, FakeStream

from torch_kvswap.channel import Channel
from torch_kvswap.transfer import Result, Transfer


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def channel(device: FakeDevice) -> Channel:
    channel = Channel("store", device, itertools.count(), threading.RLock())
    device.take_log()
    return channel


def submit(
    channel: Channel, after: object = None, copy: Callable[[], None] = lambda: None
) -> Transfer:
    return channel.submit(copy, nbytes=100, after=after, behind=None, began=time.perf_counter())


def poll(channel: Channel) -> list[Result]:
    channel.poll()
    return channel.take_results()


def assert_nothing_leaked(channel: Channel) -> None:
    assert channel.events.in_use == 0


# What is waited for


def test_a_transfer_waits_for_the_current_stream_and_runs_on_its_own(
    device: FakeDevice, channel: Channel
) -> None:
    submit(channel, copy=lambda: device.step("copy"))
    assert_expected_inline(
        device.take_log(),
        """\
new event0
new event1
new event2
record event2 on current
stream0 waits for event2
record event0 on stream0
make stream0 current
copy
make the caller's stream current
record event1 on stream0""",
    )


def test_a_transfer_waits_for_the_transfer_before_it(device: FakeDevice, channel: Channel) -> None:
    submit(channel)
    device.take_log()
    submit(channel)
    assert_expected_inline(
        device.take_log(),
        """\
new event3
new event4
new event5
record event5 on current
stream1 waits for event5
stream1 waits for event1
record event3 on stream1
make stream1 current
make the caller's stream current
record event4 on stream1""",
    )


def test_a_transfer_waits_for_the_event_that_it_is_given(
    device: FakeDevice, channel: Channel
) -> None:
    submit(channel, after=FakeEvent(device, "yours"))
    assert_expected_inline(
        device.take_log(),
        """\
new event0
new event1
new event2
stream0 waits for yours
record event0 on stream0
make stream0 current
make the caller's stream current
record event1 on stream0""",
    )


def test_a_transfer_may_wait_for_nothing_but_the_one_before_it(
    device: FakeDevice, channel: Channel
) -> None:
    submit(channel, after=())
    submit(channel, after=())
    assert_expected_inline(
        device.take_log(),
        """\
new event0
new event1
new event2
record event0 on stream0
make stream0 current
make the caller's stream current
record event1 on stream0
new event3
new event4
new event5
stream1 waits for event1
record event3 on stream1
make stream1 current
make the caller's stream current
record event4 on stream1""",
    )


def test_streams_and_events_come_back_when_the_end_has_happened_and_not_before(
    device: FakeDevice, channel: Channel
) -> None:
    transfer = submit(channel)
    assert poll(channel) == []
    assert channel.events.in_use == 3
    device.run()
    assert len(poll(channel)) == 1
    assert (transfer.stream, transfer.ready, transfer.start, transfer.end) == (None,) * 4
    assert_nothing_leaked(channel)
    assert channel.events.idle == 3


def test_an_ended_transfer_is_not_waited_for_by_the_next(
    device: FakeDevice, channel: Channel
) -> None:
    submit(channel)
    device.run()
    device.take_log()
    submit(channel)  # uses the same stream and events again
    assert_expected_inline(
        device.take_log(),
        """\
record event2 on current
stream1 waits for event2
record event1 on stream1
make stream1 current
make the caller's stream current
record event0 on stream1""",
    )


def test_a_failed_transfer_is_not_waited_for_by_the_next(
    device: FakeDevice, channel: Channel
) -> None:
    submit(channel)
    device.fail = {"make stream1 current": RuntimeError("boom")}
    assert submit(channel).result is not None
    device.take_log()
    submit(channel)  # behind the first one
    assert_expected_inline(
        device.take_log(),
        """\
record event5 on current
stream2 waits for event5
stream2 waits for event1
record event4 on stream2
make stream2 current
make the caller's stream current
record event3 on stream2""",
    )


def test_a_stream_waits_for_a_running_transfer(device: FakeDevice, channel: Channel) -> None:
    transfer = submit(channel)
    end = transfer.end.name
    device.take_log()
    channel.wait_on(transfer, FakeStream(device, "consumer"))
    assert device.take_log() == f"consumer waits for {end}"


def test_a_stream_does_not_wait_for_an_ended_transfer_whose_event_is_anothers_by_now(
    device: FakeDevice, channel: Channel
) -> None:
    first = submit(channel)
    event = first.end
    device.run()
    assert len(poll(channel)) == 1
    second = submit(channel)
    assert event in (second.ready, second.start, second.end)
    device.take_log()
    channel.wait_on(first, FakeStream(device, "consumer"))
    assert device.take_log() == ""


# How transfers end


def test_results_come_once_and_in_order(device: FakeDevice, channel: Channel) -> None:
    for _ in range(3):
        submit(channel)
    device.run()
    submit(channel)
    assert [(r.job_id, r.ok) for r in poll(channel)] == [(0, True), (1, True), (2, True)]
    assert poll(channel) == []
    device.run()
    assert [r.job_id for r in poll(channel)] == [3]


def test_a_failed_transfer_is_reported_in_its_turn(device: FakeDevice, channel: Channel) -> None:
    submit(channel)
    device.fail = {"make stream1 current": RuntimeError("boom")}
    failed = submit(channel)
    submit(channel)
    assert failed.result is not None
    assert poll(channel) == []
    device.run()
    assert [(r.job_id, r.ok) for r in poll(channel)] == [(0, True), (1, False), (2, True)]


def test_a_result_says_what_was_copied_and_how_long_it_took(
    device: FakeDevice, channel: Channel
) -> None:
    submit(channel, copy=lambda: time.sleep(0.01))
    device.run()
    (result,) = poll(channel)
    assert result.direction == "store"
    assert (result.ok, result.error, result.path, result.nbytes) == (True, None, "fake", 100)
    assert result.seconds == 2.0  # the fake's events are 2,000 ms apart
    assert 0.01 <= result.submit_seconds < 1


def test_the_host_waits_for_a_transfer_and_it_is_still_reported(
    device: FakeDevice, channel: Channel
) -> None:
    first, second = submit(channel), submit(channel)
    device.take_log()
    assert channel.wait(second, None)
    assert device.take_log() == "host waits for event4"
    assert first.result is not None
    assert [r.job_id for r in poll(channel)] == [0, 1]


def test_the_host_gives_up_at_the_deadline(device: FakeDevice, channel: Channel) -> None:
    transfer = submit(channel)
    began = time.monotonic()
    assert not channel.wait(transfer, began + 0.05)
    assert 0.05 <= time.monotonic() - began < 5
    assert not channel.wait(transfer, began)
    device.run()
    assert channel.wait(transfer, began)
    assert_nothing_leaked(channel)


def test_others_use_the_channel_while_one_waits_and_its_event_stays_its_own(
    device: FakeDevice, channel: Channel
) -> None:
    first = submit(channel)
    end = first.end
    blocked, go = threading.Event(), threading.Event()

    def block(event: FakeEvent) -> None:
        blocked.set()
        assert go.wait(10)

    device.on_synchronize = block
    waiting = threading.Thread(target=channel.wait, args=(first, None))
    waiting.start()
    assert blocked.wait(10)
    device.run()
    assert [r.job_id for r in poll(channel)] == [0]
    second = submit(channel)
    assert end not in (second.ready, second.start, second.end)
    go.set()
    waiting.join(10)
    assert not waiting.is_alive()
    device.run()
    assert [r.job_id for r in poll(channel)] == [1]
    assert_nothing_leaked(channel)


def test_many_threads_submit_wait_and_poll_and_every_transfer_ends_once(
    device: FakeDevice, channel: Channel
) -> None:
    ended: list[int] = []

    def work() -> None:
        for _ in range(50):
            channel.wait(submit(channel), None)
            ended.extend(result.job_id for result in poll(channel))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    ended.extend(result.job_id for result in poll(channel))
    assert sorted(ended) == list(range(200))
    assert_nothing_leaked(channel)


# Failures while submitting

STEPS = [
    "new event0",
    "new event1",
    "new event2",
    "record event2 on current",
    "stream0 waits for event2",
    "record event0 on stream0",
    "make stream0 current",
    "copy",
    "record event1 on stream0",
]


def fail_at(step: str, device: FakeDevice, channel: Channel) -> Transfer:
    device.fail = {step: RuntimeError(f"no {step}")}
    return submit(channel, copy=lambda: device.step("copy"))


def test_an_interrupt_right_after_the_submission_leaves_nothing(
    device: FakeDevice, channel: Channel
) -> None:
    class Interrupted(OrderedDict[int, Transfer]):
        def __setitem__(self, number: int, transfer: Transfer) -> None:
            super().__setitem__(number, transfer)
            raise KeyboardInterrupt

    channel._running = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        submit(channel)
    assert not channel._running
    assert_nothing_leaked(channel)
    assert [result.ok for result in poll(channel)] == [False]


def test_a_failed_submission_is_waited_for_until_a_capture_elsewhere_is_over(
    device: FakeDevice, channel: Channel
) -> None:
    earlier = submit(channel)
    capturing = RuntimeError("operation not permitted when stream is capturing")
    capturing.error_code = 900  # type: ignore[attr-defined]
    device.fail = {"copy": RuntimeError("no copy"), "synchronize stream1": capturing}
    failed = submit(channel, copy=lambda: device.step("copy"))
    assert device.take_log().count("synchronize stream1") == 2
    assert device.lost is None
    assert earlier.result is None
    assert failed.result is not None
    assert str(failed.result.error) == "no copy"


def test_the_steps_of_the_failure_tests_are_all_there_are(
    device: FakeDevice, channel: Channel
) -> None:
    submit(channel, copy=lambda: device.step("copy"))
    assert [line for line in device.log if "the caller's" not in line] == STEPS


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_at_any_step_ends_the_transfer_and_leaves_nothing(
    step: str, device: FakeDevice, channel: Channel
) -> None:
    failed = fail_at(step, device, channel)
    assert failed.result is not None
    assert not failed.result.ok
    assert str(failed.result.error) == f"no {step}"
    assert_nothing_leaked(channel)
    assert poll(channel) == [failed.result]
    assert poll(channel) == []
    assert channel.wait(failed, None)
    submit(channel)
    device.run()
    assert [(r.job_id, r.ok) for r in poll(channel)] == [(1, True)]
    assert_nothing_leaked(channel)


def test_a_channel_that_gets_too_few_streams_is_not_made_and_frees_those_it_got(
    device: FakeDevice,
) -> None:
    device.fail = {"new stream2": MemoryError("no streams")}
    with pytest.raises(MemoryError, match="no streams"):
        Channel("store", device, itertools.count(), threading.RLock())
    assert_expected_inline(
        device.take_log(),
        """\
new stream0
new stream1
new stream2
free stream1
free stream0""",
    )


def test_what_was_enqueued_is_waited_for_when_the_copy_fails(
    device: FakeDevice, channel: Channel
) -> None:
    fail_at("copy", device, channel)
    assert_expected_inline(
        device.take_log(),
        """\
new event0
new event1
new event2
record event2 on current
stream0 waits for event2
record event0 on stream0
make stream0 current
copy
make the caller's stream current
synchronize stream0""",
    )


def test_what_was_copied_is_waited_for_when_its_end_cannot_be_recorded(
    device: FakeDevice, channel: Channel
) -> None:
    fail_at("record event1 on stream0", device, channel)
    assert_expected_inline(
        device.take_log(),
        """\
new event0
new event1
new event2
record event2 on current
stream0 waits for event2
record event0 on stream0
make stream0 current
copy
make the caller's stream current
record event1 on stream0
synchronize stream0""",
    )


def test_nothing_is_enqueued_without_all_events(device: FakeDevice, channel: Channel) -> None:
    fail_at("new event1", device, channel)
    assert_expected_inline(
        device.take_log(),
        """\
new event0
new event1
synchronize stream0""",
    )


def test_waiting_for_the_transfer_before_may_fail_too(device: FakeDevice, channel: Channel) -> None:
    submit(channel)
    failed = fail_at("stream1 waits for event1", device, channel)
    assert failed.result is not None
    device.run()
    assert [(r.job_id, r.ok) for r in poll(channel)] == [(0, True), (1, False)]
    assert_nothing_leaked(channel)


def test_an_interrupt_ends_the_transfer_and_goes_on_to_the_caller(
    device: FakeDevice, channel: Channel
) -> None:
    device.fail = {"copy": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        submit(channel, copy=lambda: device.step("copy"))
    (result,) = poll(channel)
    assert isinstance(result.error, KeyboardInterrupt)
    assert_nothing_leaked(channel)


def test_a_wrong_after_raises_and_there_is_no_transfer(
    device: FakeDevice, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(after: object) -> None:
        raise TypeError("no stream")

    monkeypatch.setattr(device, "resolve_after", refuse)
    with pytest.raises(TypeError, match="no stream"):
        submit(channel, after=3)
    assert channel.unreported() == []
    assert device.take_log() == ""


# A lost device


def test_all_running_transfers_fail_when_the_device_is_lost(
    device: FakeDevice, channel: Channel
) -> None:
    transfers = [submit(channel) for _ in range(3)]
    device.broken = RuntimeError("illegal access")
    results = poll(channel)
    assert [(r.job_id, r.ok, str(r.error)) for r in results] == [
        (0, False, "illegal access"),
        (1, False, "illegal access"),
        (2, False, "illegal access"),
    ]
    assert [t.result for t in transfers] == results
    with pytest.raises(RuntimeError, match="the device is lost: illegal access; only a new"):
        submit(channel)
    channel.close()
    assert_nothing_leaked(channel)


def test_a_loss_that_one_channel_sees_ends_the_transfers_of_the_other(device: FakeDevice) -> None:
    ids = itertools.count()
    lock = threading.RLock()
    stores, loads = Channel("store", device, ids, lock), Channel("load", device, ids, lock)
    submit(stores)
    submit(loads)
    device.broken = RuntimeError("illegal access")
    assert [r.ok for r in poll(stores)] == [False]
    device.broken = None  # so that the other one cannot see it by itself
    assert [(r.job_id, r.ok, str(r.error)) for r in poll(loads)] == [(1, False, "illegal access")]


def test_a_loss_while_the_host_waits_ends_the_transfer(
    device: FakeDevice, channel: Channel
) -> None:
    transfer = submit(channel)

    def lose(event: FakeEvent) -> None:
        device.broken = RuntimeError("illegal access")

    device.on_synchronize = lose
    assert channel.wait(transfer, None)
    assert [(r.ok, str(r.error)) for r in poll(channel)] == [(False, "illegal access")]
    assert_nothing_leaked(channel)


def test_a_stream_that_cannot_be_synchronized_means_that_the_device_is_lost(
    device: FakeDevice, channel: Channel
) -> None:
    running = submit(channel)
    device.fail = {
        "make stream1 current": RuntimeError("boom"),
        "synchronize stream1": RuntimeError("illegal access"),
    }
    failed = submit(channel)
    assert [(r.job_id, str(r.error)) for r in poll(channel)] == [
        (0, "illegal access"),
        (1, "boom"),
    ]
    assert running.result is not None
    assert failed.result is not None
    with pytest.raises(RuntimeError, match="the device is lost"):
        submit(channel)


def test_an_error_about_capture_is_raised_and_loses_nothing(
    device: FakeDevice, channel: Channel
) -> None:
    transfer = submit(channel)
    error = RuntimeError("operation not permitted when stream is capturing")
    error.error_code = 900  # type: ignore[attr-defined]
    device.broken = error
    with pytest.raises(RuntimeError, match="capturing"):
        poll(channel)
    device.broken = None

    def fail(event: FakeEvent) -> None:
        raise error

    device.on_synchronize = fail
    with pytest.raises(RuntimeError, match="capturing"):
        channel.wait(transfer, None)
    assert poll(channel) == []
    device.run()
    assert [r.ok for r in poll(channel)] == [True]
    assert_nothing_leaked(channel)


# Ends


def test_closing_waits_for_what_runs_and_lets_streams_and_events_go(
    device: FakeDevice, channel: Channel
) -> None:
    submit(channel)
    submit(channel)
    device.take_log()
    channel.close()
    assert_expected_inline(
        device.take_log(),
        """\
host waits for event1
free stream3
free stream2
free stream1
free stream0""",
    )
    assert channel.events.created == 0
    assert [r.ok for r in poll(channel)] == [True, True]
    with pytest.raises(RuntimeError, match="the handler is closed; make a new one"):
        submit(channel)
    channel.close()
    assert device.take_log() == ""


def test_draining_ends_everything_and_reports_nothing(device: FakeDevice, channel: Channel) -> None:
    submit(channel)
    fail_at("make stream1 current", device, channel)
    submit(channel)
    channel.drain()
    assert [(r.job_id, r.ok) for r in poll(channel)] == [(0, True), (1, False), (2, True)]
    assert_nothing_leaked(channel)
