"""Writes the progress, metrics.jsonl and curve.png of a run, on rank 0.

A terminal shows a bar; a file or a pipe gets a line at least every :data:`QUIET_S` seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise SystemExit(f"{error}; this program needs: pip install 'zeroshard[examples]'") from error


QUIET_S = (
    10.0  # without a terminal a line comes when this has passed since the last, and work went on
)


class Report:
    """Collects the numbers of one run. On other ranks than 0 every method does nothing."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.quiet = folder, rank != 0
        self.train: list[tuple[int, float]] = []  # (step, bits per byte)
        self.tested: list[tuple[int, float]] = []
        self.console = Console(quiet=self.quiet, highlight=False, markup=False)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=self.quiet or not self.console.is_terminal,
        )
        self.task = self.bar.add_task("first step", total=None)
        self.first: tuple[int, float] | None = None  # a step, and when it ended
        self.spoke_s = time.perf_counter()

    def __enter__(self) -> Report:
        if not self.quiet:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "metrics.jsonl").write_text("")
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.bar.stop()
        if not self.quiet and self.train:
            self.draw()
            self.console.print(f"metrics.jsonl and curve.png are in {self.folder}")

    def tick(self, *, step: int, of: int, loss: Callable[[], float], tokens_per_s: float) -> None:
        """Note that a step has ended. ``loss()``: bits per byte of this rank since the last report."""
        now_s = time.perf_counter()
        if self.first is None:
            self.first = (step, now_s)
        elif self.is_due():
            step_s = (now_s - self.first[1]) / (step - self.first[0])
            minutes, seconds = divmod(round(step_s * (of - step)), 60)
            self.say(
                f"step {step:5d} of {of}   train {loss():.3f} bits per byte   "
                f"{tokens_per_s:,.0f} tokens/s   {minutes} min {seconds:02d} s left"
            )

    def working(self, text: str) -> None:
        """Note that other work than a step is in progress."""
        if self.is_due():
            self.say(text)

    def is_due(self) -> bool:
        """Whether a line is due: there is no bar, and nothing was printed for a while."""
        waited_s = time.perf_counter() - self.spoke_s
        return not (self.quiet or self.console.is_terminal) and waited_s > QUIET_S

    def step(self, *, step: int, of: int, train: float, tokens_per_s: float, **more: float) -> None:
        """Report a step. ``train``: the mean over the steps and ranks since the last report."""
        self.train.append((step, train))
        self.write(step=step, train_bpb=train, tokens_per_s=tokens_per_s, **more)
        self.bar.update(
            self.task,
            total=of,
            completed=step,
            description=f"train {train:.3f} bits/byte, {tokens_per_s:,.0f} tokens/s",
        )

    def held_out(self, *, step: int, held_out: float) -> None:
        self.tested.append((step, held_out))
        self.write(step=step, held_out_bpb=held_out)
        train = self.train[-1][1]
        self.say(f"step {step:5d}   train {train:.3f}   held out {held_out:.3f}   bits per byte")

    def say(self, text: str) -> None:
        """Print a line at once, also into a pipe."""
        self.console.print(text, soft_wrap=True)
        self.console.file.flush()
        self.spoke_s = time.perf_counter()

    def write(self, **values: float) -> None:
        if not self.quiet:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(values) + "\n")

    def draw(self) -> None:
        figure = Figure(figsize=(7, 4), layout="constrained")  # draws into a file, needs no screen
        axes = figure.subplots()
        axes.plot(*zip(*self.train, strict=True), color="#9db4c8", lw=1.2, label="train")
        if self.tested:
            axes.plot(
                *zip(*self.tested, strict=True), "o-", color="#b5402a", ms=4, label="held out"
            )
            axes.annotate(
                f"{self.tested[-1][1]:.2f}",
                self.tested[-1],
                xytext=(0, 8),
                textcoords="offset points",
                ha="right",
                color="#b5402a",
            )
        axes.set(xlabel="step", ylabel="bits per byte", title=f"loss of {self.folder.name}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(self.folder / "curve.png", dpi=150)
