"""A table of transfers beside a big copy and the reference, with their targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from comparison import BIG, OURS, REFERENCE, SUBMIT, Cell
from peers import Peer, best_peer
from report import Verdict, table

# What targets are on, and columns of the table.
OVER_BIG, OVER_REFERENCE = "total / big copy", "total / R"
CALL_OVER_REFERENCE, PEER = "call / R's call", "total / big copy, best peer's"

CAPTION = (
    "R: what PyTorch needs for one contiguous copy with the same guarantees; medians, [quartiles]\n"
    "of rounds; link: total / big copy on the device alone; (target), ! is a miss"
)

Targets = Callable[[Cell, str], Mapping[str, Verdict]]  # of a cell in a state, by what they are on


def measured(cell: Cell, state: str, what: str) -> float:
    samples = cell.states[state]
    if what == CALL_OVER_REFERENCE:
        return samples.ratio(OURS, REFERENCE, SUBMIT)
    return samples.ratio(OURS, REFERENCE if what == OVER_REFERENCE else BIG)


def peer_of(cell: Cell, state: str) -> Peer | None:
    kind = cell.kind
    shape = kind.shape.layers, kind.shape.fragment_kib
    return best_peer(*shape, kind.direction, kind.blocks, state)


def verdict(cell: Cell, state: str, what: str, target: float) -> Verdict:
    return Verdict(f"{cell.kind}, {state}, {what}", target, measured(cell, state, what))


def tables(cells: Sequence[Cell], targets: Targets) -> str:
    """One for each arrangement and direction; a row for each shape and number of blocks."""
    kinds = dict.fromkeys((cell.kind.arrangement, cell.kind.direction) for cell in cells)
    said = [CAPTION]
    for kind in kinds:
        chosen = [cell for cell in cells if (cell.kind.arrangement, cell.kind.direction) == kind]
        said.append(_table(", ".join(kind), chosen, targets))
    return "\n\n".join(said)


def _table(title: str, cells: Sequence[Cell], targets: Targets) -> str:
    headers = [title, "blocks"]
    for state in cells[0].states:
        headers += [f"{state}: total / big", "[quartiles]", "R / big", "total / R", "call, us"]
        headers += ["call / R's", "peer / big", "its call, us"]
    rows = []
    for cell in cells:
        row: list[object] = [str(cell.kind.shape), cell.kind.blocks]
        for state, samples in cell.states.items():
            found = targets(cell, state)
            low, _, high = samples.ratios(OURS, BIG)
            peer = peer_of(cell, state)
            row += [
                _text(cell, state, OVER_BIG, found),
                f"[{low:.2f} {high:.2f}]",
                samples.ratio(REFERENCE, BIG),
                _text(cell, state, OVER_REFERENCE, found),
                samples.median(OURS, SUBMIT),
                _text(cell, state, CALL_OVER_REFERENCE, found),
                peer and peer.ratio,
                peer and peer.submit_us,
            ]
        used = {name for one in cell.states.values() for name in one.copy_methods.get(OURS, ())}
        rows.append([*row, cell.link_ratio, "/".join(sorted(used))])
    return table([*headers, "link", "method"], rows)


def _text(cell: Cell, state: str, what: str, found: Mapping[str, Verdict]) -> str:
    said = f"{measured(cell, state, what):.2f}"
    if what not in found:
        return said
    return f"{said} ({found[what].target:.2f}){'' if found[what].met else ' !'}"


def no_targets(cell: Cell, state: str) -> Mapping[str, Verdict]:
    """Without a GPU nothing is judged."""
    return {}


def judge(cells: Sequence[Cell], targets: Targets) -> list[Verdict]:
    return [one for cell in cells for state in cell.states for one in targets(cell, state).values()]


def counts(cells: Sequence[Cell], targets: Targets) -> Iterator[str]:
    """Lines: of the targets of each kind that are met and missed."""
    found = [targets(cell, state) for cell in cells for state in cell.states]
    for what in (OVER_BIG, OVER_REFERENCE, CALL_OVER_REFERENCE, PEER):
        met = [of_cell[what].met for of_cell in found if what in of_cell]
        if met:
            yield f"{what}: {met.count(True)} met, {met.count(False)} missed"
