"""What a verdict says, and what the programs with engines judge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import block_manager
import integration_transformers_report
import integration_vllm
from expecttest import assert_expected_inline
from integration_vllm import LOSSLESS, PLAIN, THEIRS, Round
from report import Verdict
from timing import Spread


def said(verdicts: Sequence[Verdict]) -> str:
    return "\n".join(map(str, verdicts))


def test_a_verdict_at_its_target_is_met_and_what_was_not_measured_is_neither_met_nor_missed() -> (
    None
):
    nothing = [Verdict("none", 3, None), Verdict("nan", 3, math.nan, at_least=True)]
    assert_expected_inline(
        said(
            [
                Verdict("at", 3, 3.0),
                Verdict("at", 3, 3.0, at_least=True),
                Verdict("over", 1.05, 1.1),
                Verdict("by little", 3, 3.000447),
                Verdict("large", 2_097_152, 2_097_153.0),
                Verdict("under", 0.93, 0.9279458, at_least=True),
                *nothing,
            ]
        ),
        """\
met          at: 3, at most 3
met          at: 3, at least 3
MISSED       over: 1.10, at most 1.05
MISSED       by little: 3.0004, at most 3
MISSED       large: 2,097,153, at most 2,097,152
MISSED       under: 0.928, at least 0.93
not measured none: -, at most 3
not measured nan: nan, at least 3""",
    )
    assert [one.met for one in nothing] == [None, None]


def test_a_block_manager_is_judged_by_the_call_that_gains_least_and_by_misses_apart() -> None:
    times = {"digests": (2, 4, 1), "vLLM": (20, 12, 5)}
    calls = "touch", "lookup", block_manager.MISS
    cells = [
        block_manager.Cell(name, call, 100, Spread(of_call, of_call))
        for name, of_manager in times.items()
        for call, of_call in zip(calls, of_manager, strict=True)
    ]
    assert_expected_inline(
        said(block_manager.judge(cells, [block_manager.Memory("digests", 1000, 68.0)])),
        """\
MISSED       digests, times as fast as vLLM, least in lookup: 3, at least 5
met          digests, times as fast as vLLM, least in lookup, a miss: 5, at least 5
not measured by key, times as fast as vLLM by key, least in all calls but misses: -, at least 5
not measured by key, times as fast as vLLM by key, least in lookup, a miss: -, at least 5
met          bytes for each of 1,000 pages: 68, at most 200""",
    )


def rounds_of(**of_engine: tuple[float, float]) -> list[Round]:
    """By engine: seconds, and to the first token. The second turn takes twice as long. Steps of
    others take a fiftieth of the time to the first token."""
    names = {"plain": PLAIN, "theirs": THEIRS, "ours": "ours", "lossless": LOSSLESS}
    names |= {"connector": "our connector", "both": "our connector, lossless"}
    return [
        Round(
            *(names[engine], turn, kind, seconds * turn, [first * turn] * 2, [16], [[1, 2]]),
            [first * turn / 50] if kind == "beside" else [],
        )
        for engine, (seconds, first) in of_engine.items()
        for turn in (1, 2)
        for kind in integration_vllm.KINDS
    ]


def test_integration_vllm_asks_for_throughput_and_a_share_of_the_overhead() -> None:
    slow = {"plain": (9.0, 0.1), "theirs": (10.0, 0.2), "lossless": (8.0, 0.14)}
    slow |= {"connector": (8.0, 0.11), "both": (8.0, 0.12)}
    assert_expected_inline(
        said(integration_vllm.judge(rounds_of(**slow, ours=(10.5, 0.15)))),
        """\
MISSED       cold, our connector, throughput over vLLM's own offloading: 1.25, at least 1.30
met          warm, our connector, throughput over vLLM's own offloading: 1.25, at least 1.05
met          alone, our connector, share of the overhead of vLLM's own: 0.10, at most 0.65
met          beside, our connector, ms longer than plain: 0.30, at most 1
MISSED       cold, our connector, lossless, throughput over vLLM's own offloading: 1.25, at least 1.30
met          warm, our connector, lossless, throughput over vLLM's own offloading: 1.25, at least 1.05
met          alone, our connector, lossless, share of the overhead of vLLM's own: 0.20, at most 0.65
met          beside, our connector, lossless, ms longer than plain: 0.60, at most 1
MISSED       cold, ours, throughput over vLLM's own offloading: 0.95, at least 1
MISSED       warm, ours, throughput over vLLM's own offloading: 0.95, at least 1
MISSED       alone, ours, throughput over vLLM's own offloading: 0.95, at least 1
met          alone, overhead of lossless over that of raw pages: 0.80, at most 0.88
met          continued, our connector, share of the overhead of the spec: 0.20, at most 0.35
MISSED       continued, our connector, lossless, share of the overhead of the spec: 0.50, at most 0.35
MISSED       long, our connector, share of the overhead of the spec: 0.20, at most 0.15
MISSED       long, our connector, lossless, share of the overhead of the spec: 0.50, at most 0.15""",
    )
    rounds = rounds_of(**slow, ours=(8.0, 0.15))
    rounds[-1].tokens = [[1, 3]]
    assert integration_vllm.differences(rounds) == (
        "answers of 12 that are not those of plain vLLM: vLLM's own 0, ours, lossless 0, our connector 0, our connector, lossless 0, ours 1"
    )


def test_integration_vllm_compares_connectors_alone_with_vllms_own_offloading() -> None:
    both = {"connector": (8.0, 0.15), "both": (7.0, 0.21)}
    rounds = rounds_of(plain=(9.0, 0.1), theirs=(10.0, 0.2), **both)
    rounds += [replace(each, kind="restarted") for each in rounds if each.kind == "alone"]
    assert_expected_inline(
        said(integration_vllm.judge(rounds)),
        """\
MISSED       cold, our connector, throughput over vLLM's own offloading: 1.25, at least 1.30
met          warm, our connector, throughput over vLLM's own offloading: 1.25, at least 1.05
met          alone, our connector, share of the overhead of vLLM's own: 0.50, at most 0.65
met          restarted, our connector, share of the overhead of vLLM's own: 0.50, at most 1
MISSED       beside, our connector, ms longer than plain: 1.50, at most 1
met          cold, our connector, lossless, throughput over vLLM's own offloading: 1.43, at least 1.30
met          warm, our connector, lossless, throughput over vLLM's own offloading: 1.43, at least 1.05
MISSED       alone, our connector, lossless, share of the overhead of vLLM's own: 1.10, at most 0.65
MISSED       restarted, our connector, lossless, share of the overhead of vLLM's own: 1.10, at most 1
MISSED       beside, our connector, lossless, ms longer than plain: 3.30, at most 1""",
    )


def test_integration_transformers_compares_medians_of_losses_and_fastest_generations() -> None:
    def losses(*host: float) -> list[Any]:
        return [SimpleNamespace(host=one, stream=3 * one) for one in host]

    cell = integration_transformers_report.Cell(
        16, 64, 1 << 20, {"theirs": losses(30, 30, 90), "ours": losses(1, 10.5, 99)}
    )
    rates = integration_transformers_report.Rate(
        True,
        {
            name: [SimpleNamespace(tokens_per_second=one) for one in of]
            for name, of in (
                *(("theirs", (100.0, 320.0)), ("ours", (101.0, 384.0))),
                ("theirs again", (400.0,)),
            )
        },
    )
    assert_expected_inline(
        said(integration_transformers_report.judge([cell], [rates])),
        """\
MISSED       lost on the host, 64 blocks of 16 tokens, share of theirs: 0.35, at most 0.33
MISSED       lost on the stream, 64 blocks of 16 tokens, share of theirs: 0.35, at most 0.33
met          throughput, asynchronous batches, over theirs: 0.96, at least 0.95""",
    )
