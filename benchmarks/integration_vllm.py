"""vLLM without offloading, with its own CPU offloading, and with ours, with raw and with encoded
pages, side by side on one GPU, or on as many as an engine has tensor-parallel ranks.

All engines are up at once, each in a process, and serve the same prompts in turns: "cold", new
prompts, which are stored; "warm", the same again after the GPU's prefix cache was dropped, so that
all comes from the host; "alone", the same again one after the other; "continued", as alone, but
with other tokens at the end, which are computed; "beside", as continued, while other requests
decode, whose longest step counts; "long", as continued, with a longer prompt.
"plain" has a GPU cache that is large enough, which is what offloading can come close to at best:
the overhead is the time to first token less that of plain. The model has random weights and few KV
heads, as a rank of a tensor-parallel server has.

With --latent the model has latent attention (MLA): all ranks have the same cache. Ours has another
engine whose ranks exchange what they load, instead of the one with encoded pages.

With --tier vLLM's `fs` tier is below the host memory, that of vLLM and ours, all pages are raw, and
there are no long prompts. At the end all engines but plain start again and serve all prompts one
after the other: "restarted". They have to find every full block. Plain's GPU cache should have room
for all turns.

Needs vLLM 0.33 or later and a GPU. The exit code is 1 if a restarted engine misses blocks.
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # a checkout need not be installed

from program import finish, new_parser
from report import Column, table_of
from timing import in_turn, quartiles, summary
from vllm_engines import engine_settings
from vllm_server import make_prompts
from vllm_servers import Server, write_model

SHAPE = ("layers", "heads", "kv_heads", "head_size", "hidden", "intermediate", "vocabulary")
PLAIN, THEIRS = "plain", "vLLM's own"
# Prompts one after another, with other tokens at their ends.
CONTINUED = ("continued", "long")
KINDS = ("cold", "warm", "alone", *CONTINUED, "beside")


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.tier) as folder:
        logs = options.logs or Path(folder)
        shape = {name: getattr(options, name) for name in SHAPE}
        write_model(Path(folder) / "model", shape, options.latent)
        model = str(Path(folder) / "model")
        settings = engine_settings(options, model, Path(folder) / "rows")
        servers, missed = _start(settings, logs), 0
        try:
            about = {server.name: server.ready() for server in servers}
            print(*(f"{name}: {said}" for name, said in about.items()), sep="\n")
            rounds = _measure(options, servers)
            if options.tier:
                turns, logs = rounds[-1].turn + 1, logs / "restarted"
                again, missed = _measure_restarted(options, servers, settings, logs, turns)
                rounds += again
        finally:
            for server in servers:
                server.stop()
    print(rounds_table(rounds), "", load_rates(rounds), differences(rounds), sep="\n")
    content = {
        "benchmark": "integration_vllm",
        "settings": {
            name: value
            for name, value in vars(options).items()
            if name not in ("json", "logs", "preload", "device", "tier")
        },
        "engines": about,
        "rounds": [each.to_json() for each in rounds],
    }
    if missed:
        print(f"full blocks that restarted engines did not find: {missed}", file=sys.stderr)
    return finish(options, content) or int(missed > 0)


@dataclass
class Round:
    """What an engine has served at once: seconds of all, to the first token of each request, tokens
    of each that came from a cache, and the tokens that it made. If other requests decoded
    meanwhile: the longest of their steps, beside each request. loads: bytes and seconds that vLLM
    has counted of a worker's loads since it started."""

    engine: str
    turn: int
    kind: str
    seconds: float
    ttft: list[float]
    cached: list[int]
    tokens: list[list[int]]
    loads: list[float]
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
            "loads": self.loads,
        }


def _start(settings: Mapping[str, Any], logs: Path) -> list[Server]:
    logs.mkdir(parents=True, exist_ok=True)
    return [Server(name, each, logs / f"{name}.log") for name, each in settings.items()]


def _parser() -> ArgumentParser:
    parser = new_parser(__doc__)
    add = parser.add_argument
    numbers = {"layers": 80, "heads": 8, "kv_heads": 1, "head_size": 128, "hidden": 1024}
    numbers |= {"intermediate": 2816, "vocabulary": 32000, "block_tokens": 16, "turns": 8}
    numbers |= {"prompts": 8, "tokens": 8192, "prefix": 2048, "output": 16, "alone": 4}
    numbers |= {"running": 4, "batched": 8192, "new": 512}
    numbers |= {"long_tokens": 32768, "long_new": 2048, "tensor_parallel": 1}
    for name, default in numbers.items():
        add(f"--{name.replace('_', '-')}", type=int, default=default)
    add("--seconds", type=float, default=90.0, help="no turn begins after this time")
    add("--cpu-gib", type=float, default=10.0)
    add("--gpu-gib", type=float, default=10.0, help="KV cache of plain; the others get the least")
    add("--dtype", default="bfloat16")
    add("--latent", action="store_true", help="latent attention; try --backend FLASH_ATTN_MLA")
    add("--recompute", action="store_true", help='with "kv_load_failure_policy": "recompute"')
    add("--backend", default="FLASH_ATTN", help="attention backend")
    add("--tier", type=Path, help="folder for the files of tiers, removed at the end")
    add("--eager", action="store_true", help="no CUDA graphs: launches take most of the time then")
    add("--logs", type=Path, help="folder for vLLM's logs; default: none")
    add("--preload", help="a file that each engine runs first, on machines without a GPU")
    return parser


def _measure(options: Namespace, servers: list[Server]) -> list[Round]:
    """A turn is a round of each kind of each engine."""
    rounds = []
    began = time.monotonic()
    for turn in range(-1, options.turns):  # the first one warms up
        if turn > 0 and time.monotonic() - began > options.seconds:
            break
        for server in in_turn(servers, turn):
            order = _order_of(options, turn)
            drops = server.name != "plain"
            again = [number % options.prompts for number in range(options.alone)]
            alone = {"order": again, "alone": True, "drop": drops}
            kinds: dict[str, dict[str, Any]] = {"cold": {}, "warm": {"drop": drops}, "alone": alone}
            kinds["continued"] = {**alone, "new": options.new}
            kinds["beside"] = {**kinds["continued"], "beside": options.running - 1}
            long = {"prompts": 1, "lengths": (options.long_tokens - 50, options.long_tokens)}
            if not options.tier:
                kinds["long, new"] = long
                kinds["long"] = {**long, "alone": True, "drop": drops, "new": options.long_new}
            for kind, more in kinds.items():
                answer = server.serve(**order | more)
                if turn >= 0 and kind in KINDS:
                    rounds.append(Round(server.name, turn, kind, **answer))
    return rounds


def _measure_restarted(
    options: Namespace, servers: list[Server], settings: Mapping[str, Any], logs: Path, turns: int
) -> tuple[list[Round], int]:
    """Starts all engines but plain again. Also returns how many full blocks they did not find."""
    rounds: list[Round] = []
    again = [server.name for server in servers[1:]]
    for server in servers[1:]:
        server.end()
    servers[1:] = _start({name: settings[name] for name in again}, logs)
    for server in servers[1:]:
        server.ready()
    missed = 0
    for turn in range(turns):
        order, size = _order_of(options, turn), options.block_tokens
        how = {name: order[name] for name in ("seed", "lengths", "prefixes", "prefix")}
        made = make_prompts(**how, count=options.prompts, vocabulary=options.vocabulary)
        for server in in_turn(servers, turn):
            answer = server.serve(**order, alone=True, drop=server.name in again)
            rounds.append(Round(server.name, turn, "restarted", **answer))
            if server.name in again:
                pairs = zip(answer["cached"], map(len, made), strict=True)
                missed += sum(tokens // size - cached // size for cached, tokens in pairs)
    for server in servers[1:]:
        server.end()
    return rounds, missed


def _order_of(options: Namespace, turn: int) -> dict[str, Any]:
    """The prompts of a turn."""
    return {
        "seed": 100 + turn,
        "prompts": options.prompts,
        "lengths": (options.tokens - 50, options.tokens),
        "output": options.output,
        "prefixes": 2,
        "prefix": options.prefix,
    }


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


def load_rates(rounds: Sequence[Round]) -> str:
    """Bytes per second of the loads alone, as vLLM has timed them."""
    last = {each.engine: each.loads for each in rounds}
    rates = (f"{name} {size / took / 1e9:.1f}" for name, (size, took) in last.items() if took)
    return f"loads of each GPU, GB/s: {', '.join(rates)}"


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
