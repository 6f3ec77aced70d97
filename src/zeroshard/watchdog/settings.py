"""How long may ranks be silent, late or stuck before somebody says so?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zeroshard.config.sections import TrustConfig
from zeroshard.errors import ConfigError
from zeroshard.watchdog.diagnosis import Limits


@dataclass(frozen=True, kw_only=True)
class WatchdogSettings:
    """Times in seconds; the ``trust`` section of the config.

    Attributes:
        watchdog: start the sentinel thread. Records and tags are kept in any case.
        first_report_s: time inside one collective before the first report; None: ten median steps,
            at least 20 s and at most ``report_limit_s``.
        report_limit_s: a stall is reported no later than this.
        collective_timeout_s: a rank that stays outside collectives this long ends the run.
        sections: own limits of named sections (``setup``, ``save``, ``eval``...).
        frozen_s: a rank whose process does not run ends the run within this time.
        stuck_s: the same when all ranks wait in one collective.
        grace_s: time a rank has to leave user code after a verdict, before exit code 75.
        check_every: steps between hash checks where no norm is gathered.
        ring: collectives remembered per group.
        dump_dir: where the full dump of a report goes; None: a temporary directory.
        stacks: collect Python stacks.
        tick_s: period of the sentinel.
    """

    watchdog: bool = True
    first_report_s: float | None = None
    report_limit_s: float = 45.0
    collective_timeout_s: float = 1800.0
    sections: Mapping[str, float] = field(default_factory=dict)
    frozen_s: float = 60.0
    stuck_s: float = 120.0
    grace_s: float = 20.0
    check_every: int = 16
    ring: int = 256
    dump_dir: str | None = None
    stacks: bool = True
    tick_s: float = 1.0

    @classmethod
    def from_config(cls, config: TrustConfig) -> WatchdogSettings:
        """The settings of a resolved config."""
        return cls(
            watchdog=config.watchdog,
            first_report_s=config.first_report_s,
            report_limit_s=config.report_limit_s,
            collective_timeout_s=config.collective_timeout_s,
            sections=config.sections.model_dump(),
            frozen_s=config.frozen_s,
            grace_s=config.grace_s,
            check_every=config.check_every,
            ring=config.ring,
            dump_dir=config.dump_dir,
            stacks=config.stacks,
        )

    def with_environment(self, environ: Mapping[str, str] | None = None) -> WatchdogSettings:
        """``ZEROSHARD_WATCHDOG``, ``ZEROSHARD_STALL_S`` and ``ZEROSHARD_DUMP_DIR`` win."""
        env = os.environ if environ is None else environ
        settings = self
        if (watchdog := env.get("ZEROSHARD_WATCHDOG")) is not None:
            settings = replace(settings, watchdog=watchdog != "0")
        if stall := env.get("ZEROSHARD_STALL_S"):
            stall_s = _seconds("ZEROSHARD_STALL_S", stall)
            settings = replace(
                settings,
                first_report_s=stall_s,
                report_limit_s=stall_s,
                tick_s=min(settings.tick_s, stall_s / 6),
            )
        if dump_dir := env.get("ZEROSHARD_DUMP_DIR"):
            settings = replace(settings, dump_dir=dump_dir)
        return settings

    def limit_s(self, section: str) -> float:
        """When a wait in ``section`` ends by itself: where a sentinel watches, it should have by then."""
        limit_s = self.sections.get(section, self.collective_timeout_s)
        return limit_s + 60 if self.watchdog else limit_s

    def limits(self, median_step_s: float = 0.0) -> Limits:
        """The times that a verdict depends on."""
        first = self.first_report_s
        if first is None:
            first = min(max(20.0, 10 * median_step_s), self.report_limit_s)
        return Limits(
            first_report_s=first,
            frozen_s=self.frozen_s,
            stuck_s=self.stuck_s,
            timeout_s=self.collective_timeout_s,
            sections=self.sections,
        )


def _seconds(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(f"{key} is {text!r}; give seconds, for example {key}=10.")
    return value
