"""What a recorder counts of each collective."""

from __future__ import annotations

import torch

from zeroshard.comm.flight_recorder import (
    word_of,
)


class Entry:
    """One (operation, name) pair: its size, its word, its row in the recording, and its traffic so far.

    A pair nearly always moves the same buffer. Size, word and row are therefore kept from call to call,
    and traffic is added up only when the size changes.
    """

    __slots__ = (
        "_calls",
        "_payload_numel",
        "_sent_nbytes",
        "_sent_numel",
        "began_s",
        "calls",
        "digest",
        "dtype",
        "flight_nbytes",
        "flight_s",
        "name",
        "numel",
        "op",
        "row",
        "rows",
        "sent",
        "waited_s",
        "word",
    )

    def __init__(self, op: str, name: str) -> None:
        self.op = op
        self.name = name
        self.digest = word_of(op, name)
        self.numel = -1
        self.dtype: torch.dtype | None = None
        self.sent = 0
        self.word = 0
        self.row = 0
        self.began_s = 0.0  # when the last call started
        self.rows: dict[tuple[int, torch.dtype], tuple[int, int]] = {}
        self.reset()

    def bank(self) -> None:
        """Add up the traffic at the present size, before the size changes."""
        self._sent_nbytes = self.sent_nbytes
        self._payload_numel, self._sent_numel = self.payload_numel, self.sent_numel
        self._calls = self.calls

    def reset(self) -> None:
        """Set the traffic, and the time of waits, to zero."""
        self.waited_s = 0.0  # that the host was blocked in waits
        self.calls = self._calls = self._payload_numel = self._sent_numel = self._sent_nbytes = 0
        # Of the calls whose wait blocked the host: seconds from start to arrival, and bytes sent.
        self.flight_s, self.flight_nbytes = 0.0, 0

    @property
    def payload_numel(self) -> int:
        """Elements of the full buffers moved so far."""
        return self._payload_numel + (self.calls - self._calls) * self.numel

    @property
    def sent_numel(self) -> int:
        """Elements that this rank has sent so far."""
        return self._sent_numel + (self.calls - self._calls) * self.sent

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent so far."""
        itemsize = self.dtype.itemsize if self.dtype is not None else 0
        return self._sent_nbytes + (self.calls - self._calls) * self.sent * itemsize

    def note_flight(self, now_s: float) -> None:
        """The last call has ended, and the host was blocked until then."""
        if self.dtype is not None:
            self.flight_s += now_s - self.began_s
            self.flight_nbytes += self.sent * self.dtype.itemsize


class Entries(dict[str, Entry]):
    """Entries of one operation, by name. An entry is made when its name is first looked up."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def __missing__(self, name: str) -> Entry:
        entry = self[name] = Entry(self.op, name)
        return entry
