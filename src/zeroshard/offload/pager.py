"""Moves pages of optimizer state through a ring of memory slots, while they are stored on disk.

A page owns an extent of the swap file. It is assigned one slot of the ring when it is made and never
another, so views of its memory stay valid, and nothing is allocated in a step (ADR 0008). A walk opens
one page after another. It reads ahead of the open page and writes back after it; a slot is read into only
after the write of its last page has ended. The memory of a page holds its values only while the page is
open: several pages share a slot. Only one thread at a time may use a pager.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeroshard.memory.host_memory import round_to_page
from zeroshard.offload.swap_file import Extent, SwapFile, Transfer

SLOTS = 5
"""The most pages that have memory at a time."""


def slot_sizes(pages_nbytes: Sequence[int]) -> list[int]:
    """Bytes of the slots for pages of these sizes: each one has room for the largest page that it gets.

    >>> slot_sizes([40, 10, 10, 10, 10, 30, 20])
    [40, 20, 10, 10, 10]
    """
    return [max(pages_nbytes[at::SLOTS]) for at in range(min(SLOTS, len(pages_nbytes)))]


class _Slot:
    """Memory for one page at a time.

    ``holder`` reads into it or is open; ``write`` writes the page before ``holder``.
    """

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory
        self.holder: Page | None = None
        self.read: Transfer | None = None  # of ``holder``
        self.write: Transfer | None = None  # of the page before ``holder``; may be in flight


class Page:
    """``nbytes`` of state on disk. ``bytes`` is the view of its slot.

    ``changed``: write the page when it is closed. ``filled_nbytes``: how many bytes are read and written;
    may be set while the page is open. If it was never set, the first write is of the whole page.
    """

    def __init__(self, nbytes: int, extent: Extent, slot: _Slot) -> None:
        self.nbytes = nbytes
        self.extent = extent
        self.bytes: Tensor = slot.bytes[:nbytes]
        self.changed = False
        self.is_open = False  # ``bytes`` holds the page's values
        self._slot = slot
        self._filled_nbytes = self._stored_nbytes = 0
        self._write: Transfer | None = None  # the last one; if that failed, the page is lost

    @property
    def filled_nbytes(self) -> int:
        return self._filled_nbytes

    @filled_nbytes.setter
    def filled_nbytes(self, nbytes: int) -> None:
        assert self.is_open, "a page grows only while it is open"
        assert 0 <= nbytes <= self.nbytes, (nbytes, self.nbytes)
        self._filled_nbytes = nbytes


@dataclass(slots=True)
class TransferTimes:
    """The transfers of a walk, and the time that its consumer waited for them. ``str`` gives a log line.

    ``reading_s`` and ``writing_s``: seconds in which at least one such transfer was moving.
    ``waited_*_s``: seconds in which the consumer waited for one. ``total_s``: seconds of the whole walk.
    """

    pages: int = 0
    total_s: float = 0.0
    waited_reads_s: float = 0.0
    waited_writes_s: float = 0.0
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def reading_s(self) -> float:
        return _busy_s(t for t in self.transfers if not t.writes)

    @property
    def writing_s(self) -> float:
        return _busy_s(t for t in self.transfers if t.writes)

    @property
    def read_nbytes(self) -> int:
        return sum(t.nbytes for t in self.transfers if t.done and not t.writes)

    @property
    def written_nbytes(self) -> int:
        return sum(t.nbytes for t in self.transfers if t.done and t.writes)

    def __str__(self) -> str:
        read, written = self.read_nbytes, self.written_nbytes
        return (
            f"disk: {self.pages} pages in {self.total_s:.2f} s, "
            f"read {_rate(read, self.reading_s)}, wrote {_rate(written, self.writing_s)}, "
            f"together {(read + written) / 1e9 / max(self.total_s, 1e-9):.2f} GB/s; "
            f"waited {self.waited_reads_s:.2f} s for reads, {self.waited_writes_s:.2f} s for writes"
        )


class Pager:
    """A ring of slots over one swap file. ``slots_nbytes``: the size of each, at most.

    A walk reads ``read_ahead`` pages ahead of the open one. The remaining slots are for writes.
    """

    def __init__(self, file: SwapFile, slots_nbytes: Sequence[int], *, read_ahead: int = 2) -> None:
        assert slots_nbytes
        assert read_ahead >= 0
        self.timeline = TransferTimes()
        self._file = file
        self._read_ahead = read_ahead
        self._slots = [_Slot(file.memory(round_to_page(nbytes))) for nbytes in slots_nbytes]
        self._pages = 0

    @property
    def slots_nbytes(self) -> int:
        """Bytes of memory of the ring."""
        return sum(slot.bytes.nbytes for slot in self._slots)

    def page(self, nbytes: int) -> Page:
        """Make a page in the next slot. Its contents are undefined until it was written.

        Raises:
            DiskError: the disk has no space for it.
        """
        slot = self._slots[self._pages % len(self._slots)]
        assert nbytes <= slot.bytes.nbytes, (nbytes, slot.bytes.nbytes)
        page = Page(nbytes, self._file.reserve(nbytes), slot)
        self._pages += 1
        return page

    def skip(self) -> None:
        """Leave out a page for which a slot was planned: the next page gets the slot planned for it."""
        self._pages += 1

    def walk(
        self,
        pages: Sequence[Page],
        *,
        drain: bool = True,
    ) -> Generator[Page, None, None]:
        """Open one page after another, and yield each while it is open.

        When the consumer asks for the next page, the open one is written if ``page.changed`` (True when
        it is yielded); otherwise the disk keeps its old contents. ``drain=False`` ends the walk without
        waiting for the last writes; the next use of their slots waits. If the consumer stops early, the
        open page and all later ones keep their old contents on disk. This includes ``zip(others, walk)``
        without ``strict=True``, which does not come back after the last page.

        Raises:
            DiskError: a page cannot be read; or one could not be written, raised when its slot is
                needed again or at the end of the walk.
        """
        self.timeline = line = TransferTimes()
        begin_s = time.perf_counter()
        begun: deque[Page] = deque()  # pages[at:ahead], which hold their slots
        ahead, finished = 0, False
        try:
            for at, page in enumerate(pages):
                while ahead <= min(at + self._read_ahead, len(pages) - 1):
                    if pages[ahead]._slot.holder is not None:
                        break  # an earlier page holds this slot
                    begun.append(pages[ahead])
                    self._begin(pages[ahead], line)
                    ahead += 1
                assert ahead > at, "another page of this slot is open"
                self._arrive(page, line)
                line.pages += 1
                page.changed = True
                yield page
                self._leave(page, line, written=page.changed)
                begun.popleft()
            if drain:
                for slot in self._slots:
                    line.waited_writes_s += _settle(slot)
            finished = True
        finally:
            for page in begun:
                self._drop(page)
            if not finished:
                for transfer in line.transfers:
                    transfer.join()
            line.total_s = time.perf_counter() - begin_s

    @contextmanager
    def open(self, page: Page, *, changed: bool = False) -> Iterator[Page]:
        """Open one page outside a walk.

        It is written at the end of the block if ``page.changed``, which starts as ``changed``, and not if
        the block raises.

        Raises:
            DiskError: the page cannot be read or written.
        """
        assert page._slot.holder is None, "another page of this slot is open"
        line = TransferTimes()
        try:
            self._begin(page, line)
            self._arrive(page, line)
            page.changed = changed
            yield page
            self._leave(page, line, written=page.changed)
            _settle(page._slot)
        finally:
            self._drop(page)

    def close(self) -> None:
        """Wait for writes in flight and drop the ring. Its memory is freed with the last page."""
        for slot in self._slots:
            if slot.write is not None:
                slot.write.join()
        self._slots = []

    def _begin(self, page: Page, line: TransferTimes) -> None:
        """Give the page its slot, and start reading it after the write of the slot's last page."""
        slot = page._slot
        slot.holder = page
        if page._stored_nbytes:
            nbytes = round_to_page(page._stored_nbytes)
            slot.read = self._file.read(page.extent, slot.bytes, nbytes=nbytes, after=slot.write)
            line.transfers.append(slot.read)

    def _arrive(self, page: Page, line: TransferTimes) -> None:
        """Wait for the page's bytes and open it."""
        slot = page._slot
        line.waited_writes_s += _settle(slot)
        if page._write is not None:
            page._write.wait()  # has ended: only raises, if the page was lost
        if slot.read is not None:
            begin_s = time.perf_counter()
            slot.read.wait()
            line.waited_reads_s += time.perf_counter() - begin_s
            slot.read = None
        page.is_open = True

    def _leave(self, page: Page, line: TransferTimes, *, written: bool) -> None:
        """Close the page; write it if ``written``."""
        slot = page._slot
        if written:
            filled_nbytes = page._filled_nbytes or page.nbytes
            nbytes = round_to_page(filled_nbytes)
            slot.write = page._write = self._file.write(page.extent, slot.bytes, nbytes=nbytes)
            line.transfers.append(slot.write)
            page._filled_nbytes = page._stored_nbytes = filled_nbytes
        self._drop(page)

    def _drop(self, page: Page) -> None:
        """Free the slot, in whatever state its page is."""
        slot = page._slot
        if slot.holder is not page:
            return
        if slot.read is not None:
            slot.read.join()
        slot.holder = slot.read = None
        page.is_open = False
        page._filled_nbytes = page._stored_nbytes


def _settle(slot: _Slot) -> float:
    """Wait for the slot's last write. Returns the seconds waited.

    A ``DiskError`` of the write is raised once.
    """
    if slot.write is None:
        return 0.0
    begin_s = time.perf_counter()
    write, slot.write = slot.write, None
    write.wait()
    return time.perf_counter() - begin_s


def _busy_s(transfers: Iterable[Transfer]) -> float:
    """Seconds in which at least one of the transfers was moving."""
    busy_s = end_s = 0.0
    for transfer in sorted((t for t in transfers if t.done), key=lambda t: t.began_s):
        busy_s += max(0.0, transfer.ended_s - max(end_s, transfer.began_s))
        end_s = max(end_s, transfer.ended_s)
    return busy_s


def _rate(nbytes: int, seconds: float) -> str:
    return (
        f"{nbytes / 1e9:.2f} GB in {seconds:.2f} s ({nbytes / 1e9 / max(seconds, 1e-9):.2f} GB/s)"
    )


def page_nbytes(numel: int, dtypes: Iterable[torch.dtype]) -> int:
    """Bytes on a page of one flat tensor ``[numel]`` per dtype, each at a multiple of 4096."""
    return sum(-(-numel * dtype.itemsize // 4096) * 4096 for dtype in dtypes)
