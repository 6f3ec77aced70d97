"""Chooses the ranks of the next attempt, after hosts or slots were lost.

:func:`next_ranks` is pure. The launcher asks every host which of its slots can be used, and reads what
rank 0 wrote about the batch (:mod:`zeroshard.run.batch_note`): with which numbers of ranks
``train_batch_size`` stays what it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroshard.launch.hosts import Host
from zeroshard.run.batch_note import BatchNote

Answers = Mapping[str, tuple[int, ...] | None]
"""Host -> its slots that can be used; None if it does not answer."""


@dataclass(frozen=True, slots=True)
class NextRanks:
    """The hosts of the next attempt. ``lines`` say what is left out. ``reason``: why there is none."""

    hosts: tuple[Host, ...]
    lines: tuple[str, ...] = ()
    reason: str = ""


def next_ranks(
    hosts: Sequence[Host],
    answers: Answers,
    min_ranks: int,
    note: BatchNote | None,
    *,
    whole_hosts: bool = False,
) -> NextRanks:
    """The largest team of usable slots that keeps ``train_batch_size``, in the order of ``hosts``.

    ``hosts``: all of the run, so that a host which answers again takes part again. ``note``: None if no
    engine has been built yet; then all usable slots take part, and the engine checks the batch.
    ``whole_hosts``: a host takes part with all its slots or not at all (SLURM).
    """
    usable = [Host(host.name, _usable(host, answers, whole=whole_hosts)) for host in hosts]
    lines = tuple(_lines(hosts, usable, answers))
    left = [host for host in usable if host.slots]
    total, before = _count(left), _count(hosts)
    lost = f"{_ranks(total)} of {before} can be used"
    if total < min_ranks:
        return NextRanks((), lines, f"{lost}, and --min-ranks is {min_ranks}.")
    sizes = _sizes(left, whole=whole_hosts)
    fitting = sizes if note is None else [n for n in sizes if n in note.fits or n == before]
    chosen = max((size for size in fitting if min_ranks <= size <= total), default=0)
    if not chosen:
        assert note is not None, "without a note all ranks that are left fit"
        return NextRanks((), lines, f"{lost}. {note.refusal(min_ranks, total)}")
    if chosen < total:
        assert note is not None, "without a note all ranks that are left take part"
        lines += (_idle_line(note, chosen, total),)
    return NextRanks(_first(left, chosen), lines)


def _idle_line(note: BatchNote, chosen: int, total: int) -> str:
    stay = "stays" if total - chosen == 1 else "stay"
    return f"{_ranks(total - chosen)} {stay} idle: {note.why(chosen, total)}"


def _usable(host: Host, answers: Answers, *, whole: bool) -> tuple[int, ...]:
    found = answers.get(host.name) or ()
    slots = tuple(slot for slot in host.slots if slot in found)
    return () if whole and slots != host.slots else slots


def _lines(hosts: Sequence[Host], usable: Sequence[Host], answers: Answers) -> list[str]:
    said = []
    for host, rest in zip(hosts, usable, strict=True):
        answer = answers.get(host.name)
        lost = [str(slot) for slot in host.slots if slot not in (answer or ())]
        if answer is None:
            said.append(f"host {host.name} does not answer, and is left out.")
        elif lost:
            slots = f"slot{'s' if len(lost) > 1 else ''} {', '.join(lost)}"
            out = "the host" if not rest.slots else "they" if len(lost) > 1 else "it"
            verb = "are" if out == "they" else "is"
            said.append(f"{slots} of host {host.name} cannot be used, and {out} {verb} left out.")
    return said


def _sizes(hosts: Sequence[Host], *, whole: bool) -> list[int]:
    """The numbers of ranks that the first hosts, or the first slots, can make."""
    if not whole:
        return list(range(1, _count(hosts) + 1))
    return [_count(hosts[:number]) for number in range(1, len(hosts) + 1)]


def _first(hosts: Sequence[Host], count: int) -> tuple[Host, ...]:
    chosen = []
    for host in hosts:
        if slots := host.slots[:count]:
            chosen.append(Host(host.name, slots))
        count -= len(slots)
    return tuple(chosen)


def _count(hosts: Sequence[Host]) -> int:
    return sum(len(host.slots) for host in hosts)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
