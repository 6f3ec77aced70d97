"""Every page passes through its slot completely and in order, and never overwrites another page."""

from __future__ import annotations

import contextlib
import os
import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.offload.pager import Pager, TransferTimes
from zeroshard.offload.swap_file import PAGE_NBYTES, SwapFile, Transfer

NBYTES = 3 * PAGE_NBYTES + 100


@pytest.fixture
def file(tmp_path):
    made = SwapFile(tmp_path, block_nbytes=PAGE_NBYTES)
    yield made
    made.close()


@pytest.fixture
def pager(file):
    made = Pager(file, [NBYTES] * 3)
    yield made
    made.close()


def filled(pager: Pager, count: int, nbytes: int = NBYTES) -> list:
    """Pages that are filled with their index."""
    pages = [pager.page(nbytes) for _ in range(count)]
    for number, page in enumerate(pager.walk(pages)):
        page.bytes.fill_(number)
    return pages


def contents(pager: Pager, pages: list) -> list[int]:
    """The number in each page, read anew; -1 where a page is torn."""
    found = []
    for page in pager.walk(pages):
        page.changed = False
        first = int(page.bytes[0])
        found.append(first if (page.bytes == first).all() else -1)
    return found


class Calls:
    """Records system calls in order. Writes wait until they are released."""

    def __init__(self, monkeypatch) -> None:
        self.seen: list[tuple[str, int]] = []
        self.go = threading.Event()
        self.go.set()
        self._read, self._write = os.preadv, os.pwritev
        monkeypatch.setattr(os, "preadv", self.preadv)
        monkeypatch.setattr(os, "pwritev", self.pwritev)

    def preadv(self, fd, buffers, offset):
        self.seen.append(("read", offset))
        return self._read(fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):
        assert self.go.wait(60)
        done = self._write(fd, buffers, offset)
        self.seen.append(("write", offset))
        return done

    def nbytes(self, kind: str) -> int:
        return PAGE_NBYTES * sum(1 for seen, _ in self.seen if seen == kind)


# ---------------------------------------------------------------- walking


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("read_ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_changes_of_a_walk_are_found_by_the_next_one(file, slots, read_ahead, drain):
    pager = Pager(file, [NBYTES] * slots, read_ahead=read_ahead)
    pages = filled(pager, 11)
    for number, page in enumerate(pager.walk(pages, drain=drain)):
        assert (page.bytes == number).all()
        page.bytes.add_(100)
    assert contents(pager, pages) == [100 + i for i in range(11)]
    pager.close()


def test_pages_come_in_the_order_they_are_asked_for(pager):
    pages = filled(pager, 10)
    order = random.Random(1).sample(range(10), 10)
    assert contents(pager, [pages[i] for i in order]) == order
    assert contents(pager, [pages[0], pages[3], pages[6]]) == [0, 3, 6]  # all of one slot
    assert contents(pager, [pages[2], pages[2]]) == [2, 2]
    assert contents(pager, []) == []


def test_a_page_that_comes_twice_in_a_walk_shows_its_own_changes(pager):
    pages = filled(pager, 4)
    for page in pager.walk([pages[1], pages[1], pages[1]]):
        page.bytes.add_(10)
    assert contents(pager, pages) == [0, 31, 2, 3]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_sequence_of_walks_and_opens_equals_a_list_in_memory(tmp_path_factory, data):
    file = SwapFile(tmp_path_factory.mktemp("disk"), block_nbytes=PAGE_NBYTES)
    pager = Pager(
        file, [NBYTES] * data.draw(st.integers(1, 4)), read_ahead=data.draw(st.integers(0, 3))
    )
    model = list(range(data.draw(st.integers(1, 8))))
    pages = filled(pager, len(model))
    for _ in range(4):
        chosen = data.draw(st.lists(st.sampled_from(range(len(model))), max_size=8))
        leave_at = data.draw(st.integers(0, 8))
        with contextlib.closing(
            pager.walk([pages[i] for i in chosen], drain=data.draw(st.booleans()))
        ) as walk:
            for at, (i, page) in enumerate(zip(chosen, walk, strict=True)):
                assert (page.bytes == model[i]).all()
                page.bytes.add_(1)
                if at == leave_at:
                    break
                page.changed = data.draw(st.booleans())
                if page.changed:
                    model[i] += 1
        at = data.draw(st.sampled_from(range(len(model))))
        with pager.open(pages[at], changed=True) as page:
            assert (page.bytes == model[at]).all()
            page.bytes.fill_(model[at] + 7)
        model[at] += 7
    assert contents(pager, pages) == model
    pager.close()
    file.close()


def test_a_page_has_one_place_in_memory_for_ever(pager):
    pages = [pager.page(NBYTES) for _ in range(7)]
    places = [page.bytes.data_ptr() for page in pages]
    views = [page.bytes.view(torch.int32) for page in pages]
    for number, page in enumerate(pager.walk(pages)):
        views[number].fill_(number)
    for number, page in enumerate(pager.walk(pages)):
        assert page.bytes.data_ptr() == places[number]
        assert (views[number] == number).all()
    assert places[:3] * 2 == places[:6]
    assert all(place % PAGE_NBYTES == 0 for place in places)
    assert pager.slots_nbytes == 3 * 4 * PAGE_NBYTES


def test_reads_run_in_front_of_the_page_in_use(pager, monkeypatch):
    pages = filled(pager, 6)
    calls = Calls(monkeypatch)
    walk = pager.walk(pages)
    next(walk)
    for page in pages[1:3]:
        page._slot.read.wait()
    begun = {offset // (4 * PAGE_NBYTES) for kind, offset in calls.seen if kind == "read"}
    assert begun == {0, 1, 2}
    walk.close()


def test_writes_run_behind_the_page_in_use(file, monkeypatch):
    pager = Pager(file, [NBYTES] * 5)
    pages = filled(pager, 6)
    calls = Calls(monkeypatch)
    calls.go.clear()
    walk = pager.walk(pages)
    assert [int(next(walk).bytes[0]) for _ in range(3)] == [0, 1, 2]  # two writes wait
    assert calls.nbytes("write") == 0
    calls.go.set()
    assert [int(page.bytes[0]) for page in walk] == [3, 4, 5]
    assert calls.nbytes("write") == 6 * 4 * PAGE_NBYTES
    pager.close()


def test_a_slot_is_read_into_only_after_its_last_page_was_written(pager, monkeypatch):
    pages = filled(pager, 9)
    calls = Calls(monkeypatch)
    for page in pager.walk(pages):
        page.bytes.add_(1)
    place = {call: at for at, call in enumerate(calls.seen)}
    for earlier, later in zip(pages, pages[3:], strict=False):
        offsets = range(0, later.extent.nbytes, PAGE_NBYTES)
        written = max(place["write", earlier.extent.offset + at] for at in offsets)
        begun = min(place["read", later.extent.offset + at] for at in offsets)
        assert written < begun


def test_without_drain_the_last_writes_are_still_moving_when_the_walk_ends(pager, monkeypatch):
    pages = filled(pager, 2)
    calls = Calls(monkeypatch)
    calls.go.clear()
    for page in pager.walk(pages, drain=False):
        page.bytes.fill_(9)
    assert calls.nbytes("write") == 0
    calls.go.set()
    assert contents(pager, pages) == [9, 9]


def test_with_drain_all_writes_have_ended_with_the_walk(pager, monkeypatch):
    calls = Calls(monkeypatch)
    filled(pager, 5)
    assert calls.nbytes("write") == 5 * 4 * PAGE_NBYTES


# ---------------------------------------------------------------- what is written


def test_an_unchanged_page_is_not_written(pager):
    pages = filled(pager, 4)
    written = pager._file.written_nbytes
    for page in pager.walk(pages):
        page.bytes.fill_(77)
        page.changed = page is pages[2]
    assert pager._file.written_nbytes == written + 4 * PAGE_NBYTES
    assert contents(pager, pages) == [0, 1, 77, 3]


def test_only_the_filled_part_of_a_page_moves(pager):
    page = pager.page(NBYTES)
    with pager.open(page, changed=True):
        page.bytes.fill_(1)
        page.filled_nbytes = 2 * PAGE_NBYTES
    assert pager._file.written_nbytes == 2 * PAGE_NBYTES
    for _ in pager.walk([page]):
        page.changed = False
    assert pager._file.read_nbytes == 2 * PAGE_NBYTES
    assert (page.bytes[: 2 * PAGE_NBYTES] == 1).all()


def test_a_page_grows_to_the_whole_while_it_is_open(pager):
    page = pager.page(NBYTES)
    with pager.open(page, changed=True):
        page.bytes.fill_(1)
        page.filled_nbytes = 100
    for _ in pager.walk([page]):
        page.bytes.fill_(2)
        page.filled_nbytes = NBYTES
    page.bytes.zero_()
    assert contents(pager, [page]) == [2]
    assert page.filled_nbytes == NBYTES


def test_growth_that_is_not_written_is_taken_back(pager):
    page = pager.page(NBYTES)
    with pager.open(page, changed=True):
        page.filled_nbytes = 100
    with pager.open(page):
        page.filled_nbytes = NBYTES
    assert page.filled_nbytes == 100


def test_a_page_that_was_never_written_is_not_read(pager):
    pages = [pager.page(NBYTES) for _ in range(5)]
    for page in pager.walk(pages):
        page.changed = False
    assert pager._file.read_nbytes == 0
    assert {page.filled_nbytes for page in pages} == {0}


def test_a_first_write_takes_the_whole_page_if_nobody_says_less(pager):
    page = pager.page(NBYTES)
    with pager.open(page, changed=True):
        page.bytes.fill_(5)
    assert page.filled_nbytes == NBYTES
    assert contents(pager, [page]) == [5]


@pytest.mark.parametrize("changed", [True, False])
def test_an_open_page_is_written_on_leaving_if_it_was_to_change(pager, changed):
    pages = filled(pager, 4)
    with pager.open(pages[3], changed=changed) as page:
        assert page is pages[3]
        page.bytes.fill_(50)
    assert contents(pager, pages) == [0, 1, 2, 50 if changed else 3]


# ---------------------------------------------------------------- leaving early


class Stop(Exception):
    pass


def leave(pager, pages, at, how):
    """Fill pages with 90 and stop in the middle of one of them."""
    with contextlib.suppress(Stop):
        for number, page in enumerate(pager.walk(pages, drain=False)):
            page.bytes.fill_(90)
            if number == at:
                if how == "raise":
                    raise Stop
                break


@pytest.mark.parametrize("how", ["raise", "break"])
def test_a_consumer_that_leaves_early_leaves_the_rest_as_it_was(pager, how):
    pages = filled(pager, 8)
    leave(pager, pages, 3, how)
    assert [page.is_open for page in pages] == [False] * 8
    assert contents(pager, pages) == [90, 90, 90, 3, 4, 5, 6, 7]


def let_go_when_joined(calls: Calls, monkeypatch) -> None:
    """Writes wait until a thread waits for a transfer to end."""
    calls.go.clear()
    join = Transfer.join
    monkeypatch.setattr(Transfer, "join", lambda self: (calls.go.set(), join(self)))


def test_nothing_moves_any_more_when_a_consumer_has_left(file, monkeypatch):
    pager = Pager(file, [NBYTES] * 5)
    pages = filled(pager, 3)  # all reads are queued in front of the first write
    calls = Calls(monkeypatch)
    let_go_when_joined(calls, monkeypatch)
    leave(pager, pages, 2, "raise")
    still = [transfer for transfer in pager.timeline.transfers if not transfer.done]
    calls.go.set()
    assert still == []
    pager.close()


def test_an_interrupted_open_leaves_no_read_behind(pager, monkeypatch):
    pages = filled(pager, 4)
    calls = Calls(monkeypatch)
    calls.go.clear()
    with contextlib.closing(pager.walk(pages[:1], drain=False)) as walk:
        for _ in walk:  # its write waits, and so does the read of the slot's next page
            pass
    let_go_when_joined(calls, monkeypatch)
    monkeypatch.setattr(Transfer, "wait", interrupt)
    reads = []
    read = pager._file.read
    monkeypatch.setattr(
        pager._file, "read", lambda *args, **more: reads.append(read(*args, **more)) or reads[-1]
    )
    with contextlib.suppress(KeyboardInterrupt):
        pager.open(pages[3]).__enter__()
    left = [transfer for transfer in reads if not transfer.done]
    calls.go.set()
    assert len(reads) == 1
    assert left == []


def interrupt(transfer) -> None:
    raise KeyboardInterrupt


def test_an_open_page_whose_user_raises_stays_as_it_was(pager):
    pages = filled(pager, 4)
    with contextlib.suppress(Stop), pager.open(pages[1], changed=True) as page:
        page.bytes.fill_(90)
        raise Stop
    assert not pages[1].is_open
    assert contents(pager, pages) == [0, 1, 2, 3]


# ---------------------------------------------------------------- our own mistakes


def test_two_pages_of_one_slot_cannot_be_open_at_once(pager):
    pages = filled(pager, 4)
    with pager.open(pages[0]), pytest.raises(AssertionError, match="another page of this slot"):
        pager.open(pages[3]).__enter__()
    with pager.open(pages[0]), pytest.raises(AssertionError, match="another page of this slot"):
        next(pager.walk([pages[3]]))
    with pager.open(pages[0]), pytest.raises(AssertionError, match="another page of this slot"):
        next(pager.walk([pages[0]]))
    assert contents(pager, pages) == [0, 1, 2, 3]


def test_a_closed_page_cannot_grow(pager):
    page = pager.page(NBYTES)
    with pytest.raises(AssertionError, match="only while it is open"):
        page.filled_nbytes = 10


def test_a_page_knows_when_it_is_open(pager):
    pages = filled(pager, 3)
    walk = pager.walk(pages)
    next(walk)
    assert [page.is_open for page in pages] == [True, False, False]
    walk.close()


# ---------------------------------------------------------------- the timeline


class Moved:
    """A transfer that has ended."""

    done = True

    def __init__(self, began_s: float, ended_s: float, *, writes: bool = False) -> None:
        self.began_s, self.ended_s, self.writes = began_s, ended_s, writes
        self.nbytes = 1_000_000_000


def test_overlapping_transfers_are_busy_once():
    line = TransferTimes(transfers=[Moved(10, 12), Moved(11, 13), Moved(11.2, 11.5), Moved(20, 21)])
    assert line.reading_s == pytest.approx(4.0)
    assert line.writing_s == 0.0


def test_the_log_line_has_bytes_seconds_and_rates():
    line = TransferTimes(
        pages=2,
        total_s=4.0,
        waited_reads_s=0.5,
        waited_writes_s=0.25,
        transfers=[Moved(0, 2), Moved(1, 3, writes=True)],
    )
    assert str(line) == (
        "disk: 2 pages in 4.00 s, read 1.00 GB in 2.00 s (0.50 GB/s), wrote 1.00 GB in 2.00 s "
        "(0.50 GB/s), together 0.50 GB/s; waited 0.50 s for reads, 0.25 s for writes"
    )


def test_the_timeline_counts_what_a_walk_moved(pager):
    pages = filled(pager, 5)
    for page in pager.walk(pages):
        page.changed = page is not pages[0]
    line = pager.timeline
    assert (line.pages, line.read_nbytes, line.written_nbytes) == (
        5, 20 * PAGE_NBYTES, 16 * PAGE_NBYTES,
    )  # fmt: skip
    assert 0 < line.reading_s <= line.total_s
    assert 0 < line.writing_s <= line.total_s
    assert line.waited_reads_s + line.waited_writes_s <= line.total_s
