"""Copies the outputs of the ranks to the console, and keeps the end of every standard error.

Each rank writes to a pipe. One thread copies the bytes as they arrive. A traceback is held back for a
second. If no rank has failed by then, the traceback was only logged, and it is shown. If the run fails,
it is left to the report, which shows the cause first. A traceback that several ranks print alike
is shown once.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from zeroshard.run.exit_report import starts_trace, without_ranks

_TAIL_NBYTES = 128 << 10
_LINE_NBYTES = 64 << 10
_TICK_S = 0.05
_HOLD_S = 1.0


@dataclass(slots=True)
class _Stream:
    """One pipe: the file that its bytes are written to, and the state of its last lines."""

    sink: BinaryIO
    watched: bool  # it is a standard error: keep its end, hold traces back
    raw: bool = False  # ``sink`` is a file of this rank alone: lines need not be kept whole
    rank: int = 0
    first: dict[str, int] = field(
        default_factory=dict
    )  # of all ranks: who showed which trace first
    tail: bytearray = field(default_factory=bytearray)
    partial: bytes = b""  # an unfinished line, which may be the start of a trace
    partial_since_s: float = 0.0
    mid_line: bool = False
    held: bytearray = field(default_factory=bytearray)
    held_since_s: float | None = None
    shown_by: int | None = None  # the rank whose output has the last trace; None: this one

    def feed(self, data: bytes, now_s: float) -> None:
        if self.raw and not self.watched:
            self._write(data)
            return
        if self.watched:
            self.tail += data
            del self.tail[:-_TAIL_NBYTES]
        *lines, self.partial = (self.partial + data).split(b"\n")
        self.partial_since_s = now_s
        for line in lines:
            self._line(line + b"\n", now_s)
        if len(self.partial) > _LINE_NBYTES:
            self._pass_on()

    def _pass_on(self) -> None:
        """Do not wait for the end of a line this long: each new part would copy all before it."""
        if self.held_since_s is None:
            self._write(self.partial)
        else:
            self.held += self.partial
        self.partial, self.mid_line = b"", True

    def tick(self, now_s: float, failing: bool) -> None:
        """Show what was held long enough: unfinished lines (progress bars); traces unless ``failing``."""
        if self.held_since_s is not None:
            if not failing and now_s - self.held_since_s > _HOLD_S:
                self._show_held()
        elif self.partial and now_s - self.partial_since_s > _TICK_S:
            self._write(self.partial)
            self.partial, self.mid_line = b"", True

    def _show_held(self) -> None:
        """Show what is held, or a line that names the rank which has shown the same."""
        text = without_ranks(self.held.decode(errors="replace"))
        self.shown_by = self.first.setdefault(text, self.rank)
        if self.shown_by != self.rank:
            same = f"rank {self.rank} printed the same traceback as rank {self.shown_by}."
            self.held[:] = f"zeroshard: {same}\n".encode()
        self.release()

    def release(self) -> None:
        """Show everything that is held."""
        self._write(bytes(self.held) + self.partial)
        self.held.clear()
        self.partial, self.held_since_s = b"", None

    def _line(self, line: bytes, now_s: float) -> None:
        fresh = self.watched and not self.mid_line
        opens = fresh and starts_trace(line.decode(errors="replace"))
        self.mid_line = False
        if self.held_since_s is None and not opens:
            self._write(line)
            return
        if self.held_since_s is None:
            self.held_since_s = now_s
        self.held += line

    def _write(self, data: bytes) -> None:
        if data:
            # The run must not end because its console was closed.
            with contextlib.suppress(OSError, ValueError):
                self.sink.write(data)
                self.sink.flush()


class Streams:
    """The pipes of all local ranks.

    Standard errors are copied to ``errors``, standard outputs to ``outputs`` (None: the ranks write to
    the standard output of the launcher). Lines of different ranks do not mix. With ``log_dir``, both
    outputs of a rank are written to ``log_dir/rank<N>.log``.
    """

    def __init__(
        self, errors: BinaryIO, outputs: BinaryIO | None = None, log_dir: Path | None = None
    ) -> None:
        self._sinks = (outputs, errors)
        self._log_dir = log_dir
        self._selector = selectors.DefaultSelector()
        self._outputs: dict[int, _Stream] = {}
        self._errors: dict[int, _Stream] = {}
        self._first: dict[str, int] = {}
        self._write_ends: list[int] = []
        self._files: list[BinaryIO] = []
        self._done = threading.Event()
        self._failing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeroshard-streams", daemon=True)

    def paths(self, rank: int) -> tuple[str, str]:
        """The files to open as standard output ("": the launcher's) and standard error of ``rank``."""
        outputs, errors = self._sinks
        to_file = self._log_dir is not None
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            outputs = errors = (self._log_dir / f"rank{rank}.log").open("wb")
            self._files.append(errors)
        self._errors[rank] = _Stream(errors, watched=True, rank=rank, first=self._first)
        stderr = self._pipe(self._errors[rank])
        if outputs is None:
            return "", stderr
        self._outputs[rank] = _Stream(outputs, watched=False, raw=to_file)
        return self._pipe(self._outputs[rank]), stderr

    def start(self) -> None:
        """Start to copy. The ranks run by now, so this process closes its copies of the write ends."""
        for fd in self._write_ends:
            os.close(fd)
        self._write_ends.clear()
        self._thread.start()

    def say(self, text: str) -> None:
        """Tell the user something while ranks run."""
        with contextlib.suppress(OSError, ValueError):
            self._sinks[1].write(f"zeroshard: {text}\n".encode())
            self._sinks[1].flush()

    def fail(self) -> None:
        """Hold traces for the report from now on, because a rank failed."""
        self._failing.set()

    def finish(self, *, release: bool) -> None:
        """Read what is left after all ranks have ended, and end the thread.

        ``release``: show held traces; else they stay held for the report.
        """
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()
        for stream in self._outputs.values():
            stream.release()
        for stream in self._errors.values():
            if release or stream.held_since_s is None or self._log_dir is not None:
                stream.release()
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fd)
            os.close(key.fd)
        self._selector.close()
        for fd in self._write_ends:
            os.close(fd)
        for file in self._files:
            file.close()

    def tail(self, rank: int) -> str:
        """The last 128 KiB of the rank's standard error."""
        return bytes(self._errors[rank].tail).decode(errors="replace")

    def shown_by(self, rank: int) -> int | None:
        """The rank whose output on the console has ``rank``'s last trace; None: it is not there yet."""
        stream = self._errors[rank]
        if self._log_dir is not None or stream.held:
            return None
        return rank if stream.shown_by is None else stream.shown_by

    def _pipe(self, stream: _Stream) -> str:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self._selector.register(read_end, selectors.EVENT_READ, stream)
        self._write_ends.append(write_end)
        return f"/dev/fd/{write_end}"

    def _run(self) -> None:
        while not self._done.is_set():
            self._pump(_TICK_S)
        # Read what the ranks wrote before they ended; do not wait for processes that still write.
        while self._pump(0.0):
            pass

    def _pump(self, timeout_s: float) -> bool:
        """Read once from every pipe that has bytes; False if none had."""
        got = False
        ready = self._selector.select(timeout_s) if self._selector.get_map() else []
        if not ready and not self._selector.get_map():
            self._done.wait(timeout_s)
        now_s = time.monotonic()
        for key, _ in ready:
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if data:
                key.data.feed(data, now_s)
                got = True
            else:
                self._selector.unregister(key.fd)
                os.close(key.fd)
        for stream in (*self._outputs.values(), *self._errors.values()):
            stream.tick(now_s, self._failing.is_set())
        return got
