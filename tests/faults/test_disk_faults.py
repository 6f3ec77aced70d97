"""A disk error ends the run with an error that contains numbers, and leaves no files."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zeroshard.errors import DiskError
from zeroshard.offload.pager import Pager
from zeroshard.offload.swap_file import PAGE_NBYTES, SwapFile

NBYTES = 4 * PAGE_NBYTES
SMALL_NBYTES = 16 << 20


def pages_of(pager: Pager, count: int) -> list:
    """Pages that are filled with their index."""
    pages = [pager.page(NBYTES) for _ in range(count)]
    for number, page in enumerate(pager.walk(pages)):
        page.bytes.fill_(number)
    return pages


def numbers(pager: Pager, pages: list) -> list[int]:
    found = []
    for page in pager.walk(pages):
        page.changed = False
        assert (page.bytes == page.bytes[0]).all()
        found.append(int(page.bytes[0]))
    return found


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path):
    """A separate file system of 16 MiB. Needs the right to mount."""
    place = tmp_path / "small"
    place.mkdir()
    options = f"size={SMALL_NBYTES},huge=never"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount; test_a_refused_reservation covers the error itself")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def free(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def test_a_reservation_that_does_not_fit_is_refused_with_numbers(small_disk):
    file = SwapFile(small_disk)
    file.reserve(4 << 20)
    before = free(small_disk)
    with pytest.raises(DiskError) as caught:
        file.reserve(SMALL_NBYTES)
    assert str(caught.value) == (
        f"{small_disk} has no space for the state that is to be stored there: {SMALL_NBYTES} "
        f"bytes are needed in addition to the {4 << 20} that this rank uses in {file.path}, "
        f"{before} are free (No space left on device (ENOSPC)). Free space, give another "
        "nvme_path, or store less on disk (offload_optimizer.max_in_cpu or device 'cpu')."
    )
    assert free(small_disk) == before
    file.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_refused_reservation_gives_back_the_part_it_got(tmp_path, monkeypatch, number):
    file = SwapFile(tmp_path)
    first = file.reserve(NBYTES)
    real = os.posix_fallocate

    def half(fd, offset, nbytes):
        real(fd, offset, nbytes // 2)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", half)
    with pytest.raises(DiskError, match=re.escape(f"({errno.errorcode[number]})")):
        file.reserve(1 << 20)
    assert os.fstat(file._fd).st_size == first.nbytes == file.reserved_nbytes
    monkeypatch.undo()
    assert file.reserve(NBYTES).offset == NBYTES
    file.close()


def test_a_refused_reservation_is_explained_although_the_directory_is_gone(tmp_path, monkeypatch):
    file = SwapFile(tmp_path / "swap")
    (tmp_path / "swap").rmdir()

    def refuse(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DiskError, match=r"4096 bytes are needed .* \d+ are free"):
        file.reserve(1)
    file.close()


def test_a_disk_that_somebody_else_fills_does_not_stop_the_run(small_disk):
    file = SwapFile(small_disk)
    pager = Pager(file, [NBYTES] * 3)
    pages = [pager.page(NBYTES) for _ in range(100)]
    with pytest.raises(OSError, match="No space left"), open(small_disk / "other", "wb") as other:
        while True:
            os.write(other.fileno(), bytes(1 << 16))
    assert free(small_disk) < NBYTES
    for number, page in enumerate(pager.walk(pages)):
        page.bytes.fill_(number)
    assert numbers(pager, pages) == list(range(100))
    pager.close()
    file.close()


def test_a_write_that_finds_no_room_after_all_ends_in_words(tmp_path, monkeypatch):
    """On a copy-on-write file system or a thin volume, a write can fail although space was reserved."""
    file = SwapFile(tmp_path)
    extent = file.reserve(NBYTES)
    fail(monkeypatch, "pwritev", errno.ENOSPC)
    with pytest.raises(DiskError) as caught:
        file.write(extent, torch.zeros(NBYTES, dtype=torch.uint8)).wait()
    assert str(caught.value) == lost("writing", NBYTES, 0, file, "No space left on device (ENOSPC)")
    file.close()


# ---------------------------------------------------------------- a failing disk


def fail(monkeypatch, call: str, number: int, *, at: int | None = None) -> None:
    """``os.call`` fails, at one offset or always."""
    real = getattr(os, call)

    def failing(fd, buffers, offset):
        if at is None or offset == at:
            raise OSError(number, os.strerror(number))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, call, failing)


def lost(doing: str, nbytes: int, offset: int, file: SwapFile, why: str, done: int = 0) -> str:
    return (
        f"{doing} {nbytes} bytes at offset {offset} of the swap file {file.path} ended after "
        f"{done} bytes: {why}. The state that is stored there is lost: continue from the last "
        "checkpoint, with nvme_path on a disk that works."
    )


@pytest.fixture
def file(tmp_path):
    made = SwapFile(tmp_path)
    yield made
    made.close()


@pytest.fixture
def pager(file):
    made = Pager(file, [NBYTES] * 3)
    yield made
    made.close()


def test_a_read_error_surfaces_at_its_page(pager, file, monkeypatch):
    pages = pages_of(pager, 8)
    fail(monkeypatch, "preadv", errno.EIO, at=pages[4].extent.offset)
    seen = []
    with pytest.raises(DiskError) as caught:
        for page in pager.walk(pages):
            seen.append(int(page.bytes[0]))
    assert seen == [0, 1, 2, 3]
    why = "Input/output error (EIO)"
    assert str(caught.value) == lost("reading", NBYTES, pages[4].extent.offset, file, why)
    assert isinstance(caught.value.__cause__, OSError)


def test_pages_beside_an_unreadable_one_can_still_be_read(pager, monkeypatch):
    pages = pages_of(pager, 8)
    fail(monkeypatch, "preadv", errno.EIO, at=pages[4].extent.offset)
    with pytest.raises(DiskError):
        numbers(pager, pages)
    assert numbers(pager, pages[:4] + pages[5:]) == [0, 1, 2, 3, 5, 6, 7]


def test_a_write_error_surfaces_when_its_slot_is_needed_again(pager, file, monkeypatch):
    pages = pages_of(pager, 8)
    fail(monkeypatch, "pwritev", errno.EIO, at=pages[2].extent.offset)
    seen = []
    with pytest.raises(DiskError) as caught:
        for page in pager.walk(pages):
            seen.append(int(page.bytes[0]))
    assert seen == [0, 1, 2, 3, 4]
    why = "Input/output error (EIO)"
    assert str(caught.value) == lost("writing", NBYTES, pages[2].extent.offset, file, why)


def test_a_write_error_of_the_last_page_surfaces_at_the_end(pager, monkeypatch):
    pages = pages_of(pager, 5)
    fail(monkeypatch, "pwritev", errno.EIO, at=pages[4].extent.offset)
    seen = []
    with pytest.raises(DiskError, match="writing"):
        for page in pager.walk(pages):
            seen.append(int(page.bytes[0]))
    assert seen == [0, 1, 2, 3, 4]


def test_a_page_that_could_not_be_written_is_never_shown_again(pager, monkeypatch):
    pages = pages_of(pager, 5)
    with monkeypatch.context() as patch:
        fail(patch, "pwritev", errno.EIO, at=pages[4].extent.offset)
        with pytest.raises(DiskError), pager.open(pages[4], changed=True) as page:
            page.bytes.fill_(9)
    for _ in range(2):
        with pytest.raises(DiskError, match="writing"), pager.open(pages[4]):
            pytest.fail("the page on disk is not the one that was written")
    assert numbers(pager, pages[:4]) == [0, 1, 2, 3]


def test_a_failed_transfer_says_so_to_everybody_who_waits(file, monkeypatch):
    fail(monkeypatch, "pwritev", errno.EIO)
    extent, tensor = file.reserve(NBYTES), torch.zeros(NBYTES, dtype=torch.uint8)
    write = file.write(extent, tensor)
    read = file.read(extent, tensor, after=write)
    late = [write.join(), file.read(extent, tensor, after=write)][1]
    for transfer in (write, write, read, late):
        with pytest.raises(DiskError, match="writing"):
            transfer.wait()
    assert file.read_nbytes == 0


def cut(monkeypatch, call: str, nbytes: int) -> list[int]:
    """``os.call`` transfers at most this number of bytes per call."""
    real = getattr(os, call)
    offsets = []

    def short(fd, buffers, offset):
        offsets.append(offset)
        return real(fd, [buffers[0][:nbytes]], offset)

    monkeypatch.setattr(os, call, short)
    return offsets


@pytest.mark.parametrize("shift", [0, 64])
def test_short_reads_and_writes_are_continued(file, monkeypatch, shift):
    source = torch.randint(0, 256, (NBYTES + 100 + shift,), dtype=torch.uint8)[shift:]
    extent, into = file.reserve(source.nbytes), torch.empty_like(source)
    writes = cut(monkeypatch, "pwritev", PAGE_NBYTES)
    reads = cut(monkeypatch, "preadv", PAGE_NBYTES)
    file.write(extent, source).wait()
    file.read(extent, into).wait()
    assert torch.equal(into, source)
    assert writes == reads == [PAGE_NBYTES * i for i in range(5)]


def test_a_short_call_inside_a_page_is_repeated_from_the_page(file, monkeypatch):
    real, offsets = os.pwritev, []

    def short(fd, buffers, offset):
        offsets.append(offset)
        done = real(fd, buffers, offset)
        return done if len(offsets) > 1 else PAGE_NBYTES + 512

    monkeypatch.setattr(os, "pwritev", short)
    file.direct = True
    extent = file.reserve(NBYTES)
    file.write(extent, torch.zeros(NBYTES, dtype=torch.uint8)).wait()
    assert offsets == [0, PAGE_NBYTES]


@pytest.mark.parametrize(
    ("call", "doing", "why"),
    [
        ("preadv", "reading", "unreadable page, preadv moved 0 bytes"),
        ("pwritev", "writing", "pwritev moved 0 bytes"),
    ],
)
def test_a_call_that_moves_nothing_is_an_error_with_numbers(file, monkeypatch, call, doing, why):
    extent, tensor = file.reserve(NBYTES), torch.zeros(NBYTES, dtype=torch.uint8)
    file.write(extent, tensor).wait()
    real = getattr(os, call)

    def stuck(fd, buffers, offset):
        return real(fd, [buffers[0][:PAGE_NBYTES]], offset) if offset < PAGE_NBYTES else 0

    monkeypatch.setattr(os, call, stuck)
    transfer = file.read(extent, tensor) if call == "preadv" else file.write(extent, tensor)
    with pytest.raises(DiskError) as caught:
        transfer.wait()
    assert str(caught.value) == lost(doing, NBYTES, 0, file, why, done=PAGE_NBYTES)


def test_a_block_that_fails_for_any_other_reason_reaches_who_waits(file, monkeypatch):
    def broken(fd, buffers, offset):
        raise MemoryError("none left")

    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(DiskError, match="none left"):
        file.write(file.reserve(10), torch.zeros(10, dtype=torch.uint8)).wait()
    monkeypatch.undo()
    file.write(file.reserve(10), torch.zeros(10, dtype=torch.uint8)).wait()  # threads live on


def test_a_directory_that_is_removed_does_not_stop_the_run(tmp_path):
    file = SwapFile(tmp_path / "swap")
    pager = Pager(file, [NBYTES] * 3)
    pages = pages_of(pager, 5)
    shutil.rmtree(tmp_path / "swap")
    pages.append(pager.page(NBYTES))
    with pager.open(pages[5], changed=True) as page:
        page.bytes.fill_(5)
    assert numbers(pager, pages) == [0, 1, 2, 3, 4, 5]
    pager.close()
    file.close()


# ---------------------------------------------------------------- a killed process

SWAPPER = """
import sys
from zeroshard.offload.swap_file import SwapFile
from zeroshard.offload.pager import Pager

file = SwapFile(sys.argv[1])
pager = Pager(file, [1 << 20] * 5)
pages = [pager.page(1 << 20) for _ in range(10)]
for page in pager.walk(pages):
    page.bytes.fill_(1)
print(file.written_nbytes, flush=True)
while True:
    for page in pager.walk(pages, drain=False):
        page.bytes.add_(1)
"""


def swap_until_killed(place: Path) -> tuple[int, int]:
    """Kill a process that swaps. Returns the bytes that it had written, and the disk space that it
    used."""
    before = free(place)
    command = [sys.executable, "-c", SWAPPER, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as swapper:
        assert swapper.stdout is not None
        written = int(swapper.stdout.readline())
        taken = before - free(place)
        swapper.send_signal(signal.SIGKILL)
        swapper.stdout.read()
        assert swapper.wait(60) == -signal.SIGKILL
    return written, taken


def test_a_killed_process_leaves_no_file(tmp_path):
    written, _ = swap_until_killed(tmp_path)
    assert written == 10 << 20
    assert os.listdir(tmp_path) == []


def test_a_killed_process_gives_the_disk_its_bytes_back(small_disk):
    before = free(small_disk)
    _, taken = swap_until_killed(small_disk)
    assert taken >= 10 << 20
    assert os.listdir(small_disk) == []
    assert free(small_disk) == before
