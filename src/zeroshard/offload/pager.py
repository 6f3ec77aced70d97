"""How do pages of state pass through a few slots of memory while they rest on disk?

A page owns an extent of the swap file and, for ever, one slot of a small ring: views of it stay valid,
and nothing is allocated in a step. A walk yields page after page: reads run in front, writes follow
behind, and a slot is read into only after its last page was written. A page's bytes mean something
only while the page is open. One thread at a time uses a pager.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeroshard.memory.pages import aligned_bytes, round_to_page
from zeroshard.offload.swap_file import Extent, SwapFile, Transfer


class _Slot:
    """Memory for one page at a time: ``holder`` reads into it or has it open; ``write`` leaves it."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = aligned_bytes(nbytes)
        self.holder: Page | None = None
        self.read: Transfer | None = None  # of the holder
        self.write: Transfer | None = None  # of the holder before it, perhaps still on its way


class Page:
    """``nbytes`` of state on disk, and the view of the slot that they pass through.

    ``changed``: will it be written when it is closed? ``filled_nbytes``: how much of it is read and
    written, settable while open; a page that was never written is written whole if nobody sets it.
    """

    def __init__(self, nbytes: int, extent: Extent, slot: _Slot) -> None:
        self.nbytes = nbytes
        self.extent = extent
        self.bytes: Tensor = slot.bytes[:nbytes]
        self.changed = False
        self.is_open = False  # may ``bytes`` be used?
        self._slot = slot
        self._filled_nbytes = self._stored_nbytes = 0
        self._write: Transfer | None = None  # the last one; if it failed, the page is lost

    @property
    def filled_nbytes(self) -> int:
        return self._filled_nbytes

    @filled_nbytes.setter
    def filled_nbytes(self, nbytes: int) -> None:
        assert self.is_open, "a page grows only while it is open"
        assert 0 <= nbytes <= self.nbytes, (nbytes, self.nbytes)
        self._filled_nbytes = nbytes


@dataclass(slots=True)
class Timeline:
    """What the transfers of a walk did while the consumer computed. Seconds; ``str`` is a log line.

    ``reading_s`` and ``writing_s``: at least one such transfer was moving. ``waited_*_s``: the
    consumer stood still for one.
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
    """A ring of ``slots`` equal slots of ``slot_nbytes`` over one swap file.

    A walk reads ``read_ahead`` pages in front of the one in use; the other slots are left to writes.
    """

    def __init__(
        self, file: SwapFile, slot_nbytes: int, *, slots: int = 5, read_ahead: int = 2
    ) -> None:
        assert slots > 0
        assert read_ahead >= 0
        self.slot_nbytes = slot_nbytes
        self.timeline = Timeline()
        self._file = file
        self._read_ahead = read_ahead
        self._slots = [_Slot(round_to_page(slot_nbytes)) for _ in range(slots)]
        self._pages = 0

    @property
    def slots_nbytes(self) -> int:
        """Memory of the ring."""
        return sum(slot.bytes.nbytes for slot in self._slots)

    def page(self, nbytes: int) -> Page:
        """A new page in the next slot; what it holds is undefined until it was written.

        Raises ``DiskError`` if the disk has no room.
        """
        assert nbytes <= self.slot_nbytes, (nbytes, self.slot_nbytes)
        slot = self._slots[self._pages % len(self._slots)]
        page = Page(nbytes, self._file.reserve(nbytes), slot)
        self._pages += 1
        return page

    def walk(
        self,
        pages: Sequence[Page],
        *,
        drain: bool = True,
    ) -> Generator[Page, None, None]:
        """Open one page after the other; see the module.

        When the consumer comes back, the page is written if ``page.changed`` (True when it is yielded);
        else the disk keeps what it had. ``drain=False`` leaves the last writes on
        their way, and who next needs their slots waits for them. A consumer that leaves early leaves
        the open page and all later ones as they are on disk (so does ``zip(others, walk)`` without
        ``strict=True`` with the last page: it does not come back for more).

        Raises ``DiskError`` at the page that cannot be read, and for one that cannot be written when its
        slot is needed again, or at the end.
        """
        self.timeline = line = Timeline()
        begin_s = time.perf_counter()
        begun: deque[Page] = deque()  # pages[at:ahead], still holding their slots
        ahead, finished = 0, False
        try:
            for at, page in enumerate(pages):
                while ahead <= min(at + self._read_ahead, len(pages) - 1):
                    if pages[ahead]._slot.holder is not None:
                        break  # an earlier page of this ring position comes first
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
        """One page by itself, outside a walk. It is written on leaving if ``page.changed``, which starts
        as ``changed``; not if the block raises. Raises ``DiskError`` as :meth:`walk`.
        """
        assert page._slot.holder is None, "another page of this slot is open"
        line = Timeline()
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
        """Wait for writes on their way and give up the ring; its memory goes with the last page."""
        for slot in self._slots:
            if slot.write is not None:
                slot.write.join()
        self._slots = []

    def _begin(self, page: Page, line: Timeline) -> None:
        """The slot is the page's; its bytes come as soon as those of the last page have left."""
        slot = page._slot
        slot.holder = page
        if page._stored_nbytes:
            nbytes = round_to_page(page._stored_nbytes)
            slot.read = self._file.read(page.extent, slot.bytes, nbytes=nbytes, after=slot.write)
            line.transfers.append(slot.read)

    def _arrive(self, page: Page, line: Timeline) -> None:
        """The page opens when its bytes are there."""
        slot = page._slot
        line.waited_writes_s += _settle(slot)
        if page._write is not None:
            page._write.wait()  # it ended long ago: this raises if the page was lost
        if slot.read is not None:
            begin_s = time.perf_counter()
            slot.read.wait()
            line.waited_reads_s += time.perf_counter() - begin_s
            slot.read = None
        page.is_open = True

    def _leave(self, page: Page, line: Timeline, *, written: bool) -> None:
        """The page closes; its bytes go to disk or are forgotten."""
        slot = page._slot
        if written:
            filled_nbytes = page._filled_nbytes or page.nbytes
            nbytes = round_to_page(filled_nbytes)
            slot.write = page._write = self._file.write(page.extent, slot.bytes, nbytes=nbytes)
            line.transfers.append(slot.write)
            page._filled_nbytes = page._stored_nbytes = filled_nbytes
        self._drop(page)

    def _drop(self, page: Page) -> None:
        """The slot is free for another page, whatever became of this one."""
        slot = page._slot
        if slot.holder is not page:
            return
        if slot.read is not None:
            slot.read.join()
        slot.holder = slot.read = None
        page.is_open = False
        page._filled_nbytes = page._stored_nbytes


def _settle(slot: _Slot) -> float:
    """Wait until the slot's last write has ended; seconds waited. Raises its ``DiskError``, once."""
    if slot.write is None:
        return 0.0
    begin_s = time.perf_counter()
    write, slot.write = slot.write, None
    write.wait()
    return time.perf_counter() - begin_s


def _busy_s(transfers: Iterable[Transfer]) -> float:
    """Seconds in which at least one of them was moving."""
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
    """Bytes of flat tensors on a page: each begins where SIMD and the disk like it."""
    return sum(-(-numel * dtype.itemsize // 4096) * 4096 for dtype in dtypes)
