"""A file for state on disk: transfers past the page cache, in parallel with computation.

There is one file per rank and directory. It has no name: it is made with ``O_TMPFILE``, or unlinked as
soon as it is made. The kernel frees it when the process ends, in whatever way that happens (ADR 0008).
Blocks are reserved in advance, so a disk that fills up later cannot stop a run. Transfers use
``O_DIRECT`` where the file system allows it: they use no page cache and make no copy. A few threads move
blocks of 8 MiB; the system calls release the interpreter lock.

[Note: alignment] ``O_DIRECT`` needs addresses, offsets and lengths that are multiples of a page. Extents
start and end at pages. Other memory is copied through a small aligned buffer of the thread. The file
makes the buffers of all its threads when the first transfer needs one.

[Note: no buffer protocol of torch] Memory is addressed by pointer. ``Tensor.numpy()`` would mark the
storage as not resizable, and units free their shards by resizing (``zeroshard.memory.storage``).
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from zeroshard.core.files import PAGE_NBYTES, free_nbytes, reason, turn_direct
from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.errors import DiskError
from zeroshard.memory.host_memory import (
    aligned_bytes,
    allocate,
    host_access,
    memory_at,
    open_unnamed,
    round_to_page,
)

BLOCK_NBYTES = 8 << 20
BOUNCE_NBYTES = 2 << 20
"""The buffer of a thread for memory that is not aligned: one huge page. Four times as much would be 5 %
faster."""

THREADS = 4


@dataclass(frozen=True, slots=True)
class Extent:
    """A reserved part of the file. Both numbers are multiples of 4096."""

    offset: int
    nbytes: int


class Transfer:
    """One read or write in flight. Its memory may not be used otherwise until it is done."""

    def __init__(
        self, file: SwapFile, extent: Extent, memory: Tensor, nbytes: int, *, writes: bool
    ) -> None:
        assert memory.device.type == "cpu", memory.device
        assert memory.is_contiguous()
        end = memory.storage_offset() * memory.element_size() + memory.nbytes
        assert memory.untyped_storage().size() >= end, "its storage is released"
        assert 0 <= nbytes <= min(memory.nbytes, extent.nbytes), (nbytes, memory.nbytes, extent)
        self.nbytes = nbytes
        self.writes = writes
        self.began_s = self.ended_s = time.perf_counter()  # first block begun, last one ended
        self._file = file
        self._offset = extent.offset
        self._memory: Tensor | None = memory
        self._address = memory.data_ptr()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._blocks_left = -(-nbytes // file.block_nbytes)
        self._untouched = True
        self._failure: _Failure | None = None
        self._followers: list[Transfer] = []

    @property
    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when the bytes have been moved.

        Raises:
            DiskError: they could not be moved; in each call.
        """
        self._ended.wait()
        if self._failure is not None:
            raise DiskError(self._failure.text) from self._failure.cause

    def join(self) -> None:
        """Return when it has ended, successfully or not."""
        self._ended.wait()

    def _start(self, after: Transfer | None) -> None:
        """Queue the blocks when ``after`` has ended. If ``after`` failed, fail with its error."""
        if after is not None:
            with after._lock:
                if not after.done:
                    after._followers.append(self)
                    return
            if after._failure is not None:
                self._end(after._failure)
                return
        if self._blocks_left == 0:
            self._end(None)
        step = self._file.block_nbytes
        for at in range(0, self.nbytes, step):
            self._file._jobs.put((self, at, min(step, self.nbytes - at)))

    def _run(self, at: int, nbytes: int, number: int) -> None:
        """Move one block, on a thread of the file. The thread with the last block ends the transfer."""
        if self._untouched:
            self._untouched, self.began_s = False, time.perf_counter()
            self._tell_access()
        failure = None
        if self._failure is None:
            try:
                self._file._move(
                    self._address + at, self._offset + at, nbytes, number, writes=self.writes
                )
            except DiskError as error:
                failure = _Failure(str(error), error.__cause__)
            except BaseException as error:  # raised again in wait(); must not end the thread
                failure = _Failure(f"the swap file {self._file.path} failed: {error!r}", error)
        with self._lock:
            self._failure = self._failure or failure
            self._blocks_left -= 1
            last = self._blocks_left == 0
        if last:
            self._end(self._failure)

    def _tell_access(self) -> None:
        """A function of its own: no frame of the thread may keep the memory longer than the transfer."""
        memory = () if self._memory is None else (self._memory,)
        host_access(*((memory, ()) if self.writes else ((), memory)))

    def _end(self, failure: _Failure | None) -> None:
        self.ended_s = time.perf_counter()
        self._memory, self._failure = None, failure
        self._file._forget(self)
        with self._lock:
            followers, self._followers = self._followers, []
            self._ended.set()
        for follower in followers:
            follower._start(self)


class _Failure:
    """Why a transfer failed. The cause's frames are dropped, since they would keep memory alive."""

    def __init__(self, text: str, cause: BaseException | None) -> None:
        self.text = text
        self.cause = None if cause is None else cause.with_traceback(None)


_Jobs = SimpleQueue[tuple[Transfer, int, int] | None]


class SwapFile:
    """One rank's file for state on disk. It exists until it is closed or the process ends.

    ``directory`` may begin with ``~``, and is made if only its last component is missing. ``direct``:
    transfers bypass the page cache. ``read_nbytes`` and ``written_nbytes`` count what system calls moved,
    with padding to whole pages. ``bounce_nbytes`` is the size of the threads' buffers for memory that is
    not aligned; ``ledger`` gets it. The threads start with the first transfer.

    Raises:
        DiskError: no file can be made there. Every method raises it if the disk fails.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        threads: int = THREADS,
        block_nbytes: int = BLOCK_NBYTES,
        ledger: Ledger | None = None,
    ) -> None:
        assert threads > 0
        assert block_nbytes > 0
        assert block_nbytes % PAGE_NBYTES == 0
        self.directory = os.path.abspath(os.path.expanduser(directory))
        self.block_nbytes = block_nbytes
        self.read_nbytes = 0
        self.written_nbytes = 0
        self.reserved_nbytes = 0
        self._ledger = ledger
        self._bounces: list[Tensor] = []  # one for each thread
        self._fd, self.path = open_unnamed(self.directory)
        self._jobs: _Jobs = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._threads_wanted = threads
        self._moving: set[Transfer] = set()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._finish = weakref.finalize(self, _shut, self._fd, self._jobs, self._threads)
        try:
            self.direct = turn_direct(self._fd)
        except OSError as error:
            free = free_nbytes(self._fd)
            self._finish()
            raise DiskError(
                f"{self.directory} accepts a new file, but not its first {PAGE_NBYTES} bytes: "
                f"{reason(error)}; {free} bytes are free there. State cannot be stored on it: "
                "give another nvme_path."
            ) from error

    @property
    def bounce_nbytes(self) -> int:
        """Bytes of the buffers for memory that is not aligned."""
        return BOUNCE_NBYTES * len(self._bounces)

    def memory(self, nbytes: int) -> Tensor:
        """Zeroed memory ``[nbytes]``, uint8, that transfers move directly if it is whole pages."""
        return aligned_bytes(nbytes)

    def reserve(self, nbytes: int) -> Extent:
        """Reserve ``nbytes`` of the disk, rounded up to whole pages.

        Raises:
            DiskError: so much is not free, or the file cannot be used.
        """
        self._check_usable()
        extent = Extent(self.reserved_nbytes, round_to_page(nbytes))
        if extent.nbytes:
            try:
                allocate(self._fd, extent.offset, extent.nbytes)
            except OSError as error:
                os.ftruncate(self._fd, self.reserved_nbytes)  # frees a part that was reserved
                raise DiskError(
                    f"{self.directory} has no space for the state that is to be stored there: "
                    f"{extent.nbytes} bytes are needed in addition to the {self.reserved_nbytes} "
                    f"that this rank uses in {self.path}, {free_nbytes(self._fd)} are free "
                    f"({reason(error)}). Free space, give another nvme_path, or store less on "
                    "disk (offload_optimizer.max_in_cpu or device 'cpu')."
                ) from error
        self.reserved_nbytes += extent.nbytes
        return extent

    def read(
        self,
        extent: Extent,
        into: Tensor,
        *,
        nbytes: int | None = None,
        after: Transfer | None = None,
    ) -> Transfer:
        """Start reading the first ``nbytes`` of ``extent`` into ``into``.

        ``into``: a contiguous CPU tensor of any dtype. ``nbytes``: default: all of ``into``. ``after``:
        start when that transfer has ended.
        """
        return self._submit(extent, into, nbytes, after, writes=False)

    def write(
        self,
        extent: Extent,
        source: Tensor,
        *,
        nbytes: int | None = None,
        after: Transfer | None = None,
    ) -> Transfer:
        """Start writing the first ``nbytes`` of ``source`` (default: all) to the start of ``extent``.

        The last page is padded with zeros. ``after`` as in :meth:`read`.
        """
        return self._submit(extent, source, nbytes, after, writes=True)

    def flush(self) -> None:
        """Empty the page cache of the file's data. Does nothing with ``direct``."""
        self._check_usable()
        if not self.direct:
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def drain(self) -> None:
        """Wait until no transfer is in flight. An error of one is for who waits for that one."""
        while self._moving and os.getpid() == self._pid:
            with self._lock:
                moving = list(self._moving)
            for transfer in moving:
                transfer.join()

    def close(self) -> None:
        """Wait for transfers, end the threads and free the disk space. May be called again."""
        self.drain()
        self._finish()
        self._bounces = []
        self._report_bounces()

    def _make_bounces(self, count: int) -> None:
        self._bounces = [self.memory(BOUNCE_NBYTES) for _ in range(count)]
        self._report_bounces()

    def _report_bounces(self) -> None:
        if self._ledger is not None:
            owner = f"alignment buffers of {self.directory}"
            self._ledger.hold("scratch", owner, self.bounce_nbytes, Tier.HOST)

    def _submit(
        self,
        extent: Extent,
        memory: Tensor,
        nbytes: int | None,
        after: Transfer | None,
        *,
        writes: bool,
    ) -> Transfer:
        self._check_usable()
        nbytes = memory.nbytes if nbytes is None else nbytes
        transfer = Transfer(self, extent, memory, nbytes, writes=writes)
        is_aligned = not (memory.data_ptr() % PAGE_NBYTES or nbytes % PAGE_NBYTES)
        if self.direct and nbytes and not is_aligned and not self._bounces:
            self._make_bounces(self._threads_wanted)
        with self._lock:
            self._moving.add(transfer)
            while len(self._threads) < self._threads_wanted:
                number = len(self._threads)
                name, given = f"zeroshard-disk-{number}", (self._jobs, number)
                thread = threading.Thread(target=_serve, args=given, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        transfer._start(after)
        return transfer

    def _check_usable(self) -> None:
        if not self._finish.alive:
            raise DiskError(
                f"the swap file {self.path} is closed; no state is stored in it any more."
            )
        if os.getpid() != self._pid:
            raise DiskError(
                f"the swap file {self.path} belongs to process {self._pid}, and process "
                f"{os.getpid()}, which was forked from it, used it: both would overwrite each "
                "other's data. Use the engine in the process that built it."
            )

    def _forget(self, transfer: Transfer) -> None:
        with self._lock:
            self._moving.discard(transfer)

    def _move(self, address: int, offset: int, nbytes: int, number: int, *, writes: bool) -> None:
        """Move one block: the aligned part directly, the rest through the buffer of thread ``number``."""
        straight = nbytes
        if self.direct:
            straight = 0 if address % PAGE_NBYTES else nbytes - nbytes % PAGE_NBYTES
        if straight:
            self._call(address, offset, straight, writes=writes)
        for at in range(straight, nbytes, BOUNCE_NBYTES):
            between, part = self._bounces[number].data_ptr(), min(BOUNCE_NBYTES, nbytes - at)
            if writes:
                ctypes.memmove(between, address + at, part)
                ctypes.memset(between + part, 0, round_to_page(part) - part)
            self._call(between, offset + at, round_to_page(part), writes=writes)
            if not writes:
                ctypes.memmove(address + at, between, part)

    def _call(self, address: int, offset: int, nbytes: int, *, writes: bool) -> None:
        """Call the system until all ``nbytes`` were moved. Short transfers continue at a whole page."""
        memory = memory_at(address, nbytes)
        unit = PAGE_NBYTES if self.direct else 1
        done = 0
        while done < nbytes:
            call = os.pwritev if writes else os.preadv
            try:
                moved = call(self._fd, [memory[done:]], offset + done)
            except OSError as error:
                raise self._failed(offset, nbytes, done, reason(error), writes=writes) from error
            if moved < unit:
                why = f"{'pwritev' if writes else 'unreadable page, preadv'} moved {moved} bytes"
                raise self._failed(offset, nbytes, done, why, writes=writes)
            moved -= moved % unit
            done += moved
            with self._lock:
                if writes:
                    self.written_nbytes += moved
                else:
                    self.read_nbytes += moved

    def _failed(self, offset: int, wanted: int, done: int, why: str, *, writes: bool) -> DiskError:
        return DiskError(
            f"{'writing' if writes else 'reading'} {wanted} bytes at offset {offset} of the swap "
            f"file {self.path} ended after {done} bytes: {why}. The state that is stored there is "
            "lost: continue from the last checkpoint, with nvme_path on a disk that works."
        )


def _serve(jobs: _Jobs, number: int) -> None:
    """The main function of thread ``number``. Between two jobs it refers to no transfer and no file."""
    while True:
        job = jobs.get()
        if job is None:
            return
        job[0]._run(job[1], job[2], number)
        del job


def _shut(fd: int, jobs: _Jobs, threads: list[threading.Thread]) -> None:
    """End the threads and close the file. May run on one of the threads."""
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
    os.close(fd)


_ENDED = threading.Event()
_ENDED.set()


class PlannedTransfer(Transfer):
    """A transfer that has ended."""

    def __init__(self, nbytes: int, *, writes: bool) -> None:
        self.nbytes = nbytes
        self.writes = writes
        self.began_s = self.ended_s = 0.0
        self._ended = _ENDED
        self._failure = None


class PlannedSwapFile(SwapFile):
    """The swap file of a simulated rank: what a real one would reserve, move and hold, without a file.

    It counts as :class:`SwapFile` does on a disk with direct I/O. Fake tensors have no bytes, so a
    transfer has ended when it is submitted: what stores and pager hold does not depend on when one ends,
    since they give memory back in the order of their own calls. ``device``: where fake tensors are made
    that stand for host memory; a simulated rank has one memory.
    """

    direct = True

    def __init__(self, directory: str, *, device: torch.device, ledger: Ledger) -> None:
        self.directory = self.path = directory
        self.block_nbytes = BLOCK_NBYTES
        self.read_nbytes = self.written_nbytes = self.reserved_nbytes = 0
        self._device = device
        self._ledger = ledger
        self._bounces: list[Tensor] = []

    def memory(self, nbytes: int) -> Tensor:
        whole = torch.empty(round_to_page(nbytes), dtype=torch.uint8, device=self._device)
        return whole[:nbytes]

    def reserve(self, nbytes: int) -> Extent:
        """Nothing is reserved."""
        extent = Extent(self.reserved_nbytes, round_to_page(nbytes))
        self.reserved_nbytes += extent.nbytes
        return extent

    def drain(self) -> None:
        """Every transfer has ended."""

    def close(self) -> None:
        self._bounces = []
        self._report_bounces()

    def _submit(
        self,
        extent: Extent,
        memory: Tensor,
        nbytes: int | None,
        after: Transfer | None,
        *,
        writes: bool,
    ) -> Transfer:
        nbytes = memory.nbytes if nbytes is None else nbytes
        # Fakes have no address. Of what is moved only :meth:`memory` is aligned, and only that is bytes.
        is_aligned = memory.dtype is torch.uint8 and not nbytes % PAGE_NBYTES
        if nbytes and not is_aligned and not self._bounces:
            self._make_bounces(THREADS)
        if writes:
            self.written_nbytes += round_to_page(nbytes)
        else:
            self.read_nbytes += round_to_page(nbytes)
        return PlannedTransfer(nbytes, writes=writes)
