"""How do the outputs of the ranks reach the console, and what is kept of them?

Each rank writes to a pipe; one thread passes the bytes on as they come and keeps the last part of
every standard error. A traceback is held back: if the rank goes on (it was logged, not fatal) it is
shown after a moment; if the run fails, it belongs to the report, in which the cause comes first.
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

from zeroshard.launch.traces import starts_trace

_TAIL_NBYTES = 128 << 10
_TICK_S = 0.05
_HOLD_S = 1.0


@dataclass(slots=True)
class _Stream:
    """One pipe: where its bytes go, and what is known about them."""

    sink: BinaryIO
    watched: bool  # a standard error: keep the tail, hold traces back
    raw: bool = False  # a file: no need to keep lines whole
    tail: bytearray = field(default_factory=bytearray)
    partial: bytes = b""  # an unfinished line that may yet open a trace
    partial_since_s: float = 0.0
    mid_line: bool = False
    held: bytearray = field(default_factory=bytearray)
    held_since_s: float | None = None

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

    def tick(self, now_s: float, failing: bool) -> None:
        """Show what waited long enough: unfinished lines (progress bars), traces of the living."""
        if self.held_since_s is not None:
            if not failing and now_s - self.held_since_s > _HOLD_S:
                self.release()
        elif self.partial and now_s - self.partial_since_s > _TICK_S:
            self._write(self.partial)
            self.partial, self.mid_line = b"", True

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
            # A console that is gone must not end the run.
            with contextlib.suppress(OSError, ValueError):
                self.sink.write(data)
                self.sink.flush()


class Streams:
    """Pipes of all local ranks. ``paths(rank)`` gives the files to open as a rank's outputs.

    Lines of several ranks never mix: standard error goes to ``errors``, standard output to
    ``outputs`` (None: ranks write to the launcher's own). With ``log_dir`` both go to
    ``log_dir/rank<N>.log``.
    """

    def __init__(
        self, errors: BinaryIO, outputs: BinaryIO | None = None, log_dir: Path | None = None
    ) -> None:
        self._sinks = (outputs, errors)
        self._log_dir = log_dir
        self._selector = selectors.DefaultSelector()
        self._outputs: dict[int, _Stream] = {}
        self._errors: dict[int, _Stream] = {}
        self._write_ends: list[int] = []
        self._files: list[BinaryIO] = []
        self._done = threading.Event()
        self._failing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeroshard-streams", daemon=True)

    def paths(self, rank: int) -> tuple[str, str]:
        """Files for standard output ("" = the launcher's own) and standard error of ``rank``."""
        outputs, errors = self._sinks
        to_file = self._log_dir is not None
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            outputs = errors = (self._log_dir / f"rank{rank}.log").open("wb")
            self._files.append(errors)
        self._errors[rank] = _Stream(errors, watched=True)
        stderr = self._pipe(self._errors[rank])
        if outputs is None:
            return "", stderr
        self._outputs[rank] = _Stream(outputs, watched=False, raw=to_file)
        return self._pipe(self._outputs[rank]), stderr

    def start(self) -> None:
        """The ranks run: close our copies of the write ends and start to pump."""
        for fd in self._write_ends:
            os.close(fd)
        self._write_ends.clear()
        self._thread.start()

    def fail(self) -> None:
        """A rank failed: from now on traces stay held for the report."""
        self._failing.set()

    def finish(self, *, release: bool) -> None:
        """All ranks ended: read what is left; show held traces or keep them. Ends the thread."""
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
        """The end of the rank's standard error."""
        return bytes(self._errors[rank].tail).decode(errors="replace")

    def shown(self, rank: int) -> bool:
        """Whether the rank's last trace is on the console already."""
        return self._log_dir is None and not self._errors[rank].held

    def _pipe(self, stream: _Stream) -> str:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        self._selector.register(read_end, selectors.EVENT_READ, stream)
        self._write_ends.append(write_end)
        return f"/dev/fd/{write_end}"

    def _run(self) -> None:
        while not self._done.is_set():
            self._pump(_TICK_S)
        while self._pump(
            0.0
        ):  # what the ranks wrote before they ended; later writers are not waited for
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
