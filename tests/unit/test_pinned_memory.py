"""The arena is exact, aligned and shared, and it is registered exactly while it is in use."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest
import torch

from zeroshard.device import pinned
from zeroshard.device.pinned import HostArena, slot_nbytes

PAGE = 4096


class FakeCudart:
    """Records calls; ``code`` is what ``cudaHostRegister`` answers."""

    def __init__(self, code: int = 0, goodbye: int = 0) -> None:
        self.code = code
        self.goodbye = goodbye
        self.calls: list[tuple[object, ...]] = []

    def cudaHostRegister(self, *args: int) -> int:
        self.calls.append(("register", *args))
        return self.code

    def cudaHostUnregister(self, *args: int) -> int:
        self.calls.append(("unregister", *args))
        return self.goodbye

    def cudaGetErrorString(self, code: int) -> str:
        return f"reason {code}"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Pretend that there is a GPU whose runtime answers like ``fake``."""

    def pretend(fake: FakeCudart) -> FakeCudart:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
        monkeypatch.setattr(pinned, "forget_error", lambda: fake.calls.append(("forget",)))
        return fake

    return pretend


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.getLogger("zeroshard"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="zeroshard")
    return lambda: [record.getMessage() for record in caplog.records]


# Memory


def test_pieces_are_zero_aligned_and_apart() -> None:
    wanted = [(3, torch.float32), (100, torch.bfloat16), (1, torch.float64), (65, torch.uint8)]
    arena = HostArena(sum(slot_nbytes(*piece) for piece in wanted), pin=False)
    pieces = [arena.take(*piece) for piece in wanted]
    assert [(piece.numel(), piece.dtype) for piece in pieces] == wanted
    assert all(piece.data_ptr() % 64 == 0 and not piece.any() for piece in pieces)
    for value, piece in enumerate(pieces, 1):
        piece.fill_(value)
    assert [piece.unique().tolist() for piece in pieces] == [[1], [2], [3], [4]]


def test_the_size_is_rounded_to_pages_and_to_nothing_else() -> None:
    assert [HostArena(n, pin=False).nbytes for n in (0, 1, PAGE, PAGE + 1, 3 * PAGE)] == [
        *(0, PAGE, PAGE, 2 * PAGE, 3 * PAGE)
    ]


def test_the_whole_arena_can_be_taken() -> None:
    arena = HostArena(2 * PAGE, pin=False)
    assert arena.take(2 * PAGE, torch.uint8).numel() == arena.used_nbytes == 2 * PAGE


def test_taking_more_than_there_is_is_our_own_mistake() -> None:
    arena = HostArena(PAGE, pin=False)
    arena.take(PAGE - 64, torch.uint8)
    with pytest.raises(AssertionError, match="128 bytes asked for, 64 of 4096 left"):
        arena.take(65, torch.uint8)


def test_an_empty_piece_costs_nothing() -> None:
    arena = HostArena(0, pin=False)
    assert arena.take(0, torch.float32).shape == (0,)


def test_a_forked_child_does_not_copy_the_arena() -> None:
    """The kernel marks a shared mapping with an s where a private one has a p."""
    arena = HostArena(PAGE, pin=False)
    address = f"{arena.take(1, torch.uint8).data_ptr():x}-"
    lines = Path("/proc/self/maps").read_text().splitlines()
    (flags,) = (line.split()[1] for line in lines if line.startswith(address))
    assert flags == "rw-s"


def test_tensors_outlive_a_closed_arena() -> None:
    arena = HostArena(PAGE, pin=False)
    piece = arena.take(8, torch.float32)
    arena.close()
    del arena
    gc.collect()
    assert piece.fill_(3).sum() == 24


def test_a_closed_arena_hands_out_nothing() -> None:
    arena = HostArena(PAGE, pin=False)
    arena.close()
    with pytest.raises(AssertionError, match="closed"):
        arena.take(1, torch.uint8)


# Page-locking


def test_without_cuda_nothing_is_locked(monkeypatch: pytest.MonkeyPatch, warnings_of) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arena = HostArena(PAGE, pin=True)
    assert not arena.is_pinned
    assert arena.take(4, torch.float32).sum() == 0
    assert warnings_of() == []


def test_the_whole_arena_is_registered_once_and_given_back_once(install) -> None:
    fake = install(FakeCudart())
    arena = HostArena(PAGE + 1, pin=True)
    address = arena.take(1, torch.float32).data_ptr()
    arena.take(1, torch.float32)
    assert arena.is_pinned
    assert fake.calls == [("register", address, 2 * PAGE, 0)]
    arena.close()
    assert not arena.is_pinned
    assert fake.calls[1:] == [("unregister", address)]
    arena.close()
    del arena
    gc.collect()
    assert fake.calls[1:] == [("unregister", address)]


def test_a_forgotten_arena_is_given_back_too(install) -> None:
    fake = install(FakeCudart())
    arena = HostArena(PAGE, pin=True)
    del arena
    gc.collect()
    assert [call[0] for call in fake.calls] == ["register", "unregister"]


def test_an_arena_that_shall_not_be_pinned_is_not(install) -> None:
    fake = install(FakeCudart())
    arena = HostArena(PAGE, pin=False)
    arena.close()
    assert fake.calls == []
    assert not arena.is_pinned


def test_nothing_is_registered_for_no_bytes(install) -> None:
    fake = install(FakeCudart())
    HostArena(0, pin=True).close()
    assert fake.calls == []


def test_a_driver_that_refuses_costs_a_warning_not_the_run(install, warnings_of) -> None:
    fake = install(FakeCudart(code=2))
    arena = HostArena(PAGE, pin=True)
    assert not arena.is_pinned
    assert arena.take(4, torch.float32).sum() == 0
    arena.close()
    assert [call[0] for call in fake.calls] == ["register", "forget"]
    (warning,) = warnings_of()
    assert "cudaHostRegister gave error 2 (reason 2)" in warning
    assert "ulimit -l unlimited" in warning


def test_a_failure_to_give_back_is_a_warning(install, warnings_of) -> None:
    fake = install(FakeCudart(goodbye=713))
    HostArena(PAGE, pin=True).close()
    assert fake.calls[-1] == ("forget",)
    assert warnings_of() == ["cudaHostUnregister gave error 713 for the host arena"]
