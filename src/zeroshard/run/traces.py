"""Finds the last trace in the standard error of a rank that ended.

Pure functions on text. A *trace* is the Python traceback of the uncaught exception (with its chain
of causes), or the report of the fault handler or of the C++ runtime after a fatal signal.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

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
