"""What the rounds of several vLLM engines come to: a table, and the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import mean, median
from typing import Any

from report import Column, Verdict, table_of
from timing import quartiles, summary

PLAIN, THEIRS, OURS, LOSSLESS = "plain", "vLLM's own", "ours", "ours, lossless"
CONNECTOR, CONNECTOR_LOSSLESS = "our connector", "our connector, lossless"
SPEC_KINDS = ("cold", "warm", "alone")  # with the targets of our spec
LOSSLESS_SHARE = 0.88  # of the overhead of raw pages, prompts one after another
CONTINUED = {"continued": 0.35, "long": 0.15}  # share of the overhead of our spec, of the connector
# Of our connector, over vLLM's own.
THROUGHPUT = {"cold": 1.3, "warm": 1.05}
OVERHEAD = {"alone": 0.65, "restarted": 1.0}
STEP_MS = 1.0  # that a step of other requests, beside a load, may be longer than plain's
KINDS = (*SPEC_KINDS, *CONTINUED, "beside")


@dataclass
class Round:
    """What an engine has served at once: seconds of all, to the first token of each request, tokens
    of each that came from a cache, and the tokens that it made. If other requests decoded
    meanwhile: the longest of their steps, beside each request."""

    engine: str
    turn: int
    kind: str
    seconds: float
    ttft: list[float]
    cached: list[int]
    tokens: list[list[int]]
    steps: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float:
        """What is compared: the longest steps of others, or the time to first token."""
        return 1e3 * median(self.steps) if self.steps else self.ttft_ms

    @property
    def ttft_ms(self) -> float:
        """The mean of the requests. If they ran one after another: the median."""
        return 1e3 * (mean if self.kind in ("cold", "warm") else median)(self.ttft)

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "turn": self.turn,
            "kind": self.kind,
            "seconds": self.seconds,
            "ttft_ms": self.ttft_ms,
            "ttft_s": summary(self.ttft),
            **({"steps_s": summary(self.steps)} if self.steps else {}),
            "cached": sum(self.cached),
        }


def hits_to_json(pairs: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Of an engine's hits and those of the model: sums in blocks, and how many prompts differ."""
    found, expected = (sum(of) for of in zip(*pairs, strict=True))
    wrong = sum(one != other for one, other in pairs)
    return {"prompts": len(pairs), "blocks": found, "blocks_of_model": expected, "wrong": wrong}


def seconds(rounds: Sequence[Round], engine: str, kind: str) -> float:
    """The median of the turns."""
    return median(each.seconds for each in _of(rounds, engine, kind))


def ttft_ms(rounds: Sequence[Round], engine: str, kind: str) -> float:
    """The median of the turns."""
    return median(each.ttft_ms for each in _of(rounds, engine, kind))


def speedup(rounds: Sequence[Round], engine: str, kind: str) -> float:
    """The throughput over that of vLLM's own."""
    return seconds(rounds, THEIRS, kind) / seconds(rounds, engine, kind)


def overheads_ms(rounds: Sequence[Round], engine: str, kind: str) -> list[float]:
    """In time to first token, or in the steps of others, to that of plain in the same turn:
    quartiles of the turns."""
    plain = {each.turn: each.ms for each in _of(rounds, PLAIN, kind)}
    return quartiles([each.ms - plain[each.turn] for each in _of(rounds, engine, kind)])


def judge(rounds: Sequence[Round]) -> list[Verdict]:
    verdicts = []
    for engine in (CONNECTOR, CONNECTOR_LOSSLESS):
        for kind, least in THROUGHPUT.items():
            verdicts.append(_judge_throughput(rounds, engine, kind, least))
        for kind, most in OVERHEAD.items():
            if _of(rounds, engine, kind):
                name = f"{kind}, {engine}, share of the overhead of vLLM's own"
                verdicts.append(Verdict(name, most, _share(rounds, engine, THEIRS, kind)))
        longer = overheads_ms(rounds, engine, "beside")[1]
        verdicts.append(Verdict(f"beside, {engine}, ms longer than plain", STEP_MS, longer))
    if not _of(rounds, OURS, "cold"):
        return verdicts
    verdicts += [_judge_throughput(rounds, OURS, kind, 1.0) for kind in SPEC_KINDS]
    name = "alone, overhead of lossless over that of raw pages"
    verdicts.append(Verdict(name, LOSSLESS_SHARE, _share(rounds, LOSSLESS, OURS, "alone")))
    engines = ((CONNECTOR, OURS), (CONNECTOR_LOSSLESS, LOSSLESS))
    for (kind, most), (engine, spec) in product(CONTINUED.items(), engines):
        name = f"{kind}, {engine}, share of the overhead of the spec"
        verdicts.append(Verdict(name, most, _share(rounds, engine, spec, kind)))
    return verdicts


def _judge_throughput(rounds: Sequence[Round], engine: str, kind: str, least: float) -> Verdict:
    name = f"{kind}, {engine}, throughput over vLLM's own offloading"
    return Verdict(name, least, speedup(rounds, engine, kind), at_least=True)


def _share(rounds: Sequence[Round], engine: str, other: str, kind: str) -> float | None:
    """The overhead over that of the other engine, if that has one."""
    ours, its = (overheads_ms(rounds, each, kind)[1] for each in (engine, other))
    return ours / its if its > 0 else None


def rounds_table(rounds: Sequence[Round]) -> str:
    """A line for each kind of round and engine."""
    columns: list[Column[tuple[str, str]]] = [
        Column("round", lambda row: row[0]),
        Column("engine", lambda row: row[1]),
        Column("s", lambda row: seconds(rounds, row[1], row[0])),
        Column("throughput", lambda row: speedup(rounds, row[1], row[0])),
        Column("TTFT, ms", lambda row: ttft_ms(rounds, row[1], row[0])),
        Column(
            "overhead, ms",
            lambda row: "{1:.1f} ({0:.1f} to {2:.1f})".format(
                *overheads_ms(rounds, row[1], row[0])
            ),
        ),
        Column(
            "cached tokens",
            lambda row: sum(sum(each.cached) for each in _of(rounds, row[1], row[0])),
        ),
    ]
    kinds = dict.fromkeys(each.kind for each in rounds)
    engines = dict.fromkeys(each.engine for each in rounds)
    return table_of(columns, list(product(kinds, engines)))


def differences(rounds: Sequence[Round]) -> str:
    """How many answers are others than plain's in the same round: in bfloat16 a near tie can fall
    either way when requests are batched in another order."""
    plain = {(each.turn, each.kind): each.tokens for each in rounds if each.engine == PLAIN}
    counts: dict[str, int] = {}
    for each in rounds:
        pairs = zip(each.tokens, plain[each.turn, each.kind], strict=True)
        counts[each.engine] = counts.get(each.engine, 0) + sum(
            ours != other for ours, other in pairs
        )
    del counts[PLAIN]
    of = sum(len(each.tokens) for each in rounds if each.engine == PLAIN)
    said = ", ".join(f"{engine} {count}" for engine, count in counts.items())
    return f"answers of {of} that are not those of plain vLLM: {said}"


def _of(rounds: Sequence[Round], engine: str, kind: str) -> list[Round]:
    return [each for each in rounds if (each.engine, each.kind) == (engine, kind)]
