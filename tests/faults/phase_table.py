"""The table of ``test_phases_and_faults.py``: what a user must see of each fault in each phase of a run.

A *cell* is a kind of run, a phase, and a fault of one of two ranks. What must be seen follows from the
fault (:data:`FAULTS`), with exceptions for phases (:data:`EXCEPTIONS`). Cells that make no sense, or that
another cell stands for, are left out by :data:`LEFT_OUT`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from phase_program import JOIN_S

KINDS = ("stage 3", "stage 1", "zero.Init", "pipeline", "tensor")
PHASES = {
    "join": "before init_distributed",
    "construct": "in the constructor of the model, before the engine",
    "first": "in the first forward",
    "forward": "in a forward",
    "backward": "in a backward",
    "step": "in the step of the optimizer",
    "evaluate": "in a forward of an evaluation",
    "save": "before save_checkpoint",
    "behind": "while a checkpoint is written behind the training",
    "load": "before load_checkpoint",
    "own": "before a collective of the program itself",
    "export": "before save_16bit_model",
    "data": "before the batch of a step",
    "close": "before close",
    "after": "after close",
}

FROZEN_S, LATE_S, GRACE_S = 5.0, 4.0, 2.0
"""``trust.frozen_s``; the limits for late ranks; ``trust.grace_s``."""
PAUSE_S, LOCK_S = 2.5, 1.5
"""Half and a third of ``frozen_s``."""
ALONE_S = 5.0
"""How long the launcher lets stopped ranks be when no other is left."""


@dataclass(frozen=True)
class Seen:
    """What a user must see. In patterns, *R* is the rank with the fault and *O* the other one.

    ``survivor``: the error of the other rank; "": it has none. ``says``: a pattern in that error, which
    says which rank did what. ``launcher``: a pattern of the first line of the launcher, which names the
    rank, or both where neither can be presumed right; "": nothing is said. ``explain``: the command
    `zeroshard explain` names the rank. ``named_s``: seconds from the fault until any line names the rank.
    ``ended_s``: seconds until the launch ends. ``code``: its exit code.
    """

    survivor: str = ""
    says: str = ""
    launcher: str = ""
    explain: bool = True
    named_s: float = 6.0
    ended_s: float = 12.0
    code: int = 0


LOST = Seen("RankLost", r"^  rank R \(|RankLost: rank R (ended during|will not make this call)")
NOTHING = Seen(explain=False)
FAULTS = {
    "killed": replace(LOST, launcher="rank R got SIGKILL", code=137),
    "quits": replace(LOST, launcher="rank R exited with code 3", code=3),
    "exits": replace(
        LOST, launcher="rank R ended with exit code 0 while others still waited for it", code=1
    ),
    "raises": replace(LOST, launcher="rank R raised ValueError: bad sample 17", code=1),
    "memory": replace(LOST, launcher="rank R raised torch.OutOfMemoryError", code=1),
    "frozen": Seen(
        "RankFrozen",
        r"^  rank R \(.*\): process \d+ is stopped by a signal",
        launcher="rank R was stopped by a signal",
        ended_s=FROZEN_S + 8.0,
        code=137,
    ),
    "hangs": Seen(
        "RankLate",
        r"^  rank R: outside collectives, .*phase_program.py:\d+ _sleep_for_good",
        launcher="rank R was late",
        ended_s=LATE_S + GRACE_S + 8.0,
        code=75,
    ),
    "skips": Seen("RankDivergence", launcher="ranks? (R|0-1) ", code=1),
    "paused": NOTHING,
    "locked": NOTHING,
}
"""Faults, and what must be seen of them in most phases.

killed: SIGKILL. quits: ``os._exit(3)``. exits: ``sys.exit(0)``. raises: a ValueError that nobody catches.
memory: ``torch.OutOfMemoryError``, which nobody catches. frozen: SIGSTOP for good. hangs: the program
sleeps for good. skips: the rank leaves the call out, of "data": it has a batch less. paused: SIGSTOP for
half of ``frozen_s``. locked: the interpreter lock is held for a third of it.
"""
SURVIVED = {fault for fault, seen in FAULTS.items() if seen is NOTHING}

DEATHS = ("killed", "quits", "raises", "memory")
EXCEPTIONS: list[tuple[str, str, str, Callable[[Seen], Seen], str]] = [
    # -- the other rank has no error -----------------------------------------------------------------
    *(
        ("*", phase, fault, lambda seen: replace(seen, survivor="", says=""),
         "the other rank waits for nothing, and ends well")
        for phase in ("close", "after") for fault in (*DEATHS, "frozen")
    ),
    ("*", "close", "exits", lambda _: NOTHING, "the rank has done all its work"),
    ("*", "after", "exits", lambda _: NOTHING, "the rank has done all its work"),
    # -- before a configuration is read ---------------------------------------------------------------
    *(
        ("*", "join", fault, lambda seen: replace(seen, says="^  rank R: its process has ended"),
         "this host is all that is known of the rank")
        for fault in (*DEATHS, "exits")
    ),
    ("*", "join", "frozen", lambda seen: replace(
        seen, says=r"^  rank R: process \d+ is stopped by a signal", ended_s=70.0),
     "frozen_s is still the default, 60 s"),
    ("*", "join", "hangs", lambda seen: replace(
        seen, says="^  rank R: has not reached init_distributed", ended_s=JOIN_S + 10.0, code=1),
     "the limit is that of init_distributed; the rank has no watchdog to end it"),
    ("tensor", "construct", "frozen", lambda seen: replace(seen, ended_s=70.0),
     "tensor_parallel knows no configuration: frozen_s is the default, 60 s"),
    ("*", "construct", "hangs", lambda seen: replace(seen, code=1),
     "trust.grace_s is still the default, 20 s: the launcher stops the rank before"),
    ("zero.Init", "construct", "hangs", lambda seen: replace(seen, code=75),
     "zero.Init has read the configuration"),
    # -- what is known of a rank that skips ------------------------------------------------------------
    ("*", "forward", "skips", lambda seen: replace(seen, says="Rank R skipped 'layers.2'"), "skips"),
    ("tensor", "forward", "skips", lambda seen: replace(
        seen, says="Rank R skipped 'outputs of a layer'.*\n  Fix: let every rank run it|"
        "Neither can continue: rank R did not make that call"),
     "sums of layers or exchanges of the engine are compared, as one or the other rank asks first"),
    ("*", "own", "skips", lambda seen: replace(seen, ended_s=140.0),
     "what a call of torch waits for is only presumed, so the run ends after two minutes"),
    ("*", "backward", "skips", lambda seen: replace(
        seen, survivor="RankLost", says=r"^  rank R \(.*left: UsageError: engine.step\(\) before any ",
        launcher="rank R raised zeroshard.errors.UsageError: engine.step\\(\\) before any backward"),
     "the rank itself knows that this is an error"),
    ("*", "data", "skips", lambda seen: replace(
        seen, survivor="RankLost", says=r"^  rank R \(.*closed its engine[\s\S]*fewer steps",
        launcher="rank R ended with exit code 0 while others still waited for it"),
     "the rank has ended well after a batch less"),
]  # fmt: skip
"""Kind, phase and fault (patterns); the change of what must be seen; why."""

LEFT_OUT: list[tuple[str, str, str, str]] = [
    *((kind, phase, "*", "no engine is open: the kind makes no difference")
      for kind in KINDS[1:] for phase in ("join", "after")),
    *(("zero.Init", phase, "*", "the engine is that of stage 3")
      for phase in PHASES if phase not in ("construct", "first", "load", "close")),
    *(("stage 1", phase, "*", "the session is that of stage 3; other collectives run in forward to step")
      for phase in ("first", "behind", "load", "export", "own", "data", "close")),
    *((kind, phase, "*", "no collective of a mesh runs in it")
      for kind in ("pipeline", "tensor") for phase in ("behind", "own")),
    ("pipeline", "export", "*", "save_16bit_model of a pipeline is an error"),
    ("tensor", "construct", "hangs", "tensor_parallel waits for ten minutes"),
    *((kind, "first", "*", "phase forward stands for it: no unit is recorded in the first one")
      for kind in ("pipeline", "tensor")),
    *((kind, "*", "quits", "for the other rank it is SIGKILL; the launcher's words are those of stage 3")
      for kind in KINDS[1:]),
    *(("*", phase, "memory", "nothing is allocated")
      for phase in PHASES if phase not in ("construct", "forward", "backward")),
    *(("*", phase, "hangs", "no rank waits for another: that a program goes on is its own affair")
      for phase in ("close", "after")),
    *(("*", phase, "skips", "there is no call that the rank could leave out and go on")
      for phase in ("join", "construct", "behind", "after")),
    ("*", "close", "skips", "a program that does not close its engine is a usual one"),
    ("*", "first", "skips", "phase forward stands for it: no earlier step shows which block was skipped"),
    *((kind, phase, "skips", "parameters are whole: a block may be left out, and an evaluation")
      for kind in ("stage 1", "pipeline") for phase in ("forward", "evaluate")),
    *(("pipeline", phase, "skips", "train_batch makes this call") for phase in ("backward", "step")),
    *((kind, "own", "skips", "it takes two minutes; the calls of a program are watched in one way")
      for kind in KINDS[1:]),
]  # fmt: skip
"""Kind, phase and fault (patterns) of cells that do not run, and why."""

KNOWN: dict[tuple[str, str, str], str] = {}
"""Cells whose expectation the product does not meet yet, and why. They fail when they begin to pass."""


@dataclass(frozen=True)
class Cell:
    """``rank``: the one with the fault."""

    kind: str
    phase: str
    fault: str

    @property
    def rank(self) -> int:
        """Rank 0 where it has work of its own: it writes the manifest and the export, and reads the data
        of a pipeline."""
        first = self.phase in ("save", "export") or (self.kind, self.phase) == ("pipeline", "data")
        return 0 if first else 1

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.phase, self.fault

    @property
    def seen(self) -> Seen:
        """What must be seen, with the numbers of the ranks in the patterns."""
        seen = FAULTS[self.fault]
        for kind, phase, fault, change, _ in EXCEPTIONS:
            if _is_one(self.key, (kind, phase, fault)):
                seen = change(seen)
        return replace(
            seen, says=self._with_ranks(seen.says), launcher=self._with_ranks(seen.launcher)
        )

    def _with_ranks(self, pattern: str) -> str:
        return pattern.replace("rank R", f"rank {self.rank}").replace("(R|", f"({self.rank}|").replace(
            "Rank R", f"Rank {self.rank}").replace("rank O", f"rank {1 - self.rank}")  # fmt: skip


def _is_one(key: tuple[str, str, str], patterns: tuple[str, str, str]) -> bool:
    return all(fnmatch(word, pattern) for word, pattern in zip(key, patterns, strict=True))


def why_left_out(cell: Cell) -> str:
    """The reason of the first rule that leaves it out; "" if none does."""
    for kind, phase, fault, why in LEFT_OUT:
        if _is_one(cell.key, (kind, phase, fault)):
            return why
    return ""


EVERY = [Cell(kind, phase, fault) for kind in KINDS for phase in PHASES for fault in FAULTS]
CELLS = [cell for cell in EVERY if not why_left_out(cell)]
