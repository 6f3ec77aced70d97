"""Boxes of global tensors, and copies between ranges of them. Pure arithmetic.

A *box* is a part of a tensor that has one start and one extent on each axis. Ranks of tensor parallelism
hold boxes. The elements of a box are numbered in row-major order, so a rank's shard of a box is a range
of these numbers. The boxes that a tensor is stored in are the cells of a *grid*: the intervals on each
axis tile the axis, and every combination of intervals is a box. A loader wants a range of another box. It
intersects boxes first and ranges then, and reads only the spans that cover the intersections.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

STAGING_NBYTES = 8 << 20
"""The most bytes that :func:`fill` reads at a time where it cannot read to the place in ``out``."""


class Box(NamedTuple):
    """``global[start : start + extent]`` on each axis."""

    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.extent)

    def span(self, part: Box) -> tuple[int, int]:
        """``(first, end)``: the elements of this box, in row-major order, that cover ``part`` of it.

        >>> Box((0, 4), (3, 4)).span(Box((1, 5), (2, 2)))
        (5, 11)
        """
        first = last = 0
        for step, begin, low, extent in zip(
            strides(self.extent), self.start, part.start, part.extent, strict=True
        ):
            first += (low - begin) * step
            last += (low - begin + extent - 1) * step
        return first, last + 1


class Strip(NamedTuple):
    """A box as a part of a local tensor that joins several boxes along one axis.

    Of each ``stride`` elements of the local tensor, ``width`` belong to the box, from ``at`` on.
    """

    box: Box
    at: int
    width: int
    stride: int

    def count(self, end: int) -> int:
        """How many of the first ``end`` elements of the local tensor belong to the box.

        >>> [Strip(Box((0, 6), (2, 2)), 1, 2, 5).count(end) for end in (1, 2, 5, 8, 10)]
        [0, 1, 2, 4, 4]
        """
        rows, rest = divmod(end, self.stride)
        return rows * self.width + min(max(rest - self.at, 0), self.width)

    def views(self, flat: Tensor, begin: int, low: int, high: int) -> list[Tensor]:
        """Elements ``low`` to ``high`` of the box, in order, as at most three views of ``flat``.

        ``flat``: 1-D and contiguous, the local tensor from element ``begin`` on.
        """
        found: list[Tensor] = []
        first, skip = divmod(low, self.width)
        last, rest = divmod(high, self.width)
        if first == last:
            rows = [(low, 1, high - low)]
        else:
            rows = [(low, 1, self.width - skip)] if skip else []
            whole_rows = first + bool(skip)
            rows += [(whole_rows * self.width, last - whole_rows, self.width)]
            rows += [(last * self.width, 1, rest)]
        for element, count, width in rows:
            if count and width:
                row, column = divmod(element, self.width)
                at = row * self.stride + self.at + column - begin
                found.append(
                    flat.as_strided((count, width), (self.stride, 1), flat.storage_offset() + at)
                )
        return found


def whole(shape: Sequence[int]) -> Box:
    """The box that is the whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def strides(extent: Sequence[int]) -> list[int]:
    """For each axis the distance of neighbours in row-major order.

    >>> strides((3, 4, 5))
    [20, 5, 1]
    """
    return [*accumulate(extent[:0:-1], int.__mul__, initial=1)][::-1] if extent else []


def grid_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Why the boxes are not the cells of a grid over a tensor of this shape; "" if they are.

    Takes time in proportion to the number of boxes, up to a logarithm.
    """
    if any(not len(box.start) == len(box.extent) == len(shape) for box in boxes):
        return f"a box does not have {len(shape)} axes"
    cells = 1
    for axis, size in enumerate(shape):
        intervals = sorted({(box.start[axis], box.extent[axis]) for box in boxes})
        at = 0
        for start, extent in intervals:
            if start != at or extent == 0:
                what = "have a gap" if start > at else "overlap"
                return f"boxes {what} at {min(start, at):,} of axis {axis}"
            at += extent
        if at != size:
            return f"boxes reach {at:,} of {size:,} on axis {axis}"
        cells *= len(intervals)
    if len({box.start for box in boxes}) != len(boxes):
        return "two boxes have the same start"
    if cells != len(boxes):
        return f"{len(boxes):,} boxes of a grid of {cells:,}"
    return ""


class Grid:
    """The boxes of one tensor, for which :func:`grid_problem` found no problem.

    >>> grid = Grid([Box((0, 0), (3, 4)), Box((0, 4), (3, 4))])
    >>> list(grid.overlaps(whole((3, 8)), 6, 9))
    [(1, Box(start=(0, 6), extent=(1, 2))), (0, Box(start=(1, 0), extent=(1, 1)))]
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = tuple(boxes)
        axes = range(len(self.boxes[0].start)) if boxes else ()
        self._starts = [sorted({box.start[axis] for box in self.boxes}) for axis in axes]
        self._index = {box.start: at for at, box in enumerate(self.boxes)}

    def index_of(self, box: Box) -> int | None:
        """The index of this box; None if it is none of the grid's."""
        index = self._index.get(box.start)
        return index if index is not None and self.boxes[index] == box else None

    def overlaps(self, wanted: Box, begin: int, end: int) -> Iterator[tuple[int, Box]]:
        """Elements ``begin`` to ``end`` of ``wanted`` as parts that each lie in one box of the grid.

        Yields ``(index of the box, part)``.
        """
        for piece in rectangles(wanted.extent, begin, end):
            start = tuple(a + b for a, b in zip(wanted.start, piece.start, strict=True))
            stop = tuple(a + b for a, b in zip(start, piece.extent, strict=True))
            found = [
                starts[bisect_right(starts, low) - 1 : bisect_left(starts, high)]
                for starts, low, high in zip(self._starts, start, stop, strict=True)
            ]
            for cell_start in product(*found):
                index = self._index[cell_start]
                yield index, _intersection(start, stop, self.boxes[index])


def _intersection(start: Sequence[int], stop: Sequence[int], cell: Box) -> Box:
    low = tuple(map(max, start, cell.start))
    ends = [a + b for a, b in zip(cell.start, cell.extent, strict=True)]
    return Box(low, tuple(min(a, b) - c for a, b, c in zip(stop, ends, low, strict=True)))


def rectangles(extent: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Boxes that together are elements ``begin`` to ``end`` of a box in row-major order, in this order.

    There are at most ``2 * axes - 1``. Starts are counted from the start of the box.

    >>> [(box.start, box.extent) for box in rectangles((4, 3), 2, 10)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if begin >= end:
        return
    if not extent:
        yield Box((), ())
        return
    rest = tuple(extent[1:])
    inner = prod(rest)
    first, low = divmod(begin, inner)
    last, high = divmod(end, inner)
    if first == last:
        yield from _in_row(first, rest, low, high)
        return
    if low:
        yield from _in_row(first, rest, low, inner)
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in rest)), (last - first, *rest))
    yield from _in_row(last, rest, 0, high)


def _in_row(row: int, rest: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    for box in rectangles(rest, begin, end):
        yield Box((row, *box.start), (1, *box.extent))


def fill(
    out: Tensor, grid: Grid, wanted: Box, begin: int, read: Callable[[int, int, Tensor], None]
) -> None:
    """Fill 1-D ``out`` with the elements of ``wanted`` from ``begin`` on.

    ``read(index, first, memory)`` fills 1-D ``memory`` with elements of box ``index`` of the grid, from
    element ``first`` of that box on. Where rows of both boxes differ, the covering span is read first,
    into at most :data:`STAGING_NBYTES` of memory at a time.
    """
    limit = max(1, STAGING_NBYTES // out.element_size())
    for index, part in grid.overlaps(wanted, begin, begin + out.numel()):
        cell = grid.boxes[index]
        for piece in _portions(part, cell, wanted, limit):
            first, end = cell.span(piece)
            low, high = wanted.span(piece)
            target = out[low - begin : high - begin]
            if end - first == high - low == piece.numel:
                read(index, first, target)
                continue
            memory = torch.empty(end - first, dtype=out.dtype)
            read(index, first, memory)
            target.as_strided(piece.extent, strides(wanted.extent)).copy_(
                memory.as_strided(piece.extent, strides(cell.extent))
            )


def _portions(part: Box, cell: Box, wanted: Box, limit: int) -> Iterator[Box]:
    """``part`` in portions that are one range of both boxes, or whose span in ``cell`` has the limit."""
    spans = [end - first for first, end in (cell.span(part), wanted.span(part))]
    if spans == [part.numel, part.numel] or spans[0] <= limit:
        yield part
        return
    axis = next(at for at, extent in enumerate(part.extent) if extent > 1)
    rows = max(1, limit // strides(cell.extent)[axis])
    for low in range(0, part.extent[axis], rows):
        start, extent = list(part.start), list(part.extent)
        start[axis] += low
        extent[axis] = min(rows, part.extent[axis] - low)
        yield from _portions(Box(tuple(start), tuple(extent)), cell, wanted, limit)


def positions(shape: Sequence[int], box: Box, begin: int, end: int, device: torch.device) -> Tensor:
    """int64 ``[end - begin]``: the place of each element of the box's range in the flat whole tensor."""
    at = torch.arange(begin, end, device=device)
    found = torch.zeros_like(at)
    for extent, start, step, far in zip(
        box.extent, box.start, strides(box.extent), strides(shape), strict=True
    ):
        found += (at // step % extent + start) * far
    return found
