"""Which hosts and slots the current attempt has, and what its ranks are told about the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from zeroshard.launch.hosts import Host
from zeroshard.launch.launch_plan import check_min_ranks
from zeroshard.launch.next_ranks import Answers, next_ranks
from zeroshard.launch.options import LaunchRequest
from zeroshard.launch.restart import read_newest, run_attempts, say
from zeroshard.run.batch_note import BatchNote, read_note, restart_env
from zeroshard.run.exit_report import ExitReport
from zeroshard.run.run_folder import ATTEMPT_VARIABLE


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
        self._request = request
        self._all = tuple(hosts)
        self._ask = ask
        self._run_id = run_id
        self._console = console
        self._whole_hosts = whole_hosts
        self.now = self._all
        if request.min_ranks is not None:
            check_min_ranks(request.min_ranks, self._count(self._all))

    @property
    def is_elastic(self) -> bool:
        """Whether an attempt may have fewer ranks."""
        return self._request.min_ranks is not None

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
        full = self._count(self._all) if self.is_elastic else None
        note = self._note() if number else None
        return {ATTEMPT_VARIABLE: str(number), **restart_env(self._directory, full, note)}

    def log_dir(self, number: int) -> Path | None:
        """The directory for the outputs of the ranks: restarted attempts have one of their own."""
        if self._request.each_rank_log is None:
            return None
        logs = Path(self._request.each_rank_log)
        return logs / f"attempt{number}" if number else logs

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
        before, after = self._count(self.now), self._count(found.hosts)
        if before != after:
            say(
                self._console,
                f"the next attempt has {after} rank{'s' if after > 1 else ''}; the last had {before}. "
                "train_batch_size stays the same.",
            )
        self.now = found.hosts
        return ""

    def _note(self) -> BatchNote | None:
        return read_note(self._directory, self._run_id) if self.is_elastic else None

    @staticmethod
    def _count(hosts: Sequence[Host]) -> int:
        return sum(len(host.slots) for host in hosts)
