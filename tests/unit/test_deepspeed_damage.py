"""Damaged files of DeepSpeed, and files of another rank, never give another value in silence."""

from __future__ import annotations

import os

import pytest
import torch
from support.covering import FULL
from support.deepspeed_files import (
    SHAPES,
    Run,
    check_values,
    deepspeed_classes,
    model_file,
    optim_file,
    value,
    write,
)

from zeroshard.checkpoint.deepspeed.reader import DeepSpeedReader
from zeroshard.checkpoint.reader import full
from zeroshard.errors import CheckpointError

assert deepspeed_classes  # a fixture

DAMAGES = 10_000 if FULL else 300


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_damaged_byte_never_gives_another_value(tmp_path, deepspeed_classes, stage):
    """Torch does not look at the CRC-32 of its files. A tensor of 1.2 MB is not read at the start."""
    run = Run(stage, 1, shapes={**SHAPES, "large": (300, 1000)}, kind="torch")
    run.groups[0].append("large")
    path = write(tmp_path, run, deepspeed_classes)
    file = optim_file(path, 0) if stage else path / "mp_rank_00_model_states.pt"
    data = file.read_bytes()
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for at in torch.randint(0, len(data), (DAMAGES // 3,), generator=generator).tolist():
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        file.write_bytes(damaged)
        try:
            saved = DeepSpeedReader(path, groups=run.groups)
            if stage:
                check_values(saved, run)
            else:
                for name, shape in run.shapes.items():
                    expected = value(name, shape).bfloat16().float()
                    assert torch.equal(full(saved, name).float(), expected)
        except CheckpointError:
            refused += 1
    assert refused > 0.9 * (DAMAGES // 3)  # what is left are gaps between records


def test_a_damaged_tensor_is_found_when_it_is_read(tmp_path, deepspeed_classes):
    run = Run(1, 2, shapes={"large": (600, 1000), "more": (600, 1000)}, groups=[["large", "more"]])
    path = write(tmp_path, run, deepspeed_classes)
    file = optim_file(path, 1)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    saved = DeepSpeedReader(path)
    assert torch.equal(full(saved, "large"), value("large", (600, 1000)))  # in the other file
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=rf"{file.name} is damaged: Bad CRC-32.*another copy"
        ):
            full(saved, "more")


def test_files_without_checksums_are_read(tmp_path, deepspeed_classes):
    torch.serialization.set_crc32_options(False)
    try:
        path = write(tmp_path, Run(2, 2), deepspeed_classes)
    finally:
        torch.serialization.set_crc32_options(True)
    check_values(DeepSpeedReader(path), Run(2, 2))


def test_files_of_two_ranks_that_were_exchanged_are_refused(tmp_path, deepspeed_classes):
    path = write(
        tmp_path, Run(2, 2, shapes={"a": (8,), "b": (8,)}, groups=[["a", "b"]]), deepspeed_classes
    )
    first, second = optim_file(path, 0), optim_file(path, 1)
    first.rename(path / "first")
    second.rename(first)
    (path / "first").rename(second)
    with pytest.raises(
        CheckpointError, match=rf"{first.name} is not of rank 0, .* group 0 are 'b'"
    ):
        DeepSpeedReader(path)


@pytest.mark.parametrize("place", ["model", "optim"])
def test_a_pipe_in_place_of_a_file_is_not_opened(tmp_path, deepspeed_classes, place):
    path = write(tmp_path, Run(3, 1), deepspeed_classes)
    file = optim_file(path, 0) if place == "optim" else model_file(path, 0)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=rf"{file.name} is a pipe, a socket or a device"):
        DeepSpeedReader(path)
