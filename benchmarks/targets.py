"""The performance targets of ZeroShard, and whether a result meets them.

The function of a target takes a whole result (see run.py) and returns a :class:`Target`. Its value is
None if the lines that it needs were not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from comparability import Row, usable
from protocols import STEP_NBYTES_PER_ELEMENT

FORMAT = 2
"""The version of the format of results. Files with another version are not used for the README."""

PEERS = ("DDP", "FSDP2", "DeepSpeed")
STAGES = (1, 2, 3)


@dataclass(frozen=True)
class Target:
    """``at_least``: a larger value is better. ``detail``: the values that were compared."""

    name: str
    limit: float
    value: float | None
    detail: str = ""
    at_least: bool = True
    unit: str = "x"

    @property
    def wanted(self) -> str:
        """The limit as text."""
        return f"{'at least' if self.at_least else 'at most'} {self._text(self.limit)}"

    @property
    def measured(self) -> str:
        """The value as text."""
        return "-" if self.value is None else self._text(self.value)

    @property
    def verdict(self) -> str:
        """``met``, ``missed`` or ``not measured``. The exact value counts, not the rounded one."""
        if self.value is None:
            return "not measured"
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "met" if met else "missed"

    def _text(self, value: float) -> str:
        return f"{100 * value:.0f} %" if self.unit == "%" else f"{value:.2f}x"


def all_targets(result: dict[str, Any]) -> list[Target]:
    """All targets, in the order of the table."""
    return [
        _same_stage(
            result,
            "A1: CPU time per step, best peer ÷ ZeroShard with p2p or shm",
            2.0,
            ("p2p", "shm"),
        ),
        _same_stage(
            result, "A1: CPU time per step, best peer ÷ ZeroShard with stock", 1.3, ("stock",)
        ),
        _same_stage(
            result,
            "A1: wall time per step, best peer ÷ ZeroShard with p2p or shm",
            1.8,
            ("p2p", "shm"),
            "wall",
        ),
        _whole_step(result),
        _never_slower(result),
        _update(result),
        _stage_three(result),
        _scaling(result),
        _memory(result),
        _overhead(result),
        _host_offload(result, "cpu"),
        _host_offload(result, "wall"),
        _disk(result),
        _checkpoint(result, "save"),
        _checkpoint(result, "load"),
        _blocked(result),
    ]


# ---------------------------------------------------------------------- finding lines


def rows_of(result: dict[str, Any], key: str) -> list[Row]:
    """The lines of a protocol that were measured and train as the others do."""
    rows: Iterable[Row] = result["protocols"].get(key, {}).get("rows", ())
    return [row for row in rows if usable(row)]


def named(rows: Iterable[Row], name: str) -> Row | None:
    """The line of this name; None if there is none."""
    return next((row for row in rows if row["name"] == name), None)


def is_zeroshard(row: Row) -> bool:
    """Whether it is a line of ZeroShard."""
    return bool(row["family"].startswith("ZeroShard"))


def ms(row: Row, measure: str = "cpu") -> float:
    """The median of a measure, in milliseconds."""
    return float(row[f"{measure}_ms"]["median"])


def best(rows: Iterable[Row], measure: str = "cpu") -> Row | None:
    """The line with the smallest median; None if there is no line."""
    return min(rows, key=lambda row: ms(row, measure), default=None)


def peers_of_stage(rows: Sequence[Row], stage: int) -> list[Row]:
    """The lines of FSDP2 and DeepSpeed of this stage."""
    return [r for r in rows if r["family"] in PEERS[1:] and r["stage"] == stage]


def zeroshard_of_stage(rows: Sequence[Row], stage: int, transports: Sequence[str]) -> list[Row]:
    """The lines of ZeroShard of this stage over the given transports."""
    return [
        r for r in rows if is_zeroshard(r) and r["stage"] == stage and r["transport"] in transports
    ]  # fmt: skip


def bound_ms(result: dict[str, Any]) -> float | None:
    """A1's lower bound: forward and backward alone, and the update of one rank's elements at memory
    bandwidth."""
    floor = named(rows_of(result, "a1"), "forward + backward")
    if floor is None:
        return None
    numel = result["protocols"]["a1"]["settings"]["parameters"] / floor["ranks"]
    return ms(floor) + update_ms(numel, result)


def update_ms(numel: float, result: dict[str, Any], threads: int = 1) -> float:
    """Milliseconds to update ``numel`` elements at the measured memory bandwidth."""
    return STEP_NBYTES_PER_ELEMENT * numel / stream_gb_per_s(result, threads) / 1e6


def stream_gb_per_s(result: dict[str, Any], threads: int = 1) -> float:
    """The memory bandwidth that this number of threads reaches."""
    suffix = "" if threads == 1 else f"_of_{threads}_threads"
    return float(result[f"stream_gb_per_s{suffix}"]["best"])


# ---------------------------------------------------------------------- the targets


def _same_stage(
    result: dict[str, Any],
    name: str,
    limit: float,
    transports: Sequence[str],
    measure: str = "cpu",
) -> Target:
    rows, ratios = rows_of(result, "a1"), {}
    for stage in STAGES:
        peer = best(peers_of_stage(rows, stage), measure)
        own = best(zeroshard_of_stage(rows, stage, transports), measure)
        if peer and own:
            ratios[stage] = (ms(peer, measure) / ms(own, measure), own["transport"])
    complete = len(ratios) == len(STAGES)
    worst = min(ratio for ratio, _ in ratios.values()) if complete else None
    detail = "; ".join(f"stage {s}: {r:.2f}x ({t})" for s, (r, t) in ratios.items())
    return Target(name, limit, worst, detail)


def _whole_step(result: dict[str, Any]) -> Target:
    name = "A1: CPU time per step, ZeroShard ÷ lower bound"
    own = best(row for row in rows_of(result, "a1") if is_zeroshard(row) and row["stage"])
    bound = bound_ms(result)
    if own is None or bound is None:
        return Target(name, 1.2, None, at_least=False)
    detail = f"{own['name']}: {ms(own):.0f} of {bound:.0f} ms"
    return Target(name, 1.2, ms(own) / bound, detail, at_least=False)


def _never_slower(result: dict[str, Any]) -> Target:
    name = "A2: CPU time per step of 2048 tokens, fastest peer ÷ slowest ZeroShard stage"
    rows = rows_of(result, "a2-2048")
    peer = best(row for row in rows if row["family"] in PEERS)
    own = max((row for row in rows if is_zeroshard(row)), key=ms, default=None)
    if peer is None or own is None:
        return Target(name, 1.0, None)
    wall = ms(peer, "wall") / ms(own, "wall")
    return Target(
        name, 1.0, ms(peer) / ms(own), f"{peer['name']} / {own['name']}; wall {wall:.2f}x"
    )


def _update(result: dict[str, Any]) -> Target:
    name = "A4: memory bandwidth of the update ÷ STREAM"
    row = named(rows_of(result, "a4"), "ZeroShard stage 2")
    if row is None:
        return Target(name, 0.85, None, unit="%")
    numel = result["protocols"]["a4"]["settings"]["parameters"]
    detail = f"{ms(row, 'step'):.1f} ms, STREAM {result['stream_gb_per_s']['best']:.1f} GB/s"
    return Target(name, 0.85, update_ms(numel, result) / ms(row, "step"), detail, unit="%")


def _stage_three(result: dict[str, Any]) -> Target:
    name = "A8: throughput, stage 3 ÷ stage 2"
    rows = rows_of(result, "a8")
    two, three = (named(rows, f"ZeroShard stage {stage}, 2 ranks") for stage in (2, 3))
    if two is None or three is None:
        return Target(name, 0.96, None)
    detail = f"wall; CPU {ms(two) / ms(three):.2f}x"
    return Target(name, 0.96, ms(two, "wall") / ms(three, "wall"), detail)


def _scaling(result: dict[str, Any]) -> Target:
    name = "A8: throughput per rank, 2 ranks ÷ 1 rank"
    rows, ratios = rows_of(result, "a8"), {}
    for stage in (2, 3):
        one = named(rows, f"ZeroShard stage {stage}, 1 rank")
        two = named(rows, f"ZeroShard stage {stage}, 2 ranks")
        if one and two:
            ratios[stage] = ms(one, "wall") / ms(two, "wall")
    detail = "wall; " + ", ".join(f"stage {s}: {r:.2f}x" for s, r in ratios.items())
    return Target(name, 0.92, min(ratios.values(), default=None), detail if ratios else "")


def _memory(result: dict[str, Any]) -> Target:
    name = "A5: peak memory of training above the states, ZeroShard ÷ FSDP2"
    protocol = result["protocols"].get("a5", {})
    found = {
        row["name"]: row["peak_mib"]["training"] - protocol["formula_mib"]
        for row in protocol.get("rows", ())
        if row.get("learns")
    }
    mine, theirs = found.get("ZeroShard"), found.get("FSDP2", 0.0)
    if mine is None or theirs <= 0:
        return Target(name, 0.6, None, at_least=False)
    detail = f"{mine:.0f} of {theirs:.0f} MiB"
    return Target(name, 0.6, mine / theirs, detail, at_least=False)


def overhead_us(row: Row, result: dict[str, Any]) -> float | None:
    """A7: CPU microseconds of forward and backward per layer, minus those of the plain model."""
    plain = named(rows_of(result, "a7"), "forward + backward")
    layers = result["protocols"]["a7"]["settings"]["task"]["depth"]
    if plain is None:
        return None
    return float(1000 * (ms(row, "compute") - ms(plain, "compute")) / layers)


def _overhead(result: dict[str, Any]) -> Target:
    name = "A7: CPU overhead per layer, ZeroShard ÷ FSDP2"
    rows = rows_of(result, "a7")
    peer = named(rows, "FSDP2, resharded")
    own = named(rows, "ZeroShard stage 3, a unit per layer")
    if peer is None or own is None:
        return Target(name, 1 / 3, None, at_least=False)
    mine, theirs = overhead_us(own, result), overhead_us(peer, result)
    if mine is None or theirs is None:
        return Target(name, 1 / 3, None, at_least=False)
    detail = f"{mine:.0f} of {theirs:.0f} microseconds"
    return Target(name, 1 / 3, mine / theirs, detail, at_least=False)


def offload_ratio(row: Row, rows: Sequence[Row], measure: str) -> float | None:
    """A9: time of a step ÷ that of the line of the same stage without offload."""
    reference = named(rows, row.get("reference", ""))
    return ms(row, measure) / ms(reference, measure) if reference else None


def _host_offload(result: dict[str, Any], measure: str) -> Target:
    word = {"cpu": "CPU", "wall": "wall"}[measure]
    name = f"A9: {word} time per step, state in host memory ÷ no offload"
    rows = rows_of(result, "a9")
    ratios = {}
    for stage, part in ((2, "optimizer"), (3, "optimizer"), (3, "parameters")):
        row = named(rows, f"ZeroShard stage {stage}, {part} cpu")
        if row is None or (ratio := offload_ratio(row, rows, measure)) is None:
            return Target(name, 1.05, None, at_least=False)
        ratios[f"stage {stage}, {part}"] = ratio
    detail = "; ".join(f"{what}: {ratio:.2f}x" for what, ratio in ratios.items())
    return Target(name, 1.05, max(ratios.values()), detail, at_least=False)


def _disk(result: dict[str, Any]) -> Target:
    name = "A9: disk bandwidth, ZeroShard ÷ plain O_DIRECT loop"
    protocol = result["protocols"].get("a9-disk", {})
    if "share_of_raw" not in protocol:
        return Target(name, 0.85, None, unit="%")
    share = protocol["share_of_raw"]
    own, *raw = (row["gb_per_s"] for row in protocol["rows"])
    detail = (
        f"{own} of {max(raw)} GB/s, median over rounds of {100 * share['min']:.0f} to "
        f"{100 * share['max']:.0f} %"
    )
    return Target(name, 0.85, share["median"], detail, unit="%")


def _checkpoint_rows(result: dict[str, Any]) -> list[Row]:
    """The measured lines of A10. They have no losses to compare."""
    rows: Iterable[Row] = result["protocols"].get("a10", {}).get("rows", ())
    return [row for row in rows if "save" in row]


def _checkpoint(result: dict[str, Any], kind: str) -> Target:
    """Compared with the faster peer."""
    name = f"A10: wall time to {kind} a checkpoint, best peer ÷ ZeroShard"
    rows = [row for row in _checkpoint_rows(result) if kind in row and "copy" not in row]
    own = [row for row in rows if row["name"] == "ZeroShard"]
    peers = [row for row in rows if row not in own]
    if not own or not peers:
        return Target(name, 1.0, None)
    walls = {row["name"]: row[kind]["wall_ms"]["median"] for row in rows}
    peer = min((row["name"] for row in peers), key=lambda line: walls[line])
    detail = f"{walls[own[0]['name']]:.0f} ms; {peer}: {walls[peer]:.0f} ms"
    return Target(name, 1.0, walls[peer] / walls[own[0]["name"]], detail)


def _blocked(result: dict[str, Any]) -> Target:
    name = "A10: time that an asynchronous save stops training ÷ time to clone the rank's state"
    rows = [row for row in _checkpoint_rows(result) if "copy" in row]
    if not rows:
        return Target(name, 1.0, None, at_least=False)
    waits, copies, again = (
        rows[0][kind]["wall_ms"]["median"] for kind in ("save", "copy", "copy again")
    )
    detail = f"{waits:.0f} ms; the clone {copies:.0f} ms, a copy into it {again:.0f} ms"
    return Target(name, 1.0, waits / copies, detail, at_least=False)
