"""A gradient that is stored on disk is read back unchanged, and its memory is freed meanwhile."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.errors import DiskError
from zeroshard.offload.grad_store import WRITES_IN_FLIGHT, DiskGradStore, WritesInFlight
from zeroshard.offload.swap_file import PAGE_NBYTES, SwapFile

NUMEL = 3 * PAGE_NBYTES + 64
NBYTES = 2 * NUMEL


@pytest.fixture
def file(tmp_path) -> Iterator[SwapFile]:
    made = SwapFile(tmp_path)
    yield made
    made.close()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def grads(file: SwapFile, ledger: Ledger, count: int) -> list[DiskGradStore]:
    saves = WritesInFlight()
    return [
        DiskGradStore(file, NBYTES, saves, ledger=ledger, name=f"unit {i}") for i in range(count)
    ]


def values(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_memory(ledger: Ledger) -> int:
    return ledger.nbytes("scratch", Tier.HOST)


@pytest.fixture
def gate(file, monkeypatch) -> threading.Event:
    """Writes wait until it is set."""
    opened = threading.Event()
    real = os.pwritev

    def held(fd: int, buffers: list, offset: int) -> int:
        assert opened.wait(20)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", held)
    return opened


def test_it_comes_back_as_it_went_and_takes_no_memory_meanwhile(file, ledger):
    (grad,) = grads(file, ledger, 1)
    grad.write(values(1))
    assert ledger.nbytes("gradients", Tier.DISK) == NBYTES
    grad.finish()
    assert in_memory(ledger) == 0
    assert torch.equal(grad.acquire(), values(1))
    assert in_memory(ledger) >= NBYTES
    grad.free()
    assert (in_memory(ledger), ledger.nbytes("gradients", Tier.DISK)) == (0, 0)
    assert (file.written_nbytes, file.read_nbytes) == (file.reserved_nbytes, file.reserved_nbytes)


def test_a_reader_leaves_it_where_it_is(file, ledger):
    (grad,) = grads(file, ledger, 1)
    grad.write(values(1))
    grad.finish()
    for _ in range(2):
        assert torch.equal(grad.peek(), values(1))
        assert in_memory(ledger) == 0
    assert ledger.nbytes("gradients", Tier.DISK) == NBYTES


def test_one_on_its_way_out_is_not_read_back(file, ledger, gate):
    (grad,) = grads(file, ledger, 1)
    grad.write(values(1))
    grad.prefetch()
    assert not gate.is_set()
    gate.set()
    assert torch.equal(grad.acquire(), values(1))
    assert file.read_nbytes == 0


def test_it_is_writable_only_when_its_write_has_ended(file, ledger, gate):
    """A value that is written into it then differs from the file."""
    (grad,) = grads(file, ledger, 1)
    grad.write(values(1))
    opener = threading.Timer(0.2, gate.set)
    opener.start()
    grad.acquire().zero_()
    assert file.written_nbytes == file.reserved_nbytes
    opener.join()


def test_a_new_gradient_waits_for_the_write_of_the_last(file, ledger, gate):
    """Otherwise the file would contain parts of both."""
    (grad,) = grads(file, ledger, 1)
    grad.write(values(1))
    opener = threading.Timer(0.2, gate.set)
    opener.start()
    grad.write(values(2))
    assert file.written_nbytes >= file.reserved_nbytes
    grad.finish()
    assert torch.equal(grad.peek(), values(2))
    opener.join()


def test_a_few_writes_are_on_their_way_and_the_next_waits(file, ledger, gate):
    one, *others = grads(file, ledger, WRITES_IN_FLIGHT + 1)
    for grad in (one, *others[:-1]):
        grad.write(values(1))
    assert in_memory(ledger) == WRITES_IN_FLIGHT * NBYTES
    opener = threading.Timer(0.2, gate.set)
    opener.start()
    others[-1].write(values(1))
    assert gate.is_set()
    assert in_memory(ledger) == WRITES_IN_FLIGHT * NBYTES
    opener.join()


def test_a_sum_wider_than_planned_takes_its_own_place(file, ledger):
    first, second = grads(file, ledger, 2)
    for wide in (values(1, torch.float32), values(3, torch.float32)):
        first.write(wide)
        second.write(values(2))
        first.finish()
        second.finish()
        assert torch.equal(first.peek(), wide)
        assert torch.equal(second.peek(), values(2))
    pages = -(-NBYTES // PAGE_NBYTES), -(-2 * NBYTES // PAGE_NBYTES)
    assert file.reserved_nbytes == (2 * pages[0] + pages[1]) * PAGE_NBYTES


def test_a_gradient_that_could_not_be_written_is_never_shown(file, ledger, monkeypatch):
    (grad,) = grads(file, ledger, 1)
    with monkeypatch.context() as patch:
        fail(patch, "pwritev")
        grad.write(values(1))
        for use in (grad.finish, grad.acquire, grad.peek):
            with pytest.raises(DiskError, match=r"writing \d+ bytes at offset 0 of the swap file"):
                use()
    grad.write(values(2))  # the disk works again, and later writes succeed
    grad.finish()
    assert torch.equal(grad.acquire(), values(2))


def test_a_failed_write_is_heard_of_when_its_place_is_needed(file, ledger, monkeypatch):
    one, *others = grads(file, ledger, WRITES_IN_FLIGHT + 1)
    with monkeypatch.context() as patch:
        fail(patch, "pwritev")
        one.write(values(1))
        for grad in others[:-1]:
            grad.write(values(1))
        with pytest.raises(DiskError, match="writing"):
            others[-1].write(values(1))
    for grad in (one, *others):
        grad.free()
    assert in_memory(ledger) == 0


def test_what_a_failed_read_left_is_never_shown(file, ledger, monkeypatch):
    (grad,) = grads(file, ledger, 1)
    grad.write(values(1))
    grad.finish()
    with monkeypatch.context() as patch:
        fail(patch, "preadv")
        for use in (grad.acquire, grad.peek):
            with pytest.raises(DiskError, match=r"reading \d+ bytes at offset 0 of the swap file"):
                use()
        assert in_memory(ledger) == 0
    assert torch.equal(grad.acquire(), values(1))


def fail(patch: pytest.MonkeyPatch, call: str) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    patch.setattr(os, call, failing)


def test_one_that_nobody_needs_gives_its_memory_back_although_it_moves(file, ledger, gate):
    (grad,) = grads(file, ledger, 1)
    grad.write(values(1))
    opener = threading.Timer(0.2, gate.set)
    opener.start()
    grad.free()
    assert in_memory(ledger) == 0
    assert file.written_nbytes == file.reserved_nbytes
    opener.join()
