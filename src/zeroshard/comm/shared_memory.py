"""How does a rank show its memory to the other ranks of its host, and how do they wait for it?

Every rank owns one file that has no name: nothing is left when its process dies, and no mount
limits it. It begins with a control block that only its owner writes; blocks of data follow, each at
an offset of its own for ever. Neighbours open the file through ``/proc`` and map what they need.

Ordering: an owner writes data first and the number that announces it last, a reader looks in the
other order. x86-64 keeps both orders; other processors would need fences that Python cannot give.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import platform
import secrets
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Collectives that may be in flight at once before the oldest is finished to make room.
RING = 512
MASK = RING - 1
#: Bytes of a small message that travel inside its slot.
INLINE_NBYTES = 208
_SLOT_NBYTES = 256
_PAGE_NBYTES = 4096

# Control block, in 8-byte words: token, closed; the event word (32 bits) at byte 64; one mark per
# slot for "read by this rank"; the slots (number, tag, block offset, block bytes, begin, bytes).
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
    call = ctypes.CDLL(None).syscall  # lets go of the interpreter lock while it sleeps
    call.restype = ctypes.c_long
    number, address, integer = ctypes.c_long, ctypes.c_void_p, ctypes.c_int
    call.argtypes = (number, address, integer, ctypes.c_uint32, address, address, integer)
    return call


def sleep_on(address: int, value: int, timeout_s: float) -> None:
    """Sleep until somebody wakes this word, unless it no longer holds ``value``; or a signal."""
    span = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _syscall()(_FUTEX, address, _WAIT, value, ctypes.addressof(span), None, 0)


def wake(address: int) -> None:
    """Wake all threads of all processes that sleep on this word."""
    _syscall()(_FUTEX, address, _WAKE, _EVERYBODY, None, None, 0)


def unavailable() -> str:
    """Why this process cannot share memory as needed here; empty if it can."""
    machine = platform.machine()
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return f"it needs Linux, and this is {sys.platform}"
    if machine not in ("x86_64", "AMD64") or sys.maxsize < 2**32:
        return f"it needs the store order of x86-64, and this is {machine}"
    return ""


class ControlBlock:
    """A control block: the owner's side writes it, the others' side reads it."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, CONTROL_NBYTES)
        self.words = memoryview(self._map).cast("Q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._event = memoryview(self._map)[_EVENT_BYTE : _EVENT_BYTE + 4].cast("I")

    @property
    def token(self) -> int:
        """A random number that tells this file from any other."""
        return self.words[_TOKEN]

    @token.setter
    def token(self, token: int) -> None:
        self.words[_TOKEN] = token

    @property
    def closed(self) -> bool:
        """Nothing more will be posted here."""
        return bool(self.words[_CLOSED])

    def close(self) -> None:
        """Nothing more will be posted here: tell those who wait."""
        self.words[_CLOSED] = 1
        self.notify()

    @property
    def event(self) -> int:
        """A number that changes with every announcement."""
        return self._event[0]

    def notify(self) -> None:
        """Wake whoever waits for this rank."""
        self._event[0] = (self._event[0] + 1) & 0xFFFFFFFF
        self.wake()

    def wake(self) -> None:
        """Make those who sleep in :meth:`sleep` look again."""
        wake(self.address + _EVENT_BYTE)

    def sleep(self, event: int, timeout_s: float) -> None:
        """Until the next announcement after ``event``."""
        sleep_on(self.address + _EVENT_BYTE, event, timeout_s)

    def publish(self, seq: int, tag: int, place: tuple[int, int, int], nbytes: int) -> None:
        """Announce collective ``seq``. ``place``: offset and size of a block, begin inside it."""
        words, at = self.words, _SLOTS + (seq & MASK) * _SLOT
        words[at + 1] = tag
        words[at + 2], words[at + 3], words[at + 4] = place
        words[at + 5] = nbytes
        words[at] = seq  # last: from now on the others may read
        self.notify()

    def has(self, seq: int, tag: int) -> bool:
        """Whether the owner has posted ``seq``, and with the same history."""
        at = _SLOTS + (seq & MASK) * _SLOT
        return self.words[at] == seq and self.words[at + 1] == tag

    def place(self, seq: int) -> tuple[tuple[int, int, int], int]:
        """What :meth:`post` was given."""
        words, at = self.words, _SLOTS + (seq & MASK) * _SLOT
        return (words[at + 2], words[at + 3], words[at + 4]), words[at + 5]

    def inline(self, seq: int) -> int:
        """Address of the bytes that travel inside the slot."""
        return self.address + (_SLOTS + (seq & MASK) * _SLOT) * 8 + _INLINE

    def mark_done(self, seq: int) -> None:
        """This rank has read all it needs of collective ``seq``."""
        self.words[_DONE + (seq & MASK)] = seq

    def is_done(self, seq: int) -> bool:
        """Whether the owner has read all it needs of collective ``seq``."""
        return self.words[_DONE + (seq & MASK)] >= seq


class Block:
    """Part of the own file. ``reads``: the collectives that the others may still read it for.

    ``bytes`` is what is used of its ``nbytes``: all of it, or what :meth:`lend` was asked for.
    """

    __slots__ = ("_map", "bytes", "nbytes", "offset", "reads", "used_s")

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        os.posix_fallocate(fd, offset, nbytes)  # raises here where a later write would kill
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
        """From now on this much is in use; the block must be free."""
        if self.bytes.nbytes != nbytes:
            self.bytes = self._tensor(nbytes)

    def lend(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]`` at the begin, with a storage of just these bytes, as long as that lives."""
        self.use(numel * dtype.itemsize)
        return torch.empty(0, dtype=dtype).set_(self.bytes.untyped_storage(), 0, (numel,), (1,))

    @property
    def is_lent(self) -> bool:
        """Does a tensor of the program live here? (Our tensor and this look are the two users.)"""
        users: int = torch._C._storage_Use_Count(self.bytes.untyped_storage()._cdata)
        return users > 2

    def discard(self) -> None:
        """Give the pages back to the system, whoever has them mapped."""
        self._map.madvise(mmap.MADV_REMOVE)


class Arena:
    """The own file. Blocks are used again; at most as many as were ever in use at once."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("zeroshard", os.MFD_CLOEXEC)
        self._end = CONTROL_NBYTES
        os.posix_fallocate(self.fd, 0, CONTROL_NBYTES)
        self.control = ControlBlock(self.fd)
        self.control.token = secrets.randbits(63)
        self.blocks: dict[int, Block] = {}
        self._swept_s = 0.0
        self.close = weakref.finalize(self, _leave, self.control, self.fd, os.getpid())

    @property
    def own_nbytes(self) -> int:
        """Memory in blocks that no tensor of the program lives in."""
        return sum(block.bytes.nbytes for block in self.blocks.values() if not block.is_lent)

    def block_of(self, tensor: Tensor) -> Block | None:
        """The block that ``tensor`` lies in, if any."""
        return self.blocks.get(tensor.untyped_storage().data_ptr())

    def take(self, nbytes: int, is_free: Callable[[Block], bool], *, slack: int = 2) -> Block:
        """The smallest free block of at least ``nbytes``, at most ``slack`` times that; or a new one.

        Sizes are whole pages.
        """
        now_s = time.monotonic()
        nbytes = -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES
        best = None
        for block in self.blocks.values():
            fits = nbytes <= block.nbytes <= slack * nbytes
            if fits and (best is None or block.nbytes < best.nbytes) and is_free(block):
                best = block
                if block.nbytes == nbytes:
                    break
        if best is None:
            self._sweep(now_s, is_free, below_nbytes=nbytes)
            best = Block(self.fd, self._end, nbytes)
            self._end += nbytes
            self.blocks[best.bytes.data_ptr()] = best
        elif now_s > self._swept_s + _IDLE_S:
            self._sweep(now_s, is_free)
        best.used_s = now_s
        return best

    def _sweep(
        self, now_s: float, is_free: Callable[[Block], bool], *, below_nbytes: int = 0
    ) -> None:
        """Give back what nobody has asked for in a long time: set-up needs other sizes than steps.

        A new block takes the place of the free ones that were too small. What a step needs comes back
        once, and stays: nothing larger is made then.
        """
        self._swept_s = now_s
        for address, block in list(self.blocks.items()):
            idle = now_s > block.used_s + _IDLE_S or block.nbytes < below_nbytes
            if idle and is_free(block):
                del self.blocks[address]
                block.discard()


class PeerMapping:
    """Another rank's file, seen from here."""

    def __init__(self, pid: int, fd: int, token: int) -> None:
        self._fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._fd)
        if os.fstat(self._fd).st_size < CONTROL_NBYTES:
            raise OSError(f"descriptor {fd} of process {pid} is not its shared memory")
        self.control = ControlBlock(self._fd)
        if self.control.token != token:
            raise OSError(f"descriptor {fd} of process {pid} is other memory")
        self._maps: dict[int, mmap.mmap] = {}

    def tensor(
        self, place: tuple[int, int, int], skip_nbytes: int, numel: int, dtype: torch.dtype
    ) -> Tensor:
        """``[numel]`` in a block of that rank, ``skip_nbytes`` after the begin it posted."""
        offset, nbytes, begin = place
        mapped = self._maps.get(offset)
        if mapped is None:
            if len(self._maps) >= _MAPPINGS:
                self._maps.clear()
            mapped = self._maps[offset] = mmap.mmap(self._fd, nbytes, offset=offset)
        return torch.frombuffer(mapped, dtype=dtype, count=numel, offset=begin + skip_nbytes)


def _leave(control: ControlBlock, fd: int, owner: int) -> None:
    """The end of an arena, also of a forgotten one; in a forked child it is the parent's."""
    if os.getpid() == owner:
        control.close()
    with contextlib.suppress(OSError):  # the program closed all descriptors before us
        os.close(fd)
