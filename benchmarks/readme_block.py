"""Writes the measured numbers of the newest result into the pages that show them: a summary, and tables.

python benchmarks/readme_block.py           # rewrite
python benchmarks/readme_block.py --check   # only compare
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from table_columns import TextTable, target_table
from targets import (
    FORMAT,
    STAGES,
    all_targets,
    best,
    bound_ms,
    is_zeroshard,
    ms,
    named,
    peers_of_stage,
    rows_of,
    zeroshard_of_stage,
)

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TABLES = Path(__file__).with_name("README.md")
SITE = ROOT / "docs" / "speed.md"
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
SUMMARY = re.compile(r"(<!-- summary:begin -->\n).*?(<!-- summary:end -->)", re.DOTALL)
WHOLE = re.compile(r"\d{4}-\d\d-\d\d-cpu\.json")


def newest(folder: Path = RESULTS) -> Path | None:
    """The newest whole run in the format of this version. Files of partial runs have longer names."""
    found = sorted(path for path in folder.glob("*.json") if WHOLE.fullmatch(path.name))
    return next((path for path in reversed(found) if _read(path).get("format") == FORMAT), None)


def _read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def requested_result(arguments: Sequence[str]) -> Path:
    """The file that the command line names; if it names none, the newest."""
    path = Path(arguments[0]) if arguments else newest()
    if path is None:
        raise SystemExit(f"no result in {RESULTS}: run `make bench` first")
    return path


def block(result: dict[str, Any] | None) -> str:
    """The text between the markers ``BEGIN`` and ``END``."""
    if result is None:
        return (
            "Not measured yet with these protocols: `make bench`, then "
            "`python benchmarks/readme_block.py`."
        )
    return f"{short_block(result)}\n\n{_markdown(target_table(result), columns=4)}"


def short_block(result: dict[str, Any]) -> str:
    """:func:`block` without the targets."""
    return "\n\n".join([_setting(result), _markdown(_by_stage(result)), *_sentences(result)])


def _setting(result: dict[str, Any]) -> str:
    machine, a1 = result["machine"], result["protocols"]["a1"]
    floor = named(rows_of(result, "a1"), "forward + backward")
    bound = bound_ms(result)
    shortest = f"Forward and backward alone take {ms(floor):.0f} ms. " if floor else ""
    if bound:
        shortest += (
            "The lower bound adds the time to update a rank's shard at memory bandwidth: it is "
            f"{bound:.0f} ms. "
        )
    return (
        "The table has CPU milliseconds per step and rank, and wall time in parentheses. Values are "
        "medians of one run in which the systems take turns. "
        f"The model is a {result.get('compute', 'bf16')} GPT of "
        f"{a1['settings']['parameters'] / 1e6:.1f} million parameters, on 2 CPU ranks with one thread "
        f"each. Each rank has only {a1['settings']['task']['shape']['context']} tokens per step, so "
        f"that the collectives and the update are a large part of the step. {shortest}Measured on "
        f"{machine['cores']} cores ({machine['processor']}) with torch {machine['versions']['torch']}; "
        f"load average {machine['load_average'][0]:.1f} at the start. Compare numbers within the table "
        "only. ZeroShard has three transports on CPU ranks: *stock* is gloo's own collectives, *p2p* "
        "consists of sends and receives over gloo, *shm* is shared memory. *shm* is the default for "
        "ranks of one host. FSDP2 without resharding after forward is listed at stage 2, FSDP2 with "
        "it at stage 3."
    )


def _by_stage(result: dict[str, Any]) -> TextTable:
    """A1: a row for each stage, a column for each system and for each transport of ZeroShard."""
    rows = rows_of(result, "a1")
    transports = list(dict.fromkeys(row["transport"] for row in rows if is_zeroshard(row)))
    version = result["machine"]["versions"]["deepspeed"] or ""
    heads = [
        "stage", *(f"ZeroShard, {name}" for name in transports),
        f"DeepSpeed {version}".strip(), "FSDP2", "DDP",
    ]  # fmt: skip
    table = []
    for stage in (0, *STAGES):
        peers = peers_of_stage(rows, stage)
        own = [best(zeroshard_of_stage(rows, stage, [name])) for name in transports]
        others = [best(r for r in peers if r["family"] == name) for name in ("DeepSpeed", "FSDP2")]
        ddp = None if stage else named(rows, "DDP")
        cells = [
            f"{ms(row):.0f} ({ms(row, 'wall'):.0f})" if row else "" for row in (*own, *others, ddp)
        ]
        table.append([str(stage), *cells])
    return TextTable("", heads, table, [])


def _sentences(result: dict[str, Any]) -> list[str]:
    """The ratios at more tokens per step (A2), if they were measured."""
    found = []
    for key, tokens in (("a2-512", 512), ("a2-2048", 2048)):
        rows = rows_of(result, key)
        for stage in STAGES:
            peer, own = (
                best(peers_of_stage(rows, stage)),
                best(zeroshard_of_stage(rows, stage, ["auto"])),
            )
            if peer and own:
                found.append((tokens, stage, ms(peer) / ms(own)))
    if not found:
        return []
    text = "; ".join(
        f"at {tokens} tokens "
        + ", ".join(f"{ratio:.2f}x (stage {s})" for t, s, ratio in found if t == tokens)
        for tokens in dict.fromkeys(t for t, _, _ in found)
    )
    return [
        f"With more tokens per step, CPU time of the best peer ÷ CPU time of ZeroShard is: {text}."
    ]


def summary(result: dict[str, Any] | None) -> str:
    """The comparison with the peers in a few sentences, for the top of the README."""
    if result is None:
        return "Not measured yet."
    rows, lines = rows_of(result, "a1"), []
    for stage in (2, 3):
        own = best(row for row in rows if is_zeroshard(row) and row["stage"] == stage)
        slowest_first = sorted(peers_of_stage(rows, stage), key=ms, reverse=True)
        found = {row["family"]: row for row in slowest_first}  # the best line of each peer
        if own and found:
            others = ", ".join(f"{family} {ms(row):.0f} ms" for family, row in found.items())
            lines.append(f"at stage {stage} ZeroShard {ms(own):.0f} ms, {others}")
    tokens = result["protocols"]["a1"]["settings"]["task"]["shape"]["context"]
    measured = {target.name.split(",")[0]: target for target in all_targets(result)}
    wide, save, load = (
        measured[name].measured
        for name in (
            "A2: CPU time per step of 2048 tokens",
            "A10: wall time to save a checkpoint",
            "A10: wall time to load a checkpoint",
        )
    )
    return (
        f"CPU time per step of {tokens} tokens on 2 CPU ranks: {'; '.join(lines)}. Compared with "
        f"ZeroShard, the fastest other library takes {wide} the CPU time per step of 2048 tokens "
        f"(ZeroShard at its slowest stage), {save} the time to save a "
        f"checkpoint, and {load} the time to load one."
    )


def _markdown(view: TextTable, columns: int | None = None) -> str:
    lines = [view.heads[:columns], ["---", *["--:"] * (len(view.heads[:columns]) - 1)]]
    lines += [row[:columns] for row in view.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def with_summary(page: str, result: dict[str, Any] | None) -> str:
    """The page with the summary of this result.

    Raises:
        SystemExit: it has no markers for one.
    """
    if not SUMMARY.search(page):
        raise SystemExit("a page lacks the markers of the summary")
    return SUMMARY.sub(lambda found: f"{found[1]}{summary(result)}\n{found[2]}", page)


def with_tables(page: str, result: dict[str, Any] | None) -> str:
    """The page with the tables of this result.

    Raises:
        SystemExit: it has no markers for them.
    """
    return _filled(page, block(result))


def for_site(page: str, result: dict[str, Any] | None) -> str:
    """The page with the summary of this result, and its steps by stage."""
    return _filled(with_summary(page, result), short_block(result) if result else block(None))


def _filled(page: str, text: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"a page lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


PAGES = {README: with_summary, TABLES: with_tables, SITE: for_site}


def main() -> int:
    """Returns 1 if a page differs and ``--check`` was given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    path = newest()
    source = path.name if path else "no result"
    result = _read(path) if path else None
    differs = False
    for page, rewrite in PAGES.items():
        old, name = page.read_text(), page.relative_to(ROOT)
        new = rewrite(old, result)
        differs |= old != new
        if old == new:
            print(f"{name} says what {source} says")
        elif given.check:
            print(f"{name} differs from {source}: run python benchmarks/readme_block.py")
        else:
            page.write_text(new)
            print(f"{name} rewritten from {source}")
    return int(differs and given.check)


if __name__ == "__main__":
    sys.exit(main())
