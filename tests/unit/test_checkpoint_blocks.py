"""Blocks of a checkpoint file: written data is read back, and damaged data is detected."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
import zlib
from pathlib import Path

import pytest
import torch

from zeroshard.checkpoint import blocks
from zeroshard.checkpoint.blocks import BlockFile, BlockWriter, bytes_of
from zeroshard.errors import CheckpointError

BLOCK = 4096 * 3
SIZES = [0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 7 * BLOCK + 12_345]


@pytest.fixture(params=["direct", "page cache"])
def place(request, tmp_path):
    """A directory of a file system that supports O_DIRECT, and of one that does not."""
    if request.param == "direct":
        probe = tmp_path / "probe"
        with probe.open("w+b") as file:
            if not blocks.turn_direct(file.fileno()):
                pytest.skip(f"{tmp_path} does not take O_DIRECT")
        yield tmp_path
        return
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm")
    here = shm / f"zeroshard-test-{os.getpid()}"
    here.mkdir()
    yield here
    for path in here.iterdir():
        path.unlink()
    here.rmdir()


def content(nbytes: int) -> bytes:
    return torch.randint(256, (nbytes,), dtype=torch.uint8).numpy().tobytes()


def write(path: Path, data: bytes, part: int = 5000, block_nbytes: int = BLOCK) -> tuple[int, ...]:
    writer = BlockWriter(path, len(data), block_nbytes=block_nbytes)
    for at in range(0, len(data), part):
        writer.write(memoryview(data)[at : at + part])
    return writer.finish()


def read(file: BlockFile, offset: int, nbytes: int) -> bytes:
    memory = bytearray(nbytes)
    file.read(offset, memoryview(memory))
    return bytes(memory)


def save_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "zeroshard-save"]


@pytest.mark.parametrize("nbytes", SIZES)
def test_every_size_comes_back_with_the_checksum_of_each_block(place, nbytes):
    data = content(nbytes)
    crcs = write(place / "x", data)
    assert (place / "x").read_bytes() == data
    assert crcs == tuple(zlib.crc32(data[at : at + BLOCK]) for at in range(0, nbytes, BLOCK))
    assert save_threads() == []
    file = BlockFile(place / "x", nbytes, crcs, block_nbytes=BLOCK)
    try:
        assert read(file, 0, nbytes) == data
        for offset in {0, min(1, nbytes), nbytes // 2, max(0, nbytes - 1), nbytes}:
            assert read(file, offset, nbytes - offset) == data[offset:]
            assert read(file, 0, offset) == data[:offset]
        assert read(file, nbytes // 3, nbytes // 3) == data[nbytes // 3 : nbytes // 3 * 2]
        file.check()
    finally:
        file.close()


@pytest.mark.parametrize("part", [1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 10**9])
def test_it_does_not_matter_in_which_parts_bytes_arrive(tmp_path, part):
    data = content(20_000)
    assert write(tmp_path / "x", data, part, 4096) == write(tmp_path / "y", data, 5000, 4096)
    assert (tmp_path / "x").read_bytes() == data


def test_the_caller_may_change_its_memory_at_once(tmp_path):
    writer = BlockWriter(tmp_path / "x", 10 * BLOCK, block_nbytes=BLOCK)
    memory = torch.empty(BLOCK, dtype=torch.uint8)
    for turn in range(10):
        memory.fill_(turn)
        writer.write(bytes_of(memory))
    memory.fill_(99)
    writer.finish()
    written = torch.frombuffer(bytearray((tmp_path / "x").read_bytes()), dtype=torch.uint8)
    assert written.view(10, BLOCK).unique(dim=1).flatten().tolist() == list(range(10))


def test_direct_writes_where_the_file_system_takes_them(place):
    writer = BlockWriter(place / "x", 10, block_nbytes=BLOCK)
    try:
        is_direct = bool(fcntl.fcntl(writer._fd, fcntl.F_GETFL) & os.O_DIRECT)
        assert is_direct is ("shm" not in str(place) or _tmpfs_is_direct(place))
    finally:
        writer.close()


def _tmpfs_is_direct(place: Path) -> bool:
    """Newer kernels support the flag there too."""
    with (place / "probe").open("w+b") as file:
        return blocks.turn_direct(file.fileno())


def test_a_refused_o_direct_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "turn_direct", lambda fd: False)
    data = content(3 * BLOCK + 1)
    crcs = write(tmp_path / "x", data)
    assert (tmp_path / "x").read_bytes() == data
    assert len(crcs) == 4


# ---------------------------------------------------------------------- what is noticed


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("offset", [0, 1, -1])
def test_one_flipped_bit_is_named_by_its_block(tmp_path, block, offset):
    data = content(3 * BLOCK + 777)
    path = tmp_path / "x"
    crcs = write(path, data)
    begin, end = block * BLOCK, min(block * BLOCK + BLOCK, len(data))
    damaged = bytearray(data)
    damaged[begin + offset if offset >= 0 else end - 1] ^= 0x10
    path.write_bytes(damaged)
    why = f"{path} is damaged between bytes {begin:,} and {end:,}"
    whole = (0, len(data))
    for low, high in (whole, (begin, end), (begin, begin + 1), (end - 1, end)):
        file = BlockFile(path, len(data), crcs, block_nbytes=BLOCK)
        with pytest.raises(CheckpointError, match=why):
            read(file, low, high - low)
        file.close()
    file = BlockFile(path, len(data), crcs, block_nbytes=BLOCK)
    with pytest.raises(CheckpointError, match=why):
        file.check()
    for other in set(range(4)) - {block}:
        low, high = other * BLOCK, min(other * BLOCK + BLOCK, len(data))
        assert read(file, low, high - low) == data[low:high]
    file.close()


def test_blocks_in_the_wrong_order_are_noticed(tmp_path):
    data = content(2 * BLOCK)
    crcs = write(tmp_path / "x", data)
    (tmp_path / "x").write_bytes(data[BLOCK:] + data[:BLOCK])
    file = BlockFile(tmp_path / "x", len(data), crcs, block_nbytes=BLOCK)
    with pytest.raises(CheckpointError, match="damaged between bytes 0 and"):
        file.check()
    file.close()


@pytest.mark.parametrize("nbytes", [0, BLOCK, 2 * BLOCK - 1, 2 * BLOCK + 1])
def test_another_size_is_noticed_before_anything_is_read(tmp_path, nbytes):
    crcs = write(tmp_path / "x", content(2 * BLOCK))
    os.truncate(tmp_path / "x", nbytes)
    with pytest.raises(CheckpointError, match=f"has {nbytes:,} bytes instead of {2 * BLOCK:,}"):
        BlockFile(tmp_path / "x", 2 * BLOCK, crcs, block_nbytes=BLOCK)


def test_a_file_that_is_cut_while_it_is_read_is_noticed(tmp_path):
    crcs = write(tmp_path / "x", content(2 * BLOCK))
    file = BlockFile(tmp_path / "x", 2 * BLOCK, crcs, block_nbytes=BLOCK)
    os.truncate(tmp_path / "x", BLOCK + 10)
    with pytest.raises(CheckpointError, match="was truncated"):
        file.check()
    file.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: None, lambda p: p.mkdir(), lambda p: os.mkfifo(p), lambda p: p.symlink_to("/dev/zero"),
        lambda p: p.symlink_to(p.parent / "real"),
    ],
    ids=["missing", "directory", "fifo", "device", "link"],
)  # fmt: skip
def test_only_a_regular_file_is_opened(tmp_path, make):
    (tmp_path / "real").write_bytes(b"")
    make(tmp_path / "x")
    with pytest.raises(CheckpointError, match=str(tmp_path / "x")):
        BlockFile(tmp_path / "x", 0, ())


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 11), (10, 1), (11, 0), (2**60, 1)])
def test_reading_outside_of_the_file_is_refused(tmp_path, offset, nbytes):
    file = BlockFile(tmp_path / "x", 10, write(tmp_path / "x", bytes(10)), block_nbytes=BLOCK)
    with pytest.raises(CheckpointError, match="outside of its 10"):
        read(file, offset, nbytes)
    file.close()


def test_a_neighbour_takes_the_rest_of_a_block_without_reading_it_again(tmp_path, monkeypatch):
    data = content(8 * BLOCK)
    crcs = write(tmp_path / "x", data)
    file = BlockFile(tmp_path / "x", len(data), crcs, block_nbytes=BLOCK)
    read_blocks: list[int] = []
    real = BlockFile._read_block

    def counted(self, block, memory):
        read_blocks.append(block)
        real(self, block, memory)

    monkeypatch.setattr(BlockFile, "_read_block", counted)
    step = BLOCK // 2 + 100  # every piece ends in the middle of a block
    for offset in range(0, len(data), step):
        nbytes = min(step, len(data) - offset)
        assert read(file, offset, nbytes) == data[offset : offset + nbytes]
    assert sorted(read_blocks) == list(range(8))
    for block in range(8):
        read(file, block * BLOCK + 5, 10)
    assert len(file._edges) <= blocks._EDGES
    file.close()
    assert not file._edges


def test_after_an_error_nothing_writes_into_the_callers_memory(tmp_path, monkeypatch):
    """Threads that still read when :meth:`read` raises would write where the caller's tensor was."""
    data = content(6 * BLOCK)
    crcs = (0, *write(tmp_path / "x", data)[1:])
    file = BlockFile(tmp_path / "x", len(data), crcs, block_nbytes=BLOCK)
    real = BlockFile._read_block

    def slow(self, block, memory):
        if block:
            threading.Event().wait(0.05)
        real(self, block, memory)

    monkeypatch.setattr(BlockFile, "_read_block", slow)
    for low, high in ((0, 6 * BLOCK), (5, 6 * BLOCK - 5)):
        memory = bytearray(high - low)
        with pytest.raises(CheckpointError, match="damaged between bytes 0"):
            file.read(low, memoryview(memory))
        before = bytes(memory)
        threading.Event().wait(0.2)
        assert bytes(memory) == before
    file.close()


# ---------------------------------------------------------------------- writes that fail


def failing_pwrite(monkeypatch, number: int, *, at: int = 0) -> None:
    real = os.pwrite

    def pwrite(fd, data, offset):
        if offset >= at:
            raise OSError(number, os.strerror(number))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)


def test_a_file_that_cannot_fit_takes_no_block(tmp_path, monkeypatch):
    """Other programs may still have room on this disk."""
    monkeypatch.setattr(blocks, "free_nbytes", lambda _fd: 99)
    monkeypatch.setattr(blocks.ctypes, "CDLL", None)  # no call of fallocate
    with pytest.raises(CheckpointError, match=r"x \(100 bytes\).*\(ENOSPC\)"):
        BlockWriter(tmp_path / "x", 100)
    assert (tmp_path / "x").stat().st_blocks == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("at", [0, 5])
def test_a_failing_write_is_one_error_with_path_and_reason(tmp_path, monkeypatch, number, at):
    before = set(os.listdir("/proc/self/fd"))
    failing_pwrite(monkeypatch, number, at=at * BLOCK)
    data, errors = content(8 * BLOCK), 0
    writer = BlockWriter(tmp_path / "x", len(data), block_nbytes=BLOCK)
    try:
        for begin in range(0, len(data), 100):
            writer.write(memoryview(data)[begin : begin + 100])
        writer.finish()
    except CheckpointError as error:
        errors += 1
        assert str(tmp_path / "x") in str(error)
        assert errno.errorcode[number] in str(error)
    finally:
        writer.close()
        writer.close()
    assert errors == 1
    assert save_threads() == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_finish_that_fails_lets_go_of_the_file(tmp_path, monkeypatch):
    before = set(os.listdir("/proc/self/fd"))
    failing_pwrite(monkeypatch, errno.EIO)
    writer = BlockWriter(tmp_path / "x", 1, block_nbytes=BLOCK)
    writer.write(memoryview(b"a"))
    with pytest.raises(CheckpointError, match="EIO"):
        writer.finish()
    assert save_threads() == []
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("call", ["fsync", "ftruncate"])
def test_a_failing_sync_is_an_error(tmp_path, monkeypatch, call):
    writer = BlockWriter(tmp_path / "x", 1, block_nbytes=BLOCK)
    writer.write(memoryview(b"a"))

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(CheckpointError, match="EIO"):
        writer.finish()
    assert writer._fd == -1


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:4096], offset))
    data = content(2 * BLOCK + 5)
    write(tmp_path / "x", data)
    assert (tmp_path / "x").read_bytes() == data


class FullDisk:
    """A C library whose ``fallocate`` keeps what it could reserve, as that of ext4 does."""

    def __init__(self, *_args, **_keys) -> None: ...

    def fallocate(self, fd, _mode, _offset, _size) -> int:
        os.posix_fallocate(fd, 0, 1 << 20)
        ctypes.set_errno(errno.ENOSPC)
        return -1


def test_space_that_cannot_be_reserved_is_an_error_and_is_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", FullDisk)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/x \(16,777,216 bytes\).*ENOSPC"):
        BlockWriter(tmp_path / "x", 16 << 20)
    assert (tmp_path / "x").stat().st_blocks == 0
    assert save_threads() == []
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "directory"])
def test_what_exists_is_never_overwritten(tmp_path, kind):
    path, other = tmp_path / "x", tmp_path / "other"
    other.write_bytes(b"old")
    if kind == "file":
        path.write_bytes(b"old")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(other if kind == "link" else tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"cannot be written: .*EEXIST"):
        BlockWriter(path, 5)
    assert other.read_bytes() == b"old"
    assert not (tmp_path / "nothing").exists()


def test_closing_early_leaves_no_thread_and_no_open_file(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    writer = BlockWriter(tmp_path / "x", 3 * BLOCK, block_nbytes=BLOCK)
    writer.write(memoryview(content(BLOCK + 10)))
    assert len(save_threads()) == blocks.WRITE_THREADS
    writer.close()
    assert save_threads() == []
    assert set(os.listdir("/proc/self/fd")) == before
