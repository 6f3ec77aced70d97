"""The swap file returns the bytes that were written, from any memory, and frees everything."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import re
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zeroshard.core.files import filesystem_of
from zeroshard.errors import DiskError
from zeroshard.memory import storage
from zeroshard.offload import capacity_check, swap_file
from zeroshard.offload.swap_file import PAGE_NBYTES, Extent, SwapFile, aligned_bytes

BLOCK = 16 * PAGE_NBYTES  # small, so that a few pages are several blocks


def refuse(call: str, number: int, monkeypatch, *, when=lambda *args: True) -> None:
    """``os.call`` or ``fcntl.call`` fails with this errno for matching arguments."""
    module = fcntl if call == "fcntl" else os
    real = getattr(module, call)

    def refusing(*args):
        if when(*args):
            raise OSError(number, os.strerror(number))
        return real(*args)

    monkeypatch.setattr(module, call, refusing)


@pytest.fixture(params=["direct", "buffered"])
def file(request, tmp_path, monkeypatch):
    if request.param == "buffered":
        asks = lambda fd, command, flags=0: command == fcntl.F_SETFL and flags & os.O_DIRECT  # noqa: E731
        refuse("fcntl", errno.EINVAL, monkeypatch, when=asks)
    made = SwapFile(tmp_path, block_nbytes=BLOCK)
    if request.param == "buffered":
        assert not made.direct
    yield made
    made.close()


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def memory(nbytes: int, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor ``shift`` bytes after a page, and all the memory around it."""
    around = aligned_bytes(nbytes + 3 * PAGE_NBYTES)
    return around[PAGE_NBYTES + shift :][:nbytes], around


SIZES = (0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 4160, (4 << 20) + 5)


@pytest.mark.parametrize("shift", [0, 1, 64, 512])
@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_come_back_and_nothing_beside_them_changes(file, nbytes, shift):
    neighbours = [file.reserve(PAGE_NBYTES), file.reserve(nbytes), file.reserve(PAGE_NBYTES)]
    before, extent, behind = neighbours
    for seed, neighbour in ((1, before), (2, behind)):
        file.write(neighbour, pattern(PAGE_NBYTES, seed)).wait()
    source, _ = memory(nbytes, shift)
    source.copy_(pattern(nbytes, 3))
    file.write(extent, source).wait()
    into, around = memory(nbytes, shift)
    around.fill_(7)
    file.read(extent, into).wait()
    assert torch.equal(into, pattern(nbytes, 3))
    assert int((around != 7).sum()) <= nbytes
    assert (around[: PAGE_NBYTES + shift] == 7).all()
    assert (around[PAGE_NBYTES + shift + nbytes :] == 7).all()
    for seed, neighbour in ((1, before), (2, behind)):
        kept = torch.empty(PAGE_NBYTES, dtype=torch.uint8)
        file.read(neighbour, kept).wait()
        assert torch.equal(kept, pattern(PAGE_NBYTES, seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool])
def test_any_dtype_and_shape_goes_as_it_is(file, dtype):
    source = torch.randn(33, 129).to(dtype)
    extent = file.reserve(source.nbytes)
    into = torch.empty_like(source)
    file.write(extent, source).wait()
    file.read(extent, into).wait()
    assert torch.equal(into, source)


def test_a_part_can_be_read_and_written(file):
    extent = file.reserve(3 * BLOCK)
    file.write(extent, pattern(3 * BLOCK, 1)).wait()
    file.write(extent, pattern(3 * BLOCK, 2), nbytes=BLOCK).wait()
    into = torch.zeros(3 * BLOCK, dtype=torch.uint8)
    file.read(extent, into, nbytes=2 * BLOCK).wait()
    expected = torch.cat([pattern(3 * BLOCK, 2)[:BLOCK], pattern(3 * BLOCK, 1)[BLOCK : 2 * BLOCK]])
    assert torch.equal(into[: 2 * BLOCK], expected)
    assert not into[2 * BLOCK :].any()


def test_direct_calls_use_whole_pages_only(tmp_path, monkeypatch):
    file = SwapFile(tmp_path, block_nbytes=BLOCK)
    file.direct = True
    calls = []

    def moves(name):
        real = getattr(os, name)

        def call(fd, buffers, offset):
            array = torch.frombuffer(buffers[0], dtype=torch.uint8)
            calls.append((array.data_ptr(), len(buffers[0]), offset))
            return real(fd, buffers, offset)

        return call

    monkeypatch.setattr(os, "preadv", moves("preadv"))
    monkeypatch.setattr(os, "pwritev", moves("pwritev"))
    extent = file.reserve(2 * BLOCK + 5)
    for shift in (0, 64):
        tensor, _ = memory(2 * BLOCK + 5, shift)
        file.write(extent, tensor).wait()
        file.read(extent, tensor).wait()
    file.close()
    assert calls
    assert [call for call in calls if any(number % PAGE_NBYTES for number in call)] == []


def test_aligned_memory_is_moved_without_a_copy(tmp_path, monkeypatch):
    file = SwapFile(tmp_path, block_nbytes=BLOCK)
    monkeypatch.setattr("zeroshard.offload.swap_file.ctypes.memmove", None)
    extent, tensor = file.reserve(2 * BLOCK), aligned_bytes(2 * BLOCK)
    file.write(extent, tensor).wait()
    file.read(extent, tensor).wait()
    assert file.bounce_nbytes == 0
    file.close()


def test_memory_between_is_made_once_per_thread(tmp_path):
    file = SwapFile(tmp_path, threads=1)
    file.direct = True
    extent, (tensor, _) = file.reserve(BLOCK), memory(BLOCK, 64)
    for _ in range(3):
        file.write(extent, tensor).wait()
    assert file.bounce_nbytes == 2 << 20
    file.close()


def test_a_block_larger_than_the_memory_between_moves_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(swap_file, "BOUNCE_NBYTES", 2 * PAGE_NBYTES)
    file = SwapFile(tmp_path, block_nbytes=BLOCK)
    file.direct = True
    nbytes = 5 * PAGE_NBYTES + 3
    extent, (tensor, _), (into, _) = file.reserve(nbytes), memory(nbytes, 64), memory(nbytes, 64)
    tensor.copy_(pattern(nbytes))
    file.write(extent, tensor).wait()
    file.read(extent, into).wait()
    assert torch.equal(into, pattern(nbytes))
    file.close()


def test_extents_are_whole_pages_one_after_the_other(file):
    extents = [file.reserve(nbytes) for nbytes in (1, 0, 4096, 5000)]
    assert extents == [Extent(0, 4096), Extent(4096, 0), Extent(4096, 4096), Extent(8192, 8192)]
    assert file.reserved_nbytes == 16384


def test_reserved_bytes_are_taken_from_the_disk_at_once(tmp_path):
    file = SwapFile(tmp_path)
    file.reserve(8 << 20)
    assert os.fstat(file._fd).st_blocks * 512 >= 8 << 20
    file.close()


def test_a_file_system_without_reservation_gets_zeros(tmp_path, monkeypatch):
    refuse("posix_fallocate", errno.EOPNOTSUPP, monkeypatch)
    file = SwapFile(tmp_path)
    file.reserve((8 << 20) + 1)
    assert os.fstat(file._fd).st_blocks * 512 >= 8 << 20
    file.close()


def test_moved_bytes_are_counted_with_their_padding(tmp_path):
    file = SwapFile(tmp_path, block_nbytes=BLOCK)
    file.direct = True
    extent = file.reserve(BLOCK + 1)
    file.write(extent, aligned_bytes(BLOCK + 1)).wait()
    file.read(extent, aligned_bytes(BLOCK)).wait()
    file.close()
    assert (file.written_nbytes, file.read_nbytes) == (BLOCK + PAGE_NBYTES, BLOCK)


def test_a_storage_that_was_read_into_can_still_be_freed(file):
    flat = torch.empty(10_000)
    extent = file.reserve(flat.nbytes)
    file.write(extent, flat).wait()
    storage.release(flat)
    storage.allocate(flat)
    file.read(extent, flat).wait()
    storage.release(flat)
    assert flat.untyped_storage().size() == 0


def test_a_tensor_whose_storage_is_released_is_refused(file):
    flat = torch.empty(10_000)
    extent, part = file.reserve(flat.nbytes), flat[64:]
    storage.release(flat)
    for move in (file.read, file.write):
        with pytest.raises(AssertionError, match="its storage is released"):
            move(extent, part)


def test_many_transfers_at_once_do_not_mix(file):
    sources = [pattern(1000 * i + 1, i) for i in range(50)]
    extents = [file.reserve(source.nbytes) for source in sources]
    writes = [file.write(e, s) for e, s in zip(extents, sources, strict=True)]
    into = [torch.empty_like(s) for s in sources]
    reads = [file.read(e, t, after=w) for e, t, w in zip(extents, into, writes, strict=True)]
    for read in reads:
        read.wait()
    assert all(torch.equal(a, b) for a, b in zip(into, sources, strict=True))


@pytest.fixture
def gate(monkeypatch):
    """Writes wait until the gate is set."""
    opened = threading.Event()
    real = os.pwritev

    def pwritev(fd, buffers, offset):
        assert opened.wait(60)
        return real(fd, buffers, offset)

    def close(file):
        monkeypatch.setattr(os, "pwritev", pwritev)
        return opened

    return close


def test_a_follower_starts_when_its_leader_has_ended(tmp_path, gate):
    file = SwapFile(tmp_path)
    extent, into = file.reserve(BLOCK), torch.zeros(BLOCK, dtype=torch.uint8)
    opened = gate(file)
    write = file.write(extent, pattern(BLOCK))
    read = file.read(extent, into, after=write)
    assert not write.done
    assert not read.done
    opened.set()
    read.wait()
    assert write.done
    assert torch.equal(into, pattern(BLOCK))
    file.close()


def test_close_waits_for_transfers_and_their_followers(tmp_path, gate):
    file = SwapFile(tmp_path)
    extent, into = file.reserve(BLOCK), torch.zeros(BLOCK, dtype=torch.uint8)
    opened = gate(file)
    read = file.read(extent, into, after=file.write(extent, pattern(BLOCK)))
    closing = threading.Thread(target=file.close)
    closing.start()
    opened.set()
    closing.join()
    assert read.done
    assert torch.equal(into, pattern(BLOCK))


def open_files(directory) -> list[str]:
    links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return [t for t in map(_target, links) if t.startswith(str(directory))]


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # the descriptor of the listing itself
        return ""


def disk_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("zeroshard-disk")]


def test_threads_live_from_the_first_transfer_to_the_close(tmp_path):
    file = SwapFile(tmp_path, threads=3)
    extent = file.reserve(10)
    assert disk_threads() == []
    file.write(extent, pattern(10)).wait()
    assert disk_threads() == [f"zeroshard-disk-{i}" for i in range(3)]
    file.close()
    file.close()
    assert disk_threads() == []
    assert open_files(tmp_path) == []


def test_a_file_that_nobody_closed_is_given_back_with_its_last_user(tmp_path):
    file = SwapFile(tmp_path)
    transfer = file.write(file.reserve(BLOCK), pattern(BLOCK))
    transfer.wait()
    threads = list(file._threads)
    del file, transfer
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert disk_threads() == []
    assert open_files(tmp_path) == []


def test_a_transfer_ends_although_its_file_was_dropped(tmp_path, gate):
    file = SwapFile(tmp_path)
    opened = gate(file)
    transfer = file.write(file.reserve(BLOCK), pattern(BLOCK))
    del file
    gc.collect()
    opened.set()
    transfer.wait()
    assert transfer.done
    del transfer
    end_s = time.monotonic() + 10
    while open_files(
        tmp_path
    ):  # transfer and file are a cycle; the thread drops them a moment later
        assert time.monotonic() < end_s
        gc.collect()
        time.sleep(0.01)


def test_a_transfer_keeps_its_memory_only_while_it_moves(tmp_path, gate):
    file = SwapFile(tmp_path)
    source = pattern(BLOCK)
    memory = weakref.ref(source)
    opened = gate(file)
    transfer = file.write(file.reserve(BLOCK), source)
    del source
    assert memory() is not None
    opened.set()
    transfer.wait()
    assert memory() is None
    file.close()


def test_a_closed_file_says_so(tmp_path):
    file = SwapFile(tmp_path)
    extent = file.reserve(10)
    file.close()
    for use in (lambda: file.reserve(1), lambda: file.write(extent, pattern(10)), file.flush):
        with pytest.raises(DiskError, match="is closed; no state is stored in it any more"):
            use()


def test_a_forked_process_is_told_that_the_file_is_not_its_own(tmp_path):
    file = SwapFile(tmp_path)
    extent = file.reserve(10)
    file.write(extent, pattern(10)).wait()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        text = "no error"
        try:
            file.write(extent, pattern(10))
        except DiskError as error:
            text = str(error)
        file.close()
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert f"belongs to process {os.getpid()}, and process {child}" in text
    file.read(extent, pattern(10)).wait()
    file.close()


# ---------------------------------------------------------------- making the file


def test_no_directory_lists_the_file(tmp_path):
    file = SwapFile(tmp_path)
    file.write(file.reserve(10), pattern(10)).wait()
    assert os.listdir(tmp_path) == []
    assert file.path.startswith(str(tmp_path))
    file.close()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR])
def test_without_unnamed_files_the_name_is_removed_at_once(tmp_path, monkeypatch, number):
    unnamed = lambda path, flags, mode=0: flags & os.O_TMPFILE == os.O_TMPFILE  # noqa: E731
    refuse("open", number, monkeypatch, when=unnamed)
    file = SwapFile(tmp_path)
    into, extent = torch.empty(10, dtype=torch.uint8), file.reserve(10)
    file.write(extent, pattern(10)).wait()
    file.read(extent, into).wait()
    assert torch.equal(into, pattern(10))
    assert os.listdir(tmp_path) == []
    assert os.path.basename(file.path).startswith(f".zeroshard-{os.getpid()}-")
    file.close()


def test_the_last_component_of_the_directory_is_made(tmp_path):
    SwapFile(tmp_path / "swap").close()
    assert (tmp_path / "swap").is_dir()


def test_a_path_whose_parent_is_missing_is_refused(tmp_path):
    wanted = tmp_path / "no" / "swap"
    with pytest.raises(DiskError) as caught:
        SwapFile(wanted)
    assert str(caught.value) == (
        f"no swap file can be created in {wanted}: No such file or directory (ENOENT). Its parent "
        f"{tmp_path / 'no'} does not exist either. Give as nvme_path a directory on a local disk "
        "that this user may write to."
    )
    assert not (tmp_path / "no").exists()


def test_a_path_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(DiskError, match=r"Not a directory \(ENOTDIR\)"):
        SwapFile(path)
    assert path.read_text() == "x"


def test_a_directory_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    refuse("open", errno.EACCES, monkeypatch, when=lambda path, *_: path == str(tmp_path))
    with pytest.raises(DiskError, match=r"Permission denied \(EACCES\)"):
        SwapFile(tmp_path)


def test_a_disk_without_room_for_one_page_is_refused(tmp_path, monkeypatch):
    refuse("pwritev", errno.ENOSPC, monkeypatch)
    with pytest.raises(DiskError, match=r"not its first 4096 bytes: No space left on device"):
        SwapFile(tmp_path)
    assert open_files(tmp_path) == []


def test_direct_transfers_refused_at_the_first_one_are_given_up(tmp_path, monkeypatch):
    is_direct = lambda fd, *_: fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT  # noqa: E731
    refuse("pwritev", errno.EINVAL, monkeypatch, when=is_direct)
    file = SwapFile(tmp_path)
    assert not file.direct
    file.write(file.reserve(5), pattern(5)).wait()
    assert file.written_nbytes == 5
    file.close()


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5000])
def test_aligned_bytes_start_on_a_page_and_are_zero(nbytes):
    tensor = aligned_bytes(nbytes)
    assert tensor.shape == (nbytes,)
    assert tensor.dtype == torch.uint8
    assert tensor.data_ptr() % PAGE_NBYTES == 0
    assert not tensor.any()


def test_aligned_bytes_are_freed_with_the_last_view():
    def mapped_nbytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_NBYTES

    before = mapped_nbytes()
    view = aligned_bytes(256 << 20)[5:10]
    assert mapped_nbytes() >= before + (256 << 20)
    del view
    assert mapped_nbytes() < before + (128 << 20)


# ---------------------------------------------------------------- will it serve?


def test_speed_is_measured_and_leaves_nothing(tmp_path):
    speed = capacity_check.measure(tmp_path, 4 << 20, 1 << 20)
    assert speed.read_Bps > 0
    assert speed.write_Bps > 0
    assert os.listdir(tmp_path) == []
    assert ("O_DIRECT)" in str(speed)) == speed.direct


def test_a_slow_disk_is_measured_on_a_few_bytes(tmp_path, monkeypatch):
    seconds = iter(range(1000))
    monkeypatch.setattr(capacity_check.time, "perf_counter", lambda: float(next(seconds)))
    moved = []
    real = capacity_check.SwapFile.write

    def write(self, extent, source, *, nbytes):
        moved.append(nbytes)
        return real(self, extent, source, nbytes=nbytes)

    monkeypatch.setattr(capacity_check.SwapFile, "write", write)
    capacity_check.measure(tmp_path, 64 << 20, 1 << 20)
    assert sum(moved) == 1 << 20  # one round


def test_the_round_that_counts_is_the_largest(tmp_path, monkeypatch):
    rounds = [0]
    write, flush = capacity_check.SwapFile.write, capacity_check.SwapFile.flush

    def counting(self, extent, source, *, nbytes):
        rounds[-1] += nbytes >> 20
        return write(self, extent, source, nbytes=nbytes)

    monkeypatch.setattr(capacity_check.SwapFile, "write", counting)
    monkeypatch.setattr(
        capacity_check.SwapFile, "flush", lambda self: (flush(self), rounds.append(0))
    )
    monkeypatch.setattr(capacity_check.time, "perf_counter", lambda: 0.0)
    capacity_check.measure(tmp_path, 8 << 20, 1 << 20)
    assert rounds == [1, 2, 5, 0]


def test_reads_and_writes_share_the_disk_and_so_do_ranks(tmp_path, monkeypatch):
    speed = capacity_check.Speed(read_Bps=2e9, write_Bps=1e9, direct=True)
    monkeypatch.setattr(capacity_check, "measure", lambda *_: speed)
    demand = SimpleNamespace(traffic=lambda _kind: (4_000_000_000, 3_000_000_000))
    monkeypatch.setattr(capacity_check, "_on_disk", lambda *_: 8_000_000_000)
    for ranks in (1, 2):
        line, *_ = capacity_check._forecast(str(tmp_path), ["optimizer"], [demand] * ranks)
        assert line.endswith(f"; about {5.0 * ranks} s of transfers per step")


def test_what_does_not_fit_is_refused_with_both_numbers(tmp_path):
    capacity_check.check_disk(tmp_path, 1_000_000_000, 1_000_000_000)
    with pytest.raises(DiskError) as caught:
        capacity_check.check_disk(tmp_path, 1_000_000_001, 1_000_000_000)
    assert str(caught.value) == (
        f"{tmp_path} has too little space for the training state: the ranks of this host need "
        "1000000001 bytes (1.00 GB) and 1000000000 (1.00 GB) are free, 1 too few. Free space, "
        "name another nvme_path, store less on disk (max_in_cpu, or device 'cpu'), or use more "
        "hosts."
    )


def test_a_directory_that_is_yet_to_be_made_is_checked_by_its_parent(tmp_path):
    assert capacity_check.free_below(tmp_path / "swap") > 0
    with pytest.raises(DiskError, match="No such file or directory"):
        capacity_check.free_below(tmp_path / "no" / "swap")


MOUNTS = r"""/dev/vda / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
srv:/x /home nfs4 rw 0 0
/dev/vdb /home/fast\040disk xfs rw 0 0
none /mnt tmpfs rw 0 0
/dev/vdc /mnt btrfs rw 0 0
"""


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("/data", "ext4"),
        ("/dev/shm", "tmpfs"),
        ("/dev/shm/swap", "tmpfs"),
        ("/dev/shmoo", "ext4"),
        ("/home/me", "nfs4"),
        ("/home/fast disk/swap", "xfs"),
        ("/mnt/a", "btrfs"),
    ],
)
def test_the_deepest_and_last_mount_holds_a_directory(directory, kind):
    assert filesystem_of(directory, MOUNTS) == kind


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tmpfs", "stored in this host's memory"),
        ("nfs4", r"network file system \(nfs4\)"),
        ("fuse.sshfs", r"network file system \(fuse.sshfs\)"),
        ("ext4", None),
        ("overlay", None),
    ],
)
def test_memory_and_networks_are_warned_about(tmp_path, monkeypatch, kind, words):
    monkeypatch.setattr(capacity_check, "filesystem_of", lambda directory, mounts: kind)
    text = capacity_check.warning(tmp_path)
    if words is None:
        assert text is None
    else:
        assert text is not None
        assert re.search(words, text)
