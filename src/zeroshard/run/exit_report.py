"""Explains why ranks ended, and reports the first cause.

Makes a short report from exit codes, the ends of the standard errors, what ranks have told their launcher
and the kernel's counters. The *root* is the earliest failure that is not a consequence of another one.
Consequences (a lost connection, exit code 76, a stop by the launcher) are grouped at the end of the
report, because they print more than the cause and often before it.

A *trace* is the Python traceback of the uncaught exception (with its chain of causes), or the report of
the fault handler or of the C++ runtime after a fatal signal. A *blame* is what a rank tells its launcher
of the diagnosis that ends it. The rank that raises a diagnosis is often not the one that it is about: the
others waited for a rank that was late, and gave up. So the cause is named first, whoever ended first.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeroshard.core.files import write_for_this_user
from zeroshard.errors import CLOSED, ENDED, EXIT_DIAGNOSIS, DistributedError
from zeroshard.memory.host_limits import OomCounters, gib

EXIT_SURVIVOR = 76  # exit code of a rank that ends itself because it lost its peers

_LOST_PEER = re.compile(
    r"Connection (?:closed by peer|reset by peer|refused)|Broken pipe|Socket closed|RankLost"
    r"|ncclRemoteError|ncclSystemError|NCCL communicator was aborted|DistNetworkError"
    r"|Socket Timeout|failed to recv|connectFullMesh|Timed out waiting \d+ms"
)
_PYTHONS_OWN = re.compile(r"(?:Connection\w*|BrokenPipe|OS|EOF|Timeout|Interrupted)Error\b")
"""Errors of Python's own sockets and pipes, which a program has of its own too."""
_FRAME = re.compile(r'^ *File "([^"]+)", line', re.MULTILINE)
_OURS = re.compile(r"[/\\](?:zeroshard|torch[/\\]distributed)[/\\]")
_GLOO_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_WANTS_GPU = re.compile(r"support bf16/gpu|(?:fp16|bf16) mixed precision requires")
_USE_CPU = "there is no GPU here, and the program needs one: start it with `--use_cpu true`"
_FROZEN_PEER = re.compile(r"(?:[\w.]+\.)?RankFrozen\b")  # a verdict on another rank, not a cause
_VERDICT = re.compile(r"(?:[\w.]+\.)?Rank(?:Late|Divergence)\b")
_LEFT = re.compile(rf"^ *rank (\d+)\b[^:\n]*: (?:{ENDED}|{CLOSED})", re.MULTILINE)
_FROZEN = "was stopped by a signal (SIGSTOP); when other ranks had ended, the launcher killed it"
_STOPPED = "was stopped by the launcher"


@dataclass(frozen=True, slots=True)
class RankExit:
    """One ended process. ``exitcode`` is negative for a signal, as in :mod:`subprocess`."""

    rank: int
    exitcode: int
    at_s: float
    stopped: bool = False  # ended after the launcher had asked it to stop
    frozen: bool = False  # killed by the launcher, because a signal had stopped (SIGSTOP) it before
    stderr: str = ""
    error_file: str = ""
    blame: Blame | None = None  # what it told the launcher of the last diagnosis that it raised
    peak_rss_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class KernelCounters:
    """What the kernel counted during the run, and the memory limit that it enforced."""

    oom: OomCounters
    cgroup_limit_nbytes: int | None = None
    shm_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class ExitCause:
    """An exit in words (``rank 3 <what>``), and whether it is a consequence of another one."""

    death: RankExit
    what: str
    consequence: bool
    trace: Trace | None

    @property
    def text(self) -> str:
        """Its traceback; empty if there is none."""
        return self.trace.text if self.trace else ""


@dataclass(frozen=True, slots=True)
class ExitReport:
    """What the launcher prints, and its exit code."""

    lines: tuple[str, ...]
    root: int | None
    trace: str
    exitcode: int
    trace_rank: int | None = None  # whose trace it is; None: that of the root
    consequence: bool = False  # the root, too, is a consequence of a failure on another node
    interrupted: bool = False  # the user asked the launcher to stop


def explain_exit(death: RankExit, kernel: KernelCounters, said: Blame | None = None) -> ExitCause:
    """Explain one exit code by what the rank wrote and what the kernel counted.

    ``said``: what the diagnosis of all ranks says, if a rank ended with one.
    """
    trace = _trace(death)
    if death.frozen:
        return ExitCause(death, _FROZEN, False, None)
    if said is not None and (cause := _as_said(death, trace, said)) is not None:
        return cause
    if death.stopped:
        return ExitCause(death, _STOPPED, True, None)
    if death.exitcode < 0:
        return ExitCause(death, _signal(death, kernel), False, trace)
    what, is_consequence = _by_exit_code(death, trace)
    return ExitCause(death, what, is_consequence, trace)


def _as_said(death: RankExit, trace: Trace | None, said: Blame) -> ExitCause | None:
    """An exit by the diagnosis of all ranks; None if it has nothing to say about this one."""
    if not death.stopped and not _is_told(death, trace):
        return None
    if death.rank in said.ranks:
        end = _STOPPED if death.stopped else f"exit code {death.exitcode}"
        return ExitCause(death, f"{said.what} ({end})", False, trace)
    if death.stopped:
        return None
    headline = trace.headline if trace else "the diagnosis is in its output"
    return ExitCause(death, f"gave up: {headline} (exit code {death.exitcode})", True, trace)


def _by_exit_code(death: RankExit, trace: Trace | None) -> tuple[str, bool]:
    """What a positive exit code and the last traceback say; and whether the exit is a consequence."""
    code = death.exitcode
    if trace is not None and _FROZEN_PEER.match(trace.headline):
        return f"gave up on a frozen rank: {trace.headline} (exit code {code})", True
    headline = f": {trace.headline}" if trace else ""
    if code == EXIT_SURVIVOR:
        return f"lost its peers (exit code 76){headline}", True
    if code == EXIT_DIAGNOSIS:
        followed = death.blame is not None and death.blame.kind in ("RankFrozen", "RankLost")
        followed = followed if trace is None else bool(_lost_peer(trace))
        return f"was stopped by ZeroShard's watchdog (exit code 75){headline}", followed
    if trace is None:
        return f"exited with code {code} and left no traceback", False
    if code != 1:  # an uncaught exception always ends Python with 1
        return f"exited with code {code}; its last traceback was {trace.headline}", False
    if lost := _lost_peer(trace):
        return f"lost its peers: {lost} (exit code 1)", True
    hint = f"; {_USE_CPU}" if _WANTS_GPU.search(trace.headline) else ""
    return f"raised {trace.headline} (exit code 1){hint}", False


def _trace(death: RankExit) -> Trace | None:
    return trace_of_error_file(death.error_file) or last_trace(death.stderr)


def _is_told(death: RankExit, trace: Trace | None) -> bool:
    """Whether a rank ended with a diagnosis that is not about the end of another one."""
    if trace is not None:
        return _VERDICT.match(trace.headline) is not None
    return death.exitcode == EXIT_DIAGNOSIS


def _first_blame(deaths: Sequence[RankExit]) -> tuple[Blame | None, ExitCause | None]:
    """What the first of these ranks that ended with a diagnosis says in it."""
    for death in deaths:
        if death.exitcode > 0 and not death.stopped and death.blame and death.blame.ranks:
            trace = _trace(death)
            if _is_told(death, trace):
                return death.blame, ExitCause(death, "", True, trace)
    return None, None


def _lost_peer(trace: Trace) -> str:
    """What tells that another rank went away first; empty if nothing does.

    Only errors count, not the lines of source that a traceback shows; those of Python's own sockets only
    if they come from the package or from ``torch.distributed``: a program has connections of its own.
    """
    for block in trace.text.split("Traceback (most recent call last):"):
        files = _FRAME.findall(block)
        errors = "\n".join(line for line in block.splitlines() if line and not line[0].isspace())
        lost = _LOST_PEER.search(errors)
        if lost and (not _PYTHONS_OWN.match(errors) or not files or _OURS.search(files[-1])):
            return lost[0]
    return ""


def build_report(
    deaths: Sequence[RankExit],
    kernel: KernelCounters,
    *,
    interrupted: signal.Signals | None = None,
    saved: bool = False,
) -> ExitReport:
    """The report of a finished run: the root, other causes, then the consequences.

    A run without a failed rank has no lines. ``interrupted`` is the signal with which the user ended the
    run. ``saved``: the ranks had time to save then, and ended without an error.
    """
    if interrupted is not None:
        return _interrupted(deaths, interrupted, saved=saved)
    ordered = sorted(deaths, key=lambda death: (death.at_s, death.rank))
    said, teller = _first_blame(ordered)
    failed = [explain_exit(death, kernel, said) for death in ordered if death.exitcode != 0]
    if not failed:
        return ExitReport((), None, "", 0)
    causes = [cause for cause in failed if not cause.consequence] or failed[:1]
    root = causes[0]
    early = _left_early(ordered, root) if root.consequence else []  # nobody failed before them
    # A rank that the launcher stopped has no exit code of its own.
    code = (failed[0] if root.death.stopped else root).death.exitcode
    shown = root if root.trace is not None or teller is None else teller
    return ExitReport(
        lines=_lines(failed, causes, early),
        root=early[0] if early else root.death.rank,
        trace=shown.text,
        trace_rank=shown.death.rank,
        exitcode=code if code > 0 else 128 - code,
        consequence=root.consequence and not early,
    )


def _interrupted(deaths: Sequence[RankExit], by: signal.Signals, *, saved: bool) -> ExitReport:
    """The report of a run that its user ended."""
    ranks = _ranks([death.rank for death in deaths])
    if saved:
        text, code = f"{ranks} ended with exit code 0 after {by.name}.", 0
    else:
        text, code = f"stopped by {by.name}; {ranks} ended.", 128 + by
    return ExitReport((text,), None, "", code, interrupted=True)


def _lines(
    failed: Sequence[ExitCause], causes: Sequence[ExitCause], early: Sequence[int]
) -> tuple[str, ...]:
    """What came first in a run, then what followed. ``early``: the ranks that left before any failure."""
    if early:
        first = [f"{_ranks(early)} ended with exit code 0 while others still waited for it."]
        followed = failed
    else:
        first = [f"{who} {what}." for who, what in _grouped(causes)]
        followed = [cause for cause in failed if cause not in causes]
    return (*first, *(f"then {who} {what}." for who, what in _grouped(followed)))


def _left_early(ordered: Sequence[RankExit], root: ExitCause) -> list[int]:
    """The ranks that ended without an error before the root, or that its traceback says have left.

    The time alone does not tell: an interpreter that ends takes longer than the news that its rank left.
    """
    named = {int(rank) for rank in _LEFT.findall(root.text)}
    return [
        death.rank
        for death in ordered
        if death.exitcode == 0 and (death.at_s < root.death.at_s or death.rank in named)
    ]


def _signal(death: RankExit, kernel: KernelCounters) -> str:
    """The meaning of a fatal signal, as ``was killed by ...``."""
    number = -death.exitcode
    if number == signal.SIGKILL:
        return _killed(death, kernel)
    if number == signal.SIGABRT:
        sizes = _GLOO_SIZES.search(death.stderr)
        if sizes:
            return (
                f"aborted in gloo: it received {sizes[1]} bytes where {sizes[2]} were expected. "
                "The ranks called different collectives"
            )
        return "aborted (SIGABRT): a C++ check failed; its text is below"
    if number == signal.SIGBUS:
        size = "" if kernel.shm_nbytes is None else f" ({kernel.shm_nbytes >> 20} MiB)"
        return (
            f"got SIGBUS: most likely /dev/shm{size} is full; "
            "docker run --shm-size=8g makes it larger"
        )
    if number == signal.SIGSEGV:
        return "died of a segmentation fault (SIGSEGV)"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"was ended by {name}, sent from outside"


def _killed(death: RankExit, kernel: KernelCounters) -> str:
    rss = (
        ""
        if death.peak_rss_nbytes is None
        else f", RSS {gib(death.peak_rss_nbytes)} when last seen"
    )
    if kernel.oom.cgroup:
        limit = kernel.cgroup_limit_nbytes
        bound = "" if limit is None else f", limit {gib(limit)}"
        return (
            f"was killed by the kernel OOM killer (in this cgroup: oom_kill +{kernel.oom.cgroup}"
            f"{bound}{rss})"
        )
    if kernel.oom.host:
        return (
            "was killed by the kernel OOM killer (host out of memory, no cgroup limit hit: "
            f"oom_kill +{kernel.oom.host}{rss})"
        )
    if kernel.oom.cgroup is None and kernel.oom.host is None:
        return f"got SIGKILL; this system does not count OOM kills, so the sender is unknown{rss}"
    return f"got SIGKILL from outside (scheduler or user); no OOM kill was counted{rss}"


def _grouped(verdicts: Sequence[ExitCause]) -> list[tuple[str, str]]:
    """Ranks whose exits have the same words, together, in the order of the first exit."""
    groups: dict[str, list[int]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.what, []).append(verdict.death.rank)
    return [(_ranks(ranks), what) for what, ranks in groups.items()]


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


# torch prefixes tracebacks with the rank once a process group exists.
_PREFIX = re.compile(r"^\[rank\d+\]:[ ]?")
_TRACEBACK = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):")
_FATAL = re.compile(r"^(?:Fatal Python error: |terminate called (?:after|without|recursively))")
# The main script cannot be parsed: Python prints the place and the error, without a head.
_UNPARSED = re.compile(r'^  File ".+", line \d+$')
_LINK = re.compile(
    r"^(?:During handling of the above exception|The above exception was the direct cause)"
)
# Lines that are printed after the exception that ended the process, and are not part of its trace.
_EPILOGUE = re.compile(
    r"^(?:Exception ignored |Error in atexit|Error in sys\.excepthook|\[[WIE]\d{3,}|[WIE]\d{4} "
    r"|Extension modules: )"
)
_MAX_LINES = 60
_MAX_HEADLINE = 200


@dataclass(frozen=True, slots=True)
class Trace:
    """The last trace of a process: its text, and the line that names the error."""

    text: str
    headline: str  # "ValueError: boom"; one line


def starts_trace(line: str) -> bool:
    """Whether this line of a standard error is the first of a trace."""
    line = _PREFIX.sub("", line)
    return any(kind.match(line) for kind in (_TRACEBACK, _FATAL, _LINK, _UNPARSED))


def without_ranks(text: str) -> str:
    """``text`` without torch's marks of ranks at the beginnings of lines."""
    return "\n".join(_PREFIX.sub("", line) for line in text.splitlines())


def last_trace(stderr: str) -> Trace | None:
    """The last trace in a process's standard error; None if there is none."""
    lines = without_ranks(stderr).split("\n")
    start = _start_of_last(lines)
    if start is None:
        return None
    block = lines[start:]
    end = next((i for i, line in enumerate(block) if i and _EPILOGUE.match(line)), len(block))
    block = block[:end]
    while block and not block[-1].strip():
        block.pop()
    headline = _headline(block)
    if len(headline) > _MAX_HEADLINE:
        headline = headline[: _MAX_HEADLINE - 4] + " ..."
    return Trace(_shorten(block), headline)


def trace_of_error_file(content: str) -> Trace | None:
    """The trace in an error file of torch elastic (for programs that use ``@record``), or None."""
    try:
        message = json.loads(content)["message"]
        text = message["extraInfo"]["py_callstack"] if isinstance(message, dict) else message
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return last_trace(text) if isinstance(text, str) else None


def _start_of_last(lines: list[str]) -> int | None:
    """Index of the first line of the last trace; a chain of causes is one trace."""
    start: int | None = None
    linked = False
    for number, line in enumerate(lines):
        if start is not None and _EPILOGUE.match(line) and "Exception ignored" in line:
            break
        if _LINK.match(line):
            linked = True
        elif _FATAL.match(line):
            aborted = start is not None and _FATAL.match(lines[start]) is not None
            # The report of the C++ runtime and then that of the fault handler are one trace.
            start = start if aborted else number
        elif _TRACEBACK.match(line):
            if not linked:
                start = number
            linked = False
        elif _UNPARSED.match(line) and not (
            number and lines[number - 1].startswith((" ", "Trace"))
        ):
            start = number  # in a traceback, it follows a frame
    return start


def _headline(block: list[str]) -> str:
    """The line that names the last exception of a chain, or the fatal error.

    A line that ends in a colon, as of a list of problems, is followed by the next one.
    """
    last = max((i for i, line in enumerate(block) if _TRACEBACK.match(line)), default=None)
    if last is None and block and _UNPARSED.match(block[0]):
        last = 0
    if last is None:
        return block[0] if block else ""
    marked = block[last].startswith("  +")
    for at, line in enumerate(block[last + 1 :], last + 1):
        text = line.removeprefix("  | ") if marked else line
        if text and not text.startswith(" "):
            more = block[at + 1].strip() if text.endswith(":") and at + 1 < len(block) else ""
            return f"{text.strip()} {more}".strip()
    return block[-1].strip()


def _shorten(block: list[str]) -> str:
    """At most ``_MAX_LINES`` lines: the outermost frames and the end are kept."""
    if len(block) > _MAX_LINES:
        head, tail = _MAX_LINES // 4, _MAX_LINES - _MAX_LINES // 4 - 1
        cut = len(block) - head - tail
        block = [*block[:head], f"  ... {cut} lines left out ...", *block[-tail:]]
    return "\n".join(block)


BLAME_VARIABLE = "ZEROSHARD_BLAME_FILE"
"""Names the file of a rank. The launcher sets it."""


@dataclass(frozen=True, slots=True)
class Blame:
    """``kind``: the class of the error. ``ranks``: the cause; empty: no rank is presumed to be it.

    ``what``: what they did (``rank 1 <what>``).
    """

    kind: str
    ranks: tuple[int, ...] = ()
    what: str = ""


def tell_launcher(error: DistributedError, environ: Mapping[str, str]) -> None:
    """Leave what ``error`` says for the launcher of this rank, if it has one that asks."""
    path = environ.get(BLAME_VARIABLE)
    if path:
        with contextlib.suppress(OSError):  # a full disk must not hide the error
            said = [type(error).__name__, error.ranks, error.did]
            write_for_this_user(Path(path), json.dumps(said))


def read_blame(path: Path) -> Blame | None:
    """What a rank has left in its file; None: nothing that can be read."""
    try:
        kind, ranks, what = json.loads(path.read_text())
        return Blame(str(kind), tuple(map(int, ranks)), str(what))
    except (OSError, ValueError, TypeError):
        return None
