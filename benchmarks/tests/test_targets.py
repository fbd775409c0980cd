"""What each program says of its targets, a little better and a little worse than they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import bandwidth_report
import block_manager_report
import copy_methods_report
import duplex_report
import encoding_report
import host_memory_report
import integration_transformers_report
import integration_vllm_report
import interference_report
import outstanding_report
import peers_report
import submit_cost_report
from comparison import COLD, WARM, Cell, Samples
from comparison_report import judge
from expecttest import assert_expected_inline
from integration_vllm_report import LOSSLESS, PLAIN, THEIRS, Round
from interference_report import Sample
from report import Verdict
from rounds import Few
from timing import Move, Spread
from transfers import BOTH, Kind, Shape


def said(verdicts: Sequence[Verdict]) -> str:
    return "\n".join(map(str, verdicts))


def samples(**us: float) -> Samples:
    """By way: its total time; a call takes a tenth of that."""
    return Samples({name.replace("_", " "): [Move(one, one / 10)] for name, one in us.items()})


def transfers(
    direction: str, shape: str, blocks: int, state: str, cell: Any = Cell, **us: float
) -> Any:
    return cell(Kind(Shape.parse(shape), "one tensor", direction, blocks), {state: samples(**us)})


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


def test_bandwidth() -> None:
    cells = [
        transfers("store", "160x8", 8, WARM, ours=115, big_copy=100, reference=200),
        transfers("store", "160x8", 1, COLD, ours=130, big_copy=100, reference=100),
        transfers("load", "160x4", 64, COLD, ours=120, big_copy=100, reference=100),
        transfers("load", "160x2", 512, WARM, ours=106, big_copy=100, reference=100),
    ]
    assert_expected_inline(
        said(judge(cells, bandwidth_report.targets)),
        """\
met          store of 8 x (160 x 8 KiB), one tensor, warm, total / big copy: 1.15, at most 1.15
met          store of 8 x (160 x 8 KiB), one tensor, warm, call / R's call: 0.57, at most 1.30
MISSED       store of 1 x (160 x 8 KiB), one tensor, cold, total / R: 1.30, at most 1.20
MISSED       store of 1 x (160 x 8 KiB), one tensor, cold, call / R's call: 1.30, at most 0.80
MISSED       load of 64 x (160 x 4 KiB), one tensor, cold, total / big copy: 1.20, at most 1.17
MISSED       load of 64 x (160 x 4 KiB), one tensor, cold, call / R's call: 1.20, at most 1.10
met          load of 512 x (160 x 2 KiB), one tensor, warm, total / big copy: 1.06, at most 1.06
met          load of 512 x (160 x 2 KiB), one tensor, warm, call / R's call: 1.06, at most 3""",
    )


def test_a_peer_that_is_more_than_3_us_faster_is_marked() -> None:
    cells = [
        transfers("store", "160x8", 1, COLD, ours=123, vLLM=120, big_copy=100, reference=50),
        transfers("load", "160x8", 1, COLD, ours=123, vLLM=119, big_copy=100, reference=50),
    ]
    assert_expected_inline(
        said(peers_report.judge(cells)),
        """\
met          store of 1 x (160 x 8 KiB), one tensor, cold, us behind vLLM: 3, at most 3
MISSED       load of 1 x (160 x 8 KiB), one tensor, cold, us behind vLLM: 4, at most 3""",
    )
    assert_expected_inline(
        peers_report.tables(cells),
        """\
total / big copy, medians; ! is more than 3 us ahead of ours

one tensor, cold  blocks  direction  big copy, us  ours  vLLM    contiguous copy
160 x 8 KiB            1  store               100  1.23  1.20               0.50
160 x 8 KiB            1  load                100  1.23  1.19 !             0.50""",
    )


def test_submit_cost_judges_the_worst_cell() -> None:
    cells = [
        transfers("store", shape, 8, WARM, ours=us, big_copy=1, reference=100)
        for shape, us in (("160x8", 100), ("320x8", 131), ("80x8", 100))
    ]
    spreads = (Spread(us, us, us, us, us, us) for us in (3.0, 2.0, 9.0))
    verdicts = submit_cost_report.judge_calls(cells)
    verdicts += submit_cost_report.judge_expansions([submit_cost_report.Expansion(10, 4, *spreads)])
    assert_expected_inline(
        said(verdicts),
        """\
MISSED       call of 8 blocks, warm, over that of the reference, worst: 1.31, at most 1.30
MISSED       call of 8 blocks, with most layers over with fewest, worst: 1.31, at most 1.25
met          expand_block_ids by 4 over memcpy: 1.50, at most 1.50""",
    )


def test_duplex() -> None:
    cells = [
        transfers(BOTH, shape, blocks, state, ours=114, big_copy=100)
        for shape, blocks, state in (
            *(("160x4", 64, WARM), ("160x2", 512, WARM)),
            *(("160x8", 8, WARM), ("160x8", 64, COLD)),  # not judged
        )
    ]
    assert_expected_inline(
        said(judge(cells, duplex_report.targets)),
        """\
met          both of 64 x (160 x 4 KiB), one tensor, warm, total / big copy: 1.14, at most 1.15
MISSED       both of 512 x (160 x 2 KiB), one tensor, warm, total / big copy: 1.14, at most 1.12""",
    )


def test_copy_methods_are_compared_with_the_best_forced_one() -> None:
    cell = copy_methods_report.Cell
    cells = [
        transfers("store", "2x8", 64, WARM, cell, auto=105, staged=100, strided=200, big_copy=1),
        transfers("store", "2x8", 64, COLD, cell, auto=106, staged=100, strided=200, expedited=1),
        transfers("load", "2x8", 64, WARM, cell, auto=106, big_copy=1, reference=1),
    ]
    assert [of.best(state) for of in cells for state in of.states] == ["staged", "staged", None]
    assert_expected_inline(
        said(copy_methods_report.judge(cells)),
        """\
met          store of 64 x (2 x 8 KiB), one tensor, warm, automatic method over the best forced one: 1.05, at most 1.05
MISSED       store of 64 x (2 x 8 KiB), one tensor, cold, automatic method over the best forced one: 1.06, at most 1.05
not measured load of 64 x (2 x 8 KiB), one tensor, warm, automatic method over the best forced one: -, at most 1.05""",
    )


def beside(way: str, lost: float, speed: float, compute: str = "decode") -> Any:
    """Three repeats; the last one loses 1 ms/GB more."""
    repeats = [Sample(50.0, 50.0 + 2 * (lost + more), 2.0, speed) for more in (0, 0, 1)]
    kind = (Shape(160, 8), "one tensor", "load")
    return interference_report.Cell(*kind, compute, way, repeats, [], link=50.0)


def test_encoding() -> None:
    kinds = [
        *(("store", "160x8", 8), ("load", "160x8", 512), ("load", "160x2", 512)),
        *((BOTH, "160x8", 512), ("load", "160x8", 64), ("load", "64x1", 64)),
    ]
    cells = [
        transfers(
            *kind,
            WARM,
            encoding_report.Cell,
            **{"raw": raw, "lossless": 100, "raw, verified": raw + 5, "lossless, verified": 102},
        )
        for kind, raw in zip(kinds, (84, 122, 117, 115, 110, 100), strict=True)
    ]
    losses = [beside("raw", 3, 40), beside("lossless", 4.5, 40)]
    losses += [beside("raw, verified", 3.3, 40), beside("lossless, verified", 4.6, 40)]
    assert_expected_inline(
        said(encoding_report.judge(cells, losses)),
        """\
MISSED       store of 8 x (160 x 8 KiB), one tensor, us more than raw: 16, at most 15
met          load of 512 x (160 x 8 KiB), one tensor, KV bytes per second over raw: 1.22, at least 1.22
MISSED       load of 512 x (160 x 2 KiB), one tensor, KV bytes per second over raw: 1.17, at least 1.18
met          both of 512 x (160 x 8 KiB), one tensor, KV bytes per second over raw: 1.15, at least 1.15
met          load of 64 x (160 x 8 KiB), one tensor, KV bytes per second over raw: 1.10, at least 1.10
met          load of 64 x (64 x 1 KiB), one tensor, KV bytes per second over raw: 1, at least 1
met          store of 8 x (160 x 8 KiB), one tensor, raw, us more with digests: 5, at most 5
met          store of 8 x (160 x 8 KiB), one tensor, lossless, us more with digests: 2, at most 5
MISSED       load of 512 x (160 x 8 KiB), one tensor, raw, time with digests over without: 1.04, at most 1.02
met          load of 512 x (160 x 8 KiB), one tensor, lossless, time with digests over without: 1.02, at most 1.02
MISSED       load of 512 x (160 x 2 KiB), one tensor, raw, time with digests over without: 1.04, at most 1.02
met          load of 512 x (160 x 2 KiB), one tensor, lossless, time with digests over without: 1.02, at most 1.02
MISSED       both of 512 x (160 x 8 KiB), one tensor, raw, time with digests over without: 1.04, at most 1.02
met          both of 512 x (160 x 8 KiB), one tensor, lossless, time with digests over without: 1.02, at most 1.02
MISSED       load of 64 x (160 x 8 KiB), one tensor, raw, time with digests over without: 1.05, at most 1.02
met          load of 64 x (160 x 8 KiB), one tensor, lossless, time with digests over without: 1.02, at most 1.02
MISSED       load of 64 x (64 x 1 KiB), one tensor, raw, time with digests over without: 1.05, at most 1.02
met          load of 64 x (64 x 1 KiB), one tensor, lossless, time with digests over without: 1.02, at most 1.02
MISSED       load beside decode, lost ms/GB of KV: 4.50, at most 4
MISSED       load beside decode, lost ms/GB of KV, raw, verified: 3.30, at most 3.20
met          load beside decode, lost ms/GB of KV, lossless, verified: 4.60, at most 4.70""",
    )
    assert cells[3].gb_per_s == 2 * 512 * 160 * 8192 / 100 / 1e3  # both directions


def test_interference() -> None:
    cells = [
        beside(way, lost, speed, compute)
        for compute in ("decode", "GEMM")
        for way, lost, speed in (
            *(("big copy", 2, 50), ("auto", 4.5, 45)),
            ("copy engines only", 3, 50),
        )
    ]
    assert_expected_inline(
        said(interference_report.judge(cells)),
        """\
MISSED       load of 160 x 8 KiB, one tensor, beside decode, share of the link: 0.90, at least 0.93
MISSED       load of 160 x 8 KiB, one tensor, beside decode, lost ms/GB: 4.50, at most 4
met          load of 160 x 8 KiB, one tensor, beside decode, copy engines only, lost ms/GB: 3, at most 3
met          load of 160 x 8 KiB, one tensor, beside GEMM, share of the link: 0.90, at least 0.60
met          load of 160 x 8 KiB, one tensor, beside GEMM, copy engines only, lost ms/GB: 3, at most 3""",
    )


def test_host_memory() -> None:
    cells = [
        host_memory_report.Cell(name, 2**31, ready)
        for name, ready in (("torch", [4.0, 4.0, 9.0]), ("HostPool", [1.0, 1.04, 9.0]))
    ]
    assert cells[1].per_gib(cells[1].ready) == 0.52
    assert_expected_inline(
        said(host_memory_report.judge(cells)),
        """MISSED       HostPool, time until ready over torch's: 0.26, at most 0.25""",
    )


def many_jobs(scenario: str, number: int, factor: float = 1.0, **changes: Any) -> Any:
    few, many = (Spread(us, us, us, 3 * us, us, us) for us in (2.0, 2.0 * factor))
    ended: dict[str, Any] = dict(submit=few, submit_all=many, poll=many, held=True)
    ended |= dict(bytes_per_job=512.0, added_bytes=0, streams=16, events=1200, not_done=0)
    wrong = changes.pop("wrong", 0)
    return SimpleNamespace(
        scenario=scenario,
        direction="store",
        number=number,
        kept=False,
        few=Few(few, few),
        round=SimpleNamespace(**ended | changes),
        wrong=wrong,
    )


def test_outstanding_judges_the_worst_of_all_runs() -> None:
    good = [many_jobs("held", 1), many_jobs("busy", 2), many_jobs("free", 1)]
    verdicts = outstanding_report.judge(good, 50_000)
    assert [one.met for one in verdicts] == [True] * len(verdicts)
    bad = [
        many_jobs("held", 1, 2.0, submit=Spread(1, 1, 1, 4, 9, 9), held=False, streams=15),
        many_jobs("held", 2, 2.0, submit=Spread(1, 1, 1, 4, 9, 9), bytes_per_job=600.0, wrong=2),
        many_jobs("free", 1, not_done=1, events=1201),
        many_jobs("free", 2, added_bytes=72 * 50_000),
    ]
    assert_expected_inline(
        said(outstanding_report.judge(bad, 50_000)),
        """\
MISSED       p99 of submit over its median, held: 4, at most 3
not measured p99 of submit over its median, busy: -, at most 3
met          p99 of submit over its median, free: 3, at most 3
MISSED       rounds in which submitting was blocked: 1, at most 0
MISSED       median submit, all outstanding over 100: 2, at most 1.50
MISSED       median poll, all outstanding over 100: 2, at most 1.50
MISSED       resident bytes of an outstanding job: 600, at most 512
met          streams: 16, at most 16
MISSED       events: 1,201, at most 1,200
MISSED       resident bytes that a second round leaves behind for each job: 72, at most 64
MISSED       streams and events that a second round adds: 1, at most 0
MISSED       blocks and pages with wrong bytes: 2, at most 0
MISSED       jobs not reported as done once: 1, at most 0""",
    )
    # Of so few jobs memory that Python keeps would decide.
    assert {one.met for one in outstanding_report.judge(good, 2_000)} == {True, None}


def test_block_manager_judges_the_operation_that_gains_least() -> None:
    cells = [
        block_manager_report.Cell("lru", manager, operation, 10, Spread(us, us, us, us, us, us))
        for manager, operation, us in (
            *(("digests", "touch", 1.0), ("digests", "lookup", 1.0), ("vLLM", "touch", 5.0)),
            *(("vLLM", "lookup", 6.0), ("digests", "lookup, a miss", 2.0)),
            ("vLLM", "lookup, a miss", 8.0),
        )
    ]
    memory = [
        block_manager_report.Memory("lru", name, 1000, size)
        for name, size in (("digests", 201.0), ("vLLM", 900.0))
    ]
    verdicts = [*block_manager_report.judge(cells, memory, 1.0)]
    assert [one.met for one in verdicts[2:6]] == [None] * 4  # of keys, and by key
    assert_expected_inline(
        said(verdicts[:2] + verdicts[6:]),
        """\
met          digests, times as fast as vLLM, least in touch (lru): 5, at least 5
MISSED       digests, times as fast as vLLM, least in lookup, a miss (lru): 4, at least 5
MISSED       bytes for each of 1,000 pages: 201, at most 200
met          longest hold of the GIL by a call of up to 10,000 keys, ms: 1, at most 1""",
    )


def rounds_of(**of_engine: tuple[float, float]) -> list[Round]:
    """By engine: seconds, and to the first token. The second turn takes twice as long."""
    names = {"plain": PLAIN, "theirs": THEIRS, "ours": "ours", "lossless": LOSSLESS}
    names |= {"connector": "our connector", "both": "our connector, lossless"}
    return [
        Round(names[engine], turn, kind, seconds * turn, [first * turn] * 2, [16], [[1, 2]])
        for engine, (seconds, first) in of_engine.items()
        for turn in (1, 2)
        for kind in ("cold", "warm", "alone", "continued")
    ]


def test_integration_vllm_asks_for_throughput_or_for_half_the_overhead() -> None:
    slow = {"plain": (9.0, 0.1), "theirs": (10.0, 0.2), "lossless": (8.0, 0.14)}
    slow |= {"connector": (8.0, 0.11), "both": (8.0, 0.12)}
    assert_expected_inline(
        said(integration_vllm_report.judge(rounds_of(**slow, ours=(10.5, 0.15)))),
        """\
MISSED       cold, throughput over vLLM's own offloading: 0.95, at least 1
MISSED       warm, throughput over vLLM's own offloading: 0.95, at least 1
MISSED       alone, throughput over vLLM's own offloading: 0.95, at least 1
met          alone, overhead of lossless over that of raw pages: 0.80, at most 0.88
met          continued, our connector, share of the overhead of the spec: 0.20, at most 0.35
MISSED       continued, our connector, lossless, share of the overhead of the spec: 0.50, at most 0.35
met          alone, the best, share of the overhead of vLLM's own in time to first token: 0.50, at most 0.50""",
    )
    found = integration_vllm_report.judge(rounds_of(**slow, ours=(8.0, 0.15)))
    assert str(found[-1]) == (
        "met          the better of cold and warm, throughput over vLLM's own offloading: 1.25, at least 1.15"
    )
    rounds = rounds_of(**slow, ours=(8.0, 0.15))
    rounds[-1].tokens = [[1, 3]]
    assert integration_vllm_report.differences(rounds) == (
        "answers of 8 that are not those of plain vLLM: vLLM's own 0, ours, lossless 0, our connector 0, our connector, lossless 0, ours 1"
    )


def test_integration_transformers_compares_medians_of_losses_and_fastest_generations() -> None:
    def losses(*host: float) -> list[Any]:
        usual = dict(usual=[100.0], usual_with=[200.0])
        return [
            SimpleNamespace(
                host=one, stream=3 * one, copies=1.0, without=[100.0, 130.0], back=210.0, **usual
            )
            for one in host
        ]

    cell = integration_transformers_report.Cell(
        16, 64, 1 << 20, {"theirs": losses(30, 30, 90), "ours": losses(1, 10.5, 99)}
    )
    assert cell.slower("ours") == [40, 40, 40]  # batches that took longer than the usual ones
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
