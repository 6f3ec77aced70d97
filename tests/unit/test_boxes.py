"""Boxes of tensors: which boxes form a grid, and copies between ranges of different boxes."""

from __future__ import annotations

import itertools
import random
import time
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.checkpoint import boxes
from zeroshard.checkpoint.boxes import (
    Box,
    Grid,
    Strip,
    fill,
    grid_problem,
    positions,
    rectangles,
    whole,
)
from zeroshard.checkpoint.local_state import ShardItem, digest_part, total_digests
from zeroshard.checkpoint.manifest import DTYPES

SEEDS = st.integers(0, 2**32)


def some_shape(draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 4)))


def some_grid(draw: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """The cells of a grid with random cuts, in random order."""
    axes = []
    for size in shape:
        cuts = [0, *sorted(draw.sample(range(1, size), draw.randint(0, size - 1))), size]
        axes.append([(low, high - low) for low, high in itertools.pairwise(cuts)])
    cells = [
        Box(tuple(low for low, _ in cell), tuple(extent for _, extent in cell))
        for cell in itertools.product(*axes)
    ]
    draw.shuffle(cells)
    return cells


def some_box(draw: random.Random, shape: tuple[int, ...]) -> Box:
    start = [draw.randrange(size) for size in shape]
    extent = [draw.randint(1, size - low) for size, low in zip(shape, start, strict=True)]
    return Box(tuple(start), tuple(extent))


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of a box, flat."""
    places = [slice(low, low + n) for low, n in zip(box.start, box.extent, strict=True)]
    return tensor[tuple(places)].reshape(-1)


def filled(
    tensor: torch.Tensor, cells: list[Box], wanted: Box, begin: int, end: int
) -> tuple[torch.Tensor, list[int]]:
    """A range of ``wanted``, read from the cells, and the number of elements of each read."""
    stored = [part(tensor, cell) for cell in cells]
    sizes: list[int] = []

    def read(index: int, first: int, memory: torch.Tensor) -> None:
        assert memory.is_contiguous()
        assert 0 <= first <= first + memory.numel() <= stored[index].numel()
        sizes.append(memory.numel())
        memory.copy_(stored[index][first : first + memory.numel()])

    out = torch.zeros(end - begin, dtype=tensor.dtype)
    fill(out, Grid(cells), wanted, begin, read)
    return out, sizes


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(SEEDS)
def test_any_range_of_any_box_is_read_from_any_grid(seed):
    draw = random.Random(seed)
    shape = some_shape(draw)
    tensor = torch.arange(float(prod(shape))).view(shape)
    cells, wanted = some_grid(draw, shape), some_box(draw, shape)
    assert grid_problem(shape, cells) == ""
    begin, end = sorted(draw.randint(0, wanted.numel) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        limit = draw.choice([1, 2, 5, 10**6])
        patch.setattr(boxes, "STAGING_NBYTES", limit * tensor.element_size())
        found, _ = filled(tensor, cells, wanted, begin, end)
    assert torch.equal(found, part(tensor, wanted)[begin:end])


def test_rows_are_read_as_one_span_within_the_limit_of_memory(monkeypatch):
    """A column-split matrix is read from whole rows, some rows at a time."""
    monkeypatch.setattr(boxes, "STAGING_NBYTES", 4 * 1000)
    tensor = torch.randn(64, 100)
    wanted = Box((0, 20), (64, 10))
    found, sizes = filled(tensor, [whole((64, 100))], wanted, 0, 640)
    assert torch.equal(found, part(tensor, wanted))
    assert len(sizes) == 7  # ten rows at a time
    assert max(sizes) == 910  # from the first element of the first row to the last one of the last
    monkeypatch.setattr(boxes, "STAGING_NBYTES", 4 * 99)
    found, sizes = filled(tensor, [whole((64, 100))], wanted, 0, 640)
    assert torch.equal(found, part(tensor, wanted))
    assert sizes == [10] * 64  # a row does not fit: only what is wanted


def test_equal_boxes_are_one_read():
    tensor, cells = torch.randn(6, 8), [Box((0, 0), (6, 4)), Box((0, 4), (6, 4))]
    assert Grid(cells).index_of(cells[1]) == 1
    assert Grid(cells).index_of(Box((0, 4), (6, 3))) is None
    _, sizes = filled(tensor, cells, cells[1], 0, 24)
    assert sizes == [24]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_is_copied(dtype):
    raw = torch.randint(0, 2, (6 * 8 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(6, 8)
    found, _ = filled(
        tensor, [Box((0, 0), (6, 5)), Box((0, 5), (6, 3))], Box((1, 3), (4, 4)), 1, 15
    )
    expected = part(tensor, Box((1, 3), (4, 4)))[1:15].clone()
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def tiles(shape: tuple[int, ...], found: list[Box]) -> bool:
    """Whether the boxes contain each element exactly once and form a grid, by counting."""
    if not all(prod(box.extent) for box in found):
        return False
    count = torch.zeros(shape, dtype=torch.int64)
    for box in found:
        if any(a + n > size for a, n, size in zip(box.start, box.extent, shape, strict=True)):
            return False
        places = [slice(a, a + n) for a, n in zip(box.start, box.extent, strict=True)]
        count[tuple(places)] += 1
    cuts = [{(b.start[axis], b.extent[axis]) for b in found} for axis in range(len(shape))]
    return bool((count == 1).all()) and prod(map(len, cuts)) == len(found)


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(SEEDS)
def test_a_grid_is_what_counting_finds(seed):
    draw = random.Random(seed)
    shape = some_shape(draw)
    cells = some_grid(draw, shape)
    for _ in range(draw.randint(0, 2)):  # break it
        at = draw.randrange(len(cells))
        how = draw.choice(["drop", "twice", "move", "grow"])
        if how == "drop" and len(cells) > 1:
            del cells[at]
        elif how == "twice":
            cells.append(cells[at])
        elif shape:
            axis = draw.randrange(len(shape))
            numbers = list(cells[at].start if how == "move" else cells[at].extent)
            numbers[axis] = max(0, numbers[axis] + draw.choice([-1, 1]))
            cells[at] = cells[at]._replace(
                **{"start" if how == "move" else "extent": tuple(numbers)}
            )
    assert (grid_problem(shape, cells) == "") == tiles(shape, cells)


@pytest.mark.parametrize(
    ("shape", "found", "why"),
    [
        ((4, 4), [Box((0, 0), (2, 4)), Box((3, 0), (1, 4))], "gap at 2 of axis 0"),
        ((4, 4), [Box((0, 0), (3, 4)), Box((2, 0), (2, 4))], "overlap at 2 of axis 0"),
        ((4, 4), [Box((0, 0), (4, 3))], "reach 3 of 4 on axis 1"),
        ((4, 4), [Box((0, 0), (4, 5))], "reach 5 of 4 on axis 1"),
        ((4, 4), [Box((0, 0), (4, 4)), Box((0, 0), (4, 4))], "same start"),
        ((4, 4), [Box((0, 0), (2, 2)), Box((2, 2), (2, 2))], "2 boxes of a grid of 4"),
        ((4, 4), [Box((0,), (4,))], "does not have 2 axes"),
        ((4, 4), [Box((0, 0), (4,))], "does not have 2 axes"),
        ((4, 4), [Box((0, 0), (0, 4)), Box((0, 0), (4, 4))], "overlap at 0 of axis 0"),
        ((0, 4), [Box((0, 0), (0, 4))], "overlap at 0 of axis 0"),
        ((4, 4), [Box((0, 0), (4, 1)), Box((0, 1), (3, 3)), Box((3, 1), (1, 3))], "overlap"),
    ],
)
def test_a_problem_names_the_axis_and_the_place(shape, found, why):
    assert why in grid_problem(shape, found)


def test_many_boxes_are_checked_in_little_time():
    side = 300
    cells = [Box((a, b), (1, 1)) for a in range(side) for b in range(side)]
    begin_s = time.process_time()
    assert grid_problem((side, side), cells) == ""
    cells[-1] = cells[0]
    assert "same start" in grid_problem((side, side), cells)
    assert time.process_time() - begin_s < 10


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(SEEDS)
def test_rectangles_and_positions_are_the_elements_in_order(seed):
    draw = random.Random(seed)
    shape = some_shape(draw)
    tensor = torch.arange(prod(shape)).view(shape)
    box = some_box(draw, shape)
    begin, end = sorted(draw.randint(0, box.numel) for _ in range(2))
    flat = part(tensor, box)[begin:end]
    assert torch.equal(positions(shape, box, begin, end, torch.device("cpu")), flat)
    inner = part(tensor, box).view(box.extent)
    pieces = list(rectangles(box.extent, begin, end))
    assert len(pieces) <= max(1, 2 * len(shape) - 1)
    assert torch.equal(torch.cat([flat[:0], *(part(inner, piece) for piece in pieces)]), flat)


@pytest.mark.parametrize(("at", "width", "stride"), [(0, 2, 5), (1, 2, 5), (3, 2, 5), (0, 4, 4)])
def test_a_strip_counts_its_elements_before_each_place(at, width, stride):
    strip = Strip(Box((0, 0), (3, width)), at, width, stride)
    for end in range(3 * stride + 1):
        assert strip.count(end) == sum(at <= i % stride < at + width for i in range(end))


@pytest.mark.parametrize(("at", "width", "stride"), [(0, 2, 5), (1, 3, 5), (3, 2, 5), (0, 4, 4)])
def test_every_range_of_a_strip_is_viewed_in_its_order(at, width, stride):
    strip = Strip(Box((0, 0), (4, width)), at, width, stride)
    local = torch.arange(4 * stride)
    expected = local.view(4, stride)[:, at : at + width].reshape(-1)
    for low, high in itertools.combinations_with_replacement(range(4 * width + 1), 2):
        begin = int(expected[low]) if low < high else 0  # a shard may begin at any element
        views = strip.views(local[begin:], begin, low, high)
        found = torch.cat([local[:0], *(view.reshape(-1) for view in views)])
        assert torch.equal(found, expected[low:high])
        assert len(views) <= 3


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128], ids=str
)
def test_the_parts_of_a_cut_tensor_have_the_digest_of_the_whole(dtype):
    """As parts of columns and of rows, in shards that end anywhere."""
    tensor = (torch.randn(12, 16, dtype=torch.complex128) * 50).abs().to(dtype)
    if dtype.is_complex:
        tensor = tensor * 1j + 3
    (expected,) = total_digests(
        [{"w": digest_part(ShardItem("w", "", 0, 192, tensor, 0))}]
    ).values()
    cells = [Box((0, 0), (12, 5)), Box((0, 5), (7, 11)), Box((7, 5), (5, 11))]
    parts = []
    for cell in cells:
        flat = part(tensor, cell)
        for low, high in itertools.pairwise((0, 13, flat.numel())):
            item = ShardItem("w", "", low, high - low, flat, low, cell, tuple(tensor.shape))
            parts.append({"w": digest_part(item)})
    assert total_digests(parts) == {"w": expected}
    parts[0]["w"] += 1
    assert total_digests(parts) != {"w": expected}
