"""Time limits of the watchdog: how long ranks may be silent, late or stuck before a report or the end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from zeroshard.config.sections import TrustConfig
from zeroshard.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WatchdogSettings:
    """The ``trust`` section of the config. Times are in seconds.

    Attributes:
        watchdog: start the watchdog thread. Records and tags are kept in any case.
        first_report_s: time inside one collective until the first report; None: ten median steps,
            at least 20 s and at most ``report_limit_s``.
        report_limit_s: a stall is reported no later than this.
        collective_timeout_s: a rank that stays outside collectives this long ends the run.
        sections: limits of named sections (``setup``, ``save``, ``eval``...), instead of
            ``collective_timeout_s``.
        frozen_s: a rank whose process does not run ends the run within this time.
        stuck_s: when all ranks wait in the same collective this long, the run ends.
        grace_s: time that the main thread has to raise a fatal diagnosis, before exit code 75.
        ring: number of collectives that a recording keeps per group.
        dump_dir: directory for the full evidence of a report; None: a temporary directory.
        stacks: collect Python stacks.
        tick_s: time between two looks of the watchdog.
        straggler_ratio, straggler_window: which ranks are reported as slow, over how many steps.
        timeout_key: where the user sets ``collective_timeout_s``, for messages; "": nowhere.
    """

    watchdog: bool = True
    first_report_s: float | None = None
    report_limit_s: float = 45.0
    collective_timeout_s: float = 1800.0
    sections: Mapping[str, float] = field(default_factory=dict)
    frozen_s: float = 60.0
    stuck_s: float = 120.0
    grace_s: float = 20.0
    ring: int = 256
    dump_dir: str | None = None
    stacks: bool = True
    tick_s: float = 1.0
    straggler_ratio: float = 1.2
    straggler_window: int = 50
    timeout_key: str = "trust.collective_timeout_s"

    @classmethod
    def from_config(cls, config: TrustConfig) -> WatchdogSettings:
        """The settings of a resolved config."""
        names = {field.name for field in fields(cls)} & type(config).model_fields.keys()
        values = {name: getattr(config, name) for name in names}
        slow = config.stragglers
        return cls(
            **{
                **values,
                "sections": config.sections.model_dump(),
                "straggler_ratio": slow.ratio,
                "straggler_window": slow.window,
            }
        )

    def with_environment(self, environ: Mapping[str, str] | None = None) -> WatchdogSettings:
        """These settings, with ``ZEROSHARD_WATCHDOG``, ``ZEROSHARD_STALL_S`` and ``ZEROSHARD_DUMP_DIR``.

        Raises:
            ConfigError: ``ZEROSHARD_STALL_S`` is not a positive number.
        """
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

    def late_s(self, section: str) -> float:
        """Seconds that a rank may stay in ``section`` while the others wait."""
        return self.sections.get(section, self.collective_timeout_s)

    def key(self, section: str) -> str:
        """The key of :meth:`late_s` in the configuration."""
        return f"trust.sections.{section}" if section in self.sections else self.timeout_key

    def limit_s(self, section: str) -> float:
        """Seconds until a wait in ``section`` times out: a minute later if a watchdog is to end it."""
        return self.late_s(section) + (60 if self.watchdog else 0)

    def answer_s(self, size: int) -> float:
        """Seconds that ``size`` ranks have to see and to answer a question in the store."""
        return max(5 * self.tick_s, 3 * store_tick_s(self.tick_s, size))

    @property
    def frozen_verdict_s(self) -> float:
        """Seconds inside one call from which on a frozen rank is a fatal diagnosis.

        A little early, so that the run has ended when ``frozen_s`` is reached.
        """
        return 0.9 * self.frozen_s

    def judge_frozen_s(self, size: int) -> tuple[float, float]:
        """When to ask ``size`` ranks so that a frozen one is judged at :attr:`frozen_verdict_s`.

        A rank that does not answer is waited for; one that is seen to be stopped is judged at once.
        """
        return self.frozen_verdict_s - self.answer_s(size), self.frozen_verdict_s

    def report_s(self, median_step_s: float = 0.0) -> float:
        """Seconds inside one collective until the first report."""
        if self.first_report_s is not None:
            return self.first_report_s
        return min(max(20.0, 10 * median_step_s), self.report_limit_s)


def store_tick_s(tick_s: float, size: int) -> float:
    """Seconds between two looks of a rank at the store, with ``size`` ranks.

    All ranks together look at most 1024 times a second, if ``tick_s`` is shorter.
    """
    return max(tick_s, size / 1024)


def _seconds(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(f"{key} is {text!r}; give seconds, for example {key}=10.")
    return value
