"""Decides whether a failed run starts again, from its newest checkpoint, and with which ranks.

An *attempt* is one run of all ranks, with an agent and a store of its own: nothing of a dead attempt is
reused. :func:`decide` is pure. It is told how the attempts ended and which checkpoint was the newest, and
says whether there is another one. :func:`run_attempts` carries that out.

:func:`next_ranks`, which is pure too, chooses the ranks of the next attempt after hosts or slots were
lost. :class:`Team` asks every host which of its slots can be used, and reads what rank 0 wrote about the
batch (:mod:`zeroshard.run.batch_note`): with which numbers of ranks ``train_batch_size`` stays what it
was.

The launcher cannot look into a program. It reads progress from the file ``latest`` in the directory of
the checkpoints, which every complete save replaces.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from zeroshard.launch.hosts import Host
from zeroshard.launch.launch_plan import check_min_ranks
from zeroshard.launch.options import LaunchRequest
from zeroshard.run.batch_note import BatchNote, read_note, restart_env
from zeroshard.run.exit_report import ExitReport
from zeroshard.run.run_folder import ATTEMPT_VARIABLE

MAX_WITHOUT_PROGRESS = 3
"""So many attempts in a row that save no newer checkpoint end the run."""
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 300.0


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """A checkpoint, and when its file ``latest`` was written: a tag may be saved again."""

    tag: str
    saved_at_ns: int


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    """How one attempt ended. ``before`` and ``after``: the newest checkpoint at its start and its end."""

    report: ExitReport
    before: NewestCheckpoint | None
    after: NewestCheckpoint | None
    seconds: float = 0.0

    @property
    def has_progress(self) -> bool:
        return self.after is not None and self.after != self.before

    @property
    def cause(self) -> str:
        return self.report.lines[0].rstrip(".") if self.report.lines else "no reason is known"

    @property
    def exception(self) -> str:
        """The cause, if it is an exception of the program; empty for a signal or an exit code."""
        return self.cause if self.report.trace else ""


@dataclass(frozen=True, slots=True)
class Decision:
    """``restart`` after ``wait_s`` seconds, or end. ``reason``: why a failure is not followed."""

    restart: bool
    wait_s: float = 0.0
    reason: str = ""


_PLACES = ("latest", "checkpoint*/latest", "checkpoint*/pytorch_model*/latest")
"""Where saves write ``latest``: an engine, Transformers' Trainer, and Accelerate."""


def read_newest(directory: Path) -> NewestCheckpoint | None:
    """The checkpoint in ``directory`` that was saved last; None before the first save.

    Its tag is what ``latest`` names, or the folder in which a Trainer or an Accelerator has put it.
    """
    found = []
    for path in (path for pattern in _PLACES for path in directory.glob(pattern)):
        folders = path.relative_to(directory).parts[:-1]
        with contextlib.suppress(OSError):  # a Trainer has removed it
            tag = folders[0] if folders else path.read_text(errors="replace").strip()
            found.append(NewestCheckpoint(tag, path.stat().st_mtime_ns))
    return max(found, key=lambda newest: newest.saved_at_ns, default=None)


def decide(attempts: Sequence[EndedAttempt], max_restarts: int) -> Decision:
    """Whether the run starts again after ``attempts``, of which there is at least one.

    It ends after a success, a signal of the user, ``max_restarts`` restarts, or
    :data:`MAX_WITHOUT_PROGRESS` attempts in a row without a newer checkpoint, or with the same exception
    and the same newest checkpoint. The wait doubles with each attempt without a newer checkpoint, from
    :data:`FIRST_WAIT_S` to :data:`LONGEST_WAIT_S`.
    """
    last = attempts[-1]
    if last.report.exitcode == 0 or last.report.interrupted:
        return Decision(False)
    recent = attempts[-MAX_WITHOUT_PROGRESS:]
    is_full = len(recent) == MAX_WITHOUT_PROGRESS
    place = f"the newest checkpoint is {last.after.tag!r}" if last.after else "none was saved"
    if is_full and last.exception and len({(a.exception, a.after) for a in recent}) == 1:
        return Decision(
            False,
            reason=f"{len(recent)} attempts in a row ended with the same exception at the same place "
            f"({place}): {last.exception}. This is an error of the program or its data, and another "
            "attempt would end in the same way.",
        )
    idle = 0
    for attempt in reversed(attempts):
        if attempt.has_progress:
            break
        idle += 1
    if idle >= MAX_WITHOUT_PROGRESS:
        return Decision(
            False,
            reason=f"{idle} attempts in a row saved no newer checkpoint ({place}). If the program saves "
            "too rarely to get there, save more often; if it saves elsewhere, correct --checkpoint-dir.",
        )
    if len(attempts) > max_restarts:
        return Decision(False, reason=f"--max-restarts {max_restarts} is used up.")
    return Decision(True, wait_s=min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** max(0, idle - 1)))


def run_attempts(
    run: Callable[[int], ExitReport],
    newest: Callable[[], NewestCheckpoint | None],
    max_restarts: int,
    console: TextIO,
    *,
    prepare: Callable[[], str] = lambda: "",
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run attempts 0, 1, ... until :func:`decide` ends the run; returns the exit code of the last one.

    ``run`` runs one attempt to its end and prints its report. ``prepare`` chooses the ranks of the next
    attempt, after the wait; it returns "", or why there is none.
    """
    attempts: list[EndedAttempt] = []
    while True:
        before, began_s = newest(), clock()
        report = run(len(attempts))
        attempts.append(EndedAttempt(report, before, newest(), clock() - began_s))
        decision = decide(attempts, max_restarts)
        if not decision.restart:
            break
        say(
            console,
            f"attempt {len(attempts) - 1} ended; restart {len(attempts)} of {max_restarts} in "
            f"{decision.wait_s:g} s, {_from(attempts[-1].after)}.",
        )
        try:
            sleep(decision.wait_s)
            reason = prepare()
        except KeyboardInterrupt:
            say(console, "stopped by SIGINT between two attempts.")
            return 130
        if reason:
            decision = Decision(False, reason=reason)
            break
    if decision.reason:
        say(console, f"not restarted: {decision.reason}")
    if len(attempts) > 1:
        for number, attempt in enumerate(attempts):
            end = attempt.cause if attempt.report.exitcode else "finished"
            say(console, f"attempt {number}: {attempt.seconds:.0f} s, {end}.")
    return attempts[-1].report.exitcode


def _from(newest: NewestCheckpoint | None) -> str:
    return f"from checkpoint {newest.tag!r}" if newest else "from the beginning: no checkpoint yet"


def logs_of(folder: Path, number: int) -> Path:
    """Where the outputs of the ranks of attempt ``number`` go."""
    return folder / f"attempt{number}" if number else folder


def say(console: TextIO, text: str) -> None:
    """Print a line of the launcher."""
    print(f"zeroshard: {text}", file=console, flush=True)


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
        lines += (f"{_idle(total - chosen)} idle: {note.why(chosen, total)}",)
    return NextRanks(_first(left, chosen), lines)


def _idle(number: int) -> str:
    return f"{_ranks(number)} {'stays' if number == 1 else 'stay'}"


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


class Team:
    """The hosts of a run that restarts. ``now``: those of the current attempt.

    ``ask``: gives the slots of every host that can be used. ``whole_hosts``: a host takes part with all
    its slots or not at all. ``request`` has ``max_restarts`` and ``checkpoint_dir``.

    Raises:
        LaunchError: ``--min-ranks`` is more than the ranks.
    """

    def __init__(
        self,
        request: LaunchRequest,
        hosts: Sequence[Host],
        ask: Callable[[], Answers],
        *,
        run_id: str,
        console: TextIO,
        whole_hosts: bool = False,
    ) -> None:
        assert request.checkpoint_dir is not None, "check_request() refuses restarts without it"
        self._directory = Path(request.checkpoint_dir)
        self._request, self._ask, self._whole_hosts = request, ask, whole_hosts
        self._run_id, self._console = run_id, console
        self._all = tuple(hosts)
        self.now = self._all
        if request.min_ranks is not None:
            check_min_ranks(request.min_ranks, _count(self._all))

    @property
    def is_complete(self) -> bool:
        return self.now == self._all

    def run(self, attempt: Callable[[int], ExitReport]) -> int:
        """Run ``attempt`` (number -> report) again and again. Returns the exit code of the last one."""
        return run_attempts(
            attempt,
            lambda: read_newest(self._directory),
            self._request.max_restarts,
            self._console,
            prepare=self.prepare,
        )

    def env(self, number: int) -> dict[str, str]:
        """The variables for the ranks of attempt ``number``."""
        full = None if self._request.min_ranks is None else _count(self._all)
        note = self._note() if number else None
        return {ATTEMPT_VARIABLE: str(number), **restart_env(self._directory, full, note)}

    def log_dir(self, number: int) -> Path | None:
        """The directory for the outputs of the ranks: restarted attempts have one of their own."""
        logs = self._request.each_rank_log
        return None if logs is None else logs_of(Path(logs), number)

    def prepare(self) -> str:
        """Choose the ranks of the next attempt. Returns "", or why there is none."""
        if self._request.min_ranks is None:
            return ""
        found = next_ranks(
            self._all,
            self._ask(),
            self._request.min_ranks,
            self._note(),
            whole_hosts=self._whole_hosts,
        )
        for line in found.lines:
            say(self._console, line)
        if found.reason:
            return found.reason
        before, after = _count(self.now), _count(found.hosts)
        if before != after:
            say(
                self._console,
                f"the next attempt has {_ranks(after)}; the last had {before}. train_batch_size stays "
                "the same.",
            )
        self.now = found.hosts
        return ""

    def _note(self) -> BatchNote | None:
        elastic = self._request.min_ranks is not None
        return read_note(self._directory, self._run_id) if elastic else None
