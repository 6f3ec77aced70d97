"""Memory that ranks of one host share: files without names, control blocks, data blocks and their reuse.

[Note: shared memory] The decision and its measurements: docs/decisions/0006-shared-memory.md.

Vocabulary. An *arena* is the file of one rank: an anonymous file (``memfd_create``). It has no name, so
nothing is left when its process dies, and the size of ``/dev/shm`` does not limit it. The *control
block* is the start of the file; *blocks* of data follow it. A *mapping* is another rank's file, opened
once through ``/proc/<pid>/fd``. After that, neither the process nor its descriptor is needed any more.
To *publish* collective number ``seq`` is to write, into slot ``seq % RING`` of one's own control block,
where the source of that collective lies. A *mark* says "this rank has read all that it needs of
``seq``"; a rank writes its marks into its own control block.

Who owns which memory. Each rank writes only its own file: its blocks, its slots and its marks. The other
ranks only read that file, and sleep on its event word. Nothing is locked and there is no barrier.

Invariants, and what breaks without them:

* Data is written first and the sequence number of its slot last; a reader looks at the number first.
  x86-64 keeps both orders. On other processors Python has no fence for it, and a reader could see the
  number of data that has not arrived; :func:`unavailable` refuses them.
* A block gets an offset that no other block ever gets, even after it was discarded. Readers keep one
  mapping per offset and never look whether it is still right; if offsets were reused, a mapping
  could have the size of an older block.
* A block is reused only if no tensor of the program lies in it (:attr:`Block.is_lent`) and all ranks have
  marked every collective that was published from it (:attr:`Block.reads`). Otherwise a slow rank would
  read the data of a later collective: a wrong sum without an error.
* A slot is reused after :data:`RING` collectives. The user of this module must see to it that all ranks
  have marked the old one first (``Ring.begin`` in :mod:`zeroshard.comm.shm`); otherwise a rank would wait
  for a number that was overwritten.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import mmap
import os
import platform
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.comm.host import Process, this_process
from zeroshard.comm.store_keys import Rendezvous

#: Slots of a control block: with more collectives in flight, the oldest is finished first.
RING = 512
MASK = RING - 1
#: Bytes of a small message that travel inside its slot.
INLINE_NBYTES = 208
_SLOT_NBYTES = 256
_PAGE_NBYTES = 4096

# Control block, in 8-byte words: token, closed; the event word (32 bits) at byte 64; for each slot the
# mark "this rank has read collective seq"; the slots (sequence number, tag, offset and size of the block,
# start of the source inside the block, bytes of the source).
_TOKEN, _CLOSED, _EVENT_BYTE = 0, 1, 64
_DONE = _PAGE_NBYTES // 8
_SLOTS = _DONE + RING
_SLOT = _SLOT_NBYTES // 8
_INLINE = _SLOT_NBYTES - INLINE_NBYTES
CONTROL_NBYTES = (_SLOTS + RING * _SLOT) * 8

_IDLE_S = 60.0
_MAPPINGS = 4096

_FUTEX, _WAIT, _WAKE, _EVERYBODY = 202, 0, 1, 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@functools.cache
def _syscall() -> Any:
    call = ctypes.CDLL(None).syscall  # releases the interpreter lock while it sleeps
    call.restype = ctypes.c_long
    number, address, integer = ctypes.c_long, ctypes.c_void_p, ctypes.c_int
    call.argtypes = (number, address, integer, ctypes.c_uint32, address, address, integer)
    return call


def sleep_on(address: int, value: int, timeout_s: float) -> None:
    """Sleep until :func:`wake`, a signal or ``timeout_s``; not at all unless the word is ``value``."""
    span = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _syscall()(_FUTEX, address, _WAIT, value, ctypes.addressof(span), None, 0)


def wake(address: int) -> None:
    """Wake all threads of all processes that sleep on the 32-bit word at ``address``."""
    _syscall()(_FUTEX, address, _WAKE, _EVERYBODY, None, None, 0)


def unavailable() -> str:
    """Why this process cannot share memory as this module needs it; empty if it can."""
    machine = platform.machine()
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return f"it needs Linux, and this is {sys.platform}"
    if machine not in ("x86_64", "AMD64") or sys.maxsize < 2**32:
        return f"it needs the store order of x86-64, and this is {machine}"
    return ""


class ControlBlock:
    """The start of a rank's file. Its owner writes it; the others read it and sleep on its event word."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, CONTROL_NBYTES)
        self.words = memoryview(self._map).cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._event = memoryview(self._map)[_EVENT_BYTE : _EVENT_BYTE + 4].cast("I")

    @property
    def token(self) -> int:
        """A random number that identifies this file."""
        return self.words[_TOKEN]

    @token.setter
    def token(self, token: int) -> None:
        self.words[_TOKEN] = token

    @property
    def closed(self) -> bool:
        """Whether the owner will publish nothing more."""
        return bool(self.words[_CLOSED])

    def close(self) -> None:
        """Note that nothing more will be published, and wake the ranks that wait."""
        self.words[_CLOSED] = 1
        self.notify()

    @property
    def event(self) -> int:
        """A number that changes with every :meth:`notify`."""
        return self._event[0]

    def notify(self) -> None:
        """Change the event word and wake the ranks that wait for this one."""
        self._event[0] = (self._event[0] + 1) & 0xFFFFFFFF
        self.wake()

    def wake(self) -> None:
        """End every :meth:`sleep` on this block, also those of other processes."""
        wake(self.address + _EVENT_BYTE)

    def sleep(self, event: int, timeout_s: float) -> None:
        """Sleep until the event word is no longer ``event``, or for ``timeout_s``; may end earlier."""
        sleep_on(self.address + _EVENT_BYTE, event, timeout_s)

    def publish(self, seq: int, tag: int, place: tuple[int, int, int], nbytes: int) -> None:
        """Say where the source of collective ``seq`` lies.

        ``tag`` is the hash of the group's history, this collective included. ``place``: offset of the
        block in the file, size of the block, start of the source inside the block. ``nbytes``: size of
        the source.
        """
        words, at = self.words, _SLOTS + (seq & MASK) * _SLOT
        words[at + 1] = tag
        words[at + 2], words[at + 3], words[at + 4] = place
        words[at + 5] = nbytes
        words[at] = seq  # last: from now on the other ranks may read
        self.notify()

    def has(self, seq: int, tag: int) -> bool:
        """Whether the owner has published ``seq``, with the same history."""
        at = _SLOTS + (seq & MASK) * _SLOT
        return self.words[at] == seq and self.words[at + 1] == tag

    def place(self, seq: int) -> tuple[tuple[int, int, int], int]:
        """``place`` and ``nbytes`` as the owner gave them to :meth:`publish`."""
        words, at = self.words, _SLOTS + (seq & MASK) * _SLOT
        return (words[at + 2], words[at + 3], words[at + 4]), words[at + 5]

    def inline(self, seq: int) -> int:
        """Address of the :data:`INLINE_NBYTES` bytes inside the slot of ``seq``."""
        return self.address + (_SLOTS + (seq & MASK) * _SLOT) * 8 + _INLINE

    def mark_done(self, seq: int) -> None:
        """Note that this rank has read all that it needs of collective ``seq``. Wakes no sleeper."""
        self.words[_DONE + (seq & MASK)] = seq

    def is_done(self, seq: int) -> bool:
        """Whether the owner has read all that it needs of collective ``seq``."""
        return self.words[_DONE + (seq & MASK)] >= seq


class Block:
    """Part of this rank's file. ``reads``: sequence numbers of the collectives that other ranks may still
    read from it, in ascending order.

    ``bytes`` (uint8) is the part of its ``nbytes`` that is in use: all of it, or what :meth:`lend` was
    asked for. ``used_s``: monotonic time at which it was last taken.
    """

    __slots__ = ("_map", "bytes", "nbytes", "offset", "reads", "used_s")

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        os.posix_fallocate(fd, offset, nbytes)  # raises now; a write without memory would kill
        self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=offset)
        self.bytes = self._tensor(nbytes)
        self.offset = offset
        self.nbytes = nbytes
        self.reads: list[int] = []
        self.used_s = 0.0

    def _tensor(self, nbytes: int) -> Tensor:
        with torch.inference_mode(False):
            return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes)

    def use(self, nbytes: int) -> None:
        """Let :attr:`bytes` be the first ``nbytes`` of the block. The block must be free."""
        if self.bytes.nbytes != nbytes:
            self.bytes = self._tensor(nbytes)

    def is_read_by(self, readers: Sequence[ControlBlock]) -> bool:
        """Whether all ``readers`` have read all that was published from the block."""
        reads = self.reads
        while reads and all(reader.is_done(reads[-1]) for reader in readers):
            reads.pop()
        return not reads

    def lend(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]`` at the start of the block, which is lent as long as a tensor uses this storage."""
        self.use(numel * dtype.itemsize)
        return torch.empty(0, dtype=dtype).set_(self.bytes.untyped_storage(), 0, (numel,), (1,))

    @property
    def is_lent(self) -> bool:
        """Whether a tensor of the program lies here. (``bytes`` and this call are two users of it.)"""
        users: int = torch._C._storage_Use_Count(self.bytes.untyped_storage()._cdata)
        return users > 2

    def discard(self) -> None:
        """Give the pages back to the system, also those that other processes have mapped."""
        self._map.madvise(mmap.MADV_REMOVE)


window_listeners: list[Callable[[Windows], None]] = []
"""Called after a block was taken, with the windows it is of. Empty in production."""


class Windows:
    """Blocks that are reused: there are at most as many as were ever in use at once.

    Subclasses say what a block is: shared memory, or a note of it in a run that is simulated.
    ``all_nbytes``: of all blocks; ``peak_nbytes``: the most so far.
    """

    def __init__(self, end: int) -> None:
        self._end = end
        self.readers: Sequence[Any] = ()  # control blocks of the other ranks
        self.blocks: dict[int, Any] = {}  # by address
        self._swept_s = 0.0
        self.all_nbytes = self.peak_nbytes = 0

    def new_block(self, offset: int, nbytes: int) -> tuple[int, Any]:
        """A block, and its address."""
        raise NotImplementedError

    @property
    def lent_nbytes(self) -> int:
        """Bytes of tensors of the program that lie in blocks."""
        return sum(block.bytes.nbytes for block in self.blocks.values() if block.is_lent)

    @property
    def own_nbytes(self) -> int:
        """Bytes of the blocks, without those that the program was lent."""
        return self.all_nbytes - self.lent_nbytes

    def _is_free(self, block: Any) -> bool:
        return not block.is_lent and block.is_read_by(self.readers)

    def take(self, nbytes: int, *, slack: int = 2) -> Any:
        """The smallest free block of ``nbytes`` to ``slack * nbytes``; or a new one of ``nbytes``.

        A block is free if it is not lent and the other ranks have read it. ``nbytes`` is rounded up to
        whole pages.
        """
        now_s = time.monotonic()
        nbytes = -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES
        best = None
        for block in self.blocks.values():
            fits = nbytes <= block.nbytes <= slack * nbytes
            if fits and (best is None or block.nbytes < best.nbytes) and self._is_free(block):
                best = block
                if block.nbytes == nbytes:
                    break
        if best is None:
            self._sweep(now_s, below_nbytes=nbytes)
            address, best = self.new_block(self._end, nbytes)
            self._end += nbytes
            self.blocks[address] = best
            self.all_nbytes += best.nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.all_nbytes)
        elif now_s > self._swept_s + _IDLE_S:
            self._sweep(now_s)
        best.used_s = now_s
        for listener in window_listeners:
            listener(self)
        return best

    def _sweep(self, now_s: float, *, below_nbytes: int = 0) -> None:
        """Discard free blocks that were not taken for 60 s, and free blocks below ``below_nbytes``.

        Set-up needs other sizes than steps. A new block replaces the free ones that are smaller. If a
        step still needs one of those, it is made once more and then stays, because steps that repeat make
        no new larger block.
        """
        self._swept_s = now_s
        for address, block in list(self.blocks.items()):
            idle = now_s > block.used_s + _IDLE_S or block.nbytes < below_nbytes
            if idle and self._is_free(block):
                del self.blocks[address]
                self.all_nbytes -= block.nbytes
                block.discard()


class Arena(Windows):
    """This rank's file."""

    def __init__(self) -> None:
        super().__init__(CONTROL_NBYTES)
        self.fd = os.memfd_create("zeroshard", os.MFD_CLOEXEC)
        os.posix_fallocate(self.fd, 0, CONTROL_NBYTES)
        self.control = ControlBlock(self.fd)
        self.control.token = secrets.randbits(63)
        self.close = weakref.finalize(self, _leave, self.control, self.fd, os.getpid())

    def new_block(self, offset: int, nbytes: int) -> tuple[int, Block]:
        block = Block(self.fd, offset, nbytes)
        return block.bytes.data_ptr(), block

    def block_of(self, tensor: Tensor) -> Block | None:
        """The block that ``tensor`` lies in, if any."""
        return self.blocks.get(tensor.untyped_storage().data_ptr())


class PeerMapping:
    """Another rank's file, opened by this process.

    Raises:
        OSError: the file cannot be opened, or is not the one that has ``token``.
    """

    def __init__(self, pid: int, fd: int, token: int) -> None:
        self._fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._fd)
        if os.fstat(self._fd).st_size < CONTROL_NBYTES:
            raise OSError(f"descriptor {fd} of process {pid} is not its shared memory")
        self.control = ControlBlock(self._fd)
        if self.control.token != token:
            raise OSError(f"descriptor {fd} of process {pid} is not the expected memory")
        self._maps: dict[int, mmap.mmap] = {}

    def tensor(
        self, place: tuple[int, int, int], skip_nbytes: int, numel: int, dtype: torch.dtype
    ) -> Tensor:
        """``[numel]`` in a block of that rank, ``skip_nbytes`` after the start that it published.

        The mapping of a block is kept, at most 4096 of them: an offset always names the same block.
        """
        offset, nbytes, begin = place
        mapped = self._maps.get(offset)
        if mapped is None:
            if len(self._maps) >= _MAPPINGS:
                self._maps.clear()
            mapped = self._maps[offset] = mmap.mmap(self._fd, nbytes, offset=offset)
        return torch.frombuffer(mapped, dtype=dtype, count=numel, offset=begin + skip_nbytes)


def _leave(control: ControlBlock, fd: int, owner: int) -> None:
    """End an arena that is closed or collected. In a forked child the control block is the parent's."""
    if os.getpid() == owner:
        control.close()
    with contextlib.suppress(OSError):  # the program closed all descriptors before us
        os.close(fd)


class PeerMemory(NamedTuple):
    """This rank's arena, the mappings of the others, and all processes, by rank inside the group."""

    rank: int
    arena: Arena
    mappings: Mapping[int, PeerMapping]
    processes: Sequence[Process]
    timeout_s: float


def open_peer_memory(meeting: Rendezvous) -> PeerMemory | str:
    """Open each other's memory, or return why that is impossible: the same on all ranks. Collective.

    ``meeting``: in a key space that only this call uses.
    """
    rank = meeting.rank
    arena, why = _own_arena(rank)
    mine = {"why": why, "process": asdict(this_process()), "fd": -1, "token": 0}
    if arena is not None:
        mine |= {"fd": arena.fd, "token": arena.control.token}
    cards = [json.loads(text) for text in meeting.exchange(json.dumps(mine), "card")]
    processes = [Process(**card["process"]) for card in cards]
    why = next((card["why"] for card in cards if card["why"]), "") or apart(processes)
    mappings: Mapping[int, PeerMapping] = {}
    if not why:
        mappings, why = _mappings(rank, processes, cards)
    # No rank goes on before all have opened all. After that a process may end at any time.
    why = next((answer for answer in meeting.exchange(why, "opened") if answer), "")
    if arena is None:
        return why
    if why:
        arena.close()
        return why
    return PeerMemory(rank, arena, mappings, processes, meeting.timeout_s)


def _own_arena(rank: int) -> tuple[Arena | None, str]:
    """The memory that this rank shares; without it the reason."""
    if why := unavailable():
        return None, why
    try:
        return Arena(), ""
    except OSError as error:
        return None, f"rank {rank} cannot create shared memory: {error}"


def _mappings(
    rank: int, processes: Sequence[Process], cards: Sequence[Mapping[str, Any]]
) -> tuple[dict[int, PeerMapping], str]:
    """The memory of the other ranks, as far as it can be opened, and why the next one cannot."""
    mappings: dict[int, PeerMapping] = {}
    for peer, card in enumerate(cards):
        if peer == rank:
            continue
        try:
            mappings[peer] = PeerMapping(processes[peer].pid, card["fd"], card["token"])
        except OSError as error:
            return mappings, (
                f"rank {rank} cannot open the memory of rank {peer}: {error.strerror or error}"
            )
    return mappings, ""


def apart(processes: Sequence[Process]) -> str:
    """Why the processes of these ranks cannot share memory; "" if they can."""
    first = processes[0]
    for rank, process in enumerate(processes):
        if not process.space or process.space != first.space:
            there = "in another container" if process.host == first.host else f"on {process.host}"
            return f"rank 0 runs on {first.host}, rank {rank} {there}"
    return ""
